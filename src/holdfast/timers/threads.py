"""A thread that drives a timer server for those who have no loop of their own."""

from __future__ import annotations

import os
import threading
import time

from holdfast import messages
from holdfast.processes.waiting import wait_for

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Driven(Protocol):
        """What an agent's loop, or this thread, drives."""

        def fileno(self) -> int:
            """Return what can be read when there is something to take."""

        def next_deadline(self) -> float | None:
            """Return when to take in any case."""

        def take(self, now: float) -> object:
            """Do what is to be done now."""


FAULT_PAUSE_S, FAULT_PAUSE_S_MAX = 0.1, 10.0
"""How much longer it waits after each fault, and how long at most."""


class WatchThread:
    """Sleeps until there is something to do; a fault is told, and does not end it."""

    def __init__(self, server: Driven, *, daemon: bool) -> None:
        self._server = server
        self._ending, self._end = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="holdfast-timers", daemon=daemon)
        self._thread.start()

    def stop(self) -> None:
        """Have it take once more what has come, and wait until it has ended."""
        os.close(self._end)
        self._thread.join()
        os.close(self._ending)

    def _run(self) -> None:
        faults = 0
        while True:
            if faults == 0:
                wait_for(self._server.next_deadline(), self._server.fileno(), self._ending)
            else:  # What failed is there still: do not try it all the time.
                pause_s = min(faults * FAULT_PAUSE_S, FAULT_PAUSE_S_MAX)
                wait_for(time.monotonic() + pause_s, self._ending)
            ending = self._is_ending()  # Asked first: what came before is taken in any case.
            try:
                self._server.take(time.monotonic())
                faults = 0
            except Exception as problem:  # noqa: BLE001 (a watchdog goes on)
                faults += 1
                if faults == 1:
                    kind = type(problem).__name__
                    messages.warning(f"the watchdog had a fault and goes on: {kind}: {problem}")
            if ending:
                return

    def _is_ending(self) -> bool:
        import select

        poll = select.poll()
        poll.register(self._ending, select.POLLIN)
        return bool(poll.poll(0))
