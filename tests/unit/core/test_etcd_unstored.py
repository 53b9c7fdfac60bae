"""What a leader writes next: the job before the views, in portions that etcd takes."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from fake_node import RUN
from holdfast.core.etcd import leader
from holdfast.core.etcd.calls import Delete, Grant, Op, Put, Txn, TxnDone
from holdfast.core.etcd.keys import JobKeys, JobRecord, pack, unpack
from holdfast.core.etcd.leader import OPS_MAX, WRITE_BYTES_MAX, LedJob, PendingWrites
from holdfast.core.protocol import NodeRole, View
from holdfast.core.rounds import Job
from holdfast.testing.sim import etcd as sim_etcd
from holdfast.testing.sim.etcd import SimEtcd

if TYPE_CHECKING:
    import pytest

PLACES = JobKeys("/p", RUN)
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


def unstored(call: int = 0) -> tuple[PendingWrites, LedJob]:
    lead = LedJob(0.0, Job(run_id=RUN), step_s=1.0, call=call)
    return PendingWrites(PLACES, lead, LEASE), lead


def size_of(ops: list[Op]) -> int:
    return sum(len(op.value) for op in ops if isinstance(op, Put))


def is_taken(ops: list[Op]) -> bool:
    etcd = SimEtcd()
    etcd.perform(0.0, Grant(60))
    return isinstance(etcd.perform(0.0, Txn((), tuple(ops))), TxnDone)


def test_at_first_there_is_nothing_to_store() -> None:
    some, _ = unstored(call=4)
    assert some.is_empty
    assert not some.is_urgent
    assert some.take() == ([], [])


def test_the_job_comes_first_and_all_is_on_the_lease_of_the_job() -> None:
    some, lead = unstored()
    some.tell(a_view("a"))
    lead.is_changed = True
    lead.call = 1
    assert some.is_urgent
    ops, views = some.take()
    assert [op.key for op in ops] == [PLACES.job, PLACES.call, PLACES.view("a", 1)]
    assert all(isinstance(op, Put) and op.lease == LEASE for op in ops)
    assert views == [a_view("a")]
    assert isinstance(ops[0], Put)
    assert unpack(JobRecord, ops[0].value) == JobRecord(lead.job, LEASE)
    assert isinstance(ops[1], Put)
    assert ops[1].value == b"1"
    assert some.is_empty
    assert not lead.is_changed


def test_a_roll_call_alone_is_urgent_and_stored_once() -> None:
    some, lead = unstored(call=4)
    lead.call = 5
    assert some.is_urgent
    assert some.take() == ([Put(PLACES.call, b"5", LEASE)], [])
    assert some.is_empty


def test_of_several_views_for_a_node_the_newest_is_stored() -> None:
    some, _ = unstored()
    for revision in (1, 2, 3):
        some.tell(a_view("a", revision))
        some.tell(a_view("b", revision))
    ops, views = some.take()
    assert views == [a_view("a", 3), a_view("b", 3)]
    assert ops == [Put(PLACES.view(view.node, 1), pack(view), LEASE) for view in views]


def test_no_portion_has_more_operations_than_etcd_takes() -> None:
    assert OPS_MAX <= sim_etcd.OPS_MAX
    some, lead = unstored()
    lead.is_changed = True
    for i in range(2 * OPS_MAX + 5):
        some.tell(a_view(f"n{i}"))
    sizes, told = [], []
    while not some.is_empty:
        ops, views = some.take()
        assert is_taken(ops)
        sizes.append(len(ops))
        told += [view.node for view in views]
    assert sizes == [OPS_MAX, OPS_MAX, 6]
    assert told == [f"n{i}" for i in range(2 * OPS_MAX + 5)]


def test_no_portion_has_more_bytes_than_etcd_takes() -> None:
    some, lead = unstored()
    draw = Random(3)
    lead.is_changed = True
    lead.job.report = draw.randbytes(WRITE_BYTES_MAX // 2)
    for i in range(10):
        some.tell(a_view(f"n{i}", report=draw.randbytes(WRITE_BYTES_MAX // 4)))
    told = 0
    while not some.is_empty:
        ops, views = some.take()
        assert ops
        assert size_of(ops) <= WRITE_BYTES_MAX
        assert is_taken(ops)
        told += len(views)
    assert told == 10


def test_what_is_larger_than_a_portion_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "WRITE_BYTES_MAX", 100)
    some, lead = unstored()
    lead.is_changed = True
    some.tell(a_view("a"))
    some.tell(a_view("b"))
    keys = []
    while not some.is_empty:
        keys.append([op.key for op in some.take()[0]])
    assert keys == [[PLACES.job], [PLACES.view("a", 1)], [PLACES.view("b", 1)]]


def test_a_decision_made_meanwhile_comes_before_the_views_that_are_left() -> None:
    some, lead = unstored()
    lead.is_changed = True
    for i in range(OPS_MAX + 5):
        some.tell(a_view(f"n{i}"))
    some.take()
    lead.is_changed = True
    some.tell(a_view(f"n{OPS_MAX + 1}", 2))
    ops, views = some.take()
    assert ops[0].key == PLACES.job
    assert a_view(f"n{OPS_MAX + 1}", 2) in views
    assert a_view(f"n{OPS_MAX + 1}", 1) not in views


def test_who_is_gone_is_told_nothing_and_leaves_nothing() -> None:
    some, _ = unstored()
    some.tell(a_view("a"))
    some.forget("a", 1)
    assert not some.is_urgent
    assert not some.is_empty
    assert some.take() == ([Delete(PLACES.view("a", 1))], [])
    assert some.is_empty


def test_who_is_back_before_its_view_was_taken_away_keeps_the_new_one() -> None:
    some, _ = unstored()
    some.forget("a", 1)
    some.tell(a_view("a"))
    ops, _ = some.take()
    assert ops == [Put(PLACES.view("a", 1), pack(a_view("a")), LEASE)]
    assert is_taken(ops), "etcd refuses to put and delete a key at once"
    assert some.is_empty


def test_many_leavings_are_cleared_up_in_portions_too() -> None:
    some, _ = unstored()
    for i in range(OPS_MAX + 1):
        some.remove(PLACES.view(f"n{i}", 1))
    sizes = []
    while not some.is_empty:
        sizes.append(len(some.take()[0]))
    assert sizes == [OPS_MAX, 1]
