"""Checks from a thread whether a loop is still running: the thread probes, and the loop responds.

The loop sends no heartbeats by itself, because it would have to wake up for them. It waits for a descriptor, which
a probe makes readable, and responds in its next iteration. The loop has been silent for as long as the oldest probe
without a response has waited.
"""

from __future__ import annotations

import os
import threading
import time

RESPONSE_S = 0.5
"""How long a probe waits for the loop by default; a kubelet times out after 1 s."""
FRESH_S = 0.1
"""A response this recent serves the next probe too, so that probes do not keep the loop awake."""


class LoopProbe:
    """Connects one loop with any number of threads that probe it.

    The loop waits for `fileno()` among its other descriptors and calls `respond()` when that is readable, or at any
    other time. While the loop waits for something else, it is in the context `suspended()`.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._changed = threading.Condition(threading.Lock())
        self._probed_at: float | None = None  # The oldest probe without a response.
        self._responses = 0
        self._responded_at = time.monotonic()
        self._suspended_for: list[str] = []

    # In the loop.

    def fileno(self) -> int:
        """Return the descriptor that is readable when a thread probes; -1 once closed."""
        return self._fd

    def respond(self) -> None:
        """Report that the loop is running; never blocks."""
        with self._changed:
            if self._fd < 0:
                return
            self._responses += 1
            self._responded_at = time.monotonic()
            if self._probed_at is None:
                return
            self._probed_at = None
            try:
                os.eventfd_read(self._fd)
            except BlockingIOError:
                pass  # A probe sets both under the lock, so this cannot happen.
            self._changed.notify_all()

    def suspended(self, what: str) -> Suspended:
        """Return a context in which the loop need not respond, because `what` has its own timeout.

        An example is a handler that waits for a rendezvous.
        """
        return Suspended(self, what)

    def close(self) -> None:
        """Close the descriptor; later probes fail."""
        with self._changed:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
            self._changed.notify_all()

    # In other threads.

    def probe(self, limit_s: float = RESPONSE_S) -> bool:
        """Probe the loop, and return whether it responded in time."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            known = self._responses
            if self._fd >= 0 and not self._suspended_for and self._probed_at is None:
                self._probed_at = time.monotonic()
                os.eventfd_write(self._fd, 1)
            while True:
                if self._suspended_for or self._responses > known:
                    return True
                left = deadline - time.monotonic()
                if self._fd < 0 or left <= 0:
                    return False
                self._changed.wait(left)

    def silent_s(self) -> float:
        """Return how long the oldest probe has been waiting; 0.0 if no probe waits."""
        with self._changed:
            if self._probed_at is None or self._suspended_for:
                return 0.0
            return time.monotonic() - self._probed_at

    def alive_time(self) -> float:
        """Return when the loop was last known to respond, in seconds since 1970.

        This is an `alive_callback`. It probes first, unless the last response is recent.
        """
        with self._changed:
            now = time.monotonic()
            is_fresh = now - self._responded_at < FRESH_S
            # Subtract the time that an earlier probe has waited: each health check must return within a
            # second.
            waited_s = 0.0 if self._probed_at is None else now - self._probed_at
        if not is_fresh:
            self.probe(max(0.0, RESPONSE_S - waited_s))
        return time.time() - self.silent_s()

    def _suspend(self, what: str) -> None:
        with self._changed:
            self._suspended_for.append(what)
            self._changed.notify_all()

    def _resume(self, what: str) -> None:
        with self._changed:
            self._suspended_for.remove(what)
        self.respond()


class Suspended:
    """The context in which the loop waits for something that has its own timeout."""

    def __init__(self, probe: LoopProbe, what: str) -> None:
        self._probe = probe
        self._what = what

    def __enter__(self) -> None:
        self._probe._suspend(self._what)

    def __exit__(self, *_: object) -> None:
        self._probe._resume(self._what)
