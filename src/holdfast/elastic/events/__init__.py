"""Events under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic.events import api, handlers  # noqa: F401 (also reached as attributes)
from holdfast.events.destinations import configure, flush, get_logging_handler
from holdfast.events.handlers import EventHandler, NullEventHandler
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
    "Event",
    "EventHandler",
    "EventMetadataValue",
    "EventSource",
    "NodeState",
    "NullEventHandler",
    "RdzvEvent",
    "configure",
    "construct_and_record_rdzv_event",
    "flush",
    "get_logging_handler",
    "record",
    "record_rdzv_event",
]
