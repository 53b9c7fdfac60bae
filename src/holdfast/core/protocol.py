"""The messages between a node and its coordinator.

Every message carries a complete state, never a change: a `Status` is the state of a node, and a `View`
is the part of the job's state that a node needs. So lost, repeated and late messages are harmless: the
next message of the same kind carries the same or newer state, and receivers ignore older ones by number
(`Status.seq`, and `(View.term, View.revision)`). Two small messages detect losses: a `Heartbeat` shows
that the node is alive, and names its newest status and view; an `Ack` names the newest status that the
coordinator received. If one side finds that the other is behind, it sends the complete state again.

The messages are msgspec structs: the same objects travel on the wire, are stored in the state of a
`RendezvousBackend`, and run through the simulator. Their types include limits, which are checked when a
message is decoded. Each limit is far above what a real job needs, and low enough that a hostile peer
cannot do harm. `sanitized_status` and `sanitized_view` check the rest of a decoded message: names are
printable, and `min_nodes` is not above `max_nodes`.

A field with its default value is not sent, which makes messages a third smaller. So a default is part of
the protocol and never changes.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.core.blame import FailureTrace
from holdfast.core.bounded import (
    ClockTime,
    Count,
    Incarnation,
    Name,
    NodeCount,
    NodeId,
    NodeRank,
    Number,
    Patience,
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
    TERMS_PER_ENDPOINT,
    VIEW_MEMBERS_MAX,
    WHY_CHARS_MAX,
)
from holdfast.core.phases import JobOutcome, NodePhase, NodeRole, RefusalReason
from holdfast.printable import one_line, quoted

UNRESERVED = "-"
"""In `NodeInfo.reserved_on`: the id is generated, and no machine reserves it."""


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The properties of a node that do not change during one incarnation."""

    node: NodeId
    incarnation: Incarnation
    """A random number, drawn each time an agent joins or rejoins."""
    role: Name = "default"
    local_world_size: Annotated[int, Meta(ge=1, le=LOCAL_WORLD_SIZE_MAX)] = 1
    host: Name = ""
    label: Name = ""
    address: Name = ""
    """The address at which other nodes reach it: as configured, or else as the coordinator sees it."""
    ports: Annotated[tuple[Port, ...], Meta(min_length=1, max_length=PORTS_MAX)] = (0,)
    """Unused ports that the node holds for the workers' store. The node replaces a port after a
    generation has used it, so this is the only field that may change."""
    store_key: StoreKey = b""
    """A random secret of the node. If the node is the first of a round, only the members receive a key
    derived from it (`View.store_key`). Empty if its agent serves no store."""
    fixed_rank: NodeRank = -1
    """The rank that the node was started with (`static`), or -1."""
    self_fencing: bool = False
    """Whether the node, if it is disconnected, stops its workers before it counts as lost."""
    yields: bool = False
    """Whether the node, while alive, yields its id to a new agent with the same id. The earlier agent
    decides this, because the new one is not trusted."""
    reserved_on: Name = ""
    """The machine that reserves the node's generated id for its agent; `UNRESERVED` if none does. Empty if
    the user chose the id."""

    @property
    def is_reserved(self) -> bool:
        """Whether no other agent on the machine of this node can have its generated id."""
        return self.reserved_on not in ("", UNRESERVED)


class ControlPort(msgspec.Struct, frozen=True, array_like=True):
    """The port at which operators reach a node's agent in a job without a coordinator.

    Only nodes of the job can read it. The key is a random secret of the agent; a client that has the
    key is authorized.
    """

    port: Annotated[int, Meta(ge=1, le=PORT_MAX)]
    key: Annotated[bytes, Meta(min_length=CONTROL_KEY_BYTES, max_length=CONTROL_KEY_BYTES)]

    def __repr__(self) -> str:
        return f"ControlPort({self.port})"


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """An operator's request to a job. Two requests with the same id are the same request."""

    id: Annotated[str, Meta(min_length=1, max_length=REQUEST_ID_CHARS_MAX)]
    action: Name
    node: Annotated[str, Meta(max_length=NODE_ID_CHARS_MAX)] = ""
    """The node to drain or undrain: a node id, or a host with one or more nodes."""
    grace_s: Annotated[float, Meta(ge=-1.0, le=GRACE_S_MAX)] = -1.0
    """The time that workers have to exit by themselves if the job is stopped; below 0: as configured."""
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
    """Why the request was refused, or why it changed nothing."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A summary of a worker's failure: enough for decisions, and for one line on every console."""

    node: Annotated[str, Meta(max_length=NODE_ID_CHARS_MAX)]
    host: Name = ""
    rank: WorkerRank = -1
    pid: Annotated[int, Meta(ge=0, le=PID_MAX)] = 0
    exitcode: Annotated[int, Meta(ge=-EXITCODE_MAX, le=EXITCODE_MAX)] = 0
    summary: Annotated[str, Meta(max_length=SUMMARY_CHARS_MAX)] = ""
    """The failure in one line, for users."""
    sudden: bool = False
    """Whether a signal that Holdfast did not send killed the worker: more likely a cause than a
    consequence."""
    retryable: bool = True
    """False if a restart would only repeat the failure."""
    trace: FailureTrace = FailureTrace.SILENT
    """What the worker's output shows about the reason."""
    stopped: bool = False
    """Whether the worker failed after the stop of its group had begun."""
    ended_ago_s: Seconds = 0.0
    """The time from the worker's exit until this message was sent."""
    traceback_ago_s: Seconds = 0.0
    """The time from the start of the worker's traceback until this message was sent; 0 if there is none."""
    rivals: Annotated[tuple[WorkerRank, ...], Meta(max_length=RIVALS_MAX)] = ()
    """Other ranks that may have failed first."""
    ended_ns: Count = 0
    """When the worker exited, by the coordinator's clock. Only the coordinator sets it; 0 if unknown."""
    traceback_ns: Count = 0
    """When the worker began its traceback; like `ended_ns`."""


class Status(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="status"):
    """The state of a node, as it reports to the coordinator. The statuses of all nodes suffice to rebuild
    a job whose coordinator was lost."""

    seq: Number
    """Increases with every status of this incarnation."""
    run_id: RunId
    info: NodeInfo
    settings: JobSettings
    phase: NodePhase = NodePhase.READY
    generation: ReportedNumber = -1
    """The last generation that the node started, or -1."""
    clear: ReportedNumber = -1
    """The node has no workers of generations before this one and will not start any; -1 if that follows
    from `phase` and `generation` (`oldest_generation`)."""
    term: ReportedNumber = 0
    """The highest term that the node received."""
    round_term: ReportedNumber = 0
    """The term in which the node's round was formed; 0 if it is in none."""
    round: ReportedNumber = -1
    round_key: Incarnation = 0
    """Distinguishes this round from one with the same number that another coordinator formed."""
    assigned_generation: ReportedNumber = -1
    """The generation of the node's view as a member of that round. The node may not have started it."""
    rank: NodeRank = -1
    size: NodeCount = 0
    known_generation: ReportedNumber = -1
    """The highest generation of the job that the node received, as a member or not."""
    master_port: Port = 0
    """The port of the workers' store in `assigned_generation`."""
    restarts: ReportedCount = 0
    """The highest number of restarts that the node received."""
    fence: ReportedCount = 0
    """The highest fence that the node received."""
    unreachable_s: Seconds = 0.0
    """How long the node had no coordinator before it connected to this one."""
    failure: Failure | None = None
    report: Report = b""
    """The complete failure report, which every node prints; empty until it is available."""
    stuck: Why = ""
    """Why the node counts as lost although it is connected: its agent's loop is stuck."""
    call: Count = 0
    """The newest roll call that the node received."""
    request: Request | None = None
    """A request that an operator sent through this node, until it is answered."""
    drained: bool = False
    """Whether the node's newest view says that it is drained; the next coordinator needs this."""

    @property
    def endpoint_index(self) -> int:
        """The index of the last endpoint in its list whose coordinator this node obeyed."""
        return max(0, self.term) // TERMS_PER_ENDPOINT

    @property
    def oldest_generation(self) -> int:
        """Return the lowest generation whose workers the node may have."""
        if self.clear >= 0:
            return self.clear
        return self.generation + (self.phase is not NodePhase.RUNNING)

    @property
    def id(self) -> str:
        """The id of this message in stories."""
        return f"{self.info.node}/status#{self.seq}"

    def __str__(self) -> str:
        return f"{self.id}[{self.phase.value}, generation {self.generation}]"


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="beat"):
    """Shows that the node is alive, and names its newest status and its newest view."""

    run_id: RunId
    node: NodeId
    incarnation: Incarnation
    seq: Number
    term: Number
    revision: Number
    call: Count = 0
    """The newest roll call that the node received."""
    sent_at: ClockTime = 0.0
    """When the heartbeat was sent, by the node's own clock."""
    patience: Patience = 0
    """For how many further silence limits to wait for this node, which gets little CPU."""


class Ack(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="ack"):
    """Shows that the coordinator is alive, and names the newest status it has of this incarnation.

    If the coordinator does not know the incarnation, `seq` is -1.
    """

    run_id: RunId
    node: NodeId
    incarnation: Incarnation
    seq: Number
    call: Count = 0
    """The number of a roll call, to which the node immediately responds with a heartbeat; 0 for none."""
    sent_at: ClockTime = 0.0
    """`sent_at` of the heartbeat that this answers, if any."""
    patience: Patience = 0
    """If this answers a heartbeat: by how many further silence limits the node may stop its workers later."""


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A member of a round, as its other members see it."""

    node: NodeId
    host: Name = ""
    first_rank: WorkerCount = 0
    """The global rank of its first worker. Its other workers have the next ranks."""


class View(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="view"):
    """The state of the job, as far as one node needs it."""

    run_id: RunId
    node: NodeId
    incarnation: Incarnation
    term: Number
    revision: Number
    role: NodeRole
    why: Why = ""
    """The reason for the last change."""
    refusal: RefusalReason | None = None
    new_id: Annotated[str, Meta(max_length=NODE_ID_CHARS_MAX)] = ""
    """The id with which this fenced node must rejoin, if another node has its generated id."""
    present: NodeCount = 0
    """The number of connected nodes, including standbys."""
    needed: NodeCount = 0
    """The number of nodes that a round needs to form."""
    wait_reason: Why = ""
    """If this node waits for a delayed node: why, and for how long."""
    silence_s: Seconds = 0.0
    """After this time without a message the coordinator counts a node as lost; 0 if unknown."""
    round_term: Number = 0
    round: Number = -1
    round_key: Incarnation = 0
    generation: Number = -1
    start: bool = True
    """Whether a member may start its workers: no node has workers of earlier generations."""
    slow: Why = ""
    """Nodes whose workers take long to stop, as text."""
    restarts: Count = 0
    fence: Count = 0
    """Increases with every generation of the run id, under any coordinator. Storage can use it to reject
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
    """The key by which agents of this generation authenticate to the store at that port; empty if
    a member has no secret (`NodeInfo.store_key`)."""
    members: Annotated[tuple[Member, ...], Meta(max_length=VIEW_MEMBERS_MAX)] = ()
    """In the view of a member, all members by rank; empty if there are more than `VIEW_MEMBERS_MAX`."""
    outcome: JobOutcome | None = None
    failure: Failure | None = None
    report: Report = b""
    final: bool = False
    """The job is over, and the view has its failure report, if there is one. No further view follows."""
    request: Annotated[str, Meta(max_length=REQUEST_ID_CHARS_MAX)] = ""
    """The id of the newest granted request. The first views after it mention it in `why`."""
    request_text: Why = ""
    """That request as text."""
    stopped_by: Annotated[str, Meta(max_length=REQUEST_ID_CHARS_MAX)] = ""
    """The id of the request that stopped the job, if one did."""
    answered: RequestAnswer | None = None
    """The answer to the newest request that was sent through this node."""
    drained: bool = False
    """The node must have no workers until it is undrained."""
    grace_s: Annotated[float, Meta(ge=-1.0, le=GRACE_S_MAX)] = -1.0
    """The time that workers have to exit by themselves, if the request to stop the job sets it."""
    after_failure: bool = False
    """Whether a failure or a lost node is why workers of earlier generations must exit."""

    @property
    def id(self) -> str:
        """The id of this message in stories."""
        return f"{self.node}/view#{self.term}.{self.revision}"

    def as_final(self) -> View:
        """Return this view as the last one of its job."""
        return msgspec.structs.replace(self, final=True)

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
    """Return a node's status with the facts of a view that it received.

    A coordinator that starts without state rebuilds the job from these echoes. Generation, restarts and
    fence never decrease. A request is repeated until a view answers it.
    """
    member = view.role is NodeRole.MEMBER
    request = status.request
    return msgspec.structs.replace(
        status,
        term=view.term,
        unreachable_s=0.0,
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


# Checks of decoded messages that types cannot express. A name that is not printable is rejected, because
# names identify nodes and jobs. Free text is made printable instead: a status is not rejected because of
# a worker's last output.


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
    """Return a view that is safe to use; raise `ValueError` if it is invalid."""
    check_names(view.run_id, view.node, view.new_id)
    check_address(view.master_addr)
    for one in view.members:
        check_names(one.node, one.host)
    failure = sanitized_failure(view.failure)
    answered = view.answered
    answer_why = answered.why if answered is not None else ""
    text = f"{view.why}{view.wait_reason}{view.slow}{view.request_text}{answer_why}"
    if failure is view.failure and text.isprintable():
        return view
    if answered is not None:
        answered = msgspec.structs.replace(answered, why=reason(answer_why))
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
    """Return a request that is safe to use; raise `ValueError` if it is invalid."""
    check_names(request.id, request.action, request.node)
    if f"{request.who}{request.why}".isprintable():
        return request
    return msgspec.structs.replace(
        request,
        who=one_line(request.who, NAME_CHARS_MAX),
        why=one_line(request.why, REQUEST_WHY_CHARS_MAX),
    )


def sanitized_failure(failure: Failure | None) -> Failure | None:
    """Return a failure that is safe to use; raise `ValueError` if it is invalid."""
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
    """Raise `ValueError` if this is not a host name or address. Scripts pass it to shells."""
    if text.strip(ADDRESS_CHARS):
        raise ValueError(f"{quoted(repr(text))} is not a host name or an IP address")


def reason(text: str) -> str:
    """Return a reason as one printable line of limited length."""
    return one_line(text, WHY_CHARS_MAX)
