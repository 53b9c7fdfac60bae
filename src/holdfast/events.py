"""Events of a job: what happened, for programs that look on.

`record(event, destination)` gives an event to the handler of that name. Derive from `EventHandler`
and `configure` it, or choose one of those here: `null`, `console`, `jsonl`, `logging`, `otel`.

Importing this package loads nothing but this file, since every agent that starts records events;
each name is fetched from its module when it is first used.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.observe.events.destinations import (
        configure,
        construct_and_record_rdzv_event,
        flush,
        get_logging_handler,
        record,
        record_rdzv_event,
    )
    from holdfast.observe.events.event import (
        Event,
        EventMetadataValue,
        EventSource,
        NodeState,
        RdzvEvent,
    )
    from holdfast.observe.events.handlers import (
        ConsoleEventHandler,
        EventHandler,
        JsonLinesEventHandler,
        NullEventHandler,
    )
    from holdfast.observe.events.logging_handlers import LoggingEventHandler
    from holdfast.observe.events.otel import OpenTelemetryEventHandler
    from holdfast.observe.events.recorder import JobEvents

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
    "ConsoleEventHandler": "holdfast.observe.events.handlers",
    "Event": "holdfast.observe.events.event",
    "EventHandler": "holdfast.observe.events.handlers",
    "EventMetadataValue": "holdfast.observe.events.event",
    "EventSource": "holdfast.observe.events.event",
    "JobEvents": "holdfast.observe.events.recorder",
    "JsonLinesEventHandler": "holdfast.observe.events.handlers",
    "LoggingEventHandler": "holdfast.observe.events.logging_handlers",
    "NodeState": "holdfast.observe.events.event",
    "NullEventHandler": "holdfast.observe.events.handlers",
    "OpenTelemetryEventHandler": "holdfast.observe.events.otel",
    "RdzvEvent": "holdfast.observe.events.event",
    "configure": "holdfast.observe.events.destinations",
    "construct_and_record_rdzv_event": "holdfast.observe.events.destinations",
    "flush": "holdfast.observe.events.destinations",
    "get_logging_handler": "holdfast.observe.events.destinations",
    "record": "holdfast.observe.events.destinations",
    "record_rdzv_event": "holdfast.observe.events.destinations",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.events' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
