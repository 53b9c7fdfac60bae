"""A handler that is called where the event happens, and cannot hurt by raising.

For handlers of ours, which are quick. One that raises is named once; one that raises
`FAULTS_MAX` times in a row gets no more events. What it missed is counted, and said at the end.
"""

from __future__ import annotations

from holdfast import console

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.observe.events.event import Event
    from holdfast.observe.events.handlers import EventHandler

FAULTS_MAX = 3
"""A handler that raised so often in a row gets no more events."""


class SafeHandler:
    """Calls a handler, and bears what it does."""

    kind = "event"
    """What the handler gets, as the person calls it."""

    def __init__(self, handler: EventHandler, name: str) -> None:
        self.handler = handler
        self.name = name
        self.is_dropped = False
        self._faults = 0
        self._missed = 0
        self._was_named = False

    def record(self, event: Event) -> None:
        """Give the handler an event, unless it has been dropped."""
        if self.is_dropped:
            self.miss()
            return
        try:
            self.handler.record(event)
        except Exception as problem:  # noqa: BLE001 (a handler may raise anything)
            self.miss()
            self.blame(problem)
        else:
            self._faults = 0

    def flush(self, limit_s: float) -> None:
        """Have the handler send what is on its way, and say what it missed."""
        del limit_s
        self.ask("flush")
        self.tell_missed()

    def close(self, limit_s: float) -> None:
        """End the handler, and say what it missed."""
        del limit_s
        self.ask("close")
        self.tell_missed()

    def ask(self, what: str) -> None:
        """Call a method without arguments, if the handler has it and has not been dropped."""
        method = getattr(self.handler, what, None)
        if method is None or self.is_dropped:
            return
        try:
            method()
        except Exception as problem:  # noqa: BLE001 (a handler may raise anything)
            self.blame(problem)

    def blame(self, problem: BaseException) -> None:
        """Name the handler if that is its first fault; drop it if it stays faulty."""
        self._faults += 1
        if not self._was_named:
            self._was_named = True
            self.say(f"the {self.kind} handler {self.name} failed: {console.describe(problem)}")
        if self._faults >= FAULTS_MAX:
            self.drop(f"failed {FAULTS_MAX} times in a row")

    def drop(self, why: str) -> None:
        """Give the handler nothing any more."""
        if not self.is_dropped:
            self.is_dropped = True
            self.say(f"the {self.kind} handler {self.name} {why}: it gets no more {self.kind}s")

    def miss(self, count: int = 1) -> None:
        """Count events that the handler did not get."""
        self._missed += count

    def tell_missed(self) -> None:
        """Say how many events the handler did not get, if any; not again until there are more."""
        missed, self._missed = self._missed, 0
        if missed:
            kind = self.kind
            what = f"1 {kind} was" if missed == 1 else f"{missed} {kind}s were"
            self.say(f"{what} not recorded by the {kind} handler {self.name}")

    def say(self, line: str) -> None:
        """Tell the person."""
        console.warning(line)
