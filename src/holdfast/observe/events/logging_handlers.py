"""Events and Python's `logging`.

- `LoggingEventHandler` logs events on `holdfast.events`, for programs whose logging is set up.
- `LogHandlerSink` passes events to a `logging.Handler`; TorchElastic's handlers are of this type.

`LOGLEVEL` affects neither: it is for Holdfast's own messages.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.observe.events.event_handlers import EventHandler

if TYPE_CHECKING:
    from holdfast.observe.events.event import Event


LOGGER = "holdfast.events"


class LoggingEventHandler(EventHandler):
    """Logs each event at level INFO; the event itself is the attribute `event` of the record."""

    def __init__(self, logger: str = LOGGER) -> None:
        self._logger = logging.getLogger(logger)
        if self._logger.level == logging.NOTSET:
            # Otherwise the root's level applies, which is WARNING.
            self._logger.setLevel(logging.INFO)

    def record(self, event: Event) -> None:
        self._logger.info("%s", event.serialize(), extra={"event": event})


class LogHandlerSink(EventHandler):
    """Passes events to a `logging.Handler`, under the name of TorchElastic's logger for the destination.

    It creates no logger of that name: the logger's level would depend on the program, and a replaced handler would
    lose its queued events.
    """

    def __init__(self, handler: logging.Handler, destination: str) -> None:
        self.handler = handler
        self._name = f"torchelastic-events-{destination}"

    def record(self, event: Event) -> None:
        if self.handler.level <= logging.INFO:
            fields = (self._name, logging.INFO, __file__, 0, event.serialize(), None, None)
            self.handler.handle(logging.LogRecord(*fields))

    def flush(self) -> None:
        self.handler.flush()
