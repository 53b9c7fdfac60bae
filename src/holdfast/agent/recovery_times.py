"""How long each part of a recovery took, from the first sign of trouble to the first user line.

::

    trouble ──detect──► stopping ──stop──► stopped ──regroup──► ranked ──start──► started
                                                                   ──first_line──► a worker speaks

The one thing to know: a part counts only once the workers run again. What a job did before it gave
up is no recovery.
"""

from __future__ import annotations

from holdfast.agent import moments
from holdfast.core.supervision import Reason
from holdfast.metrics.histogram import Histogram

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

STAGES = ("detect", "stop", "regroup", "start", "first_line")

# Why a generation was stopped, as a label: few and fixed, whatever else may be in the words.
REASONS: Mapping[str, str] = {
    Reason.WORKER_FAILED.value: "worker_failed",
    Reason.UNHEALTHY.value: "unhealthy",
    Reason.REGROUP.value: "nodes_waiting",
    Reason.TOLD.value: "coordinator",
}
NODES_LOST = "nodes_lost"
OTHER = "other"
NO_RECOVERY = (Reason.SUCCEEDED.value, Reason.SIGNAL.value)


class RecoveryTimes:
    """Adds up what onlookers are told of recoveries."""

    def __init__(self) -> None:
        self.stages = {stage: Histogram() for stage in STAGES}
        self.outages = Histogram()
        self.restarts = dict.fromkeys((*REASONS.values(), NODES_LOST, OTHER), 0)
        self._started_at: float | None = None
        self._last: moments.Started | None = None
        self._recovered = False
        self._forget()

    def _forget(self) -> None:
        self._trouble_at: float | None = None
        self._stopping: moments.Stopping | None = None
        self._stopped_at: float | None = None
        self._ranked_at: float | None = None

    def take(self, moment: moments.Moment) -> None:
        """Take note of a moment."""
        match moment:
            case moments.Began():
                self._started_at = self._last = None
                self._forget()
            case moments.Exited(at=at, failed=True):
                if self._trouble_at is None and self._started_at is not None:
                    self._trouble_at = at
            case moments.Stopping() if moment.reason not in NO_RECOVERY:
                self._take_stopping(moment)
            case moments.Stopped(at=at) if self._stopping is not None:
                self._stopped_at = at
            case moments.Met(at=at, error="") | moments.Ranked(at=at, error=""):
                self._ranked_at = at
            case moments.Started():
                self._take_start(moment)
            case moments.Spoke():
                self._first_line(moment.at)

    def _first_line(self, at: float) -> None:
        """A worker is in its own code; only the first time in a generation counts."""
        if self._started_at is not None and self._recovered:
            self.stages["first_line"].observe(at - self._started_at)
        self._recovered = False

    def _take_stopping(self, stopping: moments.Stopping) -> None:
        if self._trouble_at is None:
            self._trouble_at = stopping.at
        self._stopping = stopping

    def _take_start(self, started: moments.Started) -> None:
        self._recovered = self._stopping is not None
        if self._stopping is not None:
            self._count(self._stopping, started.at)
            self.restarts[self._reason(self._stopping, started)] += 1
        self._started_at = started.at
        self._last = started
        self._forget()

    def _count(self, stopping: moments.Stopping, started_at: float) -> None:
        assert self._trouble_at is not None
        stopped_at = stopping.at if self._stopped_at is None else self._stopped_at
        # A node may learn of its place in the next round while it still stops its workers.
        ranked_at = stopped_at if self._ranked_at is None else max(stopped_at, self._ranked_at)
        self.stages["detect"].observe(stopping.at - self._trouble_at)
        self.stages["stop"].observe(stopped_at - stopping.at)
        self.stages["regroup"].observe(ranked_at - stopped_at)
        self.stages["start"].observe(started_at - ranked_at)
        self.outages.observe(started_at - self._trouble_at)

    def _reason(self, stopping: moments.Stopping, started: moments.Started) -> str:
        """Return why there was a restart; what a coordinator told shows in what came of it."""
        last = self._last
        if stopping.reason != Reason.TOLD.value or last is None:
            return REASONS.get(stopping.reason, OTHER)
        if started.restart_count > last.restart_count:
            return REASONS[Reason.WORKER_FAILED.value]
        more = (started.group_world_size or 0) - (last.group_world_size or 0)
        if more:
            return REASONS[Reason.REGROUP.value] if more > 0 else NODES_LOST
        return REASONS[Reason.TOLD.value]
