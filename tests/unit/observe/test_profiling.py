"""What `prof` tells of a call."""

from __future__ import annotations

import time

import pytest
from metric_fakes import Kept, nothing_configured

from holdfast.observe.metrics.handlers import configure
from holdfast.observe.metrics.profiling import get_elapsed_time_ms, prof, profile

__all__ = ["nothing_configured"]
pytestmark = pytest.mark.usefixtures("nothing_configured")


@pytest.fixture
def kept() -> Kept:
    handler = Kept()
    configure(handler)
    return handler


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


def test_a_call_that_returns(kept: Kept) -> None:
    assert Trainer().step(loss=4) == 4
    (success, one), (duration, took_ms) = kept.named()
    assert (success, one, duration) == ("Trainer.step.success", 1, "Trainer.step.duration.ms")
    assert isinstance(took_ms, int)


def test_a_call_that_raises(kept: Kept) -> None:
    with pytest.raises(ValueError, match="too good"):
        Trainer().step(-1)
    assert [name for name, _ in kept.named()] == [
        "Trainer.step.failure",
        "Trainer.step.duration.ms",
    ]


def test_an_exit_is_no_failure_and_the_group_is_as_told(kept: Kept) -> None:
    with pytest.raises(SystemExit):
        Trainer().stop()
    assert [one[1:3] for one in kept.metrics] == [("mine", "Trainer.stop.duration.ms")]


def test_a_function_is_named_with_its_module(kept: Kept) -> None:
    alone()
    assert kept.named()[0][0] == "test_profiling.alone.success"


def test_the_function_stays_itself() -> None:
    assert Trainer.step.__name__ == "step"
    assert Trainer.step.__doc__ == "Make one step."


def test_durations_are_in_milliseconds(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 102.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    alone()
    assert kept.named()[1] == ("test_profiling.alone.duration.ms", 2500)


@pytest.mark.parametrize(("group", "expected"), [("mine", "mine"), (None, "torchelastic")])
def test_the_older_name_still_works_and_says_so(
    kept: Kept, group: str | None, expected: str
) -> None:
    with pytest.warns(FutureWarning, match="prof"):
        decorate = profile(group)
    decorate(alone)()
    assert {one.group_name for one in kept.metrics if one.name == "alone.success"} == {expected}


def test_elapsed_time_is_by_the_time_of_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.25)
    assert get_elapsed_time_ms(999.0) == 1250
