"""A job that makes no sense any more ends in words, for as many of its nodes as can be told."""

from __future__ import annotations

from fake_node import RUN, a_job_of, a_node
from holdfast.core.coordinator import close_broken
from holdfast.core.protocol import JobOutcome, NodeRole, View
from holdfast.core.rounds import Job, JobPhase, Rounds

TWO = a_job_of(2, 2, max_restarts=3)


class Dead(Rounds):
    def handle(self, event: object) -> list[View]:
        raise KeyError("lost")


def a_round(kind: type[Rounds] = Rounds) -> Rounds:
    rounds = Rounds(Job(run_id=RUN, term=7))
    for i, name in enumerate("ab", start=1):
        rounds.handle(a_node(name, TWO, i).status())
    rounds.job.restarts = 2
    return kind(rounds.job)


def test_its_nodes_are_told_that_it_is_over_and_whose_fault_that_is() -> None:
    before = a_round()
    told, after = close_broken(before, "AssertionError: two ranks", Rounds)
    assert after is before
    assert {(view.node, view.role, view.outcome, view.final) for view in told} == {
        (node, NodeRole.CLOSED, JobOutcome.FAILED, True) for node in "ab"
    }
    assert "bug in Holdfast (AssertionError: two ranks)" in told[0].why
    assert after.job.phase is JobPhase.CLOSED


def test_one_that_cannot_even_be_closed_is_replaced_by_its_end() -> None:
    before = a_round(Dead)
    told, after = close_broken(before, "KeyError: 'lost'", Rounds)
    assert told == []
    after.check()
    job = after.job
    assert (job.phase, job.outcome, job.final) == (JobPhase.CLOSED, JobOutcome.FAILED, True)
    assert (job.term, job.generation, job.restarts) == (8, 0, 2)
    assert job.settings == TWO
    assert "KeyError: 'lost'" in job.why


def test_who_asks_then_is_told_in_a_later_term_than_any_it_heard() -> None:
    _, after = close_broken(a_round(Dead), "KeyError: 'lost'", Rounds)
    node = a_node("a", TWO, 1)
    node.term = 7
    (view,) = after.handle(node.status())
    assert (view.role, view.outcome) == (NodeRole.CLOSED, JobOutcome.FAILED)
    assert view.term > 7


def test_the_end_of_one_that_is_closed_stays_what_it_was() -> None:
    rounds = a_round()
    close_broken(rounds, "first", Rounds)
    told, after = close_broken(rounds, "second", Rounds)
    assert told == []
    assert "first" in after.job.why
