"""The agent's own metrics on their way to a handler that may be anybody's: `MetricsApart`.

`put_metric` calls a handler where it is called, as TorchElastic's does; for a program's own metrics
that is what the program wants. The agent must not wait, so its metrics go the way of events: they
wait in a queue for a thread that calls the handler, with the limits of `holdfast.events.apart`.
A handler that goes beyond them is left alone as one that keeps raising is, until it is configured
again.
"""

from __future__ import annotations

import time

from holdfast.events.apart import CALL_S_MAX, CLOSE_S, WAITING_MAX, Apart
from holdfast.events.handlers import EventHandler
from holdfast.metrics import streams
from holdfast.metrics.handlers import MetricData, MetricHandler, NullMetricHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HANDLERS_MAX = 16
"""How many handlers may take turns in one run; to further ones the metrics do not come."""

_unfinished: dict[int, _Queue] = {}
"""By handler, those who were still busy when a run ended: the next run goes on with them."""


class MetricsApart:
    """Takes the metrics of one run, and hands them to whichever handler is configured then."""

    def __init__(self, *, waiting_max: int = WAITING_MAX, call_s_max: float = CALL_S_MAX) -> None:
        self._limits: dict[str, Any] = {"waiting_max": waiting_max, "call_s_max": call_s_max}
        self._queues: dict[int, _Queue] = {}

    def put(self, name: str, value: int) -> None:
        """Put a metric of the agent into its handler's queue; its time is now."""
        stream = streams.getStream(streams.DEFAULT_GROUP)
        handler = stream.handler
        if type(handler) is NullMetricHandler or streams.is_left_alone(handler):
            return
        queue = self._queues.get(id(handler))
        if queue is None or queue.is_dropped:
            queue = self._queue_for(handler)
        if queue is not None:
            queue.put(MetricData(time.time(), stream.group_name, name, value))

    def _queue_for(self, handler: MetricHandler) -> _Queue | None:
        """Return a new one, or that which an earlier run left; None if there are too many."""
        if len(self._queues) >= HANDLERS_MAX:
            return None
        queue = _unfinished.pop(id(handler), None)
        # The handler of one that was dropped is left alone; so it has been configured again.
        if queue is None or queue.is_dropped:
            queue = _Queue(handler, self._limits)
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


class _Queue(Apart):
    """What waits for one handler; keeps it, so that its id stays its."""

    kind = "metric"

    def __init__(self, handler: MetricHandler, limits: dict[str, Any]) -> None:
        super().__init__(_Handing(handler), type(handler).__name__, **limits)
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
            streams.leave_alone(self._metric_handler)
        super().drop(why)


class _Handing(EventHandler):
    """What the thread calls."""

    def __init__(self, handler: MetricHandler) -> None:
        self._handler = handler

    def record(self, event: Any) -> None:
        streams.hand_over(self._handler, event)
