"""Those who look on are told everything, and hurt nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import messages
from holdfast.agent.moments import FAULTS_MAX, Moment, Onlookers, Stopped

if TYPE_CHECKING:
    import pytest


class Broken:
    """Raises whenever it is told something."""

    name = "the broken one"

    def __init__(self) -> None:
        self.told = 0

    def __call__(self, moment: Moment) -> None:
        self.told += 1
        raise ValueError("no")


def test_everybody_is_told_in_order() -> None:
    told: list[object] = []
    onlookers = Onlookers()
    assert not onlookers
    onlookers.add(lambda moment: told.append(("first", moment)))
    onlookers.add(lambda moment: told.append(("second", moment)))
    assert onlookers
    onlookers.tell(Stopped(1.0, 3))
    assert told == [("first", Stopped(1.0, 3)), ("second", Stopped(1.0, 3))]


def test_one_that_raises_is_named_and_then_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(messages.NOTICE, "holdfast")
    told: list[Moment] = []
    onlookers, broken = Onlookers(), Broken()
    onlookers.add(broken)
    onlookers.add(told.append)
    for generation in range(FAULTS_MAX + 2):
        onlookers.tell(Stopped(0.0, generation))
    assert len(told) == FAULTS_MAX + 2
    assert broken.told == FAULTS_MAX
    assert caplog.messages == [
        "the broken one failed: ValueError: no",
        f"the broken one failed {FAULTS_MAX} times, and is told nothing more",
    ]
