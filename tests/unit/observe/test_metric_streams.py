"""Metrics find the handler of their group, and no handler can hurt whoever has a metric."""

from __future__ import annotations

import time

import pytest
from metric_fakes import Kept, nothing_configured

from holdfast.observe.metrics import handlers
from holdfast.observe.metrics.handlers import (
    FAULTS_MAX,
    FAULTY_MAX,
    ConsoleMetricHandler,
    MetricData,
    MetricsConfig,
    MetricStream,
    NullMetricHandler,
    configure,
    getStream,
    initialize_metrics,
    publish_metric,
    put_metric,
)

__all__ = ["nothing_configured"]
pytestmark = pytest.mark.usefixtures("nothing_configured")


class Broken(Kept):
    """Raises while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.broken = True

    def emit(self, metric_data: MetricData) -> None:
        self.asked += 1
        if self.broken:
            raise OSError("the collector is away")
        super().emit(metric_data)


def test_a_metric_comes_with_time_and_group() -> None:
    kept = Kept()
    configure(kept)
    before = time.time()
    put_metric("steps", 7)
    [metric] = kept.metrics
    assert metric[1:] == ("torchelastic", "steps", 7)
    assert before <= metric.timestamp <= time.time()


def test_a_group_may_have_a_handler_of_its_own() -> None:
    mine, others = Kept(), Kept()
    configure(others)
    configure(mine, group="mine")
    put_metric("a", 1, "mine")
    put_metric("b", 2, "yours")
    assert mine.named() == [("a", 1)]
    assert others.named() == [("b", 2)]


def test_a_stream_is_bound_to_the_handler_of_its_time() -> None:
    first, second = Kept(), Kept()
    configure(first)
    stream = getStream("mine")
    configure(second)
    stream.add_value("a", 1)
    assert isinstance(stream, MetricStream)
    assert (stream.group_name, stream.handler) == ("mine", first)
    assert first.named() == [("a", 1)]
    assert second.named() == []


def test_whether_anybody_wants_metrics_is_known() -> None:
    assert not handlers.has_handler()
    configure(NullMetricHandler(), "mine")
    assert not handlers.has_handler()
    configure(ConsoleMetricHandler(), "mine")
    assert handlers.has_handler()


def test_a_handler_that_raises_is_named_once_and_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = Broken()
    configure(broken)
    for number in range(FAULTS_MAX + 5):
        put_metric("a", number)
    assert broken.asked == FAULTS_MAX
    first, last = caplog.messages
    assert first == "the metric handler Broken failed: OSError: the collector is away"
    assert f"failed {FAULTS_MAX} times in a row" in last


def test_one_that_comes_round_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    handler = Broken()
    configure(handler)
    for _ in range(3):
        handler.broken = True
        for _ in range(FAULTS_MAX - 1):
            put_metric("a", 1)
        handler.broken = False
        put_metric("b", 2)
    assert handler.named() == [("b", 2)] * 3
    assert len(caplog.messages) == 1


def test_one_that_is_configured_again_begins_anew() -> None:
    handler = Broken()
    configure(handler)
    for _ in range(FAULTS_MAX):
        put_metric("a", 1)
    handler.broken = False
    put_metric("a", 1)
    assert handler.named() == []
    configure(handler)
    put_metric("a", 2)
    assert handler.named() == [("a", 2)]


def test_only_so_many_faulty_handlers_are_remembered() -> None:
    for _ in range(FAULTY_MAX + 10):
        configure(Broken())
        put_metric("a", 1)
    assert len(handlers._faulty) == FAULTY_MAX


def test_the_older_name_still_works_and_says_so() -> None:
    kept = Kept()
    configure(kept)
    with pytest.warns(FutureWarning, match="put_metric"):
        publish_metric("mine", "a", 1)
    assert kept.metrics[0][1:] == ("mine", "a", 1)


def test_the_configuration_of_a_launcher_is_only_passed_on() -> None:
    assert MetricsConfig().params == {}
    assert MetricsConfig({"a": "b"}).params == {"a": "b"}
    initialize_metrics()
    initialize_metrics(MetricsConfig({"a": "b"}))
