"""Those who look on are told everything, and hurt nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import console
from holdfast.observe.lifecycle import FAULTS_MAX, GenerationStopped, LifecycleEvent, Observers

if TYPE_CHECKING:
    import pytest


class Broken:
    """Raises whenever it is told something."""

    name = "the broken one"

    def __init__(self) -> None:
        self.told = 0

    def __call__(self, moment: LifecycleEvent) -> None:
        self.told += 1
        raise ValueError("no")


def test_everybody_is_told_in_order() -> None:
    told: list[object] = []
    observers = Observers()
    assert not observers
    observers.add(lambda moment: told.append(("first", moment)))
    observers.add(lambda moment: told.append(("second", moment)))
    assert observers
    observers.notify(GenerationStopped(1.0, 3))
    assert told == [("first", GenerationStopped(1.0, 3)), ("second", GenerationStopped(1.0, 3))]


def test_one_that_raises_is_named_and_then_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(console.NOTICE, "holdfast")
    told: list[LifecycleEvent] = []
    observers, broken = Observers(), Broken()
    observers.add(broken)
    observers.add(told.append)
    for generation in range(FAULTS_MAX + 2):
        observers.notify(GenerationStopped(0.0, generation))
    assert len(told) == FAULTS_MAX + 2
    assert broken.told == FAULTS_MAX
    assert caplog.messages == [
        "the broken one failed: ValueError: no",
        f"the broken one failed {FAULTS_MAX} times, and is told nothing more",
    ]
