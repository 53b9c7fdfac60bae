"""The parts of the simulator that its runs rely on: processes, the network, and what a run reports."""

from __future__ import annotations

import pytest

from holdfast.core.job_settings import JobSettings
from holdfast.core.protocol import Ack, View
from holdfast.core.rounds import Rounds
from simulator import PROFILES, Machines, World, simulate
from simulator.agent import Agent
from simulator.ledger import JobTruth
from simulator.process import Process
from simulator.simulated_coordinator import Coordinator
from simulator.simulated_network import Link, NetworkConditions
from simulator.world import RunLog, seeded


@pytest.fixture
def world() -> World:
    profile = PROFILES["calm"]
    return World(1, nodes=4, seconds=100.0, profile=profile, machines=Machines(), log=RunLog())


class Clockwork(Process):
    def __init__(self, world: World) -> None:
        super().__init__(world, "clockwork", seeded(3))
        self.seen: list[tuple[str, float]] = []

    def tick(self) -> None:
        self.seen.append(("tick", self.world.now))

    def notice(self, what: str) -> None:
        self.seen.append((what, self.world.now))


def linked(world: World) -> tuple[Agent, Link, list[object]]:
    """Return an agent with a link whose two ends only record what arrives."""
    job = JobTruth(
        "job-1", JobSettings(min_nodes=1, max_nodes=1), 1e9, self_fencing=False, yields=False
    )
    world.jobs["job-1"] = job
    agent = Agent(world, job, "n1", "1", seeded(4))
    coordinator = world.coordinator
    assert isinstance(coordinator, Coordinator)
    link = agent.link = Link(1, agent, coordinator)
    arrived: list[object] = []
    agent.receive = arrived.append  # type: ignore[assignment,method-assign]
    coordinator.receive = arrived.append  # type: ignore[assignment,method-assign]
    return agent, link, arrived


def ack(seq: int) -> Ack:
    return Ack(run_id="job-1", node="n1", incarnation=1, seq=seq)


def seqs(arrived: list[object]) -> list[int]:
    return [one[1].seq for one in arrived]  # type: ignore[index]


def test_stopped_process_receives_its_messages_on_resume_and_then_its_timer(world: World) -> None:
    one = Clockwork(world)
    one.arm(one.clock + 1.0)
    one.after(2.0, one.notice, "first")
    one.after(3.0, one.notice, "second")
    one.pause()
    world.schedule(9.0, one.resume, None)
    world.run(20.0)
    assert one.seen == [("first", 9.0), ("second", 9.0), ("tick", 9.0)]


def test_messages_keep_their_order_on_a_healthy_network_only(world: World) -> None:
    _, link, arrived = linked(world)
    for seq in range(50):
        world.network.send_down(link, ack(seq))
    world.run(1.0)
    assert seqs(arrived) == list(range(50))
    world.network.conditions = NetworkConditions(
        loss=0.2, duplication=0.2, reordering=0.5, jitter_s=1.0
    )
    for seq in range(100, 300):
        world.network.send_down(link, ack(seq))
    world.run(20.0)
    rough = seqs(arrived)[50:]
    assert rough != sorted(rough)
    assert len(set(rough)) < 200
    assert len(rough) > len(set(rough))


def test_exception_of_a_machine_is_a_violation_with_its_story() -> None:
    class Broken(Rounds):
        def handle(self, now: float, event: object, cause: str = "") -> list[View]:
            raise RuntimeError("no more")

    result = simulate(2, nodes=3, profile="calm", machines=Machines(rounds=Broken))
    assert result.violation == "RuntimeError: no more"
    assert "handle" in result.invariant
    assert "no more" in result.story[-1]


def test_result_names_the_command_that_reproduces_it() -> None:
    result = simulate(12, nodes=3, minutes=1.5, profile="pauses", driver="etcd")
    assert result.story == ()
    assert result.command == (
        "python -m simulator --seed 12 --profile pauses --nodes 3 --minutes 1.5 --driver etcd --story"
    )
