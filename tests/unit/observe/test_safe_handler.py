"""One guard for handlers and observers: the first failure is reported, three in a row drop it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from event_fakes import FailingHandler, event
from holdfast.observe.lifecycle import GenerationStopped, LifecycleEvent, Observers
from holdfast.observe.metrics import metric_handlers
from holdfast.observe.metrics.metric_handlers import (
    MetricData,
    MetricHandler,
    configure,
    put_metric,
)
from holdfast.observe.safe_handler import FAULTS_MAX, SafeHandler

if TYPE_CHECKING:
    from collections.abc import Callable


class Fragile(MetricHandler):
    """An event handler, a metric handler and an observer, which fails for `bad`."""

    name = "the fragile one"

    def __init__(self) -> None:
        self.calls = 0

    def take(self, item: str) -> None:
        self.calls += 1
        if item == "bad":
            raise ValueError("no\nway")

    def emit(self, metric_data: MetricData) -> None:
        self.take(metric_data.name)

    def __call__(self, event: LifecycleEvent) -> None:
        assert isinstance(event, GenerationStopped)
        self.take("bad" if event.generation else "good")


def as_event_handler(fragile: Fragile) -> Callable[[str], object]:
    handler = FailingHandler()
    safe = SafeHandler(handler, "mine")

    def send(item: str) -> None:
        safe.record(event(item))
        fragile.calls = len(handler.received)

    return send


def as_metric_handler(fragile: Fragile) -> Callable[[str], object]:
    configure(fragile)
    return lambda item: put_metric(item, 1)


def as_observer(fragile: Fragile) -> Callable[[str], object]:
    observers = Observers()
    observers.add(fragile)
    return lambda item: observers.notify(GenerationStopped(0.0, int(item == "bad")))


GUARDED = pytest.mark.parametrize("guarded", [as_event_handler, as_metric_handler, as_observer])


@GUARDED
def test_repeated_failures_are_reported_once_and_drop_the_handler(
    guarded: Callable[[Fragile], Callable[[str], object]], log: pytest.LogCaptureFixture
) -> None:
    fragile = Fragile()
    send = guarded(fragile)
    for _ in range(FAULTS_MAX + 2):
        send("bad")
    assert fragile.calls == FAULTS_MAX
    assert len(log.messages) == 2  # The first failure, and that it was dropped.
    assert "ValueError" in log.messages[0]


@GUARDED
def test_handler_that_recovers_is_kept(
    guarded: Callable[[Fragile], Callable[[str], object]], log: pytest.LogCaptureFixture
) -> None:
    fragile = Fragile()
    send = guarded(fragile)
    for item in ("bad", "bad", "good") * FAULTS_MAX:
        send(item)
    assert fragile.calls == 3 * FAULTS_MAX
    assert len(log.messages) == 1


def test_missed_events_are_reported_once(log: pytest.LogCaptureFixture) -> None:
    handler = FailingHandler()
    safe = SafeHandler(handler, "mine")
    for number in range(FAULTS_MAX + 2):
        safe.record(event(f"bad {number}"))
    safe.close(0)
    safe.close(0)
    assert handler.calls == []  # A dropped handler is not even closed.
    assert len(log.messages) == 3
    assert f"{FAULTS_MAX + 2} events" in log.messages[2]


def test_failing_observer_does_not_affect_the_others() -> None:
    received: list[LifecycleEvent] = []
    observers = Observers()
    assert not observers
    observers.add(Fragile())
    observers.add(received.append)
    assert observers
    for _ in range(FAULTS_MAX + 1):
        observers.notify(GenerationStopped(0.0, 1))
    assert len(received) == FAULTS_MAX + 1


def test_remembered_faulty_metric_handlers_are_limited() -> None:
    for _ in range(metric_handlers.FAULTY_MAX + 10):
        configure(Fragile())
        put_metric("bad", 1)
    assert len(metric_handlers._faulty) == metric_handlers.FAULTY_MAX
