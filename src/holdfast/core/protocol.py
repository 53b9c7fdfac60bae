"""The messages between a node and its coordinator.

Every message carries a whole state, never a change: a `Status` is the state of a node, a `View` is what
a node must know of its job. So a lost, repeated or late message does no harm: the next one of its kind
carries the same or more, and receivers ignore older ones by number (`Status.seq`, and `(View.term,
View.revision)`). Two small messages detect a loss: a `Heartbeat` shows that the node is alive and names
its newest view, an `Ack` names the newest status that the coordinator has. If either side sees that the
other is behind, it sends the whole state again.

The values are msgspec structs, so that the same objects travel on the wire, are stored in the state
of a `RendezvousBackend`, and run through the simulator. Their limits are part of their types and
hold for everything that is decoded; a machine may build any value. Each limit is far above what a
real job needs and far below what would hurt. What a type cannot say (printable names, `min_nodes`
not over `max_nodes`) is checked by `sanitized_status` and `sanitized_view`, of whatever was decoded.

A field that has its default is not sent: most have, and a third less is to be sent, read and sealed.
So a default is part of the protocol, and never changes.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.core.blame import Trace
from holdfast.core.bounded import (
    ClockTime,
    Count,
    Incarnation,
    Name,
    NodeCount,
    NodeId,
    NodeRank,
    Number,
    Port,
    Report,
    ReportedCount,
    ReportedNumber,
    RunId,
    Seconds,
    StoreKey,
    Why,
    WorkerCount,
    WorkerRank,
)
from holdfast.core.job_settings import JobSettings, check_settings
from holdfast.core.limits import (
    ADDRESS_CHARS,
    CONTROL_KEY_BYTES,
    EXITCODE_MAX,
    GRACE_S_MAX,
    LOCAL_WORLD_SIZE_MAX,
    NAME_CHARS_MAX,
    NODE_ID_CHARS_MAX,
    PID_MAX,
    PORT_MAX,
    PORTS_MAX,
    REQUEST_ID_CHARS_MAX,
    REQUEST_WHY_CHARS_MAX,
    RIVALS_MAX,
    SUMMARY_CHARS_MAX,
    TERMS_PER_PLACE,
    VIEW_MEMBERS_MAX,
    WHY_CHARS_MAX,
)
from holdfast.printable import one_line, quoted


class NodePhase(Enum):
    """What a node is doing, by its own report."""

    READY = "ready"
    """Its workers have exited; it waits for a generation after `Status.generation`."""
    RUNNING = "running"
    """It starts or runs the workers of `Status.generation`."""
    FAILED = "failed"
    """A worker of `Status.generation` failed; the node stops or has stopped the others."""
    SUCCEEDED = "succeeded"
    """All workers of `Status.generation` succeeded."""
    LEAVING = "leaving"
    """It leaves the job and stops its workers."""
    CLOSING = "closing"
    """It closes the job, for all nodes."""


class NodeRole(Enum):
    """The role of a node in its job, as the coordinator decided."""

    WAITING = "waiting"
    """No round has this node yet, or the round it was in is broken."""
    STANDBY = "standby"
    """The round is full; the node waits to replace another."""
    MEMBER = "member"
    """The node is in the round and runs the workers of `View.generation`."""
    FENCED = "fenced"
    """The job went on without this incarnation: stop, and join as a new one."""
    REFUSED = "refused"
    """The node cannot be in this job; `View.refusal` and `View.why` have the reason."""
    CLOSED = "closed"
    """The job is over; `View.outcome` has the outcome."""


class RefusalReason(Enum):
    """Why a node cannot be in a job."""

    REPLACED = "replaced"
    """Another agent has the same node id: an earlier one that is alive, or a newer one to which this one
    yielded."""
    SETTINGS = "settings"
    """It was started with other settings than the job's, or with an impossible rank; or it reports
    numbers that no node of this job can have received."""
    TOO_MANY_JOBS = "too-many-jobs"
    """The coordinator takes no more jobs."""
    TOO_MANY_NODES = "too-many-nodes"
    """The coordinator takes no more nodes of this job."""


class JobOutcome(Enum):
    """How a job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The properties of a node that stay the same during one incarnation."""

    node: NodeId
    incarnation: Incarnation
    """A random number. An agent that rejoins, in any process, draws another."""
    role: Name = "default"
    local_world_size: Annotated[int, Meta(ge=1, le=LOCAL_WORLD_SIZE_MAX)] = 1
    host: Name = ""
    label: Name = ""
    address: Name = ""
    """The address at which other nodes reach it: as configured, else as the coordinator sees it."""
    ports: Annotated[tuple[Port, ...], Meta(min_length=1, max_length=PORTS_MAX)] = (0,)
    """Ports it holds for the workers' store that no generation has used yet. The node replaces a used
    port, so only this field may change."""
    store_key: StoreKey = b""
    """A random secret of the node. If the node is the first, the members, and nobody else, receive a key
    derived from it (`View.store_key`). Empty if its agent serves no store."""
    fixed_rank: NodeRank = -1
    """The rank that the node was started with (`static`), or -1."""
    self_fencing: bool = False
    """Whether the node, if it is cut off, stops its workers before it counts as lost."""
    yields: bool = False
    """Whether it yields, while it is alive, to a new agent with the same node id. The earlier agent
    decides this, since the new one may be anybody."""


class ControlPort(msgspec.Struct, frozen=True, array_like=True):
    """The port at which operators reach the agent of a node, if no coordinator forwards requests.

    Only nodes of the job can read it. The key is a random secret of the agent: a client that has the
    key is authorized.
    """

    port: Annotated[int, Meta(ge=1, le=PORT_MAX)]
    key: Annotated[bytes, Meta(min_length=CONTROL_KEY_BYTES, max_length=CONTROL_KEY_BYTES)]

    def __repr__(self) -> str:
        return f"ControlPort({self.port})"


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """An operator's request to a job. A request with the same id is the same request."""

    id: Annotated[str, Meta(min_length=1, max_length=REQUEST_ID_CHARS_MAX)]
    action: Name
    node: Annotated[str, Meta(max_length=NODE_ID_CHARS_MAX)] = ""
    """The node to drain or undrain: a node id, or a host with one or more nodes."""
    grace_s: Annotated[float, Meta(ge=-1.0, le=GRACE_S_MAX)] = -1.0
    """How long workers have to exit by themselves if the job is stopped; below 0: as configured."""
    who: Name = ""
    """`user@host`, as the client reports it; not authenticated."""
    why: Annotated[str, Meta(max_length=REQUEST_WHY_CHARS_MAX)] = ""

    def __str__(self) -> str:
        node = f" {self.node}" if self.node else ""
        why = f": {self.why}" if self.why else ""
        return f"{self.action}{node} requested by {self.who or 'somebody'}{why}"


class RequestAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request."""

    id: Annotated[str, Meta(max_length=REQUEST_ID_CHARS_MAX)]
    refusal: Name = ""
    """A `RequestRefusal`, or empty if it was granted."""
    why: Why = ""
    """Why it was refused, or why it changed nothing."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's failure in brief: enough to decide, and for one line on every console."""

    node: Annotated[str, Meta(max_length=NODE_ID_CHARS_MAX)]
    host: Name = ""
    rank: WorkerRank = -1
    pid: Annotated[int, Meta(ge=0, le=PID_MAX)] = 0
    exitcode: Annotated[int, Meta(ge=-EXITCODE_MAX, le=EXITCODE_MAX)] = 0
    summary: Annotated[str, Meta(max_length=SUMMARY_CHARS_MAX)] = ""
    """One line for a person."""
    sudden: bool = False
    """A signal that Holdfast did not send killed it: more likely a cause than a consequence."""
    retryable: bool = True
    """False if a restart would only repeat the failure."""
    trace: Trace = Trace.SILENT
    """How much the worker's output shows of the reason."""
    stopped: bool = False
    """It occurred after the stop of its group had begun."""
    ended_ago_s: Seconds = 0.0
    """How long ago it ended when this was sent."""
    spoke_ago_s: Seconds = 0.0
    """How long ago its traceback began; 0 if there is none."""
    rivals: Annotated[tuple[WorkerRank, ...], Meta(max_length=RIVALS_MAX)] = ()
    """Ranks that may equally have failed first."""
    ended_ns: Count = 0
    """When it ended, by the coordinator's clock; only the coordinator sets this. 0 if unknown."""
    spoke_ns: Count = 0


class Status(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="status"):
    """The state of a node for the coordinator; also enough to rebuild a lost job."""

    seq: Number
    """Increases with every status of this incarnation."""
    run_id: RunId
    info: NodeInfo
    settings: JobSettings
    phase: NodePhase = NodePhase.READY
    generation: ReportedNumber = -1
    """The last generation the node started, or -1."""
    clear: ReportedNumber = -1
    """No worker of an earlier generation than this is left on the node or will be started; -1 if the
    agent does not report it."""
    term: ReportedNumber = 0
    """The highest term it received."""
    round_term: ReportedNumber = 0
    """The term in which its round was formed; 0 if it is in none."""
    round: ReportedNumber = -1
    round_key: Incarnation = 0
    """Distinguishes this round from one of the same number that another coordinator formed."""
    assigned_generation: ReportedNumber = -1
    """The generation of its view as a member of that round; it may not have started it."""
    rank: NodeRank = -1
    size: NodeCount = 0
    known_generation: ReportedNumber = -1
    """The highest generation of the job that it received, in a round or not."""
    master_port: Port = 0
    """Where the workers of that generation meet."""
    restarts: ReportedCount = 0
    """The highest number of restarts that it received."""
    fence: ReportedCount = 0
    """The highest fence that it received."""
    away_s: Seconds = 0.0
    """How long it was without a coordinator before it found this one."""
    failure: Failure | None = None
    report: Report = b""
    """The whole failure report for every node's console, once it is known."""
    stuck: Why = ""
    """Why the node counts as lost though it is connected: its agent's loop is stuck."""
    call: Count = 0
    """The newest roll call that it received."""
    request: Request | None = None
    """An operator's request through this node, until it is answered."""
    drained: bool = False
    """Whether its newest view said so, for the next coordinator."""

    @property
    def place(self) -> int:
        """The last place in its list of endpoints at which a coordinator decided for it."""
        return max(0, self.term) // TERMS_PER_PLACE

    @property
    def clear_of(self) -> int:
        """Return the first generation of which the node may have workers."""
        if self.clear >= 0:
            return self.clear
        return self.generation + (self.phase is not NodePhase.RUNNING)

    @property
    def id(self) -> str:
        """Names this message in stories."""
        return f"{self.info.node}/status#{self.seq}"

    def __str__(self) -> str:
        return f"{self.id}[{self.phase.value}, generation {self.generation}]"


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="beat"):
    """The node is alive, its newest status has this number, and its newest view is this one."""

    run_id: RunId
    node: NodeId
    incarnation: Incarnation
    seq: Number
    term: Number
    revision: Number
    call: Count = 0
    """The newest roll call that it received."""
    sent_at: ClockTime = 0.0
    """When it was sent, by the node's own clock; meaningful only to the node."""


class Ack(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="ack"):
    """The coordinator is alive, and the newest status it has of this incarnation is this one.

    `seq` is -1 if it does not know the incarnation at all.
    """

    run_id: RunId
    node: NodeId
    incarnation: Incarnation
    seq: Number
    call: Count = 0
    """The number of a roll call, to which the node responds with a heartbeat immediately; 0 if none."""
    sent_at: ClockTime = 0.0
    """`sent_at` of the heartbeat that this answers, if any."""


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A member of a round, as its other members see it."""

    node: NodeId
    host: Name = ""
    first_rank: WorkerCount = 0
    """The global rank of its first worker; those of its others follow."""


class View(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="view"):
    """All that a node must know of its job."""

    run_id: RunId
    node: NodeId
    incarnation: Incarnation
    term: Number
    revision: Number
    role: NodeRole
    why: Why = ""
    """The last change, as text."""
    refusal: RefusalReason | None = None
    present: NodeCount = 0
    """Connected nodes, including standbys."""
    needed: NodeCount = 0
    """Nodes that a round needs to form."""
    wait_reason: Why = ""
    """Why this node has to wait for a delayed node, and for how long."""
    silence_s: Seconds = 0.0
    """How long a node may be silent before this coordinator counts it as lost; 0 if unknown."""
    round_term: Number = 0
    round: Number = -1
    round_key: Incarnation = 0
    generation: Number = -1
    start: bool = True
    """Whether a member may start its workers: no node has workers of earlier generations."""
    slow: Why = ""
    """The nodes whose workers it has waited for long, as text."""
    restarts: Count = 0
    fence: Count = 0
    """Increases with every generation of the run id, under any coordinator, so that storage can reject
    late writes of earlier generations."""
    rank: NodeRank = -1
    size: NodeCount = 0
    first_rank: WorkerCount = 0
    world_size: WorkerCount = 0
    first_role_rank: WorkerCount = 0
    role_world_size: WorkerCount = 0
    master_addr: Name = ""
    master_port: Port = 0
    store_key: StoreKey = b""
    """The key by which agents of this generation authenticate to the store at that port; empty if not
    all of them can."""
    members: Annotated[tuple[Member, ...], Meta(max_length=VIEW_MEMBERS_MAX)] = ()
    """All members by their rank, for a member; empty if the round has more than `VIEW_MEMBERS_MAX`."""
    outcome: JobOutcome | None = None
    failure: Failure | None = None
    report: Report = b""
    final: bool = False
    """The job is over, and its report, if any, is here: the node waits for nothing more."""
    request: Annotated[str, Meta(max_length=REQUEST_ID_CHARS_MAX)] = ""
    """The id of the newest request that was granted; `why` mentions it at first."""
    request_text: Why = ""
    """That request as text."""
    stopped_by: Annotated[str, Meta(max_length=REQUEST_ID_CHARS_MAX)] = ""
    """The id of the request that stopped the job, if one did."""
    answered: RequestAnswer | None = None
    """The answer to the newest request through this node."""
    drained: bool = False
    """The node must have no workers until it is undrained."""
    grace_s: Annotated[float, Meta(ge=-1.0, le=GRACE_S_MAX)] = -1.0
    """How long workers have to exit by themselves, as requested by the stop of the job."""

    @property
    def id(self) -> str:
        """Names this message in stories."""
        return f"{self.node}/view#{self.term}.{self.revision}"

    def answers(self, request: Request) -> bool:
        """Whether the view answers a request."""
        return self.answered is not None and self.answered.id == request.id

    def __str__(self) -> str:
        if self.role is NodeRole.MEMBER:
            what = f" of round {self.round_term}.{self.round}, rank {self.rank} of {self.size}"
        else:
            what = f", {self.outcome.value}" if self.outcome is not None else ""
        if not self.start:
            what += ", not to start yet"
        end = ", final" if self.final else ""
        return (
            f"{self.id}[{self.role.value}{what}, generation {self.generation}, restarts "
            f"{self.restarts}{end}: {self.why}]"
        )


Message = Status | Heartbeat | Ack | View


def echo(status: Status, view: View) -> Status:
    """Return a node's status after it received a view, with what the next coordinator needs.

    A coordinator that knows nothing rebuilds the job from the rounds that its nodes echo. Generation,
    restarts and fence never decrease. A request is repeated until a view answers it.
    """
    member = view.role is NodeRole.MEMBER
    request = status.request
    return msgspec.structs.replace(
        status,
        term=view.term,
        away_s=0.0,
        round_term=view.round_term if member else 0,
        round=view.round if member else -1,
        round_key=view.round_key if member else 0,
        assigned_generation=view.generation if member else -1,
        rank=view.rank if member else -1,
        size=view.size if member else 0,
        master_port=view.master_port if member else 0,
        request=None if request is not None and view.answers(request) else request,
        drained=view.drained,
        known_generation=max(status.known_generation, view.generation),
        restarts=max(status.restarts, view.restarts),
        fence=max(status.fence, view.fence),
    )


# What a type cannot say, of a message that was decoded. A name that is not printable is rejected,
# since names identify nodes and jobs. Free text is made printable instead: the last words of a worker
# are no reason to reject the node's status.


def sanitized_status(status: Status) -> Status:
    """Return a status that is safe to use; raise `ValueError` if it is invalid."""
    check_names(status.run_id, *names_in(status.info))
    check_address(status.info.address)
    check_settings(status.settings)
    failure = sanitized_failure(status.failure)
    request = sanitized_request(status.request) if status.request is not None else None
    is_same = failure is status.failure and request is status.request
    if is_same and status.stuck.isprintable():
        return status
    return msgspec.structs.replace(
        status, failure=failure, stuck=reason(status.stuck), request=request
    )


def sanitized_view(view: View) -> View:
    """Do the same for a view."""
    check_names(view.run_id, view.node)
    check_address(view.master_addr)
    for one in view.members:
        check_names(one.node, one.host)
    failure = sanitized_failure(view.failure)
    answered = view.answered
    said = answered.why if answered is not None else ""
    text = f"{view.why}{view.wait_reason}{view.slow}{view.request_text}{said}"
    if failure is view.failure and text.isprintable():
        return view
    if answered is not None:
        answered = msgspec.structs.replace(answered, why=reason(said))
    return msgspec.structs.replace(
        view,
        failure=failure,
        why=reason(view.why),
        wait_reason=reason(view.wait_reason),
        slow=reason(view.slow),
        request_text=reason(view.request_text),
        answered=answered,
    )


def sanitized_request(request: Request) -> Request:
    """Do the same for a request."""
    check_names(request.id, request.action, request.node)
    if f"{request.who}{request.why}".isprintable():
        return request
    return msgspec.structs.replace(
        request,
        who=one_line(request.who, NAME_CHARS_MAX),
        why=one_line(request.why, REQUEST_WHY_CHARS_MAX),
    )


def sanitized_failure(failure: Failure | None) -> Failure | None:
    """Do the same for a failure."""
    if failure is None:
        return None
    check_names(failure.node, failure.host)
    if failure.summary.isprintable():
        return failure
    return msgspec.structs.replace(failure, summary=one_line(failure.summary, SUMMARY_CHARS_MAX))


def names_in(info: NodeInfo) -> tuple[str, ...]:
    """Return all names of a node."""
    return info.node, info.role, info.host, info.label, info.address


def check_names(*names: str) -> None:
    """Raise `ValueError` for a name that is not printable."""
    if "".join(names).isprintable():
        return
    bad = next(name for name in names if not name.isprintable())
    raise ValueError(f"control characters in {quoted(repr(bad))}")


def check_address(text: str) -> None:
    """Raise `ValueError` if this is not a host: it becomes a variable that scripts pass to shells."""
    if text.strip(ADDRESS_CHARS):
        raise ValueError(f"{quoted(repr(text))} is not a host name or an IP address")


def reason(text: str) -> str:
    """Return a reason as one printable line of limited length."""
    return one_line(text, WHY_CHARS_MAX)
