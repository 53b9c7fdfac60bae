"""Events of the rendezvous: who gets them, and what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from holdfast.events import EventHandler, NullEventHandler, configure
from holdfast.observe import lifecycle
from holdfast.observe.events import destinations
from holdfast.observe.events.event import NodeState, RdzvEvent
from holdfast.observe.events.recorder import (
    DESTINATION,
    RendezvousRecorder,
    rendezvous_events_wanted,
)
from recorded_runs import began, ended, met

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
    assert not rendezvous_events_wanted()


def test_a_run_from_joining_to_its_end(kept: list[RdzvEvent]) -> None:
    assert rendezvous_events_wanted()
    recorder = RendezvousRecorder()
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
    RendezvousRecorder()(lifecycle.GenerationStopped(1.0, 0))
    destinations.flush()
    assert kept == []
