"""A node over a compare-and-set store: cases that the simulator does not reliably cover."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.core import shared_state
from holdfast.core.job_settings import JobSettings
from holdfast.core.machine import InvalidEvent, Tick
from holdfast.core.phases import JobOutcome, NodePhase, NodeRole
from holdfast.core.protocol import ControlPort, Failure, NodeInfo, View
from holdfast.core.rounds import Job
from holdfast.core.session import DeliverView, GiveUp, StatusChanged
from holdfast.core.shared_state import (
    BEAT_S_PER_NODE,
    CallFailed,
    ReadState,
    RefreshRequested,
    RefuseJoin,
    SharedStateSession,
    StateRead,
    StateWritten,
    Timeouts,
    WriteConflict,
    WriteState,
    decode,
    encode,
)

READY, RUNNING, FAILED = NodePhase.READY, NodePhase.RUNNING, NodePhase.FAILED
SUCCEEDED, LEAVING = NodePhase.SUCCEEDED, NodePhase.LEAVING


class Cluster:
    """A store, its nodes, and a clock; the store responds immediately."""

    def __init__(self, least: int = 2, most: int = 2, **timeouts: Any) -> None:
        self.now = 0.0
        self.settings = JobSettings(min_nodes=least, max_nodes=most, max_restarts=1, settle_s=1.0)
        self.timeouts = Timeouts(**{"interval_s": 1.0, "lost_after_s": 5.0, **timeouts})
        self.state: bytes | None = None
        self.token = 0
        self.writes = 0
        self.nodes: list[Node] = []

    def add(self, name: str = "", **more: Any) -> Node:
        node = Node(self, name or f"n{len(self.nodes)}", len(self.nodes) + 1, **more)
        self.nodes.append(node)
        node.report(READY)
        return node

    @property
    def job(self) -> Job:
        assert self.state is not None
        return decode(self.state)

    def pass_s(self, seconds: float, *but: Node) -> None:
        """Let time pass for all nodes except some, which do nothing."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.1)
            for node in self.nodes:
                if node not in but:
                    node.feed(Tick())


class Node:
    def __init__(self, cluster: Cluster, name: str, incarnation: int, **more: Any) -> None:
        self.cluster = cluster
        self.is_cut = False
        self.views: list[View] = []
        self.faults: list[object] = []
        self.session = SharedStateSession(
            cluster.now,
            run_id="job",
            info=NodeInfo(node=name, incarnation=incarnation, address=name),
            settings=more.get("settings", cluster.settings),
            timeouts=cluster.timeouts,
            draw=lambda: 0.5,
            control=more.get("control"),
        )

    @property
    def role(self) -> NodeRole:
        return self.views[-1].role

    def report(self, phase: NodePhase, generation: int = -1, **more: Any) -> None:
        self.feed(StatusChanged(phase, generation, **more))

    def feed(self, event: Any) -> None:
        for effect in self.session.handle(self.cluster.now, event):
            match effect:
                case ReadState() | WriteState():
                    self.feed(self.answer(effect))
                case DeliverView(view):
                    self.views.append(view)
                case _:
                    self.faults.append(effect)

    def answer(self, effect: ReadState | WriteState) -> Any:
        cluster = self.cluster
        if self.is_cut:
            return CallFailed("no route to host")
        if isinstance(effect, ReadState):
            return StateRead(cluster.state, cluster.token)
        assert effect.token == cluster.token, "nobody else wrote meanwhile"
        cluster.state, cluster.token = effect.state, cluster.token + 1
        cluster.writes += 1
        return StateWritten()


def pair(**timeouts: Any) -> tuple[Cluster, Node, Node]:
    """Return two nodes that run their first generation."""
    cluster = Cluster(**timeouts)
    one, other = cluster.add(), cluster.add()
    cluster.pass_s(0.3)
    assert one.role is other.role is NodeRole.MEMBER
    for node in (one, other):
        node.report(RUNNING, 0)
    return cluster, one, other


def test_an_idle_node_writes_one_heartbeat_per_interval() -> None:
    cluster, *_ = pair()
    cluster.pass_s(1.0)
    writes = cluster.writes
    cluster.pass_s(10.0)
    assert 16 <= cluster.writes - writes <= 20  # Two nodes, ten seconds.


def test_a_lost_control_port_is_stored_again() -> None:
    cluster, port = Cluster(1, 1), ControlPort(4711, b"k" * 16)
    cluster.add("a", control=port)
    for _ in range(2):
        cluster.pass_s(1.5)
        assert cluster.job.nodes["a"].control == port
        older = cluster.job
        older.nodes["a"].control = None
        cluster.state, cluster.token = encode(older), cluster.token + 1


def test_an_older_state_is_ignored() -> None:
    cluster, one, other = pair()
    old, generation = cluster.state, one.views[-1].generation
    other.report(FAILED, 0, failure=Failure(node="n1"))
    cluster.pass_s(0.3)
    assert one.views[-1].generation == generation + 1
    newest, cluster.state = cluster.state, old
    count = len(one.views)
    one.feed(RefreshRequested())
    assert len(one.views) == count
    cluster.state = newest


def test_successive_statuses_are_stored_in_order() -> None:
    cluster, one, other = pair()
    one.is_cut = True
    one.report(SUCCEEDED, 0)
    one.report(LEAVING, 0)
    one.is_cut = False
    one.feed(RefreshRequested())
    assert cluster.job.succeeded == {"n0"}, "storing only LEAVING would have ended the round"
    other.report(SUCCEEDED, 0)
    assert cluster.job.outcome is JobOutcome.SUCCEEDED


def test_statuses_that_wait_for_an_unavailable_store_are_limited() -> None:
    _, one, _ = pair()
    one.is_cut = True
    for _ in range(shared_state.UNSTORED_MAX + 5):
        one.report(RUNNING, 0)
    assert len(one.session._unstored) == shared_state.UNSTORED_MAX


def test_a_node_that_was_suspended_reports_no_loss() -> None:
    cluster, one, other = pair()
    cluster.now += 60.0
    one.feed(Tick())
    other.feed(Tick())
    cluster.pass_s(3.0)
    assert one.views[-1].generation == other.views[-1].generation == 0


def test_in_large_jobs_heartbeats_are_rarer_and_losses_detected_later() -> None:
    cluster = Cluster(least=1, most=100)
    one = cluster.add()
    job = cluster.job
    for number in range(99):
        known = msgspec.structs.replace(job.nodes["n0"])
        info = msgspec.structs.replace(known.info, node=f"x{number}", incarnation=100 + number)
        job.nodes[f"x{number}"] = msgspec.structs.replace(known, info=info)
    cluster.state = encode(job)
    writes = cluster.writes
    cluster.pass_s(14.0)
    assert cluster.writes - writes <= 4  # Every 5 s, and the wait that ended.
    assert len(cluster.job.nodes) == 100
    cluster.pass_s(3.0)
    assert len(cluster.job.nodes) == 1
    assert one.views


@pytest.mark.parametrize(("nodes", "interval_s"), [(2, 1.0), (2, 5.0), (40, 40 * BEAT_S_PER_NODE)])
def test_workers_of_a_stopped_node_exit_before_it_is_lost(nodes: int, interval_s: float) -> None:
    cluster = Cluster(most=nodes, interval_s=interval_s, lost_after_s=3 * interval_s)
    stopped, *_ = [cluster.add() for _ in range(nodes)]
    before = cluster.job.nodes["n0"].heartbeats
    while cluster.job.nodes["n0"].heartbeats == before:
        cluster.pass_s(0.1)
    cluster.pass_s(interval_s - 0.1)  # Its next heartbeat is almost due.
    stop_at = stopped.session.stop_at
    assert stop_at is not None
    while "n0" in cluster.job.nodes:
        cluster.pass_s(0.1, stopped)
    assert cluster.now >= stop_at


def test_workers_of_a_disconnected_node_exit_before_it_is_lost_even_if_the_job_shrinks() -> None:
    cluster = Cluster(most=60, needs_answers=True)
    nodes = [cluster.add() for _ in range(60)]
    cluster.pass_s(10.0)
    for node in nodes[20:]:
        node.is_cut = True
    cluster.pass_s(4.0)
    nodes[0].is_cut = True
    stop_at = nodes[0].session.stop_at
    assert stop_at is not None
    while "n0" in cluster.job.nodes:
        cluster.pass_s(0.1)
    assert len(cluster.job.nodes) == 19
    assert cluster.now >= stop_at


def test_workers_of_a_node_that_is_awake_may_run_even_if_one_missed_heartbeat_makes_it_lost() -> (
    None
):
    cluster, one, _ = pair(interval_s=5.0, lost_after_s=5.0)
    for _ in range(200):
        cluster.pass_s(0.1)
        assert (one.session.stop_at or 0.0) > cluster.now
    assert cluster.job.generation == 0


@pytest.mark.parametrize("is_over", [False, True])
def test_workers_may_run_while_the_store_hangs_and_after_the_end_of_the_job(is_over: bool) -> None:
    cluster, one, other = pair()
    if is_over:
        one.report(SUCCEEDED, 0)
        other.report(SUCCEEDED, 0)
        cluster.pass_s(1.0)
        assert one.role is NodeRole.CLOSED
    else:
        assert one.session.handle(cluster.now, RefreshRequested()) == [ReadState()]
    now = cluster.now
    for _ in range(20):
        due = one.session.next_deadline(now)
        assert due is not None
        assert (one.session.stop_at or 0.0) > due
        now = due
        one.session.handle(now, Tick())


def test_a_live_member_that_does_not_start_is_removed_only_with_absent_s() -> None:
    for absent_s in (None, 60.0):
        cluster, one, other = pair(absent_s=absent_s)
        one.report(READY, 0)
        cluster.pass_s(0.3)
        one.report(RUNNING, 1)
        cluster.pass_s(70.0)
        assert (other.role is NodeRole.FENCED) == (absent_s is not None)


def test_a_late_node_does_not_wait_for_the_report_of_a_failed_job() -> None:
    cluster, one, _ = pair()
    failure = Failure(node="n0", retryable=False)
    one.report(FAILED, 0, failure=failure)
    late = cluster.add()
    assert (late.role, late.views[-1].final) == (NodeRole.CLOSED, True)
    one.report(FAILED, 0, failure=failure, report=b"all of it")
    cluster.pass_s(1.0)
    assert {(view.failure, view.report) for view in late.views} == {(None, b"")}
    reads = late.session.reads_begun
    cluster.pass_s(5.0)
    assert late.session.reads_begun == reads


@pytest.mark.parametrize(
    ("longest_s", "first_s", "last_s"),
    [(1.0, 0.001, 0.5), (0.2, 0.001, 0.1), (0.001, 0.0005, 0.0005)],
)
def test_pauses_after_conflicts_grow_until_a_write_succeeds(
    longest_s: float, first_s: float, last_s: float
) -> None:
    cluster, one, _ = pair(backoff_s_max=longest_s)
    session = one.session
    pauses = []
    session.handle(cluster.now, StatusChanged(SUCCEEDED, 0))
    for _ in range(12):
        (write,) = session.handle(cluster.now, StateRead(cluster.state, cluster.token))
        assert isinstance(write, WriteState)
        assert session.handle(cluster.now, WriteConflict()) == []
        deadline = session.next_deadline(cluster.now)
        assert deadline is not None
        pauses.append(deadline - cluster.now)
        cluster.now = deadline
        assert session.handle(cluster.now, Tick()) == [ReadState()]
    assert pauses == pytest.approx(sorted(pauses))
    assert pauses[0] == pytest.approx(first_s)
    assert pauses[-1] == pytest.approx(last_s)


def test_a_status_reported_during_a_call_is_stored_right_after_it() -> None:
    cluster, one, _ = pair()
    session = one.session
    session.handle(cluster.now, RefreshRequested())
    assert session.handle(cluster.now, StatusChanged(SUCCEEDED, 0)) == []
    (write,) = session.handle(cluster.now, StateRead(cluster.state, cluster.token))
    assert isinstance(write, WriteState)
    assert [change.phase for change in write.changes] == [SUCCEEDED]  # type: ignore[union-attr]


@pytest.mark.parametrize("hangs", [False, True])
def test_unavailable_store_is_abandoned_once_after_awake_time(hangs: bool) -> None:
    cluster, one, _ = pair(unreachable_s=30.0)
    if hangs:
        assert one.session.handle(cluster.now, RefreshRequested()) == [ReadState()]
    one.is_cut = True
    cluster.now += 1000.0  # The host was suspended.
    one.feed(Tick())
    assert not one.faults
    cluster.pass_s(26.0)
    assert not one.faults
    cluster.pass_s(60.0)
    (fault,) = one.faults
    assert isinstance(fault, GiveUp)
    assert fault.unreachable_s >= 30.0
    if not hangs:
        one.is_cut = False
        cluster.pass_s(1.0)
        assert not one.session.problem, "the store is still tried"


def test_a_foreign_state_refuses_a_new_node_but_an_older_one_waits() -> None:
    cluster = Cluster()
    cluster.state = b"a pickle"
    stranger = cluster.add()
    (fault,) = stranger.faults
    assert isinstance(fault, RefuseJoin)
    cluster.state = encode(Job(run_id="another job"))
    assert cluster.add().faults
    cluster, one, _ = pair()
    good, cluster.state = cluster.state, b"spoilt"
    cluster.pass_s(2.0)
    assert one.session.problem
    assert not one.faults
    cluster.state = good
    cluster.pass_s(1.0)
    assert not one.session.problem


def test_an_unexpected_answer_is_invalid_and_changes_nothing() -> None:
    cluster, one, _ = pair()
    before = one.session.status
    for event in (StateRead(None, None), StateWritten(), WriteConflict(), CallFailed("why")):
        with pytest.raises(InvalidEvent):
            one.session.handle(cluster.now, event)
    assert one.session.status is before


def test_a_report_that_makes_the_state_too_large_is_omitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_state, "STATE_BYTES_MAX", 1_000)
    assert decode(encode(Job(run_id="job", report=b"x" * 2_000))).report == b""
    with pytest.raises(ValueError, match="limit is 1000"):
        encode(Job(run_id="x" * 2_000))
    with pytest.raises(ValueError, match="limit of 1000"):
        decode(b"x" * 2_000)


def test_the_state_of_another_version_is_refused_with_a_hint() -> None:
    state = encode(Job(run_id="job"))
    with pytest.raises(ValueError, match="install the same Holdfast on all nodes"):
        decode(state.replace(b"job 1", b"job 9", 1))
    with pytest.raises(ValueError, match="another program wrote it"):
        decode(state[1:])
