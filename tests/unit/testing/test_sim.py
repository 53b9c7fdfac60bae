"""The parts of the simulator: processes, network and story, each on its own."""

from __future__ import annotations

import pytest

from holdfast.core.protocol import Ack, Heartbeat, JobSettings, View
from holdfast.core.rounds import Rounds
from holdfast.testing.sim import PROFILES, Result, Rules, World, mixed, simulate
from holdfast.testing.sim.agent import Agent
from holdfast.testing.sim.coordinator import Coordinator
from holdfast.testing.sim.ledger import JobTruth
from holdfast.testing.sim.network import CONNECT_TIMEOUT_S, Link, NetworkConditions
from holdfast.testing.sim.process import Process
from holdfast.testing.sim.world import RunLog, seeded


def empty_world(profile: str = "calm", seed: int = 1) -> World:
    return World(
        seed,
        nodes=4,
        seconds=100.0,
        profile=PROFILES[profile],
        rules=Rules(),
        story=RunLog(),
    )


class Clockwork(Process):
    def __init__(self, world: World) -> None:
        super().__init__(world, "clockwork", seeded(3))
        self.seen: list[tuple[str, float]] = []

    def tick(self) -> None:
        self.seen.append(("tick", self.world.now))

    def notice(self, what: str) -> None:
        self.seen.append((what, self.world.now))


def linked(world: World) -> tuple[Agent, Link, list[object]]:
    """Return an agent with a link whose both ends only take note of what arrives."""
    job = JobTruth("job-1", JobSettings(min_nodes=1, max_nodes=1), 1e9)
    world.jobs["job-1"] = job
    agent = Agent(world, job, "n1", "1", seeded(4))
    coordinator = world.coordinator
    assert isinstance(coordinator, Coordinator)
    link = Link(1, agent, coordinator)
    agent.link = link
    arrived: list[object] = []
    agent.receive = arrived.append  # type: ignore[assignment,method-assign]
    coordinator.receive = arrived.append  # type: ignore[assignment,method-assign]
    return agent, link, arrived


def ack(seq: int) -> Ack:
    return Ack(run_id="job-1", node="n1", incarnation=1, seq=seq)


def seqs(arrived: list[object]) -> list[int]:
    return [one[1].seq for one in arrived]  # type: ignore[index]


# Processes.


def test_a_process_has_a_clock_of_its_own() -> None:
    world = empty_world()
    one = Clockwork(world)
    begun = one.clock
    world.now = 100.0
    assert one.clock - begun == pytest.approx(100.0 * one.rate)
    assert 0.99 <= one.rate <= 1.01
    assert one.rate != 1.0


def test_a_timer_goes_off_at_the_time_of_the_own_clock_and_only_once() -> None:
    world = empty_world()
    one = Clockwork(world)
    due = one.clock + 10.0 * one.rate
    one.arm(due)
    one.arm(due + 5.0)
    one.arm(None)
    world.run(50.0)
    assert [what for what, _ in one.seen] == ["tick"]
    assert one.seen[0][1] == pytest.approx(10.0, abs=1e-3)


def test_what_happens_to_a_stopped_process_waits_and_its_timer_comes_last() -> None:
    world = empty_world()
    one = Clockwork(world)
    one.arm(one.clock + 1.0)
    one.after(2.0, one.notice, "first")
    one.after(3.0, one.notice, "second")
    one.pause()
    world.schedule(9.0, one.resume, None)
    world.run(20.0)
    assert one.seen == [("first", 9.0), ("second", 9.0), ("tick", 9.0)]


def test_nothing_happens_to_a_dead_process() -> None:
    world = empty_world()
    one = Clockwork(world)
    one.arm(one.clock + 1.0)
    one.after(2.0, one.notice, "late")
    one.alive = False
    world.run(20.0)
    assert one.seen == []


# The network.


def test_messages_keep_their_order_in_fair_weather() -> None:
    world = empty_world()
    _, link, arrived = linked(world)
    for seq in range(50):
        world.network.send_down(link, ack(seq))
    world.run(1.0)
    assert seqs(arrived) == list(range(50))


def test_rough_weather_loses_repeats_and_reorders() -> None:
    world = empty_world()
    _, link, arrived = linked(world)
    world.network.weather = NetworkConditions(
        loss=0.2, duplication=0.2, reordering=0.5, jitter_s=1.0
    )
    for seq in range(200):
        world.network.send_down(link, ack(seq))
    world.run(20.0)
    got = seqs(arrived)
    assert got != sorted(got)
    assert len(set(got)) < 200
    assert len(got) > len(set(got))


def test_a_cut_in_one_direction_leaves_the_other() -> None:
    world = empty_world()
    agent, link, arrived = linked(world)
    agent.cut_in = True
    for seq in range(20):
        world.network.send_down(link, ack(seq))
        beat = Heartbeat(
            run_id="job-1", node="n1", incarnation=1, seq=100 + seq, term=1, revision=1
        )
        world.network.send_up(link, beat)
    world.run(1.0)
    assert seqs(arrived) == list(range(100, 120))
    agent.cut_in = False
    world.network.healed(agent)
    world.run(2.0)
    late = seqs(arrived)[20:]
    assert late, "what TCP would repeat arrives after all"
    assert set(late) < set(range(20)), "and some is lost"


def test_who_is_cut_off_waits_for_a_link_in_vain() -> None:
    world = empty_world()
    agent, _, _ = linked(world)
    agent.cut_out = True
    failed: list[tuple[str, float]] = []
    agent.link_failed = lambda why: failed.append((why, world.now))  # type: ignore[method-assign]
    world.network.open(agent)
    world.run(10.0)
    assert failed == [("timed out", CONNECT_TIMEOUT_S)]


def test_a_coordinator_that_is_gone_refuses_at_once() -> None:
    world = empty_world()
    agent, _, _ = linked(world)
    world.kill_coordinator(host_too=False)
    failed: list[str] = []
    agent.link_failed = failed.append  # type: ignore[assignment,method-assign]
    world.network.open(agent)
    world.run(0.1)
    assert failed == ["connection refused"]


# The story, and a run as a whole.


def test_a_story_keeps_its_last_lines() -> None:
    story = RunLog(lines_max=2)
    for number in range(5):
        story.note(float(number), "n1", "says {0}", number)
    assert [line.split() for line in story.lines()] == [
        ["3.0000", "s", "n1", "says", "3"],
        ["4.0000", "s", "n1", "says", "4"],
    ]


def test_a_run_has_a_story_only_where_it_is_asked_for_or_needed() -> None:
    assert simulate(2, nodes=3, profile="calm").story == ()
    story = simulate(2, nodes=3, profile="calm", whole_story=True).story
    assert any("starts workers of generation 0" in line for line in story)
    assert any("faults are over" in line for line in story)


def test_what_a_machine_raises_is_a_finding() -> None:
    class Tired(Rounds):
        def handle(self, now: float, event: object, cause: str = "") -> list[View]:
            raise RuntimeError("no more")

    result = simulate(2, nodes=3, profile="calm", rules=Rules(rounds=Tired))
    assert result.violation == "RuntimeError: no more"
    assert "handle" in result.invariant
    assert "no more" in result.story[-1]


def test_a_result_says_how_to_see_it_again() -> None:
    result = simulate(12, nodes=3, minutes=1.5, profile="pauses")
    assert isinstance(result, Result)
    assert result.command == (
        "holdfast simulate --seed 12 --profile pauses --nodes 3 --minutes 1.5 --story"
    )


def test_seeds_in_a_row_take_turns_with_the_profiles() -> None:
    assert [mixed(seed)[0] for seed in range(len(PROFILES))] == list(PROFILES)
