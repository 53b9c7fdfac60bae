"""Handlers of events by name, under TorchElastic's module path; re-exports only.

`_log_handlers` is the table that programs write into to add a handler of their own.
"""

from __future__ import annotations

from holdfast.observe.events.destinations import get_logging_handler
from holdfast.observe.events.handlers import EventHandler, NullEventHandler
from holdfast.observe.events.logging_handlers import _log_handlers

__all__ = ["EventHandler", "NullEventHandler", "_log_handlers", "get_logging_handler"]
