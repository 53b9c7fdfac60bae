"""Every message between two Holdfast programs, and their encoding.

The result of `decode` is safe to use. The message types contain the types, lengths and ranges of all values, so
decoding checks them; the few rules that a type cannot express are checked immediately after. If a peer sends
anything else, `decode` raises `BadMessage`.

Messages are msgpack maps with a tag, never pickle.

The handshake, the coordinator and its client define which side may send which message, and when.

A control client sends a `Query`; its body, and those of the replies, are structs too:

===========  ====================  ============================================================
what         body                  replies
===========  ====================  ============================================================
`here`       none                  one `AgentIdentity`; only at an agent's own socket
`status`     `StatusQuery`         one `JobSummaries`, once the nodes have reported
`act`        `Request`             one: accepted, or refused with the reason
`events`     `EventsQuery`         `Events`: the recent ones, then each new one
`logs`       `LogsQuery`           `LogLines`, until everything is sent
`stacks`     none                  one `Stacks`
`history`    none                  `control.history.NodeHistory`: some generations in each, or the series
`report`     none                  one `NodeReport`
`contacts`   none                  `Contacts`; only at an agent's own socket
`more`       `StreamCredit`        none: the stream with that id may send `size` more bytes. For size 0, the
                                   stream of a node sends an empty reply if it is open
`cancel`     none                  none: ends the query with that id
===========  ====================  ============================================================

A node answers `logs`, `stacks`, `history` and `report`; the coordinator answers `status` and `act`; both
answer `events`. In a job without a coordinator, an agent answers all of them.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from holdfast.core.bounded import (
    MALFORMED,
    ClockTime,
    Count,
    Incarnation,
    Loss,
    Name,
    NodeCount,
    NodeId,
    Number,
    Port,
    RunId,
    Seconds,
    Why,
    WorkerRank,
)
from holdfast.core.limits import (
    COORDINATORS_MAX,
    DURATION_S_MAX,
    NODE_ID_CHARS_MAX,
    RUN_ID_CHARS_MAX,
    WHY_CHARS_MAX,
)
from holdfast.core.protocol import (
    Ack,
    Heartbeat,
    Request,
    Status,
    View,
    check_names,
    reason,
    sanitized_request,
    sanitized_status,
    sanitized_view,
)
from holdfast.core.rounds import JobPhase, is_drained
from holdfast.defaults import PROTOCOL_VERSION
from holdfast.printable import one_line, quoted
from holdfast.wire import wire_limits as limits
from holdfast.wire.wire_errors import BadMessage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.core.rounds import Rounds

MAGIC = "holdfast"

HERE, STATUS, ACT, EVENTS = "here", "status", "act", "events"
LOGS, STACKS, HISTORY = "logs", "stacks", "history"
REPORT, CONTACTS = "report", "contacts"
MORE, CANCEL = "more", "cancel"
READS = (STATUS, EVENTS, LOGS, STACKS, HISTORY, REPORT, MORE, CANCEL)
"""The queries that a read-only client may send."""
WINDOW_BYTES = 2 * 1024 * 1024
"""The bytes that all log streams of a client may send before the client grants more. This must stay below
`quotas.UNREAD_BYTES_MAX`, at which a coordinator disconnects a client."""
CHUNK_BYTES = 256 * 1024
EVENTS_AT_ONCE = 64
"""Events in one message. Even with the longest texts, they fit into a frame."""
RANKS_MAX = 65_536
GREP_CHARS_MAX = 1_000
TAIL_LINES_MAX = 1_000_000
SECRET_BYTES_MAX = 64
PEM_BYTES_MAX = 64 * 1024
STATUS_WAIT_S_MAX = 60.0
CONTACTS_AT_ONCE = 512
"""Contacts in one message. Even with the longest names, they fit into a frame."""

Version = Annotated[int, Meta(ge=1, le=limits.VERSION_MAX)]
Nonce = Annotated[bytes, Meta(min_length=limits.NONCE_BYTES_MIN, max_length=limits.NONCE_BYTES_MAX)]
ProofBytes = Annotated[bytes, Meta(max_length=limits.PROOF_BYTES_MAX)]
StoreKey = Annotated[str, Meta(max_length=limits.STORE_KEY_CHARS_MAX)]
StoreValue = Annotated[bytes, Meta(max_length=limits.STORE_VALUE_BYTES_MAX)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
T = TypeVar("T", bound=msgspec.Struct)
Age = Annotated[float, Meta(ge=-1.0, le=DURATION_S_MAX)]

# The handshake.


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The client's first message: its version, its job, the endpoint to which it connects, and a nonce."""

    magic: Annotated[str, Meta(max_length=len(MAGIC))] = MAGIC
    version: Version = PROTOCOL_VERSION
    nonce: Nonce
    run_id: Annotated[str, Meta(max_length=RUN_ID_CHARS_MAX)] = ""
    """The job of this connection; empty for an operator, whose queries are about all jobs."""
    host: Name = ""
    port: Port = 0
    """The endpoint to which the client connects, as the user wrote it."""
    endpoint_index: Annotated[int, Meta(ge=0, le=COORDINATORS_MAX - 1)] = 0
    """The index of that endpoint in the client's list. At an index above 0 the client accepts only a coordinator
    that took over there: an unrelated one must not decide for the job."""
    read_only: bool = False
    """The client proves the read-only token."""


class Challenge(msgspec.Struct, frozen=True, kw_only=True, tag="challenge"):
    """The server's response: its own nonce, and the proof that it has the token."""

    nonce: Nonce
    token_wanted: bool
    proof: ProofBytes = b""
    """Empty if the server has no token."""


class Proof(msgspec.Struct, frozen=True, kw_only=True, tag="proof"):
    """The client proves the token too. Empty if neither side has one."""

    proof: ProofBytes = b""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The handshake is complete."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The server does not accept this client."""

    why: Why
    permanent: bool = True
    """False if retrying later may help."""


ALL_LEFT = "signals stopped all its agents"
"""Why a job that decided no outcome is over."""


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag="goodbye"):
    """The sender closes the connection intentionally."""

    why: Why = ""
    outcome: Name = ""
    """How the job ended, if the sender knows that it is over; `why` is then the reason."""
    left: bool = False
    """Whether a signal stopped the sender's agent, and others of the job may continue."""


# Large messages.


class Part(msgspec.Struct, frozen=True, kw_only=True, tag="part"):
    """A piece of the body of a large message; `last` completes it."""

    data: Annotated[bytes, Meta(max_length=limits.PART_BYTES)]
    last: bool = False


class PartTaken(msgspec.Struct, frozen=True, kw_only=True, tag="taken"):
    """Confirms the previous part: send the next one."""


HandshakeMessage = Hello | Challenge | Proof | Welcome | Refusal | Goodbye

# The store of a job.

StoreOp = Literal[
    "set", "get", "add", "check", "wait", "compare_set", "append", "delete", "num_keys"
]


class StoreCall(msgspec.Struct, frozen=True, kw_only=True, tag="store_call"):
    """An agent's call to the store of its job. Each call gets one result, in any order."""

    id: Count
    run_id: RunId
    scope: Annotated[str, Meta(max_length=limits.STORE_SCOPE_CHARS_MAX)] = ""
    """Keys of different scopes (rounds, generations) are independent."""
    op: StoreOp
    keys: Annotated[tuple[StoreKey, ...], Meta(max_length=limits.STORE_KEYS_MAX)] = ()
    value: StoreValue = b""
    expected: StoreValue = b""
    amount: Int64 = 0
    timeout_s: Annotated[float, Meta(ge=0, le=limits.STORE_TIMEOUT_S_MAX)] = 0.0


class StoreResult(msgspec.Struct, frozen=True, kw_only=True, tag="store_result"):
    """The outcome of the call with the same `id`."""

    id: Count
    ok: bool
    value: StoreValue = b""
    amount: Int64 = 0
    timed_out: bool = False
    """Whether the call failed because no value arrived in time; otherwise it was refused."""
    why: Why = ""


# Queries of operators; their bodies follow below.


class Query(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """An operator's query to a coordinator or an agent. A coordinator relays it to a node under another id."""

    id: Count
    """The id of all replies, and of later messages about the query (`MORE`, `CANCEL`)."""
    what: Name
    run_id: Annotated[str, Meta(max_length=RUN_ID_CHARS_MAX)] = ""
    node: Annotated[str, Meta(max_length=NODE_ID_CHARS_MAX)] = ""
    """The node it is for; empty for the coordinator."""
    body: Annotated[bytes, Meta(max_length=limits.QUERY_BYTES_MAX)] = b""


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """A reply to the query with the same `id`; none follows the `last`."""

    id: Count
    refusal: Name = ""
    """The value of a `core.protocol.RequestRefusal`, or an empty string."""
    why: Why = ""
    body: Annotated[bytes, Meta(max_length=limits.STATUS_FRAME_BYTES_MAX)] = b""
    last: bool = True


class Watch(msgspec.Struct, frozen=True, kw_only=True, tag="watch"):
    """Requests reports from a node, and a connection for queries (`attach`)."""

    for_s: Annotated[float, Meta(ge=0.0, le=limits.STORE_TIMEOUT_S_MAX)] = 0.0
    every_s: Annotated[float, Meta(ge=0.0, le=limits.STORE_TIMEOUT_S_MAX)] = 0.0
    """The interval of reports about workers; 0 for events only."""
    attach: bool = False


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag="attach"):
    """Declares this connection for queries to that node; it carries no heartbeats."""

    run_id: RunId
    node: NodeId
    incarnation: Incarnation


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, as its agent sees it."""

    rank: Number
    local_rank: Number = -1
    pid: Count = 0
    state: Name = ""
    step: Int64 = -1
    """-1 if it reports none."""
    step_age_s: Age = -1.0
    heartbeat_age_s: Age = -1.0
    """Below 0 if there was none."""
    section: Name = ""
    cpu_s: Age = -1.0
    rss_bytes: Count = 0
    total: Int64 = 0
    """The number of steps; 0 if it does not report it."""
    loss: Loss | None = None
    eta_s: Age = -1.0
    """The estimated time until the last step; below 0 if it is unknown."""


class EventKind(Enum):
    """The subject of an `EventRecord`."""

    JOB_CHANGED = "job-changed"
    """The coordinator changed the round, the generation or a node."""
    JOB_ENDED = "job-ended"
    RUN_STARTED = "run-started"
    RUN_ENDED = "run-ended"
    RENDEZVOUS_ENDED = "rendezvous-ended"
    RANKS_ASSIGNED = "ranks-assigned"
    GENERATION_STARTED = "generation-started"
    GENERATION_STOPPING = "generation-stopping"
    GENERATION_STOPPED = "generation-stopped"
    FIRST_HEARTBEAT = "first-heartbeat"
    WORKER_ENDED = "worker-ended"
    WORKERS_FAILED = "workers-failed"
    WATCHDOG = "watchdog"
    REQUESTED = "requested"
    PROTECTION = "protection"
    CUSTOM = "custom"


class EventRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened in a job."""

    wall: ClockTime
    """The time of day on the event's host: for display."""
    source: Annotated[str, Meta(max_length=NODE_ID_CHARS_MAX)] = ""
    """The node; empty for the coordinator."""
    kind: EventKind = EventKind.CUSTOM
    generation: Number = -1
    rank: Number = -1
    is_problem: bool = False
    """Whether it is a failure or a loss."""
    outcome: Name = ""
    """How the run or the job ended, if this is its end: a `RunEnd` of `control.history`."""
    text: Why = ""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """An agent's report about itself while an operator watches."""

    run_id: RunId
    node: NodeId
    incarnation: Incarnation = 0
    state: Name = ""
    activity: Why = ""
    """What delays the start of its workers; empty if nothing does."""
    generation: Number = -1
    """Its newest one; -1 until it has started workers."""
    elapsed_s: Seconds = 0.0
    """How long its run has lasted."""
    standby_s: Seconds = 0.0
    """How much of that time it was a standby."""
    useful_s: Seconds = 0.0
    """How much of that time was useful: see `control.history`."""
    counts_steps: bool = False
    """Whether its workers report steps; if not, `useful_s` is only an upper bound."""
    gpus: Count = 0
    """The number of GPUs whose utilization is known."""
    gpu: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Their mean utilization."""
    workers: Annotated[list[WorkerReport], Meta(max_length=limits.WORKERS_REPORTED_MAX)] = []
    events: Annotated[list[EventRecord], Meta(max_length=limits.EVENTS_MAX)] = []


# The state of jobs, for display.


class NodeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a node."""

    node: Annotated[str, Meta(max_length=NODE_ID_CHARS_MAX)]
    host: Name = ""
    address: Name = ""
    role: Name = ""
    phase: Name = ""
    rank: Number = -1
    generation: Number = -1
    first_rank: Number = -1
    """The rank of its first worker."""
    size: NodeCount = 0
    """How many workers it has."""
    drained: bool = False
    report: NodeReport | None = None
    """Its last report while an operator watched."""


class JobSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a job."""

    run_id: RunId
    phase: Name = ""
    term: Count = 0
    round: Number = -1
    generation: Number = -1
    restarts: Count = 0
    max_restarts: Int64 = 0
    present: NodeCount = 0
    """How many nodes are connected, even if `nodes` does not list them."""
    nodes: Annotated[list[NodeSummary], Meta(max_length=limits.SUMMARIES_MAX)] = []
    history: Annotated[list[Why], Meta(max_length=limits.HISTORY_LINES_MAX)] = []
    causes: Annotated[list[Why], Meta(max_length=limits.HISTORY_LINES_MAX)] = []
    """The causes of the restarts charged to the budget, the newest last."""
    min_nodes: NodeCount = 0
    max_nodes: NodeCount = 0
    members: NodeCount = 0
    outcome: Name = ""
    why: Why = ""
    """The reason for the last change."""
    missing: Why = ""
    """With `--ha`, the listed machines without whose members the job does not survive a loss."""


def summary_of(
    rounds: Rounds,
    reports: Mapping[tuple[str, str], NodeReport] | None = None,
    *,
    brief: bool = False,
) -> JobSummary:
    """Return the state of a job, with the last reports of its nodes, by run id and node.

    With `brief`, the result has only numbers, without nodes and history.
    """
    job = rounds.job
    settings = job.settings
    return JobSummary(
        run_id=job.run_id,
        phase=job.phase.value,
        term=job.term,
        round=job.round,
        generation=job.generation,
        restarts=job.restarts,
        max_restarts=settings.max_restarts if settings else 0,
        present=len(job.nodes),
        nodes=[] if brief else _nodes_of(rounds, reports or {}),
        history=[] if brief else [one_line(one.text, WHY_CHARS_MAX) for one in rounds.history],
        causes=[] if brief else [one_line(line, WHY_CHARS_MAX) for line in rounds.causes],
        min_nodes=settings.min_nodes if settings else 0,
        max_nodes=settings.max_nodes if settings else 0,
        members=len(job.members),
        outcome=job.outcome.value if job.outcome is not None else "",
        why="" if brief else job.why,
    )


def _nodes_of(rounds: Rounds, reports: Mapping[tuple[str, str], NodeReport]) -> list[NodeSummary]:
    job, table = rounds.job, rounds.rank_table
    is_active = job.phase is JobPhase.ACTIVE
    summaries = []
    for name, node in job.nodes.items():
        info = node.info
        rank = -1
        if is_active and table.incarnation_of(name) == info.incarnation:
            rank = table.rank_of[name]
        summaries.append(
            NodeSummary(
                node=name,
                host=info.host,
                address=info.address,
                role=info.role,
                phase=node.phase.value,
                rank=rank,
                generation=node.generation,
                first_rank=table.ranks[rank].first_rank if rank >= 0 else -1,
                size=info.local_world_size,
                drained=is_drained(job, name),
                report=reports.get((job.run_id, name)),
            )
        )
    return summaries


def printable_summary(job: JobSummary) -> JobSummary:
    """Return a job whose texts are safe to print."""
    replace = msgspec.structs.replace
    nodes = [
        replace(
            node,
            node=quoted(node.node),
            host=quoted(node.host),
            address=quoted(node.address),
            role=quoted(node.role),
            phase=quoted(node.phase),
            report=sanitized_report(node.report) if node.report is not None else None,
        )
        for node in job.nodes
    ]
    return replace(
        job,
        run_id=one_line(job.run_id),
        phase=quoted(job.phase),
        outcome=quoted(job.outcome),
        why=one_line(job.why),
        missing=one_line(job.missing),
        history=[one_line(line) for line in job.history],
        causes=[one_line(line) for line in job.causes],
        nodes=nodes,
    )


# The bodies of queries and replies.


class AgentIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The agent at a socket, and its job."""

    run_id: Annotated[str, Meta(max_length=RUN_ID_CHARS_MAX)] = ""
    node: Annotated[str, Meta(max_length=NODE_ID_CHARS_MAX)] = ""
    """Empty for a job with one node."""
    pid: Count = 0
    backend: Name = ""
    endpoint: Why = ""
    program: Name = ""
    state: Name = ""
    generation: Number = -1
    workers: Count = 0
    elapsed_s: Seconds = 0.0
    coordinated: bool = True
    """Whether one process replies for all nodes: the coordinator, or the agent of a job with one node."""


class Contact(msgspec.Struct, frozen=True, kw_only=True):
    """The address and the key of the control port of a node's agent."""

    node: Annotated[str, Meta(max_length=NODE_ID_CHARS_MAX)]
    address: Name = ""
    port: Port = 0
    """0 if the agent has no control port (`control=off`)."""
    secret: Annotated[bytes, Meta(max_length=SECRET_BYTES_MAX)] = b""

    def __repr__(self) -> str:
        return f"Contact({self.node!r}, {self.address!r}, {self.port})"


class Contacts(msgspec.Struct, frozen=True, kw_only=True):
    """The contacts of a job's agents. If the leader is among them, it is the first."""

    contacts: Annotated[list[Contact], Meta(max_length=limits.SUMMARIES_MAX)] = []
    pem: Annotated[list[Annotated[bytes, Meta(max_length=PEM_BYTES_MAX)]], Meta(max_length=3)] = []
    """With TLS: the certificate of the authority, a client certificate and its key."""
    run_id: Annotated[str, Meta(max_length=RUN_ID_CHARS_MAX)] = ""
    """The run id to send in the handshake; empty with a read-only token for all jobs."""
    read_only: bool = False

    def __repr__(self) -> str:
        return f"Contacts({self.contacts!r})"


class StatusQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Requests the state of a job; with an empty run id, the state of all jobs."""

    watch: bool = False
    """Make the nodes report about their workers for a while."""
    wait_s: Annotated[float, Meta(ge=0.0, le=STATUS_WAIT_S_MAX)] = 0.0
    """Reply once all nodes have reported, or after this time."""


class JobSummaries(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one job, or of several."""

    jobs: Annotated[list[JobSummary], Meta(max_length=limits.JOBS_MAX)] = []


class EventsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Requests the recent events and, with `follow`, each new one."""

    follow: bool = False


class Events(msgspec.Struct, frozen=True, kw_only=True):
    """Some events, in the order of their arrival."""

    events: Annotated[list[EventRecord], Meta(max_length=limits.EVENTS_MAX)] = []
    now: Annotated[float, Meta(ge=0.0)] = 0.0
    """The sender's wall-clock time, to compare events of nodes whose clocks differ."""


class LogsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Requests the output of a node's workers."""

    ranks: Annotated[list[WorkerRank], Meta(max_length=RANKS_MAX)] = []
    """The ranks to read; empty for all."""
    tail: Annotated[int, Meta(ge=-1, le=TAIL_LINES_MAX)] = -1
    """The number of last lines of each file to start with; negative for all lines."""
    follow: bool = False
    """Continue with new output, even after restarts."""
    grep: Annotated[str, Meta(max_length=GREP_CHARS_MAX)] = ""
    """Only lines that contain this text."""
    room: Annotated[int, Meta(ge=0, le=WINDOW_BYTES)] = 0
    """The bytes that the node may send before the client grants more."""


class LogLines(msgspec.Struct, frozen=True, kw_only=True):
    """Complete lines that one worker wrote, unchanged."""

    rank: WorkerRank
    stream: Name = "stdout"
    generation: Number = -1
    at: float = 0.0
    """The node's wall-clock time when it read the lines; for old lines, the file's modification time."""
    text: Annotated[bytes, Meta(max_length=limits.REPLY_BYTES_MAX)] = b""


class WorkerStacks(msgspec.Struct, frozen=True, kw_only=True):
    """The stacks of one worker."""

    rank: WorkerRank
    pid: Annotated[int, Meta(ge=0)] = 0
    text: str = ""


class Stacks(msgspec.Struct, frozen=True, kw_only=True):
    """The stacks of a node's workers."""

    workers: Annotated[list[WorkerStacks], Meta(max_length=limits.WORKERS_REPORTED_MAX)] = []


class StreamCredit(msgspec.Struct, frozen=True, kw_only=True):
    """Allows a stream to send this many more bytes."""

    size: Annotated[int, Meta(ge=0, le=WINDOW_BYTES)]


Message = (
    Status | Heartbeat | Ack | View
    | Hello | Challenge | Proof | Welcome | Refusal | Goodbye
    | StoreCall | StoreResult | Part | PartTaken
    | Query | Reply | Watch | Attach | NodeReport
)  # fmt: skip

# The whole program shares one encoder and one decoder, since creating one is expensive.
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode
_decode_handshake = msgspec.msgpack.Decoder(HandshakeMessage).decode


def encode(message: Message) -> bytes:
    """Return the body of the frame for a message.

    The values are not checked here (see `check`). Raises `BadMessage` for a value that msgpack cannot encode, such
    as a lone surrogate or a number of more than 64 bits.
    """
    try:
        return _encode(message)
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError) as error:
        raise BadMessage(
            f"a {type(message).__name__} cannot be sent: {quoted(str(error))}"
        ) from error


def decode(body: bytes | bytearray | memoryview) -> Message:
    """Return the message in a frame's body, or raise `BadMessage`."""
    try:
        message: Message = _decode(body)
    except MALFORMED as error:
        raise BadMessage(f"invalid message: {quoted(str(error))}") from None
    try:
        if isinstance(message, (Heartbeat, Ack, Attach, NodeReport)):
            check_names(message.run_id, message.node)
            if isinstance(message, NodeReport):
                return sanitized_report(message)
        elif isinstance(message, Query):
            check_names(message.what, message.run_id, message.node)
        elif isinstance(message, View):
            return sanitized_view(message)
        elif isinstance(message, Status):
            return sanitized_status(message)
    except ValueError as error:
        raise BadMessage(f"invalid {type(message).__name__}: {error}") from None
    if isinstance(message, (StoreResult, Reply)) and not message.why.isprintable():
        return msgspec.structs.replace(message, why=reason(message.why))
    return message


def pack(body: msgspec.Struct) -> bytes:
    """Return the body of a query or reply."""
    return _encode(body)


def unpack(kind: type[T], body: bytes) -> T:
    """Return the struct in a body, or raise `BadMessage`. An empty body has all defaults."""
    try:
        found = _decoder(kind).decode(body or b"\x80")
        if isinstance(found, Request):
            found = sanitized_request(found)
        elif isinstance(found, NodeReport):
            found = sanitized_report(found)
    except MALFORMED as error:
        raise BadMessage(f"invalid {kind.__name__}: {quoted(str(error))}") from None
    assert isinstance(found, kind)
    return found


@cache
def _decoder(kind: type[msgspec.Struct]) -> msgspec.msgpack.Decoder[msgspec.Struct]:
    return msgspec.msgpack.Decoder(kind)


def sanitized_report(report: NodeReport) -> NodeReport:
    """Return a report that is safe to print."""
    text = "".join(
        [report.state, report.activity, *(f"{one.state}{one.section}" for one in report.workers)]
        + [f"{one.source}{one.text}" for one in report.events]
    )
    if text.isprintable():
        return report
    replace = msgspec.structs.replace
    return replace(
        report,
        state=reason(report.state),
        activity=reason(report.activity),
        workers=[
            replace(one, state=quoted(one.state), section=quoted(one.section))
            for one in report.workers
        ],
        events=[
            replace(one, source=quoted(one.source), text=reason(one.text)) for one in report.events
        ],
    )


def decode_handshake(body: bytes | bytearray | memoryview) -> HandshakeMessage:
    """Return the handshake message in a body. From an unauthenticated peer, no other message is valid."""
    try:
        message: HandshakeMessage = _decode_handshake(body)
    except MALFORMED as error:
        raise BadMessage(f"invalid handshake message: {quoted(str(error))}") from None
    return message


def check(message: Message) -> None:
    """Raise the `BadMessage` that the other side would raise.

    This checks the user's settings before they are sent for the first time.
    """
    decode(encode(message))
