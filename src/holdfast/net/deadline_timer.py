"""An asyncio timer for a machine whose next deadline changes often."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class DeadlineTimer:
    """Calls `wake` at a deadline, or earlier: an early call is harmless and costs less than a new timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop, self._wake = loop, wake
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at: float | None) -> None:
        """Call `wake` at this loop time or earlier; None changes nothing."""
        if at is None or (self._handle is not None and self._handle.when() <= at):
            return
        self.cancel()
        self._handle = self._loop.call_at(at, self._fire)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._wake()
