"""How a thread finds out whether a loop still turns: it asks, and the loop answers.

The one thing to know: nothing happens unless somebody asks. A loop that told the time by itself
would have to wake up for that, and one that says nothing may simply have nothing to do. So the
asker makes a descriptor readable that the loop waits for, and the loop answers in its next turn.
How long the oldest question has been waiting is how long the loop has been silent.
"""

from __future__ import annotations

import os
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

ANSWER_S = 0.5
"""How long a probe waits for the loop, unless told otherwise: a kubelet gives up after 1 s."""
FRESH_S = 0.1
"""An answer this young serves the next probe too: no asker wakes a loop more often than that."""


class LoopProbe:
    """Between one loop and any number of askers.

    The loop waits for `fileno()` among its other descriptors and calls `answer()` when that is
    readable, or whenever it likes. Where it waits for something else it says so by `away()`.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._changed = threading.Condition(threading.Lock())
        self._asked_at: float | None = None  # The oldest question without an answer.
        self._answers = 0
        self._answered_at = time.monotonic()
        self._away: list[str] = []

    # The loop's side.

    def fileno(self) -> int:
        """Return the descriptor that is readable when somebody asks; -1 once closed."""
        return self._fd

    def answer(self) -> None:
        """Say that the loop turns; never blocks."""
        with self._changed:
            if self._fd < 0:
                return
            self._answers += 1
            self._answered_at = time.monotonic()
            if self._asked_at is None:
                return
            self._asked_at = None
            try:
                os.eventfd_read(self._fd)
            except BlockingIOError:
                pass  # A question is noted and made readable in one step, so this cannot be.
            self._changed.notify_all()

    def away(self, what: str) -> Busy:
        """Return a context in which the loop cannot answer, and need not: `what` has an end.

        A rendezvous that a handler waits for is such a thing: it has a timeout of its own.
        """
        return Busy(self, what)

    def close(self) -> None:
        """Let go of the descriptor; who asks from now on hears nothing."""
        with self._changed:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
            self._changed.notify_all()

    # The asker's side.

    def ask(self, limit_s: float = ANSWER_S) -> bool:
        """Ask the loop for a sign of life, and return whether one came in time."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            known = self._answers
            if self._fd >= 0 and not self._away and self._asked_at is None:
                self._asked_at = time.monotonic()
                os.eventfd_write(self._fd, 1)
            while True:
                if self._away or self._answers > known:
                    return True
                left = deadline - time.monotonic()
                if self._fd < 0 or left <= 0:
                    return False
                self._changed.wait(left)

    def silent_s(self) -> float:
        """Return for how long the oldest question has been waiting; 0.0 if none is."""
        with self._changed:
            if self._asked_at is None or self._away:
                return 0.0
            return time.monotonic() - self._asked_at

    def whereabouts(self) -> str:
        """Return what the loop waits for outside itself, if it does."""
        with self._changed:
            return self._away[-1] if self._away else ""

    def alive_time(self) -> float:
        """Return when the loop last could have answered, in seconds since 1970.

        This is an `alive_callback`: it asks first, unless an answer has just come.
        """
        with self._changed:
            now = time.monotonic()
            is_fresh = now - self._answered_at < FRESH_S
            # A question that has waited so long already is not waited for again: probes come one
            # after the other, and each has but a second.
            waited_s = 0.0 if self._asked_at is None else now - self._asked_at
        if not is_fresh:
            self.ask(max(0.0, ANSWER_S - waited_s))
        return time.time() - self.silent_s()

    def _leave(self, what: str) -> None:
        with self._changed:
            self._away.append(what)
            self._changed.notify_all()

    def _return(self, what: str) -> None:
        with self._changed:
            self._away.remove(what)
        self.answer()


class Busy:
    """While this lasts, the loop is known to wait for something with an end of its own."""

    def __init__(self, pulse: LoopProbe, what: str) -> None:
        self._pulse = pulse
        self._what = what

    def __enter__(self) -> None:
        self._pulse._leave(self._what)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._pulse._return(self._what)
