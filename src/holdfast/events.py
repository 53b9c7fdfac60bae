"""Events of a job, for programs: record them, and receive them.

`record(event, destination)` gives an event to the handler of that name. Derive from `EventHandler`
and `configure` it, or choose a built-in handler: `null`, `console`, `jsonl`, `logging`, `otel`.
"""

from __future__ import annotations

from holdfast.observe.events.destinations import configure, flush, record, record_rdzv_event
from holdfast.observe.events.event import (
    Event,
    EventMetadataValue,
    EventSource,
    NodeState,
    RdzvEvent,
)
from holdfast.observe.events.event_handlers import (
    ConsoleEventHandler,
    EventHandler,
    JsonLinesEventHandler,
    NullEventHandler,
)
from holdfast.observe.events.event_otel import OpenTelemetryEventHandler
from holdfast.observe.events.logging_handlers import LoggingEventHandler

__all__ = [
    "ConsoleEventHandler",
    "Event",
    "EventHandler",
    "EventMetadataValue",
    "EventSource",
    "JsonLinesEventHandler",
    "LoggingEventHandler",
    "NodeState",
    "NullEventHandler",
    "OpenTelemetryEventHandler",
    "RdzvEvent",
    "configure",
    "flush",
    "record",
    "record_rdzv_event",
]
