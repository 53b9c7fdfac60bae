"""The parts that only TorchElastic's `events` has: its table of `logging` handlers, and a rendezvous event.

TorchElastic's users add a handler by writing into `_log_handlers`. This module reads the table at each
event, so they may do it at any time. Holdfast's own way is `holdfast.events.configure`.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import TYPE_CHECKING

from holdfast.errors import UsageError
from holdfast.observe.events import destinations
from holdfast.observe.events.event import Event, NodeState, RdzvEvent

if TYPE_CHECKING:
    from holdfast.observe.safe_handler import SafeHandler

_log_handlers: dict[str, logging.Handler] = {
    "console": logging.StreamHandler(),
    "dynamic_rendezvous": logging.NullHandler(),
    "null": logging.NullHandler(),
}
_BUILT_IN = dict(_log_handlers)


class ForwardingHandler(logging.Handler):
    """Passes each record whose text is an event to one of our handlers."""

    def __init__(self, to: SafeHandler) -> None:
        super().__init__()
        self._to = to

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            event = RdzvEvent.deserialize(text) if '"node_state"' in text else None
            self._to.record(event or Event.deserialize(text))  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001 (logging never raises)
            self.handleError(record)


def added_handler(destination: str) -> logging.Handler | None:
    """Return the handler that a program put into the table for a destination, or None."""
    handler = _log_handlers.get(destination)
    return None if handler is _BUILT_IN.get(destination) else handler


def get_logging_handler(destination: str = destinations.DEFAULT) -> logging.Handler:
    """Return a destination as a `logging.Handler`; raise `KeyError` if there is none."""
    if destination in _log_handlers and not destinations.is_configured(destination):
        return _log_handlers[destination]
    try:
        return ForwardingHandler(destinations.find(destination))
    except UsageError:
        raise KeyError(destination) from None


def construct_and_record_rdzv_event(
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Create an event of the rendezvous and record it; do nothing if no handler gets such events.

    The event's name is the caller's file, a colon, and `name` or the caller's function. If the node failed, the
    event has the traceback of the exception that is being handled.
    """
    if not destinations.is_recorded(destinations.RENDEZVOUS):
        return
    caller = sys._getframe(1).f_code
    trace = ""
    if node_state == NodeState.FAILED:
        trace = traceback.format_exc()
    destinations.record_rdzv_event(
        RdzvEvent(
            name=f"{os.path.basename(caller.co_filename)}:{name or caller.co_name}",
            run_id=run_id,
            message=message,
            hostname=hostname or os.uname().nodename,
            pid=pid or os.getpid(),
            node_state=node_state,
            master_endpoint=master_endpoint,
            rank=rank,
            local_id=local_id,
            error_trace=trace,
        )
    )


destinations.find_added = added_handler
