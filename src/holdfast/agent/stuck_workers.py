"""Workers stuck in uninterruptible sleep: a dead disk or GPU driver holds them in the kernel.

Nothing tells of this state, so this is the one place that looks every so often, and only if a
limit was set (`TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT`). A process passes through the state
all the time; only one that stays in it, at every look, for the whole limit is stuck.
"""

from __future__ import annotations

from holdfast import console

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.processes.failures.failure import ProcessFailure
    from holdfast.processes.workers.group import PContext

CHECKS_PER_LIMIT = 10
CHECK_INTERVAL_S_MAX = 1.0


class StuckWorkers:
    """Keeps since when each worker has been seen in uninterruptible sleep."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: dict[int, float] = {}
        self._next_look: float | None = None
        self._stuck: dict[int, float] = {}

    def forget(self) -> None:
        """Begin anew, for new workers."""
        self._since.clear()
        self._stuck.clear()
        self._next_look = None

    def next_look(self, now: float) -> float | None:
        """Return when to look again, None if no limit was set."""
        if not self._limit_s:
            return None
        if self._next_look is None:
            self._next_look = now + self._look_every()
        return self._next_look

    def look(self, now: float, context: PContext) -> str:
        """Look if it is time to; return which worker is stuck, empty while none is."""
        if self._next_look is None or now < self._next_look:
            return ""
        self._next_look = now + self._look_every()
        from holdfast.processes.procfs import state_of

        pids = context.pids()
        for rank in context.running():
            if state_of(pids[rank]) != "D":
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
        return f"worker {rank} (pid {pids[rank]}) {self._what(rank)}"

    def ranks(self) -> set[int]:
        """Return the local ranks that are stuck."""
        return set(self._stuck)

    def explain(self, failure: ProcessFailure) -> ProcessFailure:
        """Return the failure of a stuck worker as what it is: the cause, not a consequence."""
        if failure.local_rank not in self._stuck:
            return failure
        detail = self._what(failure.local_rank)
        detail += f"; {failure.detail}" if failure.detail else ""
        failure.detail, failure.consequence, failure.stopped = detail, False, False
        return failure

    def _what(self, rank: int) -> str:
        return (
            f"was stuck in uninterruptible sleep for {self._stuck[rank]:.1f} s "
            f"(limit {self._limit_s:g} s): a disk, network file system or device does not answer"
        )

    def _look_every(self) -> float:
        return min(CHECK_INTERVAL_S_MAX, self._limit_s / CHECKS_PER_LIMIT)
