"""Handlers of events by name, under TorchElastic's module path; re-exports only.

`_log_handlers` is the table that programs write into to add a handler of their own.
"""

from __future__ import annotations

from holdfast.elastic._impl.event_log_handlers import _log_handlers, get_logging_handler
from holdfast.observe.events.event_handlers import EventHandler, NullEventHandler

__all__ = ["EventHandler", "NullEventHandler", "_log_handlers", "get_logging_handler"]
