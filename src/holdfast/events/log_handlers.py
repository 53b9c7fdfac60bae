"""TorchElastic's table of `logging` handlers by destination, for programs that extend it.

Its users add a handler by writing into `_log_handlers`, since there is no function for that. The
table is read again at each event, so it does not matter when they do. `configure` is the way here.
"""

from __future__ import annotations

import logging

from holdfast.events import destinations
from holdfast.events.log_records import ForwardingHandler

_log_handlers: dict[str, logging.Handler] = {
    "console": logging.StreamHandler(),
    "dynamic_rendezvous": logging.NullHandler(),
    "null": logging.NullHandler(),
}
_OURS = dict(_log_handlers)


def added(destination: str) -> logging.Handler | None:
    """Return the handler that a program put into the table for a destination, or None."""
    handler = _log_handlers.get(destination)
    return None if handler is _OURS.get(destination) else handler


def log_handler(destination: str) -> logging.Handler:
    """Return a `logging.Handler` for a destination, whatever kind of handler it has."""
    if destination in _log_handlers and not destinations.is_configured(destination):
        return _log_handlers[destination]
    return ForwardingHandler(destinations.find(destination))
