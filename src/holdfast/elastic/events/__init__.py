"""Events under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.event_log_handlers import (
    construct_and_record_rdzv_event,
    get_logging_handler,
)
from holdfast.elastic._impl.submodules import bind_submodules
from holdfast.elastic.events import api
from holdfast.elastic.events.api import *  # noqa: F403
from holdfast.observe.events.destinations import (
    configure,
    flush,
    record,
    record_rdzv_event,
)
from holdfast.observe.events.event_handlers import EventHandler, NullEventHandler

__all__ = [
    "EventHandler",
    "NullEventHandler",
    "configure",
    "construct_and_record_rdzv_event",
    "flush",
    "get_logging_handler",
    "record",
    "record_rdzv_event",
]
__all__ += api.__all__

bind_submodules(__name__)
