"""Emits TorchElastic's metrics, with the same names, at the same times, in the same order.

TorchElastic emits them from decorators around the agent's methods; this module derives them from lifecycle events.
If a TorchElastic method calls another, the inner call ends first and is reported first. Therefore the metric of a
rendezvous follows that of the ranks, and the metric of a restart follows that of the start.

The agent must not wait for a handler, so a thread calls the handler from a queue with the limits of
`background`. A handler that exceeds them receives no more metrics until it is configured again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from holdfast import plugins
from holdfast.core.supervision import StopReason
from holdfast.observe import lifecycle
from holdfast.observe.background import CALL_S_MAX, CLOSE_S, QUEUED_MAX, BackgroundHandler
from holdfast.observe.events.event_handlers import EventHandler
from holdfast.observe.metrics import metric_handlers
from holdfast.observe.metrics.metric_handlers import MetricData, MetricHandler, NullMetricHandler

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

# The state of workers that are stopped for this reason.
STATE_AT_STOP = {
    StopReason.SUCCEEDED: "succeeded",
    StopReason.WORKER_FAILED: "failed",
    StopReason.UNHEALTHY: "unhealthy",
}
# TorchElastic emits nothing for these stops.
UNREPORTED_STOPS = (StopReason.SUCCEEDED, StopReason.SIGNAL)


class MetricRecorder:
    """An observer that emits TorchElastic's metrics; `put` receives each, and must not wait."""

    name = "the recorder of metrics"

    def __init__(self, put: Callable[[str, int], object]) -> None:
        self._put = put
        self._role = ""
        self._max_restarts = self._remaining = 0
        self._state = ""
        self._reset()

    def _reset(self) -> None:
        self._rendezvous: lifecycle.RendezvousEnded | None = None  # Its workers have no ranks yet.
        self._stopping: lifecycle.GenerationStopping | None = None
        # When the calls in progress began.
        self._starting_since: float | None = None
        self._initializing_since: float | None = None
        self._restarting_since: float | None = None

    def __call__(self, event: lifecycle.LifecycleEvent) -> None:
        match event:
            case lifecycle.RunStarted():
                self._reset()
                self._role = event.role
                self._max_restarts = event.max_restarts
            case lifecycle.RendezvousEnded():
                self._rendezvous_ended(event)
            case lifecycle.RanksAssigned():
                self._call(ASSIGN_RANKS, event.took_s)
                self._end_rendezvous(event.took_s)
                self._starting_since = event.at
            case lifecycle.GenerationStarted():
                self._end_rendezvous(0.0)
                self._call(START, event.took_s)
                self._end_calls(event.at)
                self._remaining = self._max_restarts - event.restart_count
                self._state = ""
            case lifecycle.WorkersObserved():
                self._observe(event.state, event.remaining_restarts)
            case lifecycle.GenerationStopping():
                self._stopping = event
                state = STATE_AT_STOP.get(event.reason, self._state)
                if state != self._state:  # TorchElastic would have observed it by polling.
                    self._observe(state, self._remaining)
            case lifecycle.GenerationStopped():
                stopping, self._stopping = self._stopping, None
                if stopping is not None and stopping.reason not in UNREPORTED_STOPS:
                    self._restarting_since = stopping.at
                    self._call(STOP, event.at - stopping.at)
            case lifecycle.RunEnded():
                self._run_ended(event)

    def _rendezvous_ended(self, event: lifecycle.RendezvousEnded) -> None:
        self._starting_since = None
        if self._initializing_since is None:
            self._initializing_since = event.at - event.took_s
        before = self._rendezvous
        if before is not None:  # This node had a rank, but its workers received none.
            self._call(ASSIGN_RANKS, event.at - before.at, failed=True)
            self._end_rendezvous(event.at - before.at, failed=True)
        if not event.error:
            self._rendezvous = event
        elif before is None:
            self._call(RENDEZVOUS, event.took_s, failed=True)

    def _end_rendezvous(self, ranks_s: float, *, failed: bool = False) -> None:
        rendezvous, self._rendezvous = self._rendezvous, None
        if rendezvous is not None:
            self._call(RENDEZVOUS, rendezvous.took_s + ranks_s, failed=failed)

    def _run_ended(self, event: lifecycle.RunEnded) -> None:
        if not event.error:
            self._put_outcome(event)
        elif self._initializing_since is not None:
            self._end_rendezvous(0.0, failed=True)
            if self._starting_since is not None:
                self._call(START, event.at - self._starting_since, failed=True)
            self._end_calls(event.at, failed=True)
        self._call(RUN, event.took_s, failed=bool(event.error))

    def _end_calls(self, at: float, *, failed: bool = False) -> None:
        """Emit the calls that end with the start of the workers."""
        for name, since in (
            (INITIALIZE, self._initializing_since),
            (RESTART, self._restarting_since),
        ):
            if since is not None:
                self._call(name, at - since, failed=failed)
        self._reset()

    def _observe(self, state: str, remaining: int) -> None:
        self._state = state
        self._call(MONITOR, 0.0)
        self._worker("remaining_restarts", remaining)
        self._worker(state, 1)

    def _put_outcome(self, event: lifecycle.RunEnded) -> None:
        failed = event.state != "succeeded"
        left, most = event.remaining_restarts, event.max_restarts
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
"""How many handlers receive the agent's metrics in one run."""

_unfinished: dict[int, _MetricQueue] = {}
"""Queues by handler that were not empty when a run ended: the next run continues them."""


class MetricQueues:
    """Queues the metrics of one run for the handler that is configured when they occur."""

    def __init__(self, *, queued_max: int = QUEUED_MAX, call_s_max: float = CALL_S_MAX) -> None:
        self._queued_max = queued_max
        self._call_s_max = call_s_max
        self._queues: dict[int, _MetricQueue] = {}

    def put(self, name: str, value: int) -> None:
        """Queue a metric of the agent with the current time."""
        stream = metric_handlers.getStream(metric_handlers.DEFAULT_GROUP)
        handler = stream.handler
        if type(handler) is NullMetricHandler or metric_handlers.is_dropped(handler):
            return
        queue = self._queues.get(id(handler))
        if queue is None or queue.is_dropped:
            queue = self._queue_for(handler)
        if queue is not None:
            metric: Any = MetricData(time.time(), stream.group_name, name, value)
            queue.record(metric)  # A queue accepts any value.

    def _queue_for(self, handler: MetricHandler) -> _MetricQueue | None:
        """Return the handler's queue from an earlier run, or a new one; None if there are too many queues."""
        if len(self._queues) >= HANDLERS_MAX:
            return None
        queue = _unfinished.pop(id(handler), None)
        # If the handler of a dropped queue was configured again, it gets a new queue.
        if queue is None or queue.is_dropped:
            queue = _MetricQueue(handler, queued_max=self._queued_max, call_s_max=self._call_s_max)
        self._queues[id(handler)] = queue
        return queue

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Wait up to `limit_s` until the handlers have received everything. May be called twice.

        If a handler is still busy then, the exit of the process waits for it again.
        """
        deadline = time.monotonic() + limit_s
        for number, queue in self._queues.items():
            queue.flush(limit_s)
            if not queue.is_flushing:
                queue.close(limit_s)
            elif len(_unfinished) < HANDLERS_MAX:
                _unfinished[number] = queue
            limit_s = max(0.0, deadline - time.monotonic())


class _MetricQueue(BackgroundHandler):
    """The queue of one handler. It references the handler, so that no other object gets the same id."""

    def __init__(self, handler: MetricHandler, *, queued_max: int, call_s_max: float) -> None:
        name = plugins.named(handler)
        sink = _MetricSink(handler)
        super().__init__(sink, name, "metric", queued_max=queued_max, call_s_max=call_s_max)
        self._metric_handler = handler

    def drop(self, why: str) -> None:
        metric_handlers.faults_of(self._metric_handler).is_dropped = True
        super().drop(why)


class _MetricSink(EventHandler):
    """Adapts a metric handler to a queue of events."""

    def __init__(self, handler: MetricHandler) -> None:
        self._emit = handler.emit

    def record(self, event: Any) -> None:
        self._emit(event)
