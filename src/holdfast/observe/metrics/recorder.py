"""The metrics that TorchElastic emits, by the same names, at the same times, in the same order.

There they come from decorators around the agent's methods; here they are made of lifecycle events.
Where one method there calls another, the inner one ends first and is reported first: that is why a
rendezvous waits for the ranks, and a restart for the start.

`put_metric` calls a handler in the caller's thread, as TorchElastic's does. The agent must not
wait, so its metrics go through a queue to a background thread that calls the handler, with the
limits of `holdfast.observe.background`. A handler that exceeds them gets no more metrics until it
is configured again.
"""

from __future__ import annotations

import time

from holdfast.core.supervision import StopReason
from holdfast.observe import lifecycle
from holdfast.observe.background import CALL_S_MAX, CLOSE_S, QUEUED_MAX, BackgroundHandler
from holdfast.observe.events.handlers import EventHandler
from holdfast.observe.metrics import streams
from holdfast.observe.metrics.handlers import MetricData, MetricHandler, NullMetricHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


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
    StopReason.SUCCEEDED.value: "succeeded",
    StopReason.WORKER_FAILED.value: "failed",
    StopReason.UNHEALTHY.value: "unhealthy",
}
# There nothing is told of these stops: the workers are gone, or it is the agent that ends.
UNREPORTED_STOPS = (StopReason.SUCCEEDED.value, StopReason.SIGNAL.value)


class MetricRecorder:
    """An observer that emits TorchElastic's metrics."""

    name = "the recorder of metrics"

    def __init__(self, put: Callable[[str, int], object]) -> None:
        self._put = put
        self._role = ""
        self._max_restarts = self._remaining = 0
        self._seen = ""
        self._forget()

    def _forget(self) -> None:
        self._met: lifecycle.RendezvousEnded | None = None
        self._stopping: lifecycle.GenerationStopping | None = None
        # Since when what is being done is done, as far as it is.
        self._starting_since: float | None = None
        self._initializing_since: float | None = None
        self._restarting_since: float | None = None

    def __call__(self, moment: lifecycle.LifecycleEvent) -> None:
        """Emit what there is to emit for a moment."""
        match moment:
            case lifecycle.RunStarted():
                self._forget()
                self._role = moment.role
                self._max_restarts = moment.max_restarts
            case lifecycle.RendezvousEnded():
                self._take_meeting(moment)
            case lifecycle.RanksAssigned():
                self._take_ranks(moment)
            case lifecycle.GenerationStarted():
                self._end_meeting(0.0)
                self._call(START, moment.took_s)
                self._end_calls(moment.at)
                self._remaining = self._max_restarts - moment.restart_count
                self._seen = ""
            case lifecycle.WorkersObserved():
                self._look(moment.state, moment.remaining_restarts)
            case lifecycle.GenerationStopping():
                self._stopping = moment
                seen = SEEN_AT_STOP.get(moment.reason, self._seen)
                if seen != self._seen:  # Nobody had to look: the news came by itself.
                    self._look(seen, self._remaining)
            case lifecycle.GenerationStopped():
                self._take_stop(moment)
            case lifecycle.RunEnded():
                self._take_end(moment)

    def _take_meeting(self, met: lifecycle.RendezvousEnded) -> None:
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

    def _take_ranks(self, ranked: lifecycle.RanksAssigned) -> None:
        failed = bool(ranked.error)
        self._call(ASSIGN_RANKS, ranked.took_s, failed=failed)
        self._end_meeting(ranked.took_s, failed=failed)
        self._starting_since = None if failed else ranked.at

    def _end_meeting(self, ranking_s: float, *, failed: bool = False) -> None:
        met, self._met = self._met, None
        if met is not None:
            self._call(RENDEZVOUS, met.took_s + ranking_s, failed=failed)

    def _take_stop(self, stopped: lifecycle.GenerationStopped) -> None:
        stopping, self._stopping = self._stopping, None
        if stopping is None or stopping.reason in UNREPORTED_STOPS:
            return
        self._restarting_since = stopping.at
        self._call(STOP, stopped.at - stopping.at)

    def _take_end(self, ended: lifecycle.RunEnded) -> None:
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

    def _put_outcome(self, ended: lifecycle.RunEnded) -> None:
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


HANDLERS_MAX = 16
"""How many handlers may take turns in one run; to further ones the metrics do not come."""

_unfinished: dict[int, _MetricQueue] = {}
"""By handler, those who were still busy when a run ended: the next run goes on with them."""


class MetricQueues:
    """Takes the metrics of one run, and hands them to whichever handler is configured then."""

    def __init__(self, *, waiting_max: int = QUEUED_MAX, call_s_max: float = CALL_S_MAX) -> None:
        self._limits: dict[str, Any] = {"waiting_max": waiting_max, "call_s_max": call_s_max}
        self._queues: dict[int, _MetricQueue] = {}

    def put(self, name: str, value: int) -> None:
        """Put a metric of the agent into its handler's queue; its time is now."""
        stream = streams.getStream(streams.DEFAULT_GROUP)
        handler = stream.handler
        if type(handler) is NullMetricHandler or streams.is_dropped(handler):
            return
        queue = self._queues.get(id(handler))
        if queue is None or queue.is_dropped:
            queue = self._queue_for(handler)
        if queue is not None:
            queue.put(MetricData(time.time(), stream.group_name, name, value))

    def _queue_for(self, handler: MetricHandler) -> _MetricQueue | None:
        """Return a new one, or that which an earlier run left; None if there are too many."""
        if len(self._queues) >= HANDLERS_MAX:
            return None
        queue = _unfinished.pop(id(handler), None)
        # The handler of one that was dropped is left alone; so it has been configured again.
        if queue is None or queue.is_dropped:
            queue = _MetricQueue(handler, self._limits)
        self._queues[id(handler)] = queue
        return queue

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Wait until the handlers have everything, all in all for so long. May be called twice.

        One that is still busy then has until the end of the process, which waits for it again.
        """
        deadline = time.monotonic() + limit_s
        for number, queue in self._queues.items():
            if not queue.end(limit_s) and len(_unfinished) < HANDLERS_MAX:
                _unfinished[number] = queue
            limit_s = max(0.0, deadline - time.monotonic())


class _MetricQueue(BackgroundHandler):
    """What waits for one handler; keeps it, so that its id stays its."""

    kind = "metric"

    def __init__(self, handler: MetricHandler, limits: dict[str, Any]) -> None:
        super().__init__(_MetricSink(handler), type(handler).__name__, **limits)
        self._metric_handler = handler

    def put(self, metric: MetricData) -> None:
        taken: Any = metric  # A queue does not look at what is in it.
        self.record(taken)

    def end(self, limit_s: float) -> bool:
        """Close it if the handler takes everything in time; return whether it did."""
        self.flush(limit_s)
        if self.is_flushing:
            return False
        self.close(limit_s)
        return True

    def drop(self, why: str) -> None:
        if not self.is_dropped:
            streams.drop(self._metric_handler)
        super().drop(why)


class _MetricSink(EventHandler):
    """What the thread calls."""

    def __init__(self, handler: MetricHandler) -> None:
        self._handler = handler

    def record(self, event: Any) -> None:
        streams.hand_over(self._handler, event)
