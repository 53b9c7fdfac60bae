"""What the transcripts of rounds do not show: events that are not its own, limits, addresses."""

from __future__ import annotations

import msgspec
import pytest

from fake_node import RUN, FakeNode, a_job_of, a_node
from holdfast.core import rounds as book
from holdfast.core.machine import InvalidEvent
from holdfast.core.protocol import JobOutcome, JobSettings, NodePhase, NodeRole, View
from holdfast.core.rounds import (
    BLAME_S,
    HISTORY_LINES_MAX,
    RECOVER_S_MAX,
    RECOVER_S_MIN,
    REPORT_S,
    CloseRequested,
    Job,
    JobPhase,
    NodeLost,
    Rounds,
    WaitEnded,
)

TWO = a_job_of(2, 2, max_restarts=1, settle_s=0.75)


def encoded(rounds: Rounds) -> bytes:
    return msgspec.msgpack.encode(rounds.job)


def active(settings: JobSettings = TWO, **about: object) -> tuple[Rounds, list[FakeNode]]:
    """Return a job with a round, and its nodes."""
    rounds = Rounds(Job(run_id=RUN))
    nodes = [a_node(name, settings, i, **about) for i, name in enumerate("ab", start=1)]
    for node in nodes:
        told = rounds.handle(0.0, node.status())
    assert rounds.job.phase is JobPhase.ACTIVE
    hear(nodes, told)
    return rounds, nodes


def hear(nodes: list[FakeNode], told: list[View]) -> None:
    for view in told:
        for node in nodes:
            if node.hear(view):
                node.follow()


def test_what_is_no_event_raises_and_changes_nothing() -> None:
    rounds, (a, _) = active()
    before = encoded(rounds)
    with pytest.raises(InvalidEvent, match="is not an event of a job"):
        rounds.handle(0.0, a.beat())  # type: ignore[arg-type]
    assert encoded(rounds) == before


def test_a_status_of_another_job_raises_and_changes_nothing() -> None:
    rounds, (a, _) = active()
    before = encoded(rounds)
    with pytest.raises(InvalidEvent, match="'another' came to 'run'"):
        rounds.handle(0.0, msgspec.structs.replace(a.status(), run_id="another"))
    assert encoded(rounds) == before


def test_what_does_not_concern_the_job_changes_nothing() -> None:
    rounds, (a, _) = active()
    last = a.last_status()
    before = encoded(rounds)
    assert rounds.handle(0.0, last) == []
    assert rounds.handle(0.0, NodeLost("a", 99, "another incarnation")) == []
    assert rounds.handle(0.0, NodeLost("z", 1, "nobody")) == []
    assert rounds.handle(0.0, WaitEnded(rounds.job.wait_seq)) == [], "nothing is waited for"
    stranger = a_node("z", TWO, 9)
    assert rounds.handle(0.0, stranger.leave()) == []
    assert encoded(rounds) == before


def test_each_wait_has_its_time() -> None:
    rounds = Rounds(Job(run_id=RUN))
    three = a_job_of(2, 3, settle_s=0.75)
    nodes = [a_node(name, three, i) for i, name in enumerate("ab", start=1)]
    assert rounds.wait is None
    for node in nodes:
        rounds.handle(0.0, node.status())
    assert rounds.wait is not None
    assert rounds.wait.delay_s == 0.75
    hear(nodes, rounds.handle(0.0, WaitEnded(rounds.wait.seq)))
    again = Rounds(Job(run_id=RUN))
    again.handle(0.0, nodes[0].status())
    assert again.wait is not None
    assert again.wait.delay_s == RECOVER_S_MIN
    rounds.handle(0.0, nodes[0].fail(retryable=False))
    assert rounds.wait is not None
    assert rounds.wait.delay_s == REPORT_S
    nodes[0].report = b"Traceback"
    rounds.handle(0.0, nodes[0].status())
    assert rounds.wait.delay_s == BLAME_S


def test_a_failed_job_ends_with_the_likelier_cause() -> None:
    rounds, (a, b) = active(a_job_of(2, 2))
    rounds.handle(0.0, a.fail(report=b"consequence"))
    rounds.handle(0.0, b.fail(sudden=True, report=b"cause"))
    a.report = b"more of the consequence"
    rounds.handle(0.0, a.status())
    assert rounds.wait is not None
    told = rounds.handle(0.0, WaitEnded(rounds.wait.seq))
    assert [(view.report, view.final) for view in told] == [(b"cause", True)] * 2
    assert {view.failure.node for view in told if view.failure} == {"b"}


def test_of_those_who_are_out_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "RETIRED_MAX", 3)
    rounds, _ = active()
    for incarnation in range(10, 20):
        rounds.handle(0.0, a_node("c", TWO, incarnation).status())
        rounds.handle(0.0, NodeLost("c", incarnation, "silence"))
    assert list(rounds.job.retired) == [17, 18, 19]


def test_the_history_is_in_words_and_limited() -> None:
    rounds, _ = active()
    assert list(rounds.history) == ["active, round 0, generation 0: all nodes are here"]
    for incarnation in range(10, 10 + HISTORY_LINES_MAX):
        rounds.handle(0.0, NodeLost("a", rounds.job.nodes["a"].info.incarnation, "silence"))
        rounds.handle(0.0, a_node("a", TWO, incarnation).status())
    assert len(rounds.history) == HISTORY_LINES_MAX


def test_the_number_of_the_last_status_is_known_for_the_incarnation_alone() -> None:
    rounds, (a, _) = active()
    rounds.handle(0.0, a.status())
    assert rounds.seq_of("a", 1) == a.seq == 2
    assert rounds.seq_of("a", 2) == rounds.seq_of("z", 1) == -1


@pytest.mark.parametrize(
    ("addresses", "coordinator", "expected"),
    [
        (["10.0.0.1", "10.0.0.2"], "10.0.0.9", "10.0.0.1"),
        (["127.0.0.1", "127.0.0.1"], "10.0.0.9", "127.0.0.1"),
        (["127.0.0.1", "10.0.0.2"], "10.0.0.9", "10.0.0.9"),
        (["::1", "fd00::2"], "fd00::9", "fd00::9"),
        (["127.0.0.1", "10.0.0.2"], "", "127.0.0.1"),
    ],
)
def test_the_first_member_is_the_master_at_an_address_all_can_reach(
    addresses: list[str], coordinator: str, expected: str
) -> None:
    rounds = Rounds(Job(run_id=RUN, coordinator_address=coordinator))
    for i, address in enumerate(addresses, start=1):
        node = a_node("ab"[i - 1], TWO, i, address=address, ports=(100 + i, 200 + i))
        told = rounds.handle(0.0, node.status())
        node.hear(told[-1])
        node.follow()
    assert {(view.master_addr, view.master_port) for view in told} == {(expected, 101)}
    told = rounds.handle(0.0, node.fail())
    assert {view.master_port for view in told} == {201}, "each generation has another port"


def test_a_request_ends_a_job_without_any_node() -> None:
    rounds = Rounds(Job(run_id=RUN))
    assert rounds.handle(0.0, CloseRequested(JobOutcome.STOPPED, "enough")) == []
    assert (rounds.job.phase, rounds.job.final) == (JobPhase.CLOSED, True)
    rounds.check()


def test_a_node_that_is_done_while_nobody_waits_for_it_closes_nothing() -> None:
    rounds, (a, b) = active()
    rounds.handle(0.0, NodeLost("b", 2, "silence"))
    rounds.handle(0.0, a.succeed())
    assert rounds.job.phase is JobPhase.FORMING
    assert b.phase is NodePhase.RUNNING


def test_rounds_of_the_same_number_by_two_coordinators_are_not_taken_for_one() -> None:
    def lone_round(mine: str, lost: str) -> FakeNode:
        """Form a round of two at a coordinator of its own; return one of the two."""
        rounds = Rounds(Job(run_id=RUN))
        pair = [a_node(name, TWO, ord(name)) for name in (mine, lost)]
        if mine == "b":  # So that each of the two has another rank.
            pair.reverse()
        for node in pair:
            hear(pair, rounds.handle(0.0, node.status()))
        for node in pair:
            node.follow()
        return next(node for node in pair if node.name == mine)

    a, b = lone_round("a", "x"), lone_round("b", "y")
    assert (a.round_term, a.round, a.rank) == (b.round_term, b.round, 0)
    assert b.rank == 1
    rounds = Rounds(Job(run_id=RUN))
    for node in (a, b):
        assert rounds.handle(0.0, node.status()) == []
    assert rounds.job.phase is JobPhase.RECOVERING
    hear([a, b], rounds.handle(0.0, WaitEnded(rounds.job.wait_seq)))
    assert (a.assigned_generation, b.assigned_generation) == (1, 1)
    assert {a.rank, b.rank} == {0, 1}


@pytest.mark.parametrize(
    ("away_s", "delay_s"), [(0.0, RECOVER_S_MIN), (1.0, 2.0), (60.0, RECOVER_S_MAX)]
)
def test_nodes_are_waited_for_by_how_long_they_were_away(away_s: float, delay_s: float) -> None:
    _, (first, _second) = active()
    rounds = Rounds(Job(run_id=RUN))
    rounds.handle(0.0, msgspec.structs.replace(first.status(), away_s=away_s))
    assert rounds.wait is not None
    assert rounds.wait.delay_s == delay_s


def test_who_waited_in_vain_for_a_larger_round_is_told_that_it_stands_by() -> None:
    settings = a_job_of(1, 3, spares=1)
    rounds = Rounds(Job(run_id=RUN))
    a, b, c = (a_node(name, settings, i) for i, name in enumerate("abc", start=1))
    rounds.handle(0.0, a.status())
    rounds.handle(0.0, WaitEnded(rounds.job.wait_seq))
    rounds.handle(0.0, b.status())
    (told,) = rounds.handle(0.0, c.status())
    rounds.handle(0.0, NodeLost("b", 2, "gone"))
    (later,) = rounds.handle(0.0, WaitEnded(rounds.job.wait_seq))
    assert [told.role, later.role] == [NodeRole.WAITING, NodeRole.STANDBY]
    assert (later.node, later.revision > told.revision) == ("c", True)


def test_a_fixed_rank_is_one_nodes() -> None:
    rounds = Rounds(Job(run_id=RUN))
    first, second = (a_node(name, TWO, i, fixed_rank=0) for i, name in enumerate("ab", start=1))
    rounds.handle(0.0, first.status())
    (refused,) = rounds.handle(0.0, second.status())
    assert (refused.role, refused.why) == (NodeRole.REFUSED, "node rank 0 is a's already")
