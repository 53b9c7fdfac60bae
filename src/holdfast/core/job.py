"""The state of one job as its coordinator knows it: plain data, made to be stored and sent.

`core.rounds` is the only one to change it. It holds no times: how long something has lasted is
measured by whoever watches, on a clock of its own, from when it first saw the state that asks for
a wait (`Wait`). So the same state may be handed from one watcher to the next.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from holdfast.core.news import Ending, Failure, JobSettings, NodeInfo, Phase  # noqa: TC001

NO_CLAIM = (0, -1, 0)


class JobPhase(Enum):
    """Where a job is."""

    FORMING = "forming"
    """No round is running; nodes are gathering."""
    RECOVERING = "recovering"
    """Nodes of a round that an earlier coordinator formed are coming back."""
    ACTIVE = "active"
    """A round is running."""
    CLOSED = "closed"
    """The job is over, for good."""


class Node(msgspec.Struct):
    """A node that is there, and the last it said of itself."""

    info: NodeInfo
    seq: int
    phase: Phase
    generation: int
    failure: Failure | None = None
    claim: tuple[int, int, int] = NO_CLAIM
    """`(round_term, round, round_key)` of an earlier coordinator's round, while recovering."""
    claimed_rank: int = -1
    claimed_size: int = 0
    told: int = 0
    """The revision of the last view that was made for it."""
    told_present: int = 0
    beat: int = 0
    """Moves while the node lives; used where nodes share this state instead of a coordinator."""


class Retired(msgspec.Struct, frozen=True):
    """What became of an incarnation that is no longer in the job."""

    why: str
    superseded: bool = False
    """Another agent with the same node id took its place: it must not come back."""


class Job(msgspec.Struct, kw_only=True):
    """Everything about one job."""

    run_id: str
    settings: JobSettings | None = None
    phase: JobPhase = JobPhase.FORMING
    term: int = 1
    revision: int = 0
    round_term: int = 0
    round: int = -1
    generation: int = -1
    restarts: int = 0
    why: str = ""
    members: list[NodeInfo] = []
    """The nodes of the current round by rank; of the last one while there is none."""
    succeeded: set[str] = set()
    """Members whose workers of this generation are all done."""
    nodes: dict[str, Node] = {}
    """All that are there, in the order in which they came; earlier ones run first."""
    retired: dict[int, Retired] = {}
    recover_s: float = 0.0
    """How long to wait for nodes of an earlier coordinator's round, by how long they were away."""
    wait_seq: int = 0
    waiting: bool = False
    """Whether the wait number `wait_seq` is on."""
    coordinator_address: str = ""
    """How nodes of other hosts reach this one's coordinator; for members that came by loopback."""
    silence_s: float = 0.0
    """How long its coordinator hears nothing of a node before it counts as lost."""
    outcome: Ending | None = None
    failure: Failure | None = None
    report: bytes = b""
    final: bool = False


class Wait(msgspec.Struct, frozen=True):
    """A `TimeUp(seq)` is wanted once this number has stood for so long."""

    seq: int
    delay_s: float


# What happens to a job, besides what its nodes say.


class NodeLost(msgspec.Struct, frozen=True):
    """A node stopped answering, as its observer judged."""

    node: str
    incarnation: int
    why: str


class NodesLost(msgspec.Struct, frozen=True):
    """Several nodes stopped answering together; told at once, they cost one round."""

    lost: tuple[NodeLost, ...]


class TimeUp(msgspec.Struct, frozen=True):
    """The wait of this number lasted long enough."""

    seq: int


class CloseJob(msgspec.Struct, frozen=True):
    """Somebody who may do so asked for the job's end."""

    outcome: Ending
    why: str


class InvalidEvent(Exception):
    """An event that is not this machine's; nothing has changed."""
