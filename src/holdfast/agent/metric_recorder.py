"""The metrics that TorchElastic emits, by the same names, at the same moments, in the same order.

There they come from decorators around the agent's methods; here they are made of the moments of a
run. Where one method there calls another, the inner one ends first, and so it is told of first:
that is why a rendezvous waits for the ranks, and a restart for the start.

Add one to an agent's onlookers only if `holdfast.metrics.is_configured()`.
"""

from __future__ import annotations

from holdfast.agent import moments
from holdfast.core.supervision import Reason
from holdfast.metrics.streams import put_metric

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

RENDEZVOUS = "SimpleElasticAgent._rendezvous"
ASSIGN_RANKS = "SimpleElasticAgent._assign_worker_ranks"
INITIALIZE = "SimpleElasticAgent._initialize_workers"
RESTART = "SimpleElasticAgent._restart_workers"
RUN = "SimpleElasticAgent.run"
START = "LocalElasticAgent._start_workers"
STOP = "LocalElasticAgent._stop_workers"
MONITOR = "LocalElasticAgent._monitor_workers"

# There nothing is told of these stops: the workers are gone, or it is the agent that ends.
UNTOLD_STOPS = (Reason.SUCCEEDED.value, Reason.SIGNAL.value)


class MetricRecorder:
    """An onlooker that emits TorchElastic's metrics."""

    name = "the recorder of metrics"

    def __init__(self, put: Callable[[str, int], None] = put_metric) -> None:
        self._put = put
        self._role = ""
        self._met: moments.Met | None = None
        self._initializing_since: float | None = None
        self._stopping: moments.Stopping | None = None
        self._restarting_since: float | None = None

    def __call__(self, moment: moments.Moment) -> None:
        """Emit what there is to emit for a moment."""
        match moment:
            case moments.Began():
                self.__init__(self._put)  # type: ignore[misc] # Nothing is left of a run before.
                self._role = moment.role
                self._initializing_since = moment.at
            case moments.Met():
                self._take_meeting(moment)
            case moments.Ranked():
                self._call(ASSIGN_RANKS, moment.took_s, failed=bool(moment.error))
                self._end_meeting(moment.took_s, failed=bool(moment.error))
            case moments.Started():
                self._take_start(moment)
            case moments.Looked():
                self._call(MONITOR, 0.0)
                self._worker("remaining_restarts", moment.remaining_restarts)
                self._worker(moment.state, 1)
            case moments.Stopping():
                self._stopping = moment
            case moments.Stopped():
                self._take_stop(moment)
            case moments.Ended():
                self._take_end(moment)

    def _take_meeting(self, met: moments.Met) -> None:
        self._end_meeting(0.0)  # One before it, that nobody got ranks after.
        self._met = met
        if met.error:
            self._end_meeting(0.0, failed=True)

    def _end_meeting(self, ranking_s: float, *, failed: bool = False) -> None:
        met, self._met = self._met, None
        if met is not None:
            self._call(RENDEZVOUS, met.took_s + ranking_s, failed=failed)

    def _take_start(self, started: moments.Started) -> None:
        self._end_meeting(0.0)
        self._call(START, started.took_s)
        self._end_nested(started.at, failed=False)

    def _take_stop(self, stopped: moments.Stopped) -> None:
        stopping, self._stopping = self._stopping, None
        self._initializing_since = stopped.at
        if stopping is None or stopping.reason in UNTOLD_STOPS:
            self._initializing_since = None
            return
        self._restarting_since = stopping.at
        self._call(STOP, stopped.at - stopping.at)

    def _take_end(self, ended: moments.Ended) -> None:
        if ended.error:
            if self._met is not None:
                self._end_meeting(0.0, failed=True)
            self._end_nested(ended.at, failed=True)
        else:
            self._put_outcome(ended)
        self._call(RUN, ended.took_s, failed=bool(ended.error))

    def _end_nested(self, at: float, *, failed: bool) -> None:
        """Tell of what the start of the workers, or the end, is the end of."""
        for name, since in (
            (INITIALIZE, self._initializing_since),
            (RESTART, self._restarting_since),
        ):
            if since is not None:
                self._call(name, at - since, failed=failed)
        self._initializing_since = self._restarting_since = None

    def _put_outcome(self, ended: moments.Ended) -> None:
        failed = ended.state != "succeeded"
        left, most = ended.remaining_restarts, ended.max_restarts
        retried = left < most
        self._worker("flakiness", 100 if failed else int(100 - 100 * (left + 1) / (most + 1)))
        self._worker("run_total", 1)
        self._worker("run_success_with_retries", int(not failed and retried))
        self._worker("run_success_no_retries", int(not failed and not retried))
        self._worker("run_failed_with_retries", int(failed and retried))
        self._worker("run_failed_no_retries", int(failed and not retried))

    def _call(self, name: str, took_s: float, *, failed: bool = False) -> None:
        self._put(f"{name}.failure" if failed else f"{name}.success", 1)
        self._put(f"{name}.duration.ms", int(max(0.0, took_s) * 1000))

    def _worker(self, what: str, value: int) -> None:
        self._put(f"workers.{self._role}.{what}", value)
