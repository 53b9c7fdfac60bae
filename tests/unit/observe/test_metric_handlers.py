"""Metrics reach the handler of their group; the agent's own metrics do so in the background."""

from __future__ import annotations

import threading
import time

from holdfast.observe.metrics.metric_handlers import (
    MetricData,
    MetricHandler,
    NullMetricHandler,
    configure,
    getStream,
    has_handler,
    put_metric,
)
from holdfast.observe.metrics.metric_recorder import HANDLERS_MAX, MetricQueues

PATIENCE_S = 20.0


class Kept(MetricHandler):
    def __init__(self) -> None:
        self.metrics: list[MetricData] = []
        self.threads: set[str] = set()

    def emit(self, metric_data: MetricData) -> None:
        self.metrics.append(metric_data)
        self.threads.add(threading.current_thread().name)

    def names(self) -> list[str]:
        return [one.name for one in self.metrics]


class BlockingHandler(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.released = threading.Event()

    def emit(self, metric_data: MetricData) -> None:
        super().emit(metric_data)
        self.entered.set()
        assert self.released.wait(PATIENCE_S)


def test_metric_reaches_the_handler_of_its_group_immediately() -> None:
    mine, others = Kept(), Kept()
    assert not has_handler()
    configure(others)
    configure(mine, group="mine")
    assert has_handler()
    stream = getStream("yours")
    configure(NullMetricHandler())
    before = time.time()
    put_metric("a", 1, "mine")
    stream.add_value("b", 2)  # The stream keeps the handler of its creation.
    put_metric("c", 3)
    assert [one[1:] for one in mine.metrics] == [("mine", "a", 1)]
    assert [one[1:] for one in others.metrics] == [("yours", "b", 2)]
    assert before <= mine.metrics[0].timestamp <= time.time()
    assert mine.threads == {threading.current_thread().name}


def test_blocking_handler_is_dropped_until_it_is_configured_again() -> None:
    handler = BlockingHandler()
    configure(handler)
    queues = MetricQueues(call_s_max=0.0)
    queues.put("stuck", 1)
    assert handler.entered.wait(PATIENCE_S)
    queues.put("late", 1)
    put_metric("of the program", 1)
    queues.close(PATIENCE_S)
    handler.released.set()
    configure(handler)
    put_metric("again", 1)
    assert handler.names() == ["stuck", "again"]
    another = MetricQueues()
    another.put("by another run", 1)
    another.close(PATIENCE_S)
    assert handler.names()[2:] == ["by another run"]


def test_end_of_a_run_waits_no_longer_than_its_limit() -> None:
    blocked = [BlockingHandler() for _ in range(3)]
    first, second = MetricQueues(), MetricQueues()
    for handler in blocked:
        configure(handler)
        first.put("a", 1)
        assert handler.entered.wait(PATIENCE_S)
    begin = time.monotonic()
    first.close(0.5)
    assert time.monotonic() - begin < 1.0  # For all handlers together, not for each.
    second.put("b", 2)  # It is appended to the same queue.
    for handler in blocked:
        handler.released.set()
    second.close(PATIENCE_S)
    assert blocked[-1].names() == ["a", "b"]


def test_each_metric_reaches_the_handler_configured_at_that_time() -> None:
    kept = [Kept() for _ in range(HANDLERS_MAX + 1)]
    queues = MetricQueues()
    for number, handler in enumerate(kept):
        configure(handler)
        queues.put(str(number), number)
    configure(NullMetricHandler())
    queues.put("for nobody", 1)
    queues.close(PATIENCE_S)
    assert [one.names() for one in kept[:-1]] == [[str(n)] for n in range(HANDLERS_MAX)]
    assert kept[-1].names() == []
