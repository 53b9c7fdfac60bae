"""`EventHandler`: what gets the events of a job, and `NullEventHandler`, which ignores them.

The caller's obligations: `record` is called for one event at a time, in order; `flush` at the end
of each job, and `close` once, after the last event. A handler that is not ours is called in a
thread of its own, so it may take its time; `holdfast.events.apart` has the limits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.events.values import Event


class EventHandler(ABC):
    """Gets events, one by one. Derive from it, say what `record` does, and `configure` it."""

    @abstractmethod
    def record(self, event: Event) -> None:
        """Do with an event what this handler is for; one for rendezvous gets `RdzvEvent`s."""

    def flush(self) -> None:  # noqa: B027 (most hold nothing back)
        """Send whatever is still on its way; called at the end of a job."""

    def close(self) -> None:  # noqa: B027 (most have nothing to close)
        """End: no event comes after this. Whatever is still on its way should be sent now."""


class NullEventHandler(EventHandler):
    """Does nothing with events."""

    def record(self, event: Event) -> None:
        """Ignore the event."""
