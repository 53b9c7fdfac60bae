"""The guard around handlers and observers, which catches their exceptions.

The first failure of a handler is reported; a handler that raises `FAULTS_MAX` times in a row is dropped. `Faults`
counts failures for every kind of handler. `SafeHandler` calls Holdfast's own event handlers in the thread
of the event; other handlers run in their own thread (`background`). Missed events are counted and
reported at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import console

if TYPE_CHECKING:
    from holdfast.observe.events.event import Event
    from holdfast.observe.events.event_handlers import EventHandler
    from holdfast.observe.timeline import TimelineLine

FAULTS_MAX = 3
"""A handler that raises this often in a row is dropped."""


class Faults:
    """The failures of one handler; `subject` is its name in messages, `item` the kind of values that it receives."""

    def __init__(self, subject: str, item: str) -> None:
        self.subject = subject
        self.item = item
        self.is_dropped = False
        self._consecutive = 0
        self._was_reported = False

    def add(self, problem: BaseException) -> None:
        """Report the first failure; drop the handler if it keeps failing."""
        self._consecutive += 1
        if not self._was_reported:
            self._was_reported = True
            self.warn(f"{self.subject} failed: {console.describe(problem)}")
        if self._consecutive >= FAULTS_MAX:
            self.drop(f"failed {FAULTS_MAX} times in a row")

    def reset(self) -> None:
        """Reset the count of consecutive failures, after a success."""
        self._consecutive = 0

    def drop(self, why: str) -> None:
        """Drop the handler."""
        if not self.is_dropped:
            self.is_dropped = True
            self.warn(f"{self.subject} {why}; it receives no more {self.item}s")

    def warn(self, line: str) -> None:
        """Print a warning."""
        console.warning(line)


class SafeHandler(Faults):
    """Calls an event handler, and catches its exceptions."""

    def __init__(self, handler: EventHandler, name: str, item: str = "event") -> None:
        super().__init__(f"the {item} handler {name}", item)
        self.handler = handler
        self.name = name
        self._missed = 0

    def record(self, event: Event | TimelineLine) -> None:
        """Pass an event to the handler, unless the handler has been dropped."""
        if self.is_dropped:
            self.miss()
            return
        try:
            self.handler.record(event)  # type: ignore[arg-type]
        except Exception as problem:  # noqa: BLE001 (a handler may raise anything)
            self.miss()
            self.add(problem)
        else:
            self.reset()

    def flush(self, limit_s: float) -> None:
        """Flush the handler, and report the events that it missed."""
        del limit_s
        self.call("flush")
        self.report_missed()

    def close(self, limit_s: float) -> None:
        """Close the handler, and report the events that it missed."""
        del limit_s
        self.call("close")
        self.report_missed()

    def call(self, method: str) -> None:
        """Call a method without arguments, if the handler has it and has not been dropped."""
        function = getattr(self.handler, method, None)
        if function is None or self.is_dropped:
            return
        try:
            function()
        except Exception as problem:  # noqa: BLE001 (a handler may raise anything)
            self.add(problem)

    def miss(self, count: int = 1) -> None:
        """Count events that the handler missed."""
        self._missed += count

    def report_missed(self) -> None:
        """Report how many events the handler has missed since the last report, if any."""
        missed, self._missed = self._missed, 0
        if missed:
            what = f"1 {self.item} was" if missed == 1 else f"{missed} {self.item}s were"
            self.warn(f"{what} not recorded by {self.subject}")
