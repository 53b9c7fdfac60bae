"""What an event is: `Event` and, for the steps of a rendezvous, `RdzvEvent`.

Names, fields and the text are TorchElastic's: a line that one of the two wrote is read by the
other. Both are data classes to whoever treats them as such, but `dataclasses` and `json` are not
imported for that (docs/internals/decisions/0006-light-values.md says why).
"""

from __future__ import annotations

from enum import Enum

from holdfast.events.json_text import json_text
from holdfast.records import fresh, record_class

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

EventMetadataValue = str | int | float | bool | None


class EventSource(str, Enum):  # noqa: UP042 (a StrEnum would be shown as another text)
    """Who an event is about."""

    AGENT = "AGENT"
    WORKER = "WORKER"


@record_class
class Event:
    """Something that happened in a job.

    `timestamp` is the time of day in milliseconds since the epoch; 0 means that nobody said when,
    and becomes the time at which the event is recorded.
    """

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = fresh(default_factory=dict)

    def __str__(self) -> str:
        return self.serialize()

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        """Return the event that `serialize` made this text of; an event is returned as it is."""
        if isinstance(data, Event):
            return data
        fields = _fields_in(data)
        fields["source"] = EventSource[fields["source"]]
        return Event(**fields)

    def serialize(self) -> str:
        """Return the event as one line of JSON."""
        return json_text(_fields_of(self))


class NodeState(str, Enum):  # noqa: UP042 (a StrEnum would be shown as another text)
    """How a node is in a rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@record_class
class RdzvEvent:
    """One step of a node's rendezvous; what is not known of it is "" or None."""

    name: str
    run_id: str
    message: str
    hostname: str
    pid: int
    node_state: NodeState
    master_endpoint: str = ""
    rank: int | None = None
    local_id: int | None = None
    error_trace: str = ""

    def __str__(self) -> str:
        return self.serialize()

    @staticmethod
    def deserialize(data: str | RdzvEvent) -> RdzvEvent:
        """Return the event that `serialize` made this text of; an event is returned as it is."""
        if isinstance(data, RdzvEvent):
            return data
        fields = _fields_in(data)
        fields["node_state"] = NodeState[fields["node_state"]]
        return RdzvEvent(**fields)

    def serialize(self) -> str:
        """Return the event as one line of JSON."""
        return json_text(_fields_of(self))


def _fields_of(event: Any) -> dict[str, Any]:
    if type(event) in (Event, RdzvEvent):
        return {name: getattr(event, name) for name in event.__record_fields__}
    import dataclasses  # A class derived from ours may have fields of its own.

    return dataclasses.asdict(event)


def _fields_in(data: str) -> dict[str, Any]:
    import json

    fields = json.loads(data)
    if not isinstance(fields, dict):
        raise ValueError(f"not an event: {data[:100]!r}")
    return fields
