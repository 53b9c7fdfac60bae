"""The causes in stories connect a worker's failure, through all machines, to the restart on all nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.core.machine import Step, Story
from holdfast.core.phases import NodeRole
from holdfast.core.protocol import Status, View
from holdfast.core.session import Send
from holdfast.core.supervision import StartWorkers, StopWorkers, WorkerExited
from simulator import PROFILES, Machines, World
from simulator.world import RunLog

if TYPE_CHECKING:
    from collections.abc import Iterator

NODES = 5


@pytest.fixture
def steps() -> Iterator[list[Step]]:
    recorded: list[Step] = []
    world = World(
        11, nodes=NODES, seconds=90.0, profile=PROFILES["calm"], machines=Machines(), log=RunLog()
    )
    Story.sink = recorded.append
    try:
        world.begin()
        world.run(90.0)
        yield recorded
    finally:
        Story.sink = None


def messages_of(step: Step) -> list[str]:
    """Return the ids of the messages that a step sent."""
    sent = [effect.message if isinstance(effect, Send) else effect for effect in step.effects]
    return [message.id for message in sent if isinstance(message, (Status, View))]


def followed(steps: list[Step], first: Step) -> list[Step]:
    """Return all steps that a step caused, directly or indirectly."""
    causes = {first.id}
    caused = []
    for step in steps:  # A cause precedes its consequences.
        if step.id == first.id or step.cause in causes:
            causes |= {step.id, *messages_of(step)}
            caused.append(step)
    return caused


def test_a_failure_can_be_followed_to_the_restart_on_every_node(steps: list[Step]) -> None:
    assert len({step.id for step in steps}) == len(steps)
    failed = next(
        step for step in steps if isinstance(step.event, WorkerExited) and step.event.failed
    )
    assert not failed.cause, "an external event has no cause"
    caused = followed(steps, failed)
    assert caused[0] is failed
    decided = next(step for step in caused if "/rounds#" in step.id)
    assert decided.cause in {
        one for step in caused[: caused.index(decided)] for one in messages_of(step)
    }
    views = [one for one in decided.effects if isinstance(one, View)]
    nodes = {view.node for view in views if view.role is NodeRole.MEMBER}
    assert len(nodes) >= 2
    generation = failed.event.generation  # type: ignore[attr-defined]
    stopped, started = (
        {
            step.id.partition("/")[0]
            for step in caused
            for effect in step.effects
            if isinstance(effect, kind) and effect.generation == which
        }
        for kind, which in ((StopWorkers, generation), (StartWorkers, generation + 1))
    )
    assert stopped == started == nodes


def test_each_step_of_a_story_is_one_line(steps: list[Step]) -> None:
    for step in steps:
        assert str(step).isprintable()
        assert len(str(step)) < 200 * (2 + NODES)
