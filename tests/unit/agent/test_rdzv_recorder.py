"""Events of the rendezvous: who gets them, and what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from holdfast.agent import moments
from holdfast.agent.rdzv_recorder import DESTINATION, RdzvRecorder, is_wanted
from holdfast.events import EventHandler, NullEventHandler, configure, destinations
from holdfast.events.values import NodeState, RdzvEvent
from told_runs import began, ended, met

if TYPE_CHECKING:
    from collections.abc import Iterator


class Kept(EventHandler):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def record(self, event: Any) -> None:
        self.events.append(event)


@pytest.fixture
def kept() -> Iterator[list[RdzvEvent]]:
    handler = Kept()
    configure(handler, DESTINATION)
    yield handler.events
    destinations.flush()
    configure(NullEventHandler(), DESTINATION)


def test_nobody_gets_them_unless_told_to() -> None:
    assert not is_wanted()


def test_a_run_from_joining_to_its_end(kept: list[RdzvEvent]) -> None:
    assert is_wanted()
    recorder = RdzvRecorder()
    for moment in (
        began(),
        met(1.0, 0.5),
        met(2.0, 0.5, "Traceback: no"),
        ended(3.0, "succeeded", 3),
    ):
        recorder(moment)
    destinations.flush()
    assert [one.node_state for one in kept] == [
        NodeState.INIT, NodeState.RUNNING, NodeState.FAILED, NodeState.SUCCEEDED,
    ]  # fmt: skip
    assert {one.run_id for one in kept} == {"job-1"}
    assert kept[1].rank is not None
    assert kept[2].error_trace == "Traceback: no"


def test_what_is_not_about_the_rendezvous_is_passed_over(kept: list[RdzvEvent]) -> None:
    RdzvRecorder()(moments.Stopped(1.0, 0))
    destinations.flush()
    assert kept == []
