"""Events and handlers for the tests of events."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from holdfast.events import Event, EventHandler, EventMetadataValue, EventSource

if TYPE_CHECKING:
    from collections.abc import Iterable

PATIENCE_S = 10.0


def event(name: str = "it", **metadata: EventMetadataValue) -> Event:
    """Create an event with a timestamp."""
    return Event(name, EventSource.AGENT, 7, dict(metadata))


def names(events: Iterable[Event]) -> list[str]:
    return [one.name for one in events]


class RecordingHandler(EventHandler):
    """Keeps all events."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.calls: list[str] = []
        self.threads: set[str] = set()

    def record(self, event: Any) -> None:
        self.received.append(event)
        self.threads.add(threading.current_thread().name)

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


class ListHandler(logging.Handler):
    """Keeps all lines of a log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class FailingHandler(RecordingHandler):
    """Raises for events of some names."""

    def record(self, event: Event) -> None:
        super().record(event)
        if event.name.startswith("bad"):
            raise ValueError(f"cannot do\n{event.name}")


class BlockingHandler(RecordingHandler):
    """Blocks in its first call until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.released = threading.Event()

    def record(self, event: Event) -> None:
        super().record(event)
        self.entered.set()
        assert self.released.wait(PATIENCE_S)
