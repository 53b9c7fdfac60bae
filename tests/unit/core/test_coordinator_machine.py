"""The jobs of one coordinator: messages in, answers out, with a clock of the test's own."""

from __future__ import annotations

import pytest

from holdfast.core.coordinator import (
    ConnectionClosed,
    CoordinatorMachine,
    JobCloseRequested,
    StatusReceived,
)
from holdfast.core.machine import TICK
from holdfast.core.protocol import (
    Ack,
    Heartbeat,
    JobOutcome,
    JobSettings,
    NodeInfo,
    NodePhase,
    NodeRole,
    Status,
    View,
)
from holdfast.core.rounds import Job, JobPhase, Rounds

TWO = JobSettings(min_nodes=2, max_nodes=2, max_restarts=1)


def status(node: str, seq: int = 1, phase: NodePhase = NodePhase.READY, **more: object) -> Status:
    info = NodeInfo(node=node, incarnation=hash_of(node))
    values = {"run_id": "job", "settings": TWO, **more}
    return Status(seq=seq, info=info, phase=phase, **values)  # type: ignore[arg-type]


def beat(node: str, seq: int = 1, *, term: int = 9, revision: int = 9) -> Heartbeat:
    return Heartbeat(
        run_id="job",
        node=node,
        incarnation=hash_of(node),
        seq=seq,
        term=term,
        revision=revision,
    )


def hash_of(node: str) -> int:
    return sum(node.encode())


class Host(CoordinatorMachine):
    def received(self, now: float, message: Status | Heartbeat, address: str) -> list[View | Ack]:
        event = StatusReceived(message, address) if isinstance(message, Status) else message
        return self.handle(now, event)

    def link_closed(self, now: float, *peer: object) -> None:
        assert self.handle(now, ConnectionClosed(*peer)) == []  # type: ignore[arg-type]

    def close(self, now: float, run_id: str, outcome: JobOutcome, why: str) -> list[View | Ack]:
        return self.handle(now, JobCloseRequested(run_id, outcome, why))

    def tick(self, now: float) -> list[View | Ack]:
        return self.handle(now, TICK)


def hosting(**more: object) -> Host:
    return Host(0.0, silence_s=5.0, grace_s=0.2, **more)  # type: ignore[arg-type]


def formed(**more: object) -> Host:
    host = hosting(**more)
    host.received(0.0, status("a"), "10.0.0.1")
    host.received(0.0, status("b"), "10.0.0.2")
    return host


def roles(answers: list[View | Ack]) -> dict[str, NodeRole | int]:
    return {one.node: one.role if isinstance(one, View) else one.seq for one in answers}


def test_nodes_of_a_job_are_told_of_their_round() -> None:
    host = hosting()
    assert roles(host.received(0.0, status("a"), "10.0.0.1")) == {"a": NodeRole.WAITING}
    told = host.received(0.0, status("b"), "10.0.0.2")
    assert roles(told) == {"a": NodeRole.MEMBER, "b": NodeRole.MEMBER}
    assert [one.master_addr for one in told if isinstance(one, View)] == ["10.0.0.1"] * 2


def test_a_status_without_news_is_acknowledged() -> None:
    host = formed()
    assert roles(host.received(0.1, status("a", 2, NodePhase.RUNNING, generation=0), "")) == {
        "a": 2
    }
    assert roles(host.received(0.1, status("a", 1), "")) == {"a": 2}


def test_a_beat_is_answered_with_what_the_node_lacks() -> None:
    host = formed()
    assert roles(host.received(0.1, beat("a"), "")) == {"a": 1}
    assert roles(host.received(0.1, beat("a", term=1, revision=1), "")) == {"a": NodeRole.MEMBER}
    both = host.received(0.1, beat("a", 7, term=1, revision=1), "")
    assert [type(one) for one in both] == [View, Ack]


def test_whoever_is_unknown_is_asked_for_all_it_knows() -> None:
    host = formed()
    assert roles(host.received(0.1, beat("x"), "")) == {"x": -1}
    assert roles(hosting().received(0.1, beat("x"), "")) == {"x": -1}


def test_a_closed_link_means_lost_after_the_grace() -> None:
    host = formed()
    host.link_closed(1.0, "job", "a", hash_of("a"))
    assert host.next_deadline(1.0) == pytest.approx(1.2)
    assert host.tick(1.1) == []
    assert roles(host.tick(1.21)) == {"b": NodeRole.WAITING}


def test_a_node_that_speaks_again_within_the_grace_is_not_lost() -> None:
    host = formed()
    host.link_closed(1.0, "job", "a", hash_of("a"))
    host.received(1.1, beat("a"), "")
    assert host.tick(1.3) == []


def test_silence_means_lost() -> None:
    host = formed()
    for second in range(1, 6):
        host.received(float(second), beat("b"), "")
        told = host.tick(float(second))
    assert roles(told) == {"b": NodeRole.WAITING}


def test_nodes_lost_together_cost_one_round() -> None:
    three = JobSettings(min_nodes=1, max_nodes=3)
    host = hosting()
    for node in "abc":
        host.received(0.0, status(node, settings=three), "")
    for node in "ab":
        host.link_closed(1.0, "job", node, hash_of(node))
    assert roles(host.tick(1.3)) == {"c": NodeRole.MEMBER}
    assert host.jobs["job"].job.round == 1


def test_a_wait_counts_from_when_it_began() -> None:
    host = hosting()
    some = JobSettings(min_nodes=1, max_nodes=3, settle_s=0.5)
    host.received(3.0, status("a", settings=some), "")
    assert host.next_deadline(3.0) == pytest.approx(3.5)
    assert host.tick(3.4) == []
    assert roles(host.tick(3.5)) == {"a": NodeRole.MEMBER}


def test_time_in_which_nobody_looked_does_not_count() -> None:
    host = formed()
    assert host.tick(100.0) == []
    assert host.received(100.0, beat("a"), "") != []


def test_who_leaves_is_acknowledged_even_if_nobody_knew_it() -> None:
    assert roles(hosting().received(0.0, status("a", 4, NodePhase.LEAVING), "")) == {"a": 4}
    host = formed()
    told = host.received(0.1, status("a", 4, NodePhase.LEAVING), "")
    assert roles(told) == {"b": NodeRole.WAITING, "a": 4}
    assert hosting().jobs == {}


def test_two_jobs_do_not_know_of_each_other() -> None:
    host = formed()
    told = host.received(0.0, status("a", run_id="other"), "")
    assert roles(told) == {"a": NodeRole.WAITING}
    assert set(host.jobs) == {"job", "other"}
    host.link_closed(1.0, "job", "a", hash_of("a"))
    host.tick(1.3)
    assert list(host.jobs["other"].job.nodes) == ["a"]


def test_a_job_can_be_closed_and_is_forgotten_once_it_was_empty_for_long() -> None:
    host = formed(closed_job_keep_s=60.0)
    told = host.close(1.0, "job", JobOutcome.STOPPED, "enough")
    assert roles(told) == {"a": NodeRole.CLOSED, "b": NodeRole.CLOSED}
    assert host.close(1.0, "another", JobOutcome.STOPPED, "enough") == []
    for node in "ab":
        host.link_closed(1.0, "job", node, hash_of(node))
    host.tick(1.3)
    assert host.next_deadline(1.3) == pytest.approx(61.3)
    assert roles(host.received(50.0, status("c"), "")) == {"c": NodeRole.CLOSED}
    host.tick(61.4)
    assert host.jobs == {}
    assert host.next_deadline(61.4) is None


def test_no_more_jobs_than_there_is_room_for() -> None:
    host = formed(jobs_max=2)
    host.received(0.0, status("a", run_id="second"), "")
    told = host.received(0.0, status("a", run_id="third", term=7), "")
    assert roles(told) == {"a": NodeRole.REFUSED}
    assert isinstance(told[0], View)
    assert told[0].term == 8
    host.received(0.0, status("a", 2, NodePhase.LEAVING, run_id="second"), "")
    assert roles(host.received(0.0, status("a", run_id="third"), "")) == {"a": NodeRole.WAITING}
    assert set(host.jobs) == {"job", "third"}


class Broken(Rounds):
    def check(self) -> None:
        assert not self.job.nodes, "somebody is here"


class Dead(Rounds):
    def handle(self, now: float, event: object, cause: str = "") -> list[View]:
        raise KeyError("lost")


def test_a_broken_job_is_closed_and_the_others_go_on() -> None:
    host = hosting(rounds=lambda job: Broken(job) if job.run_id == "job" else Rounds(job))
    told = host.received(0.0, status("a"), "")
    assert roles(told) == {"a": NodeRole.CLOSED}
    assert "somebody is here" in host.broken["job"]
    assert isinstance(told[0], View)
    assert "bug in Holdfast" in told[0].why
    assert roles(host.received(0.0, status("a", run_id="other"), "")) == {"a": NodeRole.WAITING}


def test_a_job_that_cannot_even_be_closed_is_told_of_when_nodes_ask() -> None:
    made: list[Job] = []

    def rounds(job: Job) -> Rounds:
        made.append(job)
        return Dead(job) if len(made) == 1 else Rounds(job)

    host = hosting(rounds=rounds)
    assert roles(host.received(0.0, status("a"), "")) == {"a": -1}
    assert roles(host.received(0.1, status("a", 2), "")) == {"a": NodeRole.CLOSED}
    assert host.jobs["job"].job.phase is JobPhase.CLOSED


def test_in_a_test_the_error_is_raised() -> None:
    with pytest.raises(AssertionError, match="somebody is here"):
        hosting(rounds=Broken, strict=True).received(0.0, status("a"), "")


def test_rounds_of_coordinators_that_know_nothing_of_each_other_are_never_mixed() -> None:
    """Each of the first two forms a round of its own; half of each comes to the third."""

    def member(host: CoordinatorMachine, node: str) -> Status:
        view = host.received(1.0, beat(node, term=0, revision=0), "")[0]
        assert isinstance(view, View)
        return status(
            node,
            9,
            NodePhase.RUNNING,
            generation=0,
            assigned_generation=0,
            term=view.term,
            round_term=view.round_term,
            round=view.round,
            round_key=view.round_key,
            rank=view.rank,
            size=view.size,
        )

    first, second, third = formed(), hosting(), hosting()
    for node in "cd":
        second.received(0.0, status(node), "")
    third.received(2.0, member(first, "a"), "")
    told = third.received(2.0, member(second, "d"), "")
    assert third.jobs["job"].job.phase is JobPhase.RECOVERING
    assert roles(told) == {"d": 9}


def test_a_coordinator_that_follows_another_waits_for_nodes_of_running_rounds() -> None:
    before = formed()
    (running,) = (view for view in before.received(1.0, status("a", 2, away_s=0.1), "x"))
    assert isinstance(running, View)
    after = hosting(follows_another=True)
    # Two newcomers would fill the round at once; those who run are there a moment later.
    assert roles(after.received(0.1, status("x"), "10.0.0.3")) == {"x": 1}
    assert roles(after.received(0.2, status("y"), "10.0.0.4")) == {"y": 1}
    claim = {"round_term": 1, "round": 0, "assigned_generation": 0, "generation": 0, "size": 2}
    for rank, node in enumerate("ab"):
        said = status(node, 3, NodePhase.RUNNING, term=1, rank=rank, **claim)
        told = after.received(0.3, said, "10.0.0.1")
    assert roles(told)["a"] is roles(told)["b"] is NodeRole.MEMBER
    assert {view.generation for view in told if isinstance(view, View)} == {0}


def test_a_coordinator_that_follows_another_starts_new_jobs_all_the_same() -> None:
    host = hosting(follows_another=True)
    host.received(0.1, status("a"), "")
    host.received(0.2, status("b"), "")
    assert roles(host.tick(1.0)) == {"a": NodeRole.MEMBER, "b": NodeRole.MEMBER}
    old = hosting(follows_another=True)
    old.received(60.0, status("a"), "")
    assert roles(old.received(60.0, status("b"), "")) == {
        "a": NodeRole.MEMBER,
        "b": NodeRole.MEMBER,
    }


def test_nodes_are_told_how_long_the_coordinator_waits_for_a_sign_of_life() -> None:
    views = hosting().received(0.0, status("a"), "")
    assert [view.silence_s for view in views if isinstance(view, View)] == [5.0]


# Failures that may be another's.


def cut(host: Host, node: str, now: float) -> None:
    host.link_closed(now, "job", node, hash_of(node))


def running(settings: JobSettings = TWO, nodes: str = "ab") -> Host:
    host = hosting()
    for node in nodes:
        host.received(0.0, status(node, settings=settings), "")
    for node in nodes:
        host.received(0.0, status(node, 2, NodePhase.RUNNING, generation=0, settings=settings), "")
    return host


ONE_OR_TWO = JobSettings(min_nodes=1, max_nodes=2, max_restarts=0)


def test_a_failure_of_a_lost_nodes_peer_costs_nothing() -> None:
    host = running(ONE_OR_TWO)
    cut(host, "b", 1.0)
    failed = status("a", 3, NodePhase.FAILED, generation=0, settings=ONE_OR_TWO)
    assert roles(host.received(1.01, failed, "")) == {"a": 3}
    assert roles(host.received(1.1, beat("a", 3), "")) == {"a": 3}
    (told,) = host.tick(1.3)
    assert isinstance(told, View)
    assert (told.role, told.generation, told.restarts) == (NodeRole.MEMBER, 1, 0)
    assert told.why == "b was lost: its connection closed"
    assert host.tick(1.4) == []


def test_a_failure_counts_when_the_node_that_was_away_is_back() -> None:
    host = running()
    cut(host, "b", 1.0)
    failed = status("a", 3, NodePhase.FAILED, generation=0)
    host.received(1.01, failed, "")
    told = host.received(1.1, beat("b", 2), "")
    views = {one.node: one for one in told if isinstance(one, View)}
    assert {name: (view.generation, view.restarts) for name, view in views.items()} == {
        "a": (1, 1),
        "b": (1, 1),
    }
    assert host.tick(1.3) == []


def test_a_failure_counts_at_once_where_nobody_who_matters_is_cut_off() -> None:
    host = running(JobSettings(min_nodes=2, max_nodes=2, max_restarts=1), nodes="abc")
    cut(host, "c", 1.0)  # A standby.
    told = host.received(1.01, status("a", 3, NodePhase.FAILED, generation=0), "")
    assert {one.generation for one in told if isinstance(one, View)} == {1}


def test_a_node_that_leaves_takes_its_failure_along() -> None:
    host = running(ONE_OR_TWO)
    cut(host, "b", 1.0)
    host.received(1.01, status("a", 3, NodePhase.FAILED, generation=0, settings=ONE_OR_TWO), "")
    host.received(1.02, status("a", 4, NodePhase.LEAVING, generation=0, settings=ONE_OR_TWO), "")
    assert host.received(1.1, beat("b", 2), "") != []
    assert host.jobs["job"].job.outcome is None
    assert host.jobs["job"].job.restarts == 0


def test_both_of_two_failures_are_held_and_the_first_counts() -> None:
    three = JobSettings(min_nodes=3, max_nodes=3, max_restarts=1)
    host = running(three, nodes="abc")
    cut(host, "c", 1.0)
    for node in "ab":
        host.received(1.01, status(node, 3, NodePhase.FAILED, generation=0, settings=three), "")
    told = host.received(1.1, beat("c", 2), "")
    assert {one.restarts for one in told if isinstance(one, View)} == {1}
