"""Rounds: invalid events, limits and addresses; the transcripts of `rounds` show the rest."""

from __future__ import annotations

import msgspec
import pytest

from fake_node import RUN, FakeNode, a_job_of, a_node
from holdfast.core import rounds as machine
from holdfast.core.first_failure import with_local_times
from holdfast.core.job_settings import JobSettings, StoreAccess
from holdfast.core.limits import (
    NODE_ID_CHARS_MAX,
    RUN_ID_CHARS_MAX,
    SUMMARY_CHARS_MAX,
    WHY_CHARS_MAX,
)
from holdfast.core.machine import InvalidEvent
from holdfast.core.phases import JobOutcome, NodeRole, RefusalReason
from holdfast.core.protocol import Request, Status, View
from holdfast.core.ranks import RankOrder
from holdfast.core.rounds import (
    HISTORY_LINES_MAX,
    RECOVER_S_MAX,
    RECOVER_S_MIN,
    CloseRequested,
    Job,
    JobPhase,
    NodeLost,
    Rounds,
    WaitEnded,
)
from holdfast.wire.messages import check

TWO = a_job_of(2, 2, max_restarts=1)


def active(settings: JobSettings = TWO) -> tuple[Rounds, list[FakeNode]]:
    """Return a job with a round, and its nodes."""
    rounds = Rounds(Job(run_id=RUN))
    nodes = [a_node(name, settings, i) for i, name in enumerate("ab", start=1)]
    for node in nodes:
        views = rounds.handle(0.0, node.status())
    assert rounds.job.phase is JobPhase.ACTIVE
    apply(nodes, views)
    return rounds, nodes


def apply(nodes: list[FakeNode], views: list[View]) -> None:
    for view in views:
        for node in nodes:
            if node.receive(view):
                node.apply()


def delay_s(rounds: Rounds) -> float:
    return rounds.waits[0].delay_s


def test_invalid_and_irrelevant_events_change_nothing() -> None:
    rounds, (a, _) = active()
    last, before = a.last_status(), msgspec.msgpack.encode(rounds.job)
    for wrong in (a.heartbeat(), msgspec.structs.replace(last, run_id="another")):
        with pytest.raises(InvalidEvent):
            rounds.handle(0.0, wrong)  # type: ignore[arg-type]
    for event in (
        last,
        NodeLost("a", 99, "another incarnation"),
        NodeLost("z", 1, "nobody"),
        WaitEnded(rounds.job.wait_seq),
        a_node("z", TWO, 9).leave(),
    ):
        assert rounds.handle(0.0, event) == []
    assert msgspec.msgpack.encode(rounds.job) == before


def test_every_reason_is_one_printable_line_of_limited_length() -> None:
    long = "died\x1b[2J\n[holdfast] forged" + "x" * SUMMARY_CHARS_MAX

    def failed(node: FakeNode) -> Status:
        status = node.fail()
        assert status.failure is not None
        failure = msgspec.structs.replace(status.failure, summary=long[:SUMMARY_CHARS_MAX])
        return msgspec.structs.replace(status, failure=failure, report=b"")

    rounds, (a, b) = active(a_job_of(2, 2, max_restarts=0))
    views = rounds.handle(0.0, failed(a))
    views += rounds.handle(0.0, failed(b))
    views += rounds.handle(0.0, WaitEnded(rounds.job.wait_seq))
    rounds, (a, b) = active()
    views += rounds.handle(0.0, NodeLost("a", 1, long))
    views += rounds.handle(0.0, a.status())
    strange = a_node("c" * NODE_ID_CHARS_MAX, a_job_of(3, 4), 9)
    rounds.job.run_id = strange.run_id = "\\" * RUN_ID_CHARS_MAX
    views += rounds.handle(0.0, strange.status())
    assert {view.role for view in views} >= {NodeRole.CLOSED, NodeRole.FENCED, NodeRole.REFUSED}
    for view in views:
        assert view.why.isprintable()
        assert 0 < len(view.why) <= WHY_CHARS_MAX
    assert all(one.why.isprintable() for one in rounds.job.retired.values())


def numbers(job: Job) -> dict[str, int]:
    return {name: getattr(job, name) for name in ("term", "round", "generation", "fence")}


FALSE_NUMBERS: list[dict[str, int]] = [
    {"term": 2**53, "round_term": 2**53, "rank": 0, "size": 2, "round": 3},
    {"generation": 2**53},
    {"assigned_generation": 2**53},
    {"known_generation": 2**53},
    {"round": 2**53, "round_term": 5, "term": 5, "rank": 0, "size": 2},
    {"fence": 2**53},
]


@pytest.mark.parametrize("false", FALSE_NUMBERS)
def test_false_numbers_of_a_node_do_not_exhaust_the_counters_of_a_job(
    false: dict[str, int],
) -> None:
    """Counters never decrease, so above the limit no node could report its progress."""
    rounds, nodes = active()
    before = numbers(rounds.job)
    stranger = a_node("z", TWO, 9)
    reported = msgspec.structs.replace(stranger.status(), **false)
    (view,) = rounds.handle(0.0, reported)
    assert (view.role, view.refusal) == (NodeRole.REFUSED, RefusalReason.SETTINGS)
    assert (view.term, view.revision) > (reported.term, 0)  # The node does not ignore the view.
    assert numbers(rounds.job) == before
    # A new job accepts numbers up to half of the range, so it can continue from them.
    fresh = Rounds(Job(run_id=RUN))
    (view,) = fresh.handle(0.0, reported)
    assert view.role is NodeRole.REFUSED
    half = {name: min(value, 2**52) for name, value in false.items()}
    fresh.handle(0.0, msgspec.structs.replace(reported, **half))
    fresh.handle(0.0, NodeLost("z", 9, "silent"))
    for number, node in enumerate(nodes, start=20):
        node.rejoin(number)
        apply(nodes, fresh.handle(0.0, node.status()))
    for wait in fresh.waits:
        apply(nodes, fresh.handle(0.0, wait.ended))
    assert all(node.is_member for node in nodes)
    for node in nodes:
        check(node.status())


@pytest.mark.parametrize("lead", [{"generation": 1000}, {"term": 10**10}, {"fence": 10**9}])
def test_plausible_numbers_from_another_coordinator_are_accepted(lead: dict[str, int]) -> None:
    rounds, _ = active()
    rounds.handle(0.0, msgspec.structs.replace(a_node("z", TWO, 9).status(), **lead))
    assert "z" in rounds.job.nodes
    assert all(numbers(rounds.job)[name] >= number for name, number in lead.items())


@pytest.mark.parametrize(
    ("unreachable_s", "expected_s"), [(0.0, RECOVER_S_MIN), (1.0, 2.0), (60.0, RECOVER_S_MAX)]
)
def test_recovery_waits_for_nodes_depending_on_their_time_without_a_coordinator(
    unreachable_s: float, expected_s: float
) -> None:
    _, (first, _second) = active()
    rounds = Rounds(Job(run_id=RUN))
    rounds.handle(0.0, msgspec.structs.replace(first.status(), unreachable_s=unreachable_s))
    assert delay_s(rounds) == expected_s


def test_a_failed_job_ends_with_the_report_of_the_likelier_cause() -> None:
    rounds, (a, b) = active(a_job_of(2, 2))
    views = rounds.handle(0.0, a.fail(report=b"consequence"))
    assert [(view.report, view.final) for view in views] == [(b"", False)] * 2
    rounds.handle(0.0, b.fail(sudden=True, report=b"cause"))
    a.report = b"more of the consequence"
    rounds.handle(0.0, a.status())
    views = rounds.handle(0.0, WaitEnded(rounds.job.wait_seq))
    assert [(view.report, view.final) for view in views] == [(b"cause", True)] * 2
    assert {view.failure.node for view in views if view.failure} == {"b"}


def test_if_the_order_of_two_failures_is_uncertain_all_candidates_are_listed() -> None:
    """Both exits were silent, and on b either of two workers may have failed first."""
    rounds, (a, b) = active(a_job_of(2, 2))
    rounds.handle(0.0, with_local_times(1.0, a.fail()))
    b.fail(report=b"as well")
    assert b.failure is not None
    b.failure = msgspec.structs.replace(b.failure, rank=2, rivals=(3,))
    rounds.handle(0.0, with_local_times(1.02, b.status()))
    (view, _) = rounds.handle(0.0, WaitEnded(rounds.job.wait_seq))
    assert view.failure is not None
    assert (view.failure.node, view.failure.rivals) == ("a", (2, 3))


def test_only_failures_and_losses_are_problems() -> None:
    rounds, (a, b) = active(a_job_of(1, 2))
    rounds.handle(0.0, Request(id="r", action="restart", why="new data"))
    requested = rounds.history[-1]
    rounds.handle(0.0, b.leave())
    left = rounds.history[-1]
    assert [left.why, requested.is_problem, left.is_problem] == ["b left", False, False]
    generation = rounds.job.generation
    rounds.handle(0.0, NodeLost("a", a.info.incarnation, "silence"))
    lost = rounds.history[-1]
    assert (lost.is_problem, lost.generation) == (True, generation)
    rounds.handle(0.0, CloseRequested(JobOutcome.STOPPED, "enough"))
    ended = rounds.history[-1]
    assert (ended.is_problem, ended.outcome, ended.why) == (False, JobOutcome.STOPPED, "enough")


def test_history_and_retired_nodes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "RETIRED_MAX", 3)
    rounds, _ = active()
    for incarnation in range(10, 10 + HISTORY_LINES_MAX):
        rounds.handle(0.0, NodeLost("a", rounds.job.nodes["a"].info.incarnation, "silence"))
        rounds.handle(0.0, a_node("a", TWO, incarnation).status())
        rounds.handle(0.0, Request(id=str(incarnation), action="dance"))
    assert len(rounds.history) == HISTORY_LINES_MAX
    assert len(rounds.job.retired) == 3
    assert incarnation - 1 in rounds.job.retired


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
def test_the_master_address_is_one_that_all_members_can_reach(
    addresses: list[str], coordinator: str, expected: str
) -> None:
    rounds = Rounds(Job(run_id=RUN, coordinator_address=coordinator))
    for i, address in enumerate(addresses, start=1):
        node = a_node("ab"[i - 1], TWO, i, address=address, ports=(100 + i, 200 + i))
        views = rounds.handle(0.0, node.status())
        apply([node], views)
    assert {(view.master_addr, view.master_port) for view in views} == {(expected, 101)}
    views = rounds.handle(0.0, node.fail())
    assert {view.master_port for view in views} == {201}, "each generation has another port"


@pytest.mark.parametrize(
    "other",
    [
        {"min_nodes": 1}, {"max_nodes": 3}, {"max_restarts": 2}, {"spares": 1},
        {"order": RankOrder.HOST}, {"store": StoreAccess.OPEN}, {"fixed_rank": 0}, {"fixed_rank": 2},
    ],
    ids=str,
)  # fmt: skip
def test_a_node_with_different_settings_is_refused(other: dict[str, object]) -> None:
    rounds = Rounds(Job(run_id=RUN))
    settings, about = TWO, other
    if "fixed_rank" not in other:
        settings, about = TWO._replace(**other), {}  # type: ignore[arg-type]
    rounds.handle(0.0, a_node("a", TWO, 1, fixed_rank=0 if about else -1).status())
    (view,) = rounds.handle(0.0, a_node("b", settings, 2, **about).status())
    assert (view.role, view.refusal) == (NodeRole.REFUSED, RefusalReason.SETTINGS)
    assert list(rounds.job.nodes) == ["a"]


def test_each_generation_gets_a_new_port_and_keeps_it() -> None:
    settings = a_job_of(1, 1, max_restarts=3)
    rounds, node = Rounds(Job(run_id=RUN)), a_node("a", settings, 1, ports=(11, 12))
    given: list[int] = []
    for fresh in ((12, 21), (21, 22), (22, 31)):
        views = rounds.handle(0.0, node.fail() if given else node.status())
        given.append(views[-1].master_port)
        apply([node], views)
        node.info = msgspec.structs.replace(node.info, ports=fresh)
        rounds.handle(0.0, node.status())
        # A machine that is created from the state has the same port.
        assert Rounds(rounds.job).rank_table.master_port == given[-1]
    assert given == [11, 12, 21]


def test_a_generation_does_not_reuse_a_port_that_the_node_still_lists() -> None:
    settings = a_job_of(1, 1, max_restarts=2)
    rounds, node = Rounds(Job(run_id=RUN)), a_node("a", settings, 1, ports=(11, 12))
    (first,) = rounds.handle(0.0, node.status())
    apply([node], [first])
    rounds.handle(0.0, node.status())
    (second,) = rounds.handle(0.0, node.fail())
    assert (first.master_port, second.master_port, second.start) == (11, 12, True)


def test_a_generation_reuses_the_port_of_one_that_never_started() -> None:
    settings = a_job_of(2, 2, max_restarts=2)
    rounds = Rounds(Job(run_id=RUN))
    nodes = [a_node(name, settings, i, ports=(11, 12)) for i, name in enumerate("ab", start=1)]
    for node in nodes:
        views = rounds.handle(0.0, node.status())
    apply(nodes, views)
    (held, _) = rounds.handle(0.0, nodes[0].fail())  # The other node still has workers.
    rounds.handle(0.0, NodeLost("b", 2, "gone", is_silent=False))
    views = rounds.handle(0.0, a_node("b", settings, 3).status())
    after = next(view for view in views if view.node == "a")
    assert (held.start, held.master_port) == (False, 12)
    assert (after.generation, after.master_port) == (held.generation + 1, 12)


def test_only_members_receive_the_store_key_of_their_generation() -> None:
    settings = a_job_of(2, 2, max_restarts=1)
    rounds = Rounds(Job(run_id=RUN))
    nodes = [a_node(one, settings, i, store_key=bytes([i]) * 32) for i, one in enumerate("abc", 1)]
    for node in nodes:
        views = rounds.handle(0.0, node.status())
        apply(nodes, views)
    keys = {view_of(rounds, node).store_key for node in nodes[:2]}
    assert len(keys) == 1
    assert view_of(rounds, nodes[2]).role is NodeRole.STANDBY
    assert view_of(rounds, nodes[2]).store_key == b""
    later = Rounds(Job(run_id=RUN))  # A new coordinator derives the same key.
    for node in nodes[:2]:
        views = later.handle(0.0, node.status())
    assert {view.store_key for view in views} == keys
    rounds.handle(0.0, nodes[0].fail())
    assert view_of(rounds, nodes[1]).store_key not in keys | {bytes([1]) * 32, b""}


def test_there_is_no_store_key_if_a_member_has_none() -> None:
    rounds = Rounds(Job(run_id=RUN))
    for node in (a_node("a", TWO, 1, store_key=bytes(32)), a_node("b", TWO, 2)):
        views = rounds.handle(0.0, node.status())
    assert {view.store_key for view in views} == {b""}


def view_of(rounds: Rounds, node: FakeNode) -> View:
    return machine.view_for_node(rounds.job, rounds.rank_table, node.info)


def test_a_new_coordinator_learns_the_master_port_of_a_round() -> None:
    rounds, nodes = active()
    port = rounds.job.master_port
    later = Rounds(Job(run_id=RUN))
    for node in nodes:
        info = msgspec.structs.replace(node.info, ports=(7, 8))
        status = msgspec.structs.replace(node.status(), info=info, master_port=port)
        views = later.handle(0.0, status)
    assert {view.master_port for view in views} == {port}
