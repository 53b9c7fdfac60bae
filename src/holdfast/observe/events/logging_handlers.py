"""Events and Python's `logging`, in both directions.

- `LoggingEventHandler` logs events on `holdfast.events`, for programs whose logging is set up.
- `LogHandlerSink` gives events to a `logging.Handler`, which is what TorchElastic's handlers are.
- `ForwardingHandler` is a `logging.Handler` that gives events to one of ours.

`LOGLEVEL` silences none of them: it is about what Holdfast says, and events are not that.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.observe.events import destinations
from holdfast.observe.events.event import Event, RdzvEvent
from holdfast.observe.events.handlers import EventHandler

if TYPE_CHECKING:
    from holdfast.observe.safe_handler import SafeHandler


LOGGER = "holdfast.events"


class LoggingEventHandler(EventHandler):
    """Logs each event at level INFO; the event itself is the attribute `event` of the record."""

    def __init__(self, logger: str = LOGGER) -> None:
        self._logger = logging.getLogger(logger)
        if self._logger.level == logging.NOTSET:
            self._logger.setLevel(logging.INFO)  # Else that of the root counts, which is WARNING.

    def record(self, event: Event) -> None:
        """Log the event."""
        self._logger.info("%s", event.serialize(), extra={"event": event})


class LogHandlerSink(EventHandler):
    """Gives events to a `logging.Handler`, under the name that TorchElastic's logger for it has.

    There is no such logger here: its level would depend on the program, and the handler that
    another one replaces would lose the events that still wait for it.
    """

    def __init__(self, handler: logging.Handler, destination: str) -> None:
        self.handler = handler
        self._name = f"torchelastic-events-{destination}"

    def record(self, event: Event) -> None:
        """Have the handler log the event's text, if it takes anything of level INFO."""
        if self.handler.level <= logging.INFO:
            fields = (self._name, logging.INFO, __file__, 0, event.serialize(), None, None)
            self.handler.handle(logging.LogRecord(*fields))

    def flush(self) -> None:
        """Have the handler write what it holds back."""
        self.handler.flush()


class ForwardingHandler(logging.Handler):
    """Gives each record whose text is an event to a handler of ours."""

    def __init__(self, to: SafeHandler) -> None:
        super().__init__()
        self._to = to

    def emit(self, record: logging.LogRecord) -> None:
        """Give the event on; a text that is none is an error as logging has it."""
        try:
            text = record.getMessage()
            event = RdzvEvent.deserialize(text) if '"node_state"' in text else None
            self._to.record(event or Event.deserialize(text))  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001 (logging never raises)
            self.handleError(record)


# TorchElastic's table of `logging` handlers by destination, for programs that extend it.
#
# Its users add a handler by writing into `_log_handlers`, since there is no function for that. The
# table is read again at each event, so it does not matter when they do. `configure` is the way
# here.


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
