"""Events and handlers for the tests of events."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

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
        self.received: list[Event] = []
        self.calls: list[str] = []
        self.threads: set[str] = set()

    def record(self, event: Event) -> None:
        self.received.append(event)
        self.threads.add(threading.current_thread().name)

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


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
