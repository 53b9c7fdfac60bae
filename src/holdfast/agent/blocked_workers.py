"""Detects workers in uninterruptible sleep: a broken disk or GPU driver blocks them in the kernel.

The kernel does not report this state, so the agent checks its workers at intervals. It does so only if
`TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT` sets a limit. Every process enters this state briefly;
the supervision decides when it has lasted too long.
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
    """Checks the worker processes of the current generation."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._interval_s = min(CHECK_INTERVAL_S_MAX, limit_s / CHECKS_PER_LIMIT)
        self._pids: dict[int, int] = {}  # By local rank.
        self._generation = -1
        self._since: dict[int, float] = {}
        self._next_check: float | None = None

    def started(self, generation: int, pids: Mapping[int, int], now: float) -> None:
        """Start checking these processes."""
        self._generation, self._pids, self._since = generation, dict(pids), {}
        self._next_check = now + self._interval_s

    def ended(self, rank: int) -> None:
        """Forget a worker that has exited."""
        self._pids.pop(rank, None)
        self._since.pop(rank, None)

    def stopped(self) -> None:
        """Stop checking until `started` is called again."""
        self._pids.clear()
        self._next_check = None

    def next_deadline(self) -> float | None:
        """Return when `poll` is due."""
        return self._next_check

    def poll(self, now: float) -> list[Event]:
        """If a check is due, check the workers; return an event for each change."""
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
        # Check at the limit too, so that the supervision decides from a fresh state.
        limits = [at + self.limit_s for at in self._since.values()]
        self._next_check = min([now + self._interval_s, *(at for at in limits if at > now)])
        return events
