"""What an agent has still to hear, put down by one thread and taken by another: `NewsBox`.

Of views only the newest is kept, since a view says all there is to know; of faults the first few,
which say most. `fileno()` is readable while there is something to `take`, from `open` to `close`.

It does not judge what is put into it: whether a view is for this incarnation, its owner knows. It
never calls out, so an owner may hold a lock of its own around any call.
"""

from __future__ import annotations

import os
import threading

from holdfast.coordinator.client import GaveUp, Refused
from holdfast.core.news import View

FAULTS_MAX = 16  # Besides the newest view.

News = View | GaveUp | Refused


class NewsBox:
    """The newest view, the first faults, and a descriptor that tells of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._view: View | None = None
        self._faults: list[GaveUp | Refused] = []
        self._wakes = -1

    def open(self) -> None:
        """Get the descriptor."""
        self._wakes = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def close(self) -> None:
        """Release the descriptor; may be called more than once, and without `open`."""
        with self._lock:
            if self._wakes >= 0:
                os.close(self._wakes)
                self._wakes = -1

    def fileno(self) -> int:
        """Return the descriptor, or -1 while there is none."""
        return self._wakes

    def put_view(self, view: View) -> None:
        """Put a view in the place of the one before."""
        with self._lock:
            self._view = view
            self._wake()

    def put_fault(self, fault: GaveUp | Refused) -> None:
        """Add a fault, if there are not too many."""
        with self._lock:
            if len(self._faults) < FAULTS_MAX:
                self._faults.append(fault)
                self._wake()

    def forget_view(self) -> None:
        """Throw away a view that was not taken."""
        with self._lock:
            self._view = None

    def take(self) -> list[News]:
        """Return what was put here since the last call."""
        with self._lock:
            if self._wakes >= 0:
                try:
                    os.eventfd_read(self._wakes)
                except BlockingIOError:
                    pass
            taken: list[News] = [self._view] if self._view is not None else []
            taken += self._faults
            self._view = None
            self._faults = []
            return taken

    def _wake(self) -> None:
        if self._wakes >= 0:
            os.eventfd_write(self._wakes, 1)
