"""Nodes of a team that share a state, in virtual time: no threads, no waiting."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from holdfast.core.protocol import (
    Failure,
    JobOutcome,
    JobSettings,
    NodeInfo,
    NodePhase,
    NodeRole,
    View,
)
from holdfast.core.rounds import Job, JobPhase
from holdfast.core.shared_state import UNSAID_MAX, Outlook, SharedStateNode
from holdfast.rendezvous.backend import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL_S = 1.0
LOST_AFTER_S = 5.0
LOOK_S = 0.1
BROKEN = Failure(node="a", summary="it broke")


class World:
    """A state in common, one clock, and nodes that look at the state in turn."""

    def __init__(self, least: int, most: int, max_restarts: int = 0) -> None:
        self.now = 1000.0
        self.settings = JobSettings(
            min_nodes=least, max_nodes=most, max_restarts=max_restarts, settle_s=1.0
        )
        self.state: bytes | None = None
        self.nodes: dict[str, SharedStateNode] = {}
        self.cut_off: set[str] = set()
        self.writes = 0
        self._incarnations = itertools.count(1)

    def add(self, name: str, settings: JobSettings | None = None) -> SharedStateNode:
        self.nodes[name] = node = SharedStateNode(
            self.now,
            run_id="job",
            info=NodeInfo(node=name, incarnation=next(self._incarnations), ports=(1, 2)),
            settings=settings or self.settings,
            interval_s=INTERVAL_S,
            lost_after_s=LOST_AFTER_S,
        )
        node.say(NodePhase.READY, -1)
        return node

    def look(self, name: str) -> Outlook:
        node, job = self.nodes[name], self.job
        answer, is_new = node.step(self.now, job)
        if is_new:
            self.state = encode(job)
            self.writes += 1
        return node.keep(self.now, job, answer)

    @property
    def job(self) -> Job:
        return Job(run_id="job") if self.state is None else decode(self.state)

    def all_look(self, times: int = 2) -> None:
        for _ in range(times):
            for name in [one for one in self.nodes if one not in self.cut_off]:
                self.look(name)

    def until(self, condition: Callable[[], object], limit_s: float = 30.0) -> float:
        start = self.now
        while not condition():
            assert self.now < start + limit_s, "it did not happen"
            self.now += LOOK_S
            self.all_look(1)
        return self.now - start

    def formed(self, *names: str) -> None:
        """Add nodes and have them run a generation together."""
        for name in names:
            self.add(name)
        self.until(lambda: all(self.view(name).role is NodeRole.MEMBER for name in names))
        self.all_say(NodePhase.RUNNING)

    def all_say(self, phase: NodePhase) -> None:
        for name, node in self.nodes.items():
            node.say(phase, self.view(name).generation)
        self.all_look()

    def view(self, name: str) -> View:
        view = self.nodes[name].standing.view
        return view or View(
            run_id="", node="", incarnation=0, term=0, revision=0, role=NodeRole.WAITING
        )

    def rejoin(self, name: str) -> None:
        self.nodes[name].rejoin(next(self._incarnations))


def test_nodes_work_out_the_same_round_each_for_itself() -> None:
    world = World(2, 2)
    world.formed("a", "b")
    views = [world.view(name) for name in "ab"]
    assert [(view.rank, view.size, view.generation) for view in views] == [(0, 2, 0), (1, 2, 0)]
    assert views[0].master_port == views[1].master_port


def test_a_view_is_news_only_if_it_says_something_else() -> None:
    world = World(1, 1)
    world.formed("a")
    before = world.view("a")
    world.add("standby")
    world.all_look()
    assert world.view("standby").role is NodeRole.STANDBY
    assert world.job.revision > before.revision
    assert world.view("a") is before


def test_how_many_are_there_is_news_to_those_who_wait() -> None:
    world = World(3, 3)
    world.add("a")
    world.all_look()
    assert (world.view("a").present, world.view("a").needed) == (1, 3)
    leaver = world.add("b")
    world.all_look()
    assert world.view("a").present == 2
    leaver.say(NodePhase.LEAVING, -1)
    world.all_look()
    assert world.view("a").present == 1


def test_an_older_state_that_turns_up_is_passed_over() -> None:
    world = World(1, 1, max_restarts=1)
    world.formed("a")
    old = world.state
    world.nodes["a"].say(NodePhase.FAILED, 0, BROKEN)
    world.all_look()
    assert world.view("a").generation == 1
    new, world.state = world.state, old
    node, job = world.nodes["a"], world.job
    outlook = node.keep(world.now, job, None)
    assert outlook.view is not None
    assert outlook.view.generation == 1
    assert new != old


def test_a_failure_restarts_all_and_the_budget_is_the_jobs() -> None:
    world = World(2, 2, max_restarts=1)
    world.formed("a", "b")
    world.nodes["a"].say(NodePhase.FAILED, 0, BROKEN)
    world.all_look()
    for name in "ab":
        assert (world.view(name).generation, world.view(name).restarts) == (1, 1)
    world.all_say(NodePhase.RUNNING)
    world.nodes["b"].say(NodePhase.FAILED, 1, BROKEN)
    world.all_look()
    assert {world.view(name).outcome for name in "ab"} == {JobOutcome.FAILED}


def test_the_report_of_the_last_failure_comes_to_all() -> None:
    world = World(2, 2)
    world.formed("a", "b")
    world.nodes["a"].say(NodePhase.FAILED, 0, BROKEN)
    world.all_look()
    assert not world.view("b").final
    world.nodes["b"].say(NodePhase.READY, 0)
    world.nodes["a"].say(NodePhase.FAILED, 0, BROKEN, b"the whole story")
    world.until(lambda: world.view("b").final, 1.0)
    assert world.view("b").report == b"the whole story"
    assert world.nodes["b"].standing.rests


def test_a_failed_job_ends_without_the_report_if_its_author_is_lost() -> None:
    world = World(2, 2)
    world.formed("a", "b")
    world.nodes["a"].say(NodePhase.FAILED, 0, BROKEN)
    world.all_look()
    world.cut_off.add("a")
    took_s = world.until(lambda: world.view("b").final)
    assert took_s == pytest.approx(LOST_AFTER_S, abs=2 * LOOK_S)


def test_a_node_that_is_done_is_told_when_another_is_lost() -> None:
    world = World(1, 2)
    world.formed("a", "b")
    world.nodes["a"].say(NodePhase.SUCCEEDED, 0)
    world.all_look()
    world.cut_off.add("b")
    world.until(lambda: world.view("a").generation == 1)
    assert (world.view("a").role, world.view("a").size) == (NodeRole.MEMBER, 1)


def test_nothing_is_written_once_all_is_over() -> None:
    world = World(2, 2)
    world.formed("a", "b")
    world.all_say(NodePhase.SUCCEEDED)
    assert {world.view(name).outcome for name in "ab"} == {JobOutcome.SUCCEEDED}
    writes = world.writes
    leaver = world.nodes["a"]
    leaver.say(NodePhase.LEAVING, 0)
    world.now += 10 * INTERVAL_S
    world.all_look()
    assert world.writes == writes
    assert leaver.standing.heard_seq == leaver.status.seq
    assert leaver.next_deadline(world.now) is None


def test_what_was_said_in_a_row_is_taken_in_one_after_the_other() -> None:
    """A node that is done and goes is not missed; one that only goes would be."""
    world = World(2, 2)
    world.formed("a", "b")
    world.nodes["a"].say(NodePhase.SUCCEEDED, 0)
    world.nodes["a"].say(NodePhase.LEAVING, 0)
    world.look("a")
    assert not world.nodes["a"].standing.in_job
    world.look("b")
    assert world.view("b").role is NodeRole.MEMBER
    world.nodes["b"].say(NodePhase.SUCCEEDED, 0)
    world.look("b")
    assert world.view("b").outcome is JobOutcome.SUCCEEDED


def test_only_so_much_is_kept_for_a_state_that_cannot_be_reached() -> None:
    node = World(1, 1).add("a")
    for _ in range(3 * UNSAID_MAX):
        node.say(NodePhase.READY, -1)
    assert len(node._unsaid) == UNSAID_MAX


def test_a_node_that_was_lost_is_fenced_and_comes_back_as_another() -> None:
    world = World(1, 2)
    world.formed("a", "b")
    world.cut_off.add("b")
    world.until(lambda: world.view("a").size == 1)
    world.cut_off.clear()
    fenced = world.look("b")
    assert fenced.view is not None
    assert fenced.view.role is NodeRole.FENCED
    assert fenced.rests
    again = world.look("b")
    assert again.view is fenced.view
    world.rejoin("b")
    world.until(lambda: world.view("b").role is NodeRole.MEMBER)
    world.all_look()
    assert world.view("b").generation == world.view("a").generation == 2


def test_another_agent_of_the_same_name_takes_the_place_for_good() -> None:
    world = World(1, 1)
    world.formed("a")
    old = world.nodes["a"]
    world.add("a")
    world.look("a")
    world.nodes["old"] = old
    outlook = world.look("old")
    assert outlook.view is not None
    assert outlook.view.role is NodeRole.REFUSED


def test_a_node_started_otherwise_is_refused_and_leaves_no_trace() -> None:
    world = World(1, 1)
    world.formed("a")
    state = world.state
    world.add("odd", JobSettings(min_nodes=1, max_nodes=2))
    outlook = world.look("odd")
    assert outlook.view is not None
    assert outlook.view.role is NodeRole.REFUSED
    assert "--nnodes 1:2" in outlook.view.why
    assert world.state == state


def test_a_late_node_is_told_that_the_job_is_over() -> None:
    world = World(1, 1)
    world.formed("a")
    world.all_say(NodePhase.SUCCEEDED)
    world.add("late")
    outlook = world.look("late")
    assert outlook.view is not None
    assert (outlook.view.role, outlook.view.final) == (NodeRole.CLOSED, True)


def test_a_node_that_left_hears_no_more() -> None:
    world = World(1, 2)
    world.formed("a", "b")
    before = world.view("b")
    world.nodes["b"].say(NodePhase.LEAVING, 0)
    outlook = world.look("b")
    assert outlook.rests
    assert outlook.heard_seq == world.nodes["b"].status.seq
    world.nodes["b"].say(NodePhase.LEAVING, 0)
    assert world.look("b").view is before
    world.look("a")
    assert world.view("a").size == 1


def test_a_state_that_was_lost_is_restored_from_what_the_nodes_know() -> None:
    world = World(2, 2, max_restarts=3)
    world.formed("a", "b")
    world.nodes["a"].say(NodePhase.FAILED, 0, BROKEN)
    world.all_look()
    world.all_say(NodePhase.RUNNING)
    before = {name: world.view(name) for name in "ab"}
    world.state = None
    world.now += 2.0
    world.look("a")
    assert world.job.recover_s == 4.0, "others may have been away for as long"
    recovering = world.job.phase
    assert recovering is JobPhase.RECOVERING
    assert world.view("a") is before["a"], "nobody stops before it is decided"
    world.all_look()
    assert world.job.phase is JobPhase.ACTIVE
    for name in "ab":
        view = world.view(name)
        assert view.term > before[name].term
        assert (view.generation, view.rank, view.restarts) == (1, before[name].rank, 1)


def test_signs_of_life_are_written_and_nothing_else_in_between() -> None:
    world = World(1, 1)
    world.formed("a")
    writes = world.writes
    world.all_look(5)
    assert world.writes == writes
    beat = world.job.nodes["a"].beat
    world.now += INTERVAL_S
    world.all_look(5)
    assert world.writes == writes + 1
    assert world.job.nodes["a"].beat == beat + 1
    assert world.nodes["a"].next_deadline(world.now) == pytest.approx(world.now + INTERVAL_S)
