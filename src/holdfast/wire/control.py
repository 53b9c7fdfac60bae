"""What is in the bodies of queries and replies (`wire.messages.Query`), and what can be asked for.

===========  ====================  ============================================================
what         body                  replies
===========  ====================  ============================================================
`here`       nothing               one `Here`; of an agent's own socket alone
`act`        `Request`             one, refused or not
`status`     `StatusQuery`         one `JobSummaries`: of one job, or of all that the connection may see
`events`     `EventsQuery`         `Events`, the kept ones first; then each as it comes
`logs`       `LogsQuery`           `LogLines`, until all is sent that was asked for
`stacks`     nothing               one `Stacks`
`stages`     nothing               one `Stages`
`report`     nothing               one `NodeReport`
`contacts`   nothing               `Contacts`; of an agent's own socket alone
`more`       `More`                none: the query of that id may send so much more; an empty one to a
                                   stream of a node is answered by an empty reply, to show that it is there
`cancel`     nothing               none: the query of that id is over
===========  ====================  ============================================================

`logs`, `stacks`, `stages` and `report` are for one node, `act` for whoever decides, `events` for either.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from holdfast.core.bounded import MALFORMED, Count, Name, Number, Port, Seconds, Why, WorkerRank
from holdfast.core.limits import NODE_ID_CHARS_MAX, RUN_ID_CHARS_MAX
from holdfast.core.protocol import Request, sound_request
from holdfast.printable import quoted
from holdfast.wire import limits
from holdfast.wire.errors import BadMessage
from holdfast.wire.messages import Age, EventRecord, JobSummary, NodeReport, sound_report

HERE, ACT, STATUS, EVENTS = "here", "act", "status", "events"
LOGS, STACKS, STAGES = "logs", "stacks", "stages"
REPORT, CONTACTS = "report", "contacts"
MORE, CANCEL = "more", "cancel"
READS = (STATUS, EVENTS, LOGS, STACKS, STAGES, REPORT, MORE, CANCEL)
"""What somebody may ask for who may change nothing."""
WINDOW_BYTES = 2 * 1024 * 1024
"""What all streams of an operator may send before he says that there is room for more. It must stay
below `quotas.UNREAD_BYTES_MAX`, at which a coordinator drops whoever does not read."""
CHUNK_BYTES = 256 * 1024
EVENTS_AT_ONCE = 64
"""In one message: with the longest texts there are, they fit into a frame."""
RANKS_MAX = 65_536
GREP_CHARS_MAX = 1_000
TAIL_LINES_MAX = 1_000_000
SECRET_BYTES_MAX = 64
PEM_BYTES_MAX = 64 * 1024
CONTACTS_AT_ONCE = 512
"""In one message: with the longest names there are, they fit into a frame."""

T = TypeVar("T", bound=msgspec.Struct)


class Here(msgspec.Struct, frozen=True, kw_only=True):
    """The agent at a socket, and its job."""

    run_id: Annotated[str, Meta(max_length=RUN_ID_CHARS_MAX)] = ""
    node: Annotated[str, Meta(max_length=NODE_ID_CHARS_MAX)] = ""
    """Empty of a job with one node."""
    pid: Count = 0
    backend: Name = ""
    endpoint: Why = ""
    program: Name = ""
    state: Name = ""
    generation: Number = -1
    workers: Count = 0
    elapsed_s: Seconds = 0.0
    coordinated: bool = True
    """Whether a coordinator, or this agent alone, answers for all nodes."""


class Contact(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach the agent of a node at its control port."""

    node: Annotated[str, Meta(max_length=NODE_ID_CHARS_MAX)]
    address: Name = ""
    port: Port = 0
    """0 if it has none (`control=off`)."""
    secret: Annotated[bytes, Meta(max_length=SECRET_BYTES_MAX)] = b""

    def __repr__(self) -> str:
        return f"Contact({self.node!r}, {self.address!r}, {self.port})"


class Contacts(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach agents of a job; the one that leads is the first, if it is among them."""

    contacts: Annotated[list[Contact], Meta(max_length=limits.SUMMARIES_MAX)] = []
    pem: Annotated[list[Annotated[bytes, Meta(max_length=PEM_BYTES_MAX)]], Meta(max_length=3)] = []
    """With TLS: an authority, a certificate and its key."""
    run_id: Annotated[str, Meta(max_length=RUN_ID_CHARS_MAX)] = ""
    """The job, as the handshake is to name it: none with a token by which people look at all jobs."""
    read_only: bool = False

    def __repr__(self) -> str:
        return f"Contacts({self.contacts!r})"


class StatusQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Requests the state of a job; with an empty `run_id` of all that the connection may see."""

    watch: bool = False
    """Have the nodes report about their workers for a while; the next reply contains the reports."""


class JobSummaries(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs that a `StatusQuery` requested."""

    jobs: Annotated[list[JobSummary], Meta(max_length=limits.JOBS_MAX)] = []


class EventsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for the events that are kept, and for all that come, if it is to follow."""

    follow: bool = False


class Events(msgspec.Struct, frozen=True, kw_only=True):
    """Some events, in the order in which they became known."""

    events: Annotated[list[EventRecord], Meta(max_length=limits.EVENTS_MAX)] = []
    now: Annotated[float, Meta(ge=0.0)] = 0.0
    """The time of day where they are sent from, by which they are told from those of other nodes."""


class LogsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Asks a node for what its workers wrote."""

    ranks: Annotated[list[WorkerRank], Meta(max_length=RANKS_MAX)] = []
    """Only of these; empty for all."""
    tail: Annotated[int, Meta(ge=-1, le=TAIL_LINES_MAX)] = -1
    """So many lines of each to begin with; all below 0."""
    follow: bool = False
    """Go on with what they write, through restarts."""
    grep: Annotated[str, Meta(max_length=GREP_CHARS_MAX)] = ""
    """Only lines with this text."""
    room: Annotated[int, Meta(ge=0, le=WINDOW_BYTES)] = 0
    """How much may be sent before there is room for more."""


class LogLines(msgspec.Struct, frozen=True, kw_only=True):
    """Whole lines that one worker wrote, as it wrote them."""

    rank: WorkerRank
    stream: Name = "stdout"
    generation: Number = -1
    at: float = 0.0
    """When they were seen, by the time of day of the node; of old lines when the file was last written."""
    text: Annotated[bytes, Meta(max_length=limits.REPLY_BYTES_MAX)] = b""


class WorkerStacks(msgspec.Struct, frozen=True, kw_only=True):
    """The stacks of one worker."""

    rank: WorkerRank
    pid: Annotated[int, Meta(ge=0)] = 0
    text: str = ""


class Stacks(msgspec.Struct, frozen=True, kw_only=True):
    """The stacks of a node's workers."""

    workers: Annotated[list[WorkerStacks], Meta(max_length=limits.WORKERS_REPORTED_MAX)] = []


class GenerationStages(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one generation went on one node; below 0 what is not known or not over."""

    generation: Number
    age_s: Age = -1.0
    """Since its workers were started."""
    ran_s: Age = -1.0
    """From then until their stop began, or until now."""
    is_over: bool = False
    world_size: Count = 0
    why: Why = ""
    """Why it was started, as whoever decides for all nodes put it."""
    regroup_s: Age = -1.0
    """From the end of the workers before it until the nodes had met."""
    start_s: Age = -1.0
    first_step_s: Age = -1.0
    """From the start of the workers until the last of them had made a step, or given a sign of life."""
    detect_s: Age = -1.0
    """Something was wrong already: until the stop began."""
    stop_s: Age = -1.0
    reason: Name = ""
    """Why its workers were stopped: a `core.supervision.StopReason`."""
    detail: Why = ""


class Stages(msgspec.Struct, frozen=True, kw_only=True):
    """The newest generations of a node, the oldest first."""

    generations: Annotated[list[GenerationStages], Meta(max_length=limits.EVENTS_MAX)] = []


class More(msgspec.Struct, frozen=True, kw_only=True):
    """Room for so many more bytes."""

    size: Annotated[int, Meta(ge=0, le=WINDOW_BYTES)]


_encode = msgspec.msgpack.Encoder().encode
_decoders: dict[type, msgspec.msgpack.Decoder[msgspec.Struct]] = {
    kind: msgspec.msgpack.Decoder(kind)
    for kind in (
        Request,
        Here,
        StatusQuery,
        JobSummaries,
        EventsQuery,
        Events,
        LogsQuery,
        LogLines,
        Stacks,
        Stages,
        More,
        Contacts,
        NodeReport,
    )
}


def pack(body: msgspec.Struct) -> bytes:
    """Return the body of a query or reply."""
    return _encode(body)


def unpack(kind: type[T], body: bytes) -> T:
    """Return what is in a body, or raise `BadMessage`; an empty one has all the defaults."""
    try:
        found = _decoders[kind].decode(body or b"\x80")
        if isinstance(found, Request):
            found = sound_request(found)
        elif isinstance(found, NodeReport):
            found = sound_report(found)
    except MALFORMED as error:
        raise BadMessage(f"no {kind.__name__}: {quoted(str(error))}") from None
    assert isinstance(found, kind)
    return found
