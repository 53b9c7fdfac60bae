"""The queries of control clients, and the bodies of queries and replies.

===========  ====================  ============================================================
what         body                  replies
===========  ====================  ============================================================
`here`       none                  one `Here`; only at an agent's own socket
`status`     `StatusQuery`         one `JobSummaries`, once the nodes have reported
`act`        `Request`             one: accepted, or refused with the reason
`events`     `EventsQuery`         `Events`: the recent ones, then each new one
`logs`       `LogsQuery`           `LogLines`, until everything is sent
`stacks`     none                  one `Stacks`
`history`    none                  `control.history.NodeHistory`, some generations in each
`report`     none                  one `NodeReport`
`contacts`   none                  `Contacts`; only at an agent's own socket
`more`       `More`                none: the stream with that id may send `size` more bytes. For size 0, the
                                   stream of a node sends an empty reply if it is open
`cancel`     none                  none: ends the query with that id
===========  ====================  ============================================================

A node answers `logs`, `stacks`, `history` and `report`; the coordinator answers `status` and `act`; both
answer `events`. In a job without a coordinator, an agent answers all of them.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from holdfast.core.bounded import MALFORMED, Count, Name, Number, Port, Seconds, Why, WorkerRank
from holdfast.core.limits import NODE_ID_CHARS_MAX, RUN_ID_CHARS_MAX
from holdfast.core.protocol import Request, sanitized_request
from holdfast.printable import quoted
from holdfast.wire import wire_limits as limits
from holdfast.wire.messages import EventRecord, JobSummary, NodeReport, sanitized_report
from holdfast.wire.wire_errors import BadMessage

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

T = TypeVar("T", bound=msgspec.Struct)


class Here(msgspec.Struct, frozen=True, kw_only=True):
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
    """How to reach the agent of a node at its control port."""

    node: Annotated[str, Meta(max_length=NODE_ID_CHARS_MAX)]
    address: Name = ""
    port: Port = 0
    """0 if the agent has no control port (`control=off`)."""
    secret: Annotated[bytes, Meta(max_length=SECRET_BYTES_MAX)] = b""

    def __repr__(self) -> str:
        return f"Contact({self.node!r}, {self.address!r}, {self.port})"


class Contacts(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach agents of a job. If the leader is among them, it is the first."""

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
    """Continue with new output, also after restarts."""
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


class More(msgspec.Struct, frozen=True, kw_only=True):
    """Allows a stream to send this many more bytes."""

    size: Annotated[int, Meta(ge=0, le=WINDOW_BYTES)]


_encode = msgspec.msgpack.Encoder().encode


@cache
def _decoder(kind: type[msgspec.Struct]) -> msgspec.msgpack.Decoder[msgspec.Struct]:
    return msgspec.msgpack.Decoder(kind)


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
