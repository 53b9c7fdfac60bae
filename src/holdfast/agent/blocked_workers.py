"""Detects workers in uninterruptible sleep: a dead disk or GPU driver holds them in the kernel.

The kernel does not report this state, so workers are checked at intervals, and only if a limit is
set (`TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT`). Every process is in the state now and then. The
supervision decides when it has lasted for too long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import console
from holdfast.core.supervision import WorkerBlocked, WorkerUnblocked
from holdfast.processes import procfs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.core.machine import Event

CHECKS_PER_LIMIT = 10
CHECK_INTERVAL_S_MAX = 1.0


class BlockedWorkers:
    """Checks the processes of one generation after the other."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._interval_s = min(CHECK_INTERVAL_S_MAX, limit_s / CHECKS_PER_LIMIT)
        self._pids: dict[int, int] = {}  # By local rank.
        self._generation = -1
        self._since: dict[int, float] = {}
        self._next_check: float | None = None

    def started(self, generation: int, pids: Mapping[int, int], now: float) -> None:
        """Check these processes from now on."""
        self._generation, self._pids, self._since = generation, dict(pids), {}
        self._next_check = now + self._interval_s

    def ended(self, rank: int) -> None:
        """Forget a worker that has exited."""
        self._pids.pop(rank, None)
        self._since.pop(rank, None)

    def stopped(self) -> None:
        """Check nothing until other workers are started."""
        self._pids.clear()
        self._next_check = None

    def next_deadline(self) -> float | None:
        """Return when `look` is due."""
        return self._next_check

    def look(self, now: float) -> list[Event]:
        """Check the workers if that is due; return which became blocked, or left that state."""
        if self._next_check is None or now < self._next_check:
            return []
        events: list[Event] = []
        for rank, pid in self._pids.items():
            is_blocked = procfs.state_of(pid) == "D"
            if is_blocked and rank not in self._since:
                console.info(f"worker {rank} (pid {pid}) is in uninterruptible sleep")
                self._since[rank] = now
                events.append(WorkerBlocked(self._generation, rank, pid))
            elif not is_blocked and rank in self._since:
                del self._since[rank]
                events.append(WorkerUnblocked(self._generation, rank))
        # Check at the limit too, so that the supervision decides on a fresh state.
        limits = [at + self.limit_s for at in self._since.values()]
        self._next_check = min([now + self._interval_s, *(at for at in limits if at > now)])
        return events
