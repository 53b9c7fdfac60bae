"""Events of a job, for programs: record them, and receive them.

`record(event, destination)` gives an event to the handler of that name. Derive from `EventHandler`
and `configure` it, or choose one of those here: `null`, `console`, `jsonl`, `logging`, `otel`.
Each name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    match name:
        case "LoggingEventHandler":
            home = "logging_handlers"
        case "OpenTelemetryEventHandler":
            home = "event_otel"
        case _ if name.endswith("Handler"):
            home = "event_handlers"
        case _ if name[0].isupper():
            home = "event"
        case _:
            home = "destinations"
    value: object = getattr(import_module(f"holdfast.observe.events.{home}"), name)
    globals()[name] = value
    return value
