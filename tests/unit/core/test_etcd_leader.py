"""The leader on etcd: limits of writes, waits, and broken jobs; `etcd_leader` has transcripts of the rest."""

from __future__ import annotations

from random import Random

import pytest

from fake_node import RUN, a_job_of, a_node
from holdfast.core.etcd import leader
from holdfast.core.etcd.calls import Delete, Grant, Op, Put, Txn, TxnDone
from holdfast.core.etcd.keys import JobKeys, pack
from holdfast.core.etcd.leader import OPS_MAX, WRITE_BYTES_MAX, LedJob, NodeReported, PendingWrites
from holdfast.core.job_settings import JobSettings
from holdfast.core.machine import TICK
from holdfast.core.phases import JobOutcome, NodeRole
from holdfast.core.protocol import View
from holdfast.core.rounds import Job, JobPhase, NodeLost, NodesLost, Rounds
from simulator.etcd_model import SimEtcd

KEYS = JobKeys("/p", RUN)
LEASE = 1001


def a_view(node: str, revision: int = 1, report: bytes = b"") -> View:
    return View(
        run_id=RUN,
        node=node,
        incarnation=1,
        term=1,
        revision=revision,
        role=NodeRole.WAITING,
        report=report,
    )


def pending() -> tuple[PendingWrites, LedJob]:
    led = LedJob(0.0, Job(run_id=RUN), step_s=1.0)
    return PendingWrites(KEYS, led, LEASE), led


def take_all(writes: PendingWrites) -> list[list[Op]]:
    """Return all portions; etcd accepts each."""
    portions = []
    while not writes.is_empty:
        etcd = SimEtcd()
        etcd.perform(0.0, Grant(60))
        portions.append(writes.take()[0])
        assert isinstance(etcd.perform(0.0, Txn((), tuple(portions[-1]))), TxnDone)
    return portions


def test_no_portion_has_more_operations_than_etcd_accepts() -> None:
    writes, led = pending()
    led.is_changed = True
    for i in range(2 * OPS_MAX + 5):
        writes.add(a_view(f"n{i}"))
    for i in range(OPS_MAX):
        writes.delete(KEYS.view(f"old{i}", 1))
    assert [len(ops) for ops in take_all(writes)] == [OPS_MAX, OPS_MAX, OPS_MAX, 6]


def test_no_portion_has_more_bytes_than_etcd_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    writes, led = pending()
    draw = Random(3)
    led.is_changed = True
    led.job.report = draw.randbytes(WRITE_BYTES_MAX // 2)
    for i in range(10):
        writes.add(a_view(f"n{i}", report=draw.randbytes(WRITE_BYTES_MAX // 4)))
    portions = take_all(writes)
    sizes = [sum(len(op.value) for op in ops if isinstance(op, Put)) for ops in portions]
    assert max(sizes) <= WRITE_BYTES_MAX
    assert sum(map(len, portions)) == 11
    # A record above the limit is written alone.
    monkeypatch.setattr(leader, "WRITE_BYTES_MAX", 100)
    led.is_changed = True
    writes.add(a_view("a"))
    assert [[op.key for op in ops] for ops in take_all(writes)] == [[KEYS.job], [KEYS.view("a", 1)]]


def test_an_invalid_roll_call_number_is_ignored() -> None:
    led = LedJob(0.0, Job(run_id=RUN), step_s=1.0, roll_call=7)
    status = a_node("a", a_job_of(1, 1), 1).status()
    led.handle(0.0, NodeReported(status, 10**18 - 1))
    assert led.roll_call == 7
    led.handle(0.0, NodeReported(status, 900))  # The stored number was lost.
    assert led.roll_call == 900


def test_a_new_decision_is_written_before_the_remaining_views() -> None:
    writes, led = pending()
    for i in range(OPS_MAX + 5):
        writes.add(a_view(f"n{i}"))
    writes.take()
    led.is_changed = True
    writes.add(a_view(f"n{OPS_MAX + 1}", 2))
    ops, views = writes.take()
    assert ops[0].key == KEYS.job
    assert [view.revision for view in views if view.node == f"n{OPS_MAX + 1}"] == [2]


def test_the_view_of_a_node_that_left_and_returned_is_put_or_deleted_but_not_both() -> None:
    writes, _ = pending()
    writes.add(a_view("a"))
    writes.forget("a", 1)
    assert not writes.is_urgent
    assert writes.take() == ([Delete(KEYS.view("a", 1))], [])
    writes.forget("a", 1)
    writes.add(a_view("a"))
    # etcd rejects a put and a deletion of one key in one transaction.
    assert take_all(writes) == [[Put(KEYS.view("a", 1), pack(a_view("a")), LEASE)]]


class Led:
    """A leader's job, and nodes that apply their views."""

    def __init__(self, names: str, settings: JobSettings, **more: object) -> None:
        self.led = LedJob(0.0, Job(run_id=RUN), step_s=1.0, **more)  # type: ignore[arg-type]
        self.nodes = {name: a_node(name, settings, i) for i, name in enumerate(names, 1)}
        for name in names:
            self.answer(name)

    def report(self, status: object, roll_call: int = 0) -> list[View]:
        return self.deliver(self.led.handle(0.0, NodeReported(status, roll_call)))  # type: ignore[arg-type]

    def answer(self, name: str) -> list[View]:
        return self.report(self.nodes[name].status(), self.led.roll_call)

    def lose(self, *names: str) -> list[View]:
        lost = [NodeLost(name, self.nodes[name].info.incarnation, "silence") for name in names]
        return self.deliver(self.led.handle(0.0, NodesLost(tuple(lost))))

    def deliver(self, views: list[View]) -> list[View]:
        for view in views:
            node = self.nodes[view.node]
            if node.receive(view) and node.apply():
                self.report(node.status())
        return views


def test_a_node_that_fails_and_leaves_is_charged_for_the_failure() -> None:
    one = Led("abc", a_job_of(2, 3, max_restarts=3, settle_s=0.5))
    one.led.handle(0.0, TICK)
    one.deliver(one.led.handle(1.0, TICK))
    one.report(one.nodes["b"].fail())
    one.report(one.nodes["b"].leave())
    one.lose("b")  # It removed its keys.
    assert one.led.job.restarts == 0
    one.answer("a")
    one.answer("c")
    assert one.led.job.restarts == 1
    assert [info.node for info in one.led.job.members] == ["a", "c"]


def test_a_failure_of_the_last_generation_is_not_a_response_in_this_one() -> None:
    one = Led("abc", a_job_of(1, 4, max_restarts=3, settle_s=0.5))
    one.led.handle(0.0, TICK)
    one.deliver(one.led.handle(1.0, TICK))
    one.report(one.nodes["a"].fail())
    one.lose("b")  # The failure of `a` is held until `c` responds.
    assert one.led.job.generation == 1
    one.report(one.nodes["c"].fail())
    assert one.led.job.generation == 1
    one.answer("a")
    assert one.led.job.generation == 2


def test_only_former_members_receive_the_failure_report() -> None:
    one = Led("abc", a_job_of(2, 3))
    one.lose("c")
    one.report(one.nodes["a"].fail(), roll_call=0)
    one.answer("b")
    assert one.led.job.outcome is JobOutcome.FAILED
    assert not one.led.job.final
    one.nodes["z"] = a_node("z", a_job_of(2, 3), 9)
    (received,) = one.answer("z")
    assert (received.role, received.final, received.failure) == (NodeRole.CLOSED, True, None)
    one.answer("c")
    one.nodes["a"].report = b"the whole report"
    one.report(one.nodes["a"].status())
    views = [view for s in range(1, 99) for view in one.led.handle(float(s), TICK)]
    reports = {view.node: view.report for view in views}
    assert (reports["c"], reports["z"]) == (b"the whole report", b"")
    assert one.led.is_changed


def test_a_wait_counts_only_while_the_leader_is_awake() -> None:
    one = Led("ab", a_job_of(1, 3, settle_s=2.5))
    led = one.led
    assert led.next_deadline(0.0) == pytest.approx(1.0)
    assert led.handle(100.0, TICK) == []  # Only one step of a long gap counts.
    assert led.next_deadline(100.0) == pytest.approx(101.0)
    assert led.handle(101.0, TICK) == []
    assert led.next_deadline(101.0) == pytest.approx(101.5)
    assert {view.role for view in led.handle(101.5, TICK)} == {NodeRole.MEMBER}
    assert led.next_deadline(101.5) is None


def test_only_changes_that_a_successor_needs_are_stored() -> None:
    one = Led("abc", a_job_of(2, 3, max_restarts=3))
    one.led.is_changed = False
    one.answer("a")
    one.report(one.nodes["c"].fail())
    assert one.lose() == []
    assert not one.led.is_changed
    one.answer("a")
    one.answer("b")
    assert one.led.is_changed


class Broken(Rounds):
    def check(self) -> None:
        if len(self.job.nodes) > 1:
            raise ValueError("too many")


def test_a_job_that_breaks_an_invariant_is_closed() -> None:
    one = Led("ab", a_job_of(2, 3), rounds=Broken)
    assert one.led.broken == "ValueError: too many"
    assert (one.led.job.phase, one.led.is_changed) == (JobPhase.CLOSED, True)
    with pytest.raises(ValueError, match="too many"):
        Led("ab", a_job_of(2, 3), rounds=Broken, strict=True)
