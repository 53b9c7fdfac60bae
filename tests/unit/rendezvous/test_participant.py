"""Nodes that share a state, in virtual time: no threads, no waiting."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from holdfast.core.protocol import JobSettings, NodeInfo, NodeRole
from holdfast.core.rounds import Job, JobPhase
from holdfast.rendezvous.backend import decode, encode
from holdfast.rendezvous.participant import Goal, Participant, PolledStanding, absentees

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL_S = 1.0
LOST_AFTER_S = 5.0
SETTLE_S = 1.0
ATTEND_S = 60.0
LOOK_S = 0.1


class World:
    """A state in common, one clock, and nodes that look at the state in turn."""

    def __init__(self, least: int, most: int, *, spares: int = 0) -> None:
        self.now = 1000.0
        self.least, self.most, self.spares = least, most, spares
        self.state: bytes | None = None
        self.nodes: dict[str, Participant] = {}
        self.cut_off: set[str] = set()
        self._incarnations = itertools.count(1)

    def add(self, name: str, *, least: int | None = None, asks: bool = True) -> Participant:
        settings = JobSettings(
            min_nodes=least or self.least,
            max_nodes=self.most,
            settle_s=SETTLE_S,
            spares=self.spares,
        )
        self.nodes[name] = node = Participant(
            self.now,
            run_id="job",
            info=NodeInfo(node=name, incarnation=0, address=name, ports=(1, 2)),
            settings=settings,
            interval_s=INTERVAL_S,
            lost_after_s=LOST_AFTER_S,
            new_incarnation=lambda: next(self._incarnations),
            attend_s=ATTEND_S,
        )
        if asks:
            node.ask_round()
        return node

    def look(self, name: str) -> PolledStanding:
        node = self.nodes[name]
        job = self.job
        mine, is_new = node.step(self.now, job)
        if is_new:
            self.state = encode(job)
        return node.keep(self.now, job, mine)

    @property
    def job(self) -> Job:
        return Job(run_id="job") if self.state is None else decode(self.state)

    def all_look(self, times: int = 3) -> None:
        for _ in range(times):
            for name in [one for one in self.nodes if one not in self.cut_off]:
                self.look(name)

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += LOOK_S
            self.all_look(1)

    def until(self, condition: Callable[[], object], limit_s: float = 30.0) -> float:
        begin = self.now
        while not condition():
            assert self.now < begin + limit_s, "it did not happen"
            self.pass_time(LOOK_S)
        return self.now - begin

    def standing(self, name: str) -> PolledStanding:
        return self.nodes[name].standing

    def ranks(self) -> dict[str, tuple[int, int]]:
        return {
            name: (seat.rank, seat.size)
            for name, node in self.nodes.items()
            if (seat := node.standing.seat) is not None and not node.standing.regroup
        }

    def regroup(self) -> None:
        """Do what agents do: ask for another round where one is due."""
        for name, node in self.nodes.items():
            if name not in self.cut_off and node.standing.regroup:
                node.ask_round()
        self.all_look()


def running(count: int, least: int | None = None, most: int | None = None) -> World:
    """Return a job in which all of so many nodes are in a round."""
    world = World(least or count, most or count)
    for number in range(count):
        world.add(f"n{number}")
    world.until(lambda: len(world.ranks()) == count)
    return world


def test_a_round_forms_at_once_when_it_is_full() -> None:
    world = World(2, 2)
    world.add("a")
    world.add("b")
    world.all_look()
    assert world.ranks() == {"a": (0, 2), "b": (1, 2)}
    assert world.standing("a").seat_key == world.standing("b").seat_key


def test_nobody_starts_before_all_have_taken_their_seats() -> None:
    world = World(2, 2)
    world.add("a")
    world.add("b")
    world.look("a")
    world.look("b")  # This completes the round and takes b's seat.
    assert world.ranks() == {}
    assert [info.node for info in absentees(world.job, 0)] == ["a"]
    world.look("a")
    assert world.ranks() == {"a": (0, 2)}
    world.look("b")
    assert world.ranks() == {"a": (0, 2), "b": (1, 2)}


def test_a_round_with_enough_nodes_waits_for_more_for_the_settle_time() -> None:
    world = World(1, 3)
    world.add("a")
    world.all_look()
    world.pass_time(0.8)
    world.add("b")
    world.all_look()
    assert world.until(lambda: len(world.ranks()) == 2) == pytest.approx(SETTLE_S, abs=3 * LOOK_S)
    assert world.ranks() == {"a": (0, 2), "b": (1, 2)}


def test_too_few_nodes_wait() -> None:
    world = World(2, 2)
    world.add("a")
    world.pass_time(50)
    standing = world.standing("a")
    assert (standing.role, standing.present, standing.needed) == (NodeRole.WAITING, 1, 2)


def test_nodes_that_live_are_never_lost() -> None:
    world = running(3)
    world.pass_time(100)
    assert len(world.ranks()) == 3
    assert world.job.generation == 0


def test_a_silent_node_is_put_out_and_the_others_regroup() -> None:
    world = running(3, least=2)
    world.cut_off.add("n1")
    took = world.until(lambda: world.standing("n0").regroup and world.standing("n2").regroup)
    assert took == pytest.approx(LOST_AFTER_S, abs=INTERVAL_S)
    world.regroup()
    assert world.ranks() == {"n0": (0, 2), "n1": (1, 3), "n2": (1, 2)}
    assert world.job.generation == 1


def test_below_the_least_number_the_round_is_broken_and_the_rest_wait() -> None:
    world = running(2)
    world.cut_off.add("n1")
    world.until(lambda: world.standing("n0").regroup)
    world.regroup()
    assert world.standing("n0").role is NodeRole.WAITING
    world.add("new")
    world.until(lambda: world.standing("new").seat)
    world.all_look()
    assert world.ranks() == {"n0": (0, 2), "n1": (1, 2), "new": (1, 2)}


def test_a_node_that_was_put_out_is_told_when_it_is_back_and_joins_anew() -> None:
    world = running(3, least=2)
    world.cut_off.add("n1")
    world.until(lambda: world.standing("n0").regroup)
    world.regroup()
    world.cut_off.clear()
    world.all_look(1)
    assert world.standing("n1").regroup
    assert not world.standing("n1").in_job
    world.regroup()
    world.until(lambda: world.standing("n0").regroup)
    world.regroup()
    assert {rank for rank, _ in world.ranks().values()} == {0, 1, 2}


def test_an_observer_that_was_away_itself_accuses_nobody() -> None:
    world = running(2)
    world.now += 1000
    world.all_look()
    world.pass_time(10)
    assert world.job.generation == 0


def test_a_node_that_joins_causes_one_regroup_after_the_settle_time() -> None:
    world = running(2, least=1, most=4)
    world.add("late")
    world.all_look()
    assert world.standing("n0").regroup == 0
    world.pass_time(0.5)
    world.add("later")
    world.until(lambda: world.standing("n0").regroup)
    assert world.standing("n0").regroup == 2
    world.regroup()
    assert {name: rank for name, (rank, _) in world.ranks().items()} == {
        "n0": 0, "n1": 1, "late": 2, "later": 3,
    }  # fmt: skip
    assert world.job.generation == 1


def test_a_node_above_the_most_is_a_standby_and_replaces_a_lost_one() -> None:
    world = running(2)
    world.add("spare")
    world.all_look()
    assert world.standing("spare").role is NodeRole.STANDBY
    assert world.standing("n0").regroup == 0
    world.cut_off.add("n0")
    world.until(lambda: world.standing("n1").regroup)
    world.regroup()
    assert world.ranks() == {"n0": (0, 2), "n1": (1, 2), "spare": (0, 2)}


def test_one_that_asks_for_a_new_start_takes_all_others_along() -> None:
    world = running(3)
    keys = {world.standing(name).seat_key for name in world.nodes}
    world.nodes["n2"].ask_round()
    world.all_look(2)
    assert [world.standing(name).regroup for name in ("n0", "n1")] == [1, 1]
    world.regroup()
    assert world.ranks() == {"n0": (0, 3), "n1": (1, 3), "n2": (2, 3)}
    assert world.job.generation == 1
    keys |= {world.standing(name).seat_key for name in world.nodes}
    assert len(keys) == 2


def test_two_that_ask_at_the_same_time_cost_one_restart() -> None:
    world = running(2)
    world.nodes["n0"].ask_round()
    world.nodes["n1"].ask_round()
    world.all_look()
    assert world.job.generation == 1
    assert len(world.ranks()) == 2


def test_a_member_that_lives_but_does_not_come_is_put_out() -> None:
    world = running(3, least=2)
    for name in ("n0", "n1"):
        world.nodes[name].ask_round()
    world.pass_time(ATTEND_S - 1)
    assert "n0" not in world.ranks()
    assert world.standing("n2").in_job
    world.until(lambda: "n0" in world.ranks() and "n1" in world.ranks())
    assert world.ranks()["n0"] == (0, 2)
    assert "did not come to generation 1" in world.job.why
    assert world.standing("n2").regroup


def test_leaving_costs_the_others_a_regroup_and_nothing_else() -> None:
    world = running(2, least=1)
    world.nodes["n0"].ask_leave()
    world.all_look(1)
    assert not world.standing("n0").in_job
    assert world.standing("n1").regroup
    world.nodes["n1"].ask_round()
    world.until(lambda: world.ranks().get("n1") == (0, 1))
    assert world.job.phase is JobPhase.ACTIVE


def test_closing_is_for_all_and_for_good() -> None:
    world = running(2)
    world.nodes["n0"].ask_close("enough")
    world.all_look(1)
    assert all(world.standing(name).closed for name in world.nodes)
    assert world.standing("n1").regroup == 1  # Its workers are of no use any more.
    late = world.add("late")
    world.all_look()
    assert late.standing.closed
    assert not late.standing.in_job
    assert not late.standing.was_standby


def test_a_standby_learns_that_it_is_no_longer_needed() -> None:
    world = running(1)
    world.add("spare")
    world.all_look()
    world.nodes["n0"].ask_close("enough")
    world.all_look()
    assert world.standing("spare").closed
    assert world.standing("spare").was_standby


def test_a_node_that_disagrees_on_the_size_is_refused_and_changes_nothing() -> None:
    world = running(2)
    before = world.job.revision
    world.add("odd", least=1)
    standing = world.look("odd")
    assert "--nnodes 1:2" in standing.refusal
    assert world.job.revision == before
    assert world.look("odd").goal is Goal.ABSENT


def test_an_agent_of_the_same_name_takes_the_place_and_the_old_one_is_refused() -> None:
    world = running(2)
    old = world.nodes["n0"]
    world.add("n0")
    world.all_look()
    world.nodes["old"] = old
    old._info = NodeInfo(node="n0", incarnation=0)  # It is known by its old name.
    world.look("old")
    assert world.standing("old").regroup
    old.ask_round()
    assert "another agent took the place of n0" in world.look("old").refusal


def test_a_state_that_vanished_is_rebuilt_and_no_worker_is_restarted() -> None:
    world = running(3)
    world.state = None
    world.pass_time(10)
    assert len(world.ranks()) == 3
    assert all(not world.standing(name).regroup for name in world.nodes)
    assert world.job.generation == 0
    assert world.job.phase is JobPhase.ACTIVE


def test_a_state_that_vanished_with_one_of_the_nodes_is_mended() -> None:
    world = running(3, least=2)
    world.state = None
    world.cut_off.add("n0")
    world.until(lambda: world.standing("n1").regroup and world.standing("n2").regroup)
    world.regroup()
    assert {name: world.ranks()[name][1] for name in ("n1", "n2")} == {"n1": 2, "n2": 2}


def test_a_node_that_only_looks_leaves_no_trace() -> None:
    world = World(1, 1)
    world.add("a", asks=False)
    world.pass_time(3)
    assert world.state is None
    assert world.standing("a").goal is Goal.ABSENT


def test_what_was_not_stored_was_not_said() -> None:
    """A write that fails after it was prepared changes nothing about the node."""
    world = World(1, 1)
    node = world.add("a")
    node.step(world.now, world.job)  # Nobody stores it.
    world.all_look()
    assert world.ranks() == {"a": (0, 1)}
    assert world.job.generation == 0


def test_a_write_that_counted_though_it_seemed_lost_is_taken_up() -> None:
    world = World(1, 1)
    node = world.add("a")
    job = world.job
    node.step(world.now, job)
    world.state = encode(job)  # It was stored, but the answer never came.
    world.all_look()
    assert world.ranks() == {"a": (0, 1)}
    assert world.job.generation == 0


def test_when_to_look_again() -> None:
    world = World(1, 2)
    node = world.add("a")
    assert node.next_deadline(world.now) is None
    world.look("a")
    due = node.next_deadline(world.now)
    assert due == pytest.approx(world.now + min(INTERVAL_S, SETTLE_S))
    node.ask_leave()
    assert node.next_deadline(world.now) is None
