"""Checks from a thread whether a loop still turns: the thread probes, and the loop responds.

Nothing happens without a probe: a loop that reported by itself would have to wake up for it, and a silent loop may
have nothing to do. A probe makes a descriptor readable that the loop waits for, and the loop responds in
its next iteration. The loop has been silent for as long as the oldest probe has waited.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

ANSWER_S = 0.5
"""How long a probe waits for the loop by default: a kubelet gives up after 1 s."""
FRESH_S = 0.1
"""An answer this young serves the next probe too, so that probes do not keep the loop awake."""


class LoopProbe:
    """Between one loop and any number of threads that probe it.

    The loop waits for `fileno()` among its other descriptors and calls `answer()` when that is
    readable, or at any other time. While it waits for something else it is `busy()`.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._changed = threading.Condition(threading.Lock())
        self._asked_at: float | None = None  # The oldest probe without an answer.
        self._answers = 0
        self._answered_at = time.monotonic()
        self._busy_with: list[str] = []

    # In the loop.

    def fileno(self) -> int:
        """Return the descriptor that is readable when somebody probes; -1 once closed."""
        return self._fd

    def answer(self) -> None:
        """Report that the loop turns; never blocks."""
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
                pass  # A probe is noted and made readable in one step, so this cannot happen.
            self._changed.notify_all()

    def busy(self, what: str) -> Busy:
        """Return a context in which the loop cannot answer and need not: `what` has its own timeout.

        A rendezvous that a handler waits for is an example.
        """
        return Busy(self, what)

    def close(self) -> None:
        """Close the descriptor; a probe from now on fails."""
        with self._changed:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
            self._changed.notify_all()

    # In other threads.

    def probe(self, limit_s: float = ANSWER_S) -> bool:
        """Probe the loop, and return whether it answered in time."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            known = self._answers
            if self._fd >= 0 and not self._busy_with and self._asked_at is None:
                self._asked_at = time.monotonic()
                os.eventfd_write(self._fd, 1)
            while True:
                if self._busy_with or self._answers > known:
                    return True
                left = deadline - time.monotonic()
                if self._fd < 0 or left <= 0:
                    return False
                self._changed.wait(left)

    def silent_s(self) -> float:
        """Return for how long the oldest probe has been waiting; 0.0 if none is."""
        with self._changed:
            if self._asked_at is None or self._busy_with:
                return 0.0
            return time.monotonic() - self._asked_at

    def alive_time(self) -> float:
        """Return when the loop last could have answered, in seconds since 1970.

        This is an `alive_callback`: it probes first, unless an answer has just come.
        """
        with self._changed:
            now = time.monotonic()
            is_fresh = now - self._answered_at < FRESH_S
            # The time that an earlier probe has waited counts: probes come one after the other,
            # and each has but a second.
            waited_s = 0.0 if self._asked_at is None else now - self._asked_at
        if not is_fresh:
            self.probe(max(0.0, ANSWER_S - waited_s))
        return time.time() - self.silent_s()

    def _enter_busy(self, what: str) -> None:
        with self._changed:
            self._busy_with.append(what)
            self._changed.notify_all()

    def _exit_busy(self, what: str) -> None:
        with self._changed:
            self._busy_with.remove(what)
        self.answer()


class Busy:
    """While this lasts, the loop is known to wait for something with a timeout of its own."""

    def __init__(self, probe: LoopProbe, what: str) -> None:
        self._probe = probe
        self._what = what

    def __enter__(self) -> None:
        self._probe._enter_busy(self._what)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._probe._exit_busy(self._what)
