"""Events of a job: what happened, for programs that look on.

`record(event, destination)` gives an event to the handler of that name. Derive from `EventHandler`
and `configure` it, or choose one of those here: `null`, `console`, `jsonl`, `logging`, `otel`.

Importing this package loads nothing but this file, since every agent that starts records events;
each name is fetched from its module when it is first used.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.events.console import ConsoleEventHandler
    from holdfast.events.destinations import configure, flush, get_logging_handler
    from holdfast.events.handlers import EventHandler, NullEventHandler
    from holdfast.events.job import JobEvents
    from holdfast.events.json_lines import JsonLinesEventHandler
    from holdfast.events.log_records import LoggingEventHandler
    from holdfast.events.open_telemetry import OpenTelemetryEventHandler
    from holdfast.events.recording import (
        construct_and_record_rdzv_event,
        record,
        record_rdzv_event,
    )
    from holdfast.events.values import (
        Event,
        EventMetadataValue,
        EventSource,
        NodeState,
        RdzvEvent,
    )

__all__ = [
    "ConsoleEventHandler",
    "Event",
    "EventHandler",
    "EventMetadataValue",
    "EventSource",
    "JobEvents",
    "JsonLinesEventHandler",
    "LoggingEventHandler",
    "NodeState",
    "NullEventHandler",
    "OpenTelemetryEventHandler",
    "RdzvEvent",
    "configure",
    "construct_and_record_rdzv_event",
    "flush",
    "get_logging_handler",
    "record",
    "record_rdzv_event",
]

_HOMES = {
    "ConsoleEventHandler": "holdfast.events.console",
    "Event": "holdfast.events.values",
    "EventHandler": "holdfast.events.handlers",
    "EventMetadataValue": "holdfast.events.values",
    "EventSource": "holdfast.events.values",
    "JobEvents": "holdfast.events.job",
    "JsonLinesEventHandler": "holdfast.events.json_lines",
    "LoggingEventHandler": "holdfast.events.log_records",
    "NodeState": "holdfast.events.values",
    "NullEventHandler": "holdfast.events.handlers",
    "OpenTelemetryEventHandler": "holdfast.events.open_telemetry",
    "RdzvEvent": "holdfast.events.values",
    "configure": "holdfast.events.destinations",
    "construct_and_record_rdzv_event": "holdfast.events.recording",
    "flush": "holdfast.events.destinations",
    "get_logging_handler": "holdfast.events.destinations",
    "record": "holdfast.events.recording",
    "record_rdzv_event": "holdfast.events.recording",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.events' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
