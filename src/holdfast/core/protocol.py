"""What a node and its coordinator send each other: the values that both machines are driven by.

Every message carries a whole state, never a change: a `Status` is all there is to know of a node, a
`View` all that a node must know of its job. A message that is lost, repeated or late therefore does
no harm: the next one of its kind carries the same or more, and older ones are recognised by their
number (`Status.seq`, and `(View.term, View.revision)`) and ignored. Two small messages keep this
moving: a `Heartbeat` shows that the node is alive and which view it has, an `Ack` answers with what
the coordinator has; whoever sees that the other is behind sends the whole again.

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
    ASKED_WHY_CHARS_MAX,
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
    """Its workers are down; it wants to start a generation after `Status.generation`."""
    RUNNING = "running"
    """It starts or runs the workers of `Status.generation`."""
    FAILED = "failed"
    """A worker of `Status.generation` failed; the others are being stopped or are gone."""
    SUCCEEDED = "succeeded"
    """All workers of `Status.generation` succeeded."""
    LEAVING = "leaving"
    """It leaves the job, and its workers are being stopped."""
    CLOSING = "closing"
    """It asks for the end of the job, for all nodes."""


class NodeRole(Enum):
    """What a node is to its job, by the coordinator's decision."""

    WAITING = "waiting"
    """No round has this node yet, or the round it was in is broken."""
    STANDBY = "standby"
    """The round is full; the node waits to replace another."""
    MEMBER = "member"
    """The node is in the round and runs the workers of `View.generation`."""
    FENCED = "fenced"
    """The job went on without this incarnation: stop, and join as a new one."""
    REFUSED = "refused"
    """The node cannot be in this job; `View.refusal` and `View.why` tell why."""
    CLOSED = "closed"
    """The job is over; `View.outcome` tells how."""


class RefusalReason(Enum):
    """Why a node cannot be in a job."""

    REPLACED = "replaced"
    """Another agent has the same node id: it was there before, or this one gave way to it."""
    SETTINGS = "settings"
    """It was started with other settings than the job's, or with a rank that cannot be; or it reports
    numbers that no node of this job can have heard of."""
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
    """What does not change about a node while it is one incarnation."""

    node: NodeId
    incarnation: Incarnation
    """A random number: an agent that begins anew, in whatever process, draws another."""
    role: Name = "default"
    local_world_size: Annotated[int, Meta(ge=1, le=LOCAL_WORLD_SIZE_MAX)] = 1
    host: Name = ""
    label: Name = ""
    address: Name = ""
    """Where other nodes reach it: as configured, else as the coordinator sees it."""
    ports: Annotated[tuple[Port, ...], Meta(min_length=1, max_length=PORTS_MAX)] = (0,)
    """Ports it holds for the workers' store that no generation was given yet. The node replaces one
    that was given, so this alone may change."""
    store_key: StoreKey = b""
    """A secret that the node drew. If it is the first, members are told what comes of it in their
    generation (`View.store_key`), and nobody else is. Empty if its agent serves no store."""
    fixed_rank: NodeRank = -1
    """The rank that the node was started with (`static`), or -1."""
    stops_alone: bool = False
    """Whether its workers are gone by the time it counts as silent, also if it is only cut off."""
    yields: bool = False
    """Whether it gives way, while it is there, to an agent that comes with the same node id. It is
    for the one that is there to say: a newcomer may be anybody."""


class ControlPort(msgspec.Struct, frozen=True, array_like=True):
    """The port at which people reach the agent of a node, where no coordinator passes on what they ask.

    It is told where nodes of the job alone can read it. The key is a secret that the agent drew: who
    has read it there is one of those who may ask.
    """

    port: Annotated[int, Meta(ge=1, le=PORT_MAX)]
    key: Annotated[bytes, Meta(min_length=CONTROL_KEY_BYTES, max_length=CONTROL_KEY_BYTES)]

    def __repr__(self) -> str:
        return f"ControlPort({self.port})"


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """What somebody asks of a job: which, who and why. Repeated under the same id it is the same one."""

    id: Annotated[str, Meta(min_length=1, max_length=REQUEST_ID_CHARS_MAX)]
    action: Name
    node: Annotated[str, Meta(max_length=NODE_ID_CHARS_MAX)] = ""
    """Which node is to be drained or undrained: its id, or the host of one or several."""
    grace_s: Annotated[float, Meta(ge=-1.0, le=GRACE_S_MAX)] = -1.0
    """How long workers have to end by themselves when the job is stopped; below 0 as configured."""
    who: Name = ""
    """`user@host`, as whoever asks says it: for people, it proves nothing."""
    why: Annotated[str, Meta(max_length=ASKED_WHY_CHARS_MAX)] = ""

    def __str__(self) -> str:
        node = f" {self.node}" if self.node else ""
        why = f": {self.why}" if self.why else ""
        return f"{self.action}{node} asked for by {self.who or 'somebody'}{why}"


class RequestAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request."""

    id: Annotated[str, Meta(max_length=REQUEST_ID_CHARS_MAX)]
    refusal: Name = ""
    """A `RequestRefusal`, or nothing if it was granted."""
    why: Why = ""
    """Of a refusal, or of what changed nothing: it was so already."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's failure in short: enough to decide, and for a line on every console."""

    node: Annotated[str, Meta(max_length=NODE_ID_CHARS_MAX)]
    host: Name = ""
    rank: WorkerRank = -1
    pid: Annotated[int, Meta(ge=0, le=PID_MAX)] = 0
    exitcode: Annotated[int, Meta(ge=-EXITCODE_MAX, le=EXITCODE_MAX)] = 0
    summary: Annotated[str, Meta(max_length=SUMMARY_CHARS_MAX)] = ""
    """One line for a person."""
    sudden: bool = False
    """It died by a signal that Holdfast did not send: more likely a cause than a consequence."""
    retryable: bool = True
    """False for what a new start would only repeat."""
    trace: Trace = Trace.SILENT
    """What it shows of its reason."""
    stopped: bool = False
    """It came after the stop of its group had begun."""
    ended_ago_s: Seconds = 0.0
    """How long ago it ended when this was sent."""
    spoke_ago_s: Seconds = 0.0
    """How long ago it began to say why; 0 if it said nothing."""
    rivals: Annotated[tuple[WorkerRank, ...], Meta(max_length=RIVALS_MAX)] = ()
    """Ranks that may just as well have failed first."""
    ended_ns: Count = 0
    """When it ended, by the clock of whoever decides, who alone sets this; 0 if it is not known."""
    spoke_ns: Count = 0


class Status(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="status"):
    """All that a coordinator must know of a node; also enough to rebuild a lost job from."""

    seq: Number
    """Grows with every status of this incarnation."""
    run_id: RunId
    info: NodeInfo
    settings: JobSettings
    phase: NodePhase = NodePhase.READY
    generation: ReportedNumber = -1
    """The last generation the node started, or -1."""
    clear: ReportedNumber = -1
    """Of generations before this one no worker is left on the node, nor will one be started; -1 of
    an agent that does not say."""
    term: ReportedNumber = 0
    """The highest term it heard of."""
    round_term: ReportedNumber = 0
    """The term in which the round it is a member of was formed; 0 if it is in none."""
    round: ReportedNumber = -1
    round_key: Incarnation = 0
    """Tells this round from one of the same number that another coordinator formed."""
    assigned_generation: ReportedNumber = -1
    """The generation of its view as a member of that round; it may not have started it."""
    rank: NodeRank = -1
    size: NodeCount = 0
    heard_generation: ReportedNumber = -1
    """The highest generation of the job that it heard of, in a round or not."""
    master_port: Port = 0
    """Where the workers of that generation meet."""
    restarts: ReportedCount = 0
    """The most restarts of the job that it heard of."""
    fence: ReportedCount = 0
    """The highest fence that it heard of."""
    away_s: Seconds = 0.0
    """How long it was without a coordinator before it found this one."""
    failure: Failure | None = None
    report: Report = b""
    """The whole failure report for every node's console, once it is known."""
    stuck: Why = ""
    """Why the node counts as lost though it can still speak: its agent does not supervise."""
    call: Count = 0
    """The newest roll call that it has heard."""
    request: Request | None = None
    """What somebody asks of the job through this node, until it is answered."""
    drained: bool = False
    """Whether its newest view said so: a coordinator after that one is to know it."""

    @property
    def place(self) -> int:
        """The last place in its list of endpoints at which a coordinator decided for it."""
        return max(0, self.term) // TERMS_PER_PLACE

    @property
    def clear_of(self) -> int:
        """Return the first generation of which workers may be on the node."""
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
    """The newest roll call that it has heard."""
    sent_at: ClockTime = 0.0
    """When it was sent, by the node's own clock: of meaning to the node alone."""


class Ack(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="ack"):
    """The coordinator is alive, and the newest status it has of this incarnation is this one.

    `seq` is -1 if it does not know the incarnation at all.
    """

    run_id: RunId
    node: NodeId
    incarnation: Incarnation
    seq: Number
    call: Count = 0
    """The number of a roll call, to be answered at once by a heartbeat; 0 if there is none."""
    sent_at: ClockTime = 0.0
    """That of the heartbeat which it answers, if it answers one."""


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
    """What the last change was, in words for a person."""
    refusal: RefusalReason | None = None
    present: NodeCount = 0
    """Nodes that are there, standbys included."""
    needed: NodeCount = 0
    """Nodes that must be there before a round can form."""
    held_back: Why = ""
    """Who came and went too often to be let in at once, and for how long, if this node waits for it."""
    silence_s: Seconds = 0.0
    """This coordinator takes nodes for lost that are silent for so long; 0 if it does not say."""
    round_term: Number = 0
    round: Number = -1
    round_key: Incarnation = 0
    generation: Number = -1
    start: bool = True
    """Whether a member may start its workers: of earlier generations none is left on any node."""
    slow: Why = ""
    """Whose workers it waits for already long, in words for a person."""
    restarts: Count = 0
    fence: Count = 0
    """Grows with every generation of the run id, whoever decides: what is written with it can be
    told from what a worker of an earlier generation writes late."""
    rank: NodeRank = -1
    size: NodeCount = 0
    first_rank: WorkerCount = 0
    world_size: WorkerCount = 0
    first_role_rank: WorkerCount = 0
    role_world_size: WorkerCount = 0
    master_addr: Name = ""
    master_port: Port = 0
    store_key: StoreKey = b""
    """By what agents of this generation prove to the store at that port that they are its members;
    empty if not all of them can."""
    members: Annotated[tuple[Member, ...], Meta(max_length=VIEW_MEMBERS_MAX)] = ()
    """All members by their rank, for a member; empty if the round has more than `VIEW_MEMBERS_MAX`."""
    outcome: JobOutcome | None = None
    failure: Failure | None = None
    report: Report = b""
    final: bool = False
    """Nothing more is to be waited for: the job is over and its report, if any, is here."""
    request: Annotated[str, Meta(max_length=REQUEST_ID_CHARS_MAX)] = ""
    """The id of the newest request that was granted; while it is new, `why` tells of it."""
    asked: Why = ""
    """That request in words."""
    stopped_by: Annotated[str, Meta(max_length=REQUEST_ID_CHARS_MAX)] = ""
    """The id of the request that stopped the job, if one did."""
    answered: RequestAnswer | None = None
    """What became of the newest request that came through this node."""
    drained: bool = False
    """The node is to have no workers until it is undrained."""
    grace_s: Annotated[float, Meta(ge=-1.0, le=GRACE_S_MAX)] = -1.0
    """How long workers have to end by themselves, as somebody asked who had the job stopped."""

    @property
    def id(self) -> str:
        """Names this message in stories."""
        return f"{self.node}/view#{self.term}.{self.revision}"

    def answers(self, request: Request) -> bool:
        """Whether the view has the answer to a request."""
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
    """Return a node's status after it received a view: what it must tell the next coordinator.

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
        heard_generation=max(status.heard_generation, view.generation),
        restarts=max(status.restarts, view.restarts),
        fence=max(status.fence, view.fence),
    )


# What a type cannot say, of a message that was decoded. A name that is not printable is refused,
# since names tell nodes and jobs apart. Text for a person is made printable instead: what a dying
# worker said is no reason not to hear its node.


def sanitized_status(status: Status) -> Status:
    """Return a status as it may be used; raise `ValueError` if it may not be."""
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
    text = f"{view.why}{view.held_back}{view.slow}{view.asked}{said}"
    if failure is view.failure and text.isprintable():
        return view
    if answered is not None:
        answered = msgspec.structs.replace(answered, why=reason(said))
    return msgspec.structs.replace(
        view,
        failure=failure,
        why=reason(view.why),
        held_back=reason(view.held_back),
        slow=reason(view.slow),
        asked=reason(view.asked),
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
        why=one_line(request.why, ASKED_WHY_CHARS_MAX),
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
    """Return all that a node goes by."""
    return info.node, info.role, info.host, info.label, info.address


def check_names(*names: str) -> None:
    """Raise `ValueError` for a name that is not printable."""
    if "".join(names).isprintable():
        return
    bad = next(name for name in names if not name.isprintable())
    raise ValueError(f"control characters in {quoted(repr(bad))}")


def check_address(text: str) -> None:
    """Raise `ValueError` for what is no host: it becomes a variable, and scripts put that in shells."""
    if text.strip(ADDRESS_CHARS):
        raise ValueError(f"{quoted(repr(text))} is not a host name or an IP address")


def reason(text: str) -> str:
    """Return a reason for a person as it may be sent and shown, whoever it comes from."""
    return one_line(text, WHY_CHARS_MAX)
