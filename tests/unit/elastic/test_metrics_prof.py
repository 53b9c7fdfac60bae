"""`prof` emits metrics of every call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.elastic import metrics
from holdfast.elastic.metrics import prof, profile, publish_metric

if TYPE_CHECKING:
    from collections.abc import Iterator


class Kept(metrics.MetricHandler):
    def __init__(self) -> None:
        self.got: list[tuple[str, str]] = []

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.got.append((metric_data.group_name, metric_data.name))


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    metrics.configure(handler)
    yield handler
    metrics.configure(metrics.NullMetricHandler())


class Trainer:
    @prof
    def step(self, loss: int) -> int:
        """Make one step."""
        if loss < 0:
            raise ValueError("too good")
        return loss

    @prof(group="mine")
    def stop(self) -> None:
        raise SystemExit(3)


@prof
def alone() -> None: ...


def test_decorated_call_records_outcome_and_duration(kept: Kept) -> None:
    assert Trainer().step(loss=4) == 4
    with pytest.raises(ValueError, match="too good"):
        Trainer().step(-1)
    with pytest.raises(SystemExit):  # Neither a success nor a failure.
        Trainer().stop()
    alone()
    assert kept.got == [
        ("torchelastic", "Trainer.step.success"),
        ("torchelastic", "Trainer.step.duration.ms"),
        ("torchelastic", "Trainer.step.failure"),
        ("torchelastic", "Trainer.step.duration.ms"),
        ("mine", "Trainer.stop.duration.ms"),
        ("torchelastic", "test_metrics_prof.alone.success"),
        ("torchelastic", "test_metrics_prof.alone.duration.ms"),
    ]
    assert (Trainer.step.__name__, Trainer.step.__doc__) == ("step", "Make one step.")


def test_older_names_of_metrics_work(kept: Kept) -> None:
    with pytest.warns(FutureWarning):
        publish_metric("mine", "a", 1)
    with pytest.warns(FutureWarning):
        decorated = profile("mine")(len)
    decorated("abc")
    assert kept.got[0] == ("mine", "a")
    assert kept.got[1] == ("mine", "len.success")
