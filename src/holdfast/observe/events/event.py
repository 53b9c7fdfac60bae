"""Events: `Event` and, for the steps of a rendezvous, `RdzvEvent`; and their JSON.

Names, fields and text are TorchElastic's, so each of the two programs can read the other's lines. The text
is that of `json.dumps`. If JSON has no type for a value (a date, a path, a tensor), `json` would raise; here the
text contains its `str`.
"""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from typing import TYPE_CHECKING

from holdfast.lazy_dataclass import factory_field, lazy_dataclass

if TYPE_CHECKING:
    from typing import Any


DEPTH_MAX = 50
"""How deep values may be nested; a value that contains itself would have no end."""


def json_text(value: Any) -> str:
    """Return a value as JSON. Never raises."""
    try:
        return json.dumps(value, default=_text_of)
    except (TypeError, ValueError, RecursionError):  # A key of another type, or an endless value.
        return json.dumps(_reduced(value))


def _reduced(value: Any, depth: int = 0) -> Any:
    """Return a copy that has only JSON's types and a limited depth."""
    if depth > DEPTH_MAX:
        return "..."
    match value:
        case dict():
            return {_key(key): _reduced(inner, depth + 1) for key, inner in value.items()}
        case list() | tuple():
            return [_reduced(inner, depth + 1) for inner in value]
        case None | str() | int() | float():
            return value
    return _text_of(value)


def _key(key: object) -> object:
    return key if key is None or isinstance(key, (str, int, float)) else _text_of(key)


def _text_of(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 (the class may be a user's)
        return f"<{type(value).__name__}>"


EventMetadataValue = str | int | float | bool | None


class EventSource(str, Enum):  # noqa: UP042 (a StrEnum would be shown as another text)
    """The subject of an event."""

    AGENT = "AGENT"
    WORKER = "WORKER"


@lazy_dataclass
class Event:
    """Something that happened in a job.

    `timestamp` is the time of day in milliseconds since the epoch; 0 becomes the time at which the
    event is recorded.
    """

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = factory_field(default_factory=dict)

    def __str__(self) -> str:
        return self.serialize()

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        """Parse the text that `serialize` returns; return an event unchanged."""
        if isinstance(data, Event):
            return data
        fields = _fields_in(data)
        fields["source"] = EventSource[fields["source"]]
        return Event(**fields)

    def serialize(self) -> str:
        """Return the event as one line of JSON."""
        return json_text(_fields_of(self))


class NodeState(str, Enum):  # noqa: UP042 (a StrEnum would be shown as another text)
    """The state of a node in a rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@lazy_dataclass
class RdzvEvent:
    """One step of a node's rendezvous; unknown fields are "" or None."""

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
        """Parse the text that `serialize` returns; return an event unchanged."""
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
        return {name: getattr(event, name) for name in event.__lazy_fields__}
    return dataclasses.asdict(event)


def _fields_in(data: str) -> dict[str, Any]:
    fields = json.loads(data)
    if not isinstance(fields, dict):
        raise ValueError(f"not an event: {data[:100]!r}")
    return fields
