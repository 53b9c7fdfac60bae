"""The metrics that TorchElastic emits, by the same names, at the same moments, in the same order.

There they come from decorators around the agent's methods; here they are made of the moments of a
run. Where one method there calls another, the inner one ends first, and so it is told of first:
that is why a rendezvous waits for the ranks, and a restart for the start.

Add one to an agent's onlookers only if a handler is configured. What gets the metrics
must not wait: it is called in the agent's thread.
"""

from __future__ import annotations

from holdfast.agent import moments
from holdfast.core.supervision import Reason

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

# What a look at the workers finds where they are stopped for this reason.
SEEN_AT_STOP = {
    Reason.SUCCEEDED.value: "succeeded",
    Reason.WORKER_FAILED.value: "failed",
    Reason.UNHEALTHY.value: "unhealthy",
}
# There nothing is told of these stops: the workers are gone, or it is the agent that ends.
UNTOLD_STOPS = (Reason.SUCCEEDED.value, Reason.SIGNAL.value)


class MetricRecorder:
    """An onlooker that emits TorchElastic's metrics."""

    name = "the recorder of metrics"

    def __init__(self, put: Callable[[str, int], object]) -> None:
        self._put = put
        self._role = ""
        self._max_restarts = self._remaining = 0
        self._seen = ""
        self._forget()

    def _forget(self) -> None:
        self._met: moments.Met | None = None
        self._stopping: moments.Stopping | None = None
        # Since when what is being done is done, as far as it is.
        self._starting_since: float | None = None
        self._initializing_since: float | None = None
        self._restarting_since: float | None = None

    def __call__(self, moment: moments.Moment) -> None:
        """Emit what there is to emit for a moment."""
        match moment:
            case moments.Began():
                self._forget()
                self._role = moment.role
                self._max_restarts = moment.max_restarts
            case moments.Met():
                self._take_meeting(moment)
            case moments.Ranked():
                self._take_ranks(moment)
            case moments.Started():
                self._end_meeting(0.0)
                self._call(START, moment.took_s)
                self._end_calls(moment.at)
                self._remaining = self._max_restarts - moment.restart_count
                self._seen = ""
            case moments.Looked():
                self._look(moment.state, moment.remaining_restarts)
            case moments.Stopping():
                self._stopping = moment
                seen = SEEN_AT_STOP.get(moment.reason, self._seen)
                if seen != self._seen:  # Nobody had to look: the news came by itself.
                    self._look(seen, self._remaining)
            case moments.Stopped():
                self._take_stop(moment)
            case moments.Ended():
                self._take_end(moment)

    def _take_meeting(self, met: moments.Met) -> None:
        self._starting_since = None
        if self._initializing_since is None:
            self._initializing_since = met.at - met.took_s
        before = self._met
        if before is not None:  # This node had a place, but its workers got no ranks.
            self._call(ASSIGN_RANKS, met.at - before.at, failed=True)
            self._end_meeting(met.at - before.at, failed=True)
        if not met.error:
            self._met = met
        elif before is None:
            self._call(RENDEZVOUS, met.took_s, failed=True)

    def _take_ranks(self, ranked: moments.Ranked) -> None:
        failed = bool(ranked.error)
        self._call(ASSIGN_RANKS, ranked.took_s, failed=failed)
        self._end_meeting(ranked.took_s, failed=failed)
        self._starting_since = None if failed else ranked.at

    def _end_meeting(self, ranking_s: float, *, failed: bool = False) -> None:
        met, self._met = self._met, None
        if met is not None:
            self._call(RENDEZVOUS, met.took_s + ranking_s, failed=failed)

    def _take_stop(self, stopped: moments.Stopped) -> None:
        stopping, self._stopping = self._stopping, None
        if stopping is None or stopping.reason in UNTOLD_STOPS:
            return
        self._restarting_since = stopping.at
        self._call(STOP, stopped.at - stopping.at)

    def _take_end(self, ended: moments.Ended) -> None:
        if not ended.error:
            self._put_outcome(ended)
        elif self._initializing_since is not None:
            self._end_meeting(0.0, failed=True)
            if self._starting_since is not None:
                self._call(START, ended.at - self._starting_since, failed=True)
            self._end_calls(ended.at, failed=True)
        self._call(RUN, ended.took_s, failed=bool(ended.error))

    def _end_calls(self, at: float, *, failed: bool = False) -> None:
        """Tell of that which the start of the workers is the last part of."""
        for name, since in (
            (INITIALIZE, self._initializing_since),
            (RESTART, self._restarting_since),
        ):
            if since is not None:
                self._call(name, at - since, failed=failed)
        self._forget()

    def _look(self, state: str, remaining: int) -> None:
        self._seen = state
        self._call(MONITOR, 0.0)
        self._worker("remaining_restarts", remaining)
        self._worker(state, 1)

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
