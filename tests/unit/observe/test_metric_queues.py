"""The agent's metrics reach their handler in order, and no handler makes the agent wait."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from holdfast.observe.metrics import recorder
from holdfast.observe.metrics.handlers import (
    FAULTS_MAX,
    MetricData,
    MetricHandler,
    NullMetricHandler,
    configure,
    put_metric,
)
from holdfast.observe.metrics.recorder import HANDLERS_MAX, MetricQueues

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 20.0
A_SHORT_TIME_S = 0.01


class Kept(MetricHandler):
    def __init__(self) -> None:
        self.metrics: list[MetricData] = []
        self.threads: set[str] = set()

    def emit(self, metric_data: MetricData) -> None:
        self.metrics.append(metric_data)
        self.threads.add(threading.current_thread().name)

    def named(self) -> list[str]:
        return [one.name for one in self.metrics]


class Blocking(Kept):
    """Blocks until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def emit(self, metric_data: MetricData) -> None:
        super().emit(metric_data)
        self.entered.set()
        assert self.go_on.wait(PATIENCE_S)


@pytest.fixture(autouse=True)
def nothing_configured() -> Iterator[None]:
    yield
    configure(NullMetricHandler())
    for queue in recorder._unfinished.values():
        queue.close(PATIENCE_S)
    recorder._unfinished.clear()


def test_metrics_come_in_order_with_the_time_at_which_they_were_put() -> None:
    kept = Kept()
    configure(kept)
    apart = MetricQueues()
    before = time.time()
    for number in range(100):
        apart.put(str(number), number)
    after = time.time()
    apart.close()
    apart.close()
    assert [(one.name, one.value) for one in kept.metrics] == [(str(n), n) for n in range(100)]
    assert all(before <= one.timestamp <= after for one in kept.metrics)
    assert {one.group_name for one in kept.metrics} == {"torchelastic"}
    assert kept.threads == {"holdfast-metrics-Kept"}


def test_what_a_program_puts_itself_comes_at_once() -> None:
    kept = Kept()
    configure(kept)
    put_metric("mine", 1)
    assert kept.named() == ["mine"]
    assert kept.threads == {threading.current_thread().name}


def test_nobody_waits_for_a_handler_that_blocks(caplog: pytest.LogCaptureFixture) -> None:
    handler = Blocking()
    configure(handler)
    apart = MetricQueues(queued_max=2)
    apart.put("first", 1)
    assert handler.entered.wait(PATIENCE_S)
    for number in range(5):
        apart.put(str(number), number)
    assert caplog.messages == [
        "the metric handler Blocking is slow: 2 metrics wait for it, and no more can"
    ]
    handler.go_on.set()
    apart.close(PATIENCE_S)
    assert handler.named() == ["first", "0", "1"]
    assert caplog.messages[1:] == ["3 metrics were not recorded by the metric handler Blocking"]


def test_one_that_blocks_for_too_long_is_left_alone_until_it_is_configured_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handler = Blocking()
    configure(handler)
    apart = MetricQueues(call_s_max=0.0)
    apart.put("stuck", 1)
    assert handler.entered.wait(PATIENCE_S)
    apart.put("late", 1)
    apart.put("later", 1)
    put_metric("of the program", 1)
    apart.close(PATIENCE_S)
    busy = "has been busy with one metric for more than 0 s"
    assert caplog.messages == [
        f"the metric handler Blocking {busy}: it gets no more metrics",
        "2 metrics were not recorded by the metric handler Blocking",
    ]
    handler.go_on.set()
    configure(handler)
    put_metric("again", 1)
    assert handler.named() == ["stuck", "again"]
    another = MetricQueues()
    another.put("by another run", 1)
    another.close(PATIENCE_S)
    assert handler.named()[2:] == ["by another run"]


def test_the_end_of_a_run_waits_no_longer_than_it_may(caplog: pytest.LogCaptureFixture) -> None:
    handler = Blocking()
    configure(handler)
    first, second = MetricQueues(), MetricQueues()
    first.put("a", 1)
    assert handler.entered.wait(PATIENCE_S)
    first.close(A_SHORT_TIME_S)
    assert caplog.messages == [
        "the metric handler Blocking still has 1 metric to take after 0.01 s"
    ]
    second.put("b", 2)  # Goes to the end of the same queue.
    handler.go_on.set()
    second.close(PATIENCE_S)
    assert handler.named() == ["a", "b"]
    assert len(caplog.messages) == 1


def test_one_that_raises_is_named_once_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    class Raising(Kept):
        def emit(self, metric_data: MetricData) -> None:
            super().emit(metric_data)
            raise Unspeakable

    handler = Raising()
    configure(handler)
    apart = MetricQueues()
    for number in range(FAULTS_MAX + 2):
        apart.put(str(number), number)
    apart.close(PATIENCE_S)
    assert handler.named() == [str(number) for number in range(FAULTS_MAX)]
    assert caplog.messages == [
        "the metric handler Raising failed: Unspeakable",
        f"the metric handler Raising failed {FAULTS_MAX} times in a row, and gets nothing more",
    ]


def test_one_that_wants_to_exit_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Leaving(Kept):
        def emit(self, metric_data: MetricData) -> None:
            raise SystemExit(3)

    configure(Leaving())
    apart = MetricQueues()
    for number in range(FAULTS_MAX):
        apart.put(str(number), number)
    apart.close(PATIENCE_S)
    assert caplog.messages[:2] == [
        "the metric handler Leaving failed: SystemExit: 3",
        f"the metric handler Leaving failed {FAULTS_MAX} times in a row: it gets no more metrics",
    ]


def test_each_metric_goes_to_the_handler_of_its_moment() -> None:
    handlers = [Kept() for _ in range(HANDLERS_MAX + 1)]
    apart = MetricQueues()
    for number, handler in enumerate(handlers):
        configure(handler)
        apart.put(str(number), number)
    configure(NullMetricHandler())
    apart.put("for nobody", 1)
    apart.close(PATIENCE_S)
    assert [one.named() for one in handlers[:-1]] == [[str(n)] for n in range(HANDLERS_MAX)]
    assert handlers[-1].named() == []
