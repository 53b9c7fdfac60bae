"""Workers stuck in uninterruptible sleep: a dead disk or GPU driver holds them in the kernel.

The kernel does not report this state, so workers are checked at intervals, and only if a limit was
set (`TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT`). Every process is in the state now and then; one
that is in it at every check for the whole limit is stuck.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import console
from holdfast.processes import procfs

if TYPE_CHECKING:
    from holdfast.processes.failures.failure import ProcessFailure
    from holdfast.processes.workers.group import PContext

CHECKS_PER_LIMIT = 10
CHECK_INTERVAL_S_MAX = 1.0


class StuckWorkers:
    """Since when each worker of one generation has been in uninterruptible sleep."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._interval_s = min(CHECK_INTERVAL_S_MAX, limit_s / CHECKS_PER_LIMIT)
        self.forget()

    def forget(self) -> None:
        """Begin anew, for new workers."""
        self._since: dict[int, float] = {}
        self._stuck: dict[int, float] = {}
        self._next_check: float | None = None

    def next_check(self, now: float) -> float:
        if self._next_check is None:
            self._next_check = now + self._interval_s
        return self._next_check

    def check(self, now: float, group: PContext) -> str:
        """Check the workers if it is time to; return in words which one is stuck, if any."""
        if self._next_check is None or now < self._next_check:
            return ""
        self._next_check = now + self._interval_s
        pids = group.pids()
        for rank in group.running():
            if procfs.state_of(pids[rank]) != "D":
                self._since.pop(rank, None)
                continue
            if rank not in self._since:
                console.info(f"worker {rank} (pid {pids[rank]}) is in uninterruptible sleep")
            since = self._since.setdefault(rank, now)
            if now - since >= self._limit_s:
                self._stuck[rank] = now - since
        if not self._stuck:
            return ""
        rank = min(self._stuck)
        return f"worker {rank} (pid {pids[rank]}) {self._describe(rank)}"

    def ranks(self) -> set[int]:
        """Return the local ranks that are stuck."""
        return set(self._stuck)

    def explain(self, failure: ProcessFailure) -> None:
        """Make the failure of a stuck worker the cause it is, not a consequence."""
        if failure.local_rank in self._stuck:
            detail = self._describe(failure.local_rank)
            failure.detail = f"{detail}; {failure.detail}" if failure.detail else detail
            failure.consequence = failure.stopped = False

    def _describe(self, rank: int) -> str:
        return (
            f"was stuck in uninterruptible sleep for {self._stuck[rank]:.1f} s "
            f"(limit {self._limit_s:g} s): a disk, network file system or device does not answer"
        )
