"""What a node and its coordinator send each other: the values that both machines are driven by.

Every message carries a whole state, never a change: a `Status` is all there is to know of a node, a
`View` all that a node must know of its job. A message that is lost, repeated or late therefore does
no harm: the next one of its kind carries the same or more, and older ones are recognised by their
number (`Status.seq`, and `(View.term, View.revision)`) and ignored. Two small messages keep this
moving: a `Heartbeat` shows that the node is alive and which view it has, an `Ack` answers with what
the coordinator has; whoever sees that the other is behind sends the whole again.

The values are msgspec structs, so that the same objects travel on the wire, are stored in the state
of a `RendezvousBackend`, and run through the simulator.
"""

from __future__ import annotations

from enum import Enum

import msgspec

NODE_ID_CHARS_MAX = 200
RUN_ID_CHARS_MAX = 1_000


class NodePhase(Enum):
    """What a node is doing, as it says itself."""

    READY = "ready"
    """Its workers are down; it wants to start a generation after `Status.generation`."""
    RUNNING = "running"
    """It starts or runs the workers of `Status.generation`."""
    FAILED = "failed"
    """A worker of `Status.generation` failed; the others are being stopped or are gone."""
    SUCCEEDED = "succeeded"
    """All workers of `Status.generation` ended well."""
    LEAVING = "leaving"
    """It goes, and its workers with it."""
    CLOSING = "closing"
    """It asks for the end of the job, for all nodes."""


class NodeRole(Enum):
    """What a node is to its job, as the coordinator says."""

    WAITING = "waiting"
    """No round has this node yet, or the round it was in is broken."""
    STANDBY = "standby"
    """The round is full; the node waits to replace another."""
    MEMBER = "member"
    """The node is in the round and runs the workers of `View.generation`."""
    FENCED = "fenced"
    """The job went on without this incarnation: stop, and join as a new one."""
    REFUSED = "refused"
    """The node cannot be in this job; `View.why` says what is wrong."""
    CLOSED = "closed"
    """The job is over; `View.outcome` says how."""


class JobOutcome(Enum):
    """How a job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class JobSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What all nodes of a job must agree on; the first to join sets it."""

    min_nodes: int
    max_nodes: int
    max_restarts: int = 0
    spares: int = 0
    """So many nodes are kept back as standbys while at least `min_nodes` are left to run."""
    settle_s: float = 1.0
    """Wait for more nodes after the last one joined, once the minimum is there."""
    order: str = "stable"
    """How nodes are ranked: `stable`, or grouped by `host` or by `label`."""


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change about a node while it is one incarnation."""

    node: str
    incarnation: int
    """A random number: an agent that begins anew, in whatever process, draws another."""
    role: str = "default"
    local_world_size: int = 1
    host: str = ""
    label: str = ""
    address: str = ""
    """Where other nodes reach it: as the person said, else as the coordinator sees it."""
    ports: tuple[int, ...] = (0,)
    """Ports it holds for the workers' store; each generation takes the next, round and round."""
    fixed_rank: int = -1
    """The rank that the person gave the node (`static`), or -1."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's failure in short: enough to decide, and for a line on every console."""

    node: str
    host: str = ""
    rank: int = -1
    pid: int = 0
    exitcode: int = 0
    summary: str = ""
    """One line for a person."""
    sudden: bool = False
    """It died by a signal nobody of ours sent: more likely a cause than a consequence."""
    retryable: bool = True
    """False for what a new start would only repeat."""


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """All that a coordinator must know of a node; also enough to rebuild a lost job from."""

    seq: int
    """Grows with every status of this incarnation."""
    run_id: str
    info: NodeInfo
    settings: JobSettings
    phase: NodePhase = NodePhase.READY
    generation: int = -1
    """The last generation the node started, or -1."""
    term: int = 0
    """The highest term it heard of."""
    round_term: int = 0
    """The term in which the round it is a member of was formed; 0 if it is in none."""
    round: int = -1
    round_key: int = 0
    """Tells this round from one of the same number that another coordinator formed."""
    assigned_generation: int = -1
    """The generation it was told to run as a member of that round; it may not have started it."""
    rank: int = -1
    size: int = 0
    restarts: int = 0
    away_s: float = 0.0
    """How long it was without a coordinator before it found this one."""
    failure: Failure | None = None
    report: bytes = b""
    """The whole story of the failure for every node's console, once it is known."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """The node lives, its newest status has this number, and its newest view is this one."""

    run_id: str
    node: str
    incarnation: int
    seq: int
    term: int
    revision: int


class Ack(msgspec.Struct, frozen=True, kw_only=True, tag="ack"):
    """The coordinator lives, and the newest status it has of this incarnation is this one.

    `seq` is -1 if it does not know the incarnation at all.
    """

    run_id: str
    node: str
    incarnation: int
    seq: int


class View(msgspec.Struct, frozen=True, kw_only=True, tag="view"):
    """All that a node must know of its job."""

    run_id: str
    node: str
    incarnation: int
    term: int
    revision: int
    role: NodeRole
    why: str = ""
    """What the last change was, in words for a person."""
    present: int = 0
    """Nodes that are there, standbys included."""
    needed: int = 0
    """Nodes that must be there before a round can form."""
    silence_s: float = 0.0
    """Nodes without a sign of life for so long are lost to this coordinator; 0 if nobody says."""
    round_term: int = 0
    round: int = -1
    round_key: int = 0
    generation: int = -1
    restarts: int = 0
    rank: int = -1
    size: int = 0
    first_rank: int = 0
    world_size: int = 0
    first_role_rank: int = 0
    role_world_size: int = 0
    master_addr: str = ""
    master_port: int = 0
    outcome: JobOutcome | None = None
    failure: Failure | None = None
    report: bytes = b""
    final: bool = False
    """Nothing more is to be waited for: the job is over and its report, if any, is here."""


Message = Status | Heartbeat | Ack | View
