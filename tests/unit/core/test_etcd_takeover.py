"""Who comes to lead asks first who lives, and decides about nobody whose fate is open."""

from __future__ import annotations

import pytest

from etcd_machines import GONE, LEASE_S, PREFIX, NodeOnEtcd, Scene
from fake_node import RUN, a_job_of, a_node
from holdfast.core.etcd.calls import Change, KeyValue, Op, Put
from holdfast.core.etcd.keys import JobKeys, JobRecord, NodeRecord, pack
from holdfast.core.etcd.leader import LeaderState, TakeoverRollCall, inherit
from holdfast.core.protocol import JobOutcome, NodePhase
from holdfast.core.rounds import Job, JobPhase, Node

THREE = a_job_of(2, 3, max_restarts=3, settle_s=0.5)
PLACES = JobKeys(PREFIX, RUN)
TERM = 50


def a_job(names: str = "abc", **more: object) -> JobRecord:
    nodes = {
        name: Node(a_node(name, THREE, i).info, 1, NodePhase.READY, -1)
        for i, name in enumerate(names, start=1)
    }
    return JobRecord(Job(run_id=RUN, term=7, nodes=nodes, **more), 1002)  # type: ignore[arg-type]


def a_record(name: str, incarnation: int, call: int) -> bytes:
    return pack(NodeRecord(a_node(name, THREE, incarnation).status(), call))


def there(*those: tuple[str, int, int]) -> tuple[KeyValue, ...]:
    """Return records as they are read: each of a node, an incarnation, the call it heard."""
    return tuple(
        KeyValue(key=PLACES.node(name, incarnation), value=a_record(name, incarnation, call))
        for name, incarnation, call in those
    )


def heard(name: str, incarnation: int, call: int | None) -> tuple[Change, ...]:
    """Return what a watch tells of a node that answered, or is gone."""
    value = None if call is None else a_record(name, incarnation, call)
    return (Change(PLACES.node(name, incarnation), value, 99),)


ALL = there(("a", 1, 3), ("b", 2, 3), ("c", 3, 3))


# Whom to wait for.


def test_all_that_the_job_knows_and_that_are_there_are_asked() -> None:
    roll = TakeoverRollCall(PLACES)
    strangers = there(("d", 4, 3), ("b", 22, 3))
    assert roll.waits(TERM, a_job(), ALL[:2] + strangers, 3, own=1)
    assert roll.unsaid(3, 1002) == (Put(PLACES.call, b"4", 1002),)
    assert not roll.is_answered(heard("d", 4, 4))
    assert not roll.is_answered(heard("b", 22, 4))
    assert not roll.is_answered(heard("b", 2, 3)), "that is an answer to an earlier call"
    assert roll.is_answered(heard("b", 2, 4))


def test_who_is_gone_is_not_waited_for() -> None:
    roll = TakeoverRollCall(PLACES)
    assert roll.waits(TERM, a_job(), ALL, 3, own=1)
    assert not roll.is_answered(heard("b", 2, None))
    assert roll.is_answered(heard("c", 3, 4))


def test_the_number_is_higher_than_any_that_was_heard() -> None:
    roll = TakeoverRollCall(PLACES)
    assert roll.waits(TERM, a_job("ab"), there(("a", 1, 9), ("b", 2, 0)), 0, own=1)
    assert roll.unsaid(0, 1002) == (Put(PLACES.call, b"10", 1002),)


def test_in_one_term_there_is_one_call() -> None:
    roll = TakeoverRollCall(PLACES)
    assert roll.waits(TERM, a_job(), ALL, 3, own=1)
    some = there(("a", 1, 3), ("b", 2, 4), ("c", 3, 3))
    assert roll.waits(TERM, a_job(), some, 4, own=1)
    assert roll.unsaid(4, 1002) == (), "it is stored"
    assert not roll.waits(TERM, a_job(), there(("a", 1, 3), ("b", 2, 4), ("c", 3, 4)), 4, own=1)
    assert roll.waits(TERM + 9, a_job(), ALL, 4, own=1), "with another term there is another"


@pytest.mark.parametrize(
    "record",
    [None, a_job(outcome=JobOutcome.FAILED), JobRecord(Job(run_id=RUN, term=TERM), 1)],
    ids=["no job", "a job that ended", "its own"],
)
def test_where_there_is_nothing_to_decide_nobody_is_asked(record: JobRecord | None) -> None:
    assert not TakeoverRollCall(PLACES).waits(TERM, record, ALL, 3, own=1)


def test_records_that_cannot_be_read_are_nobodys() -> None:
    roll = TakeoverRollCall(PLACES)
    strange = (
        KeyValue(key=PLACES.node("b", 2), value=b"hf9="),
        KeyValue(key=PLACES.nodes + b"no/such/name", value=a_record("c", 3, 0)),
    )
    assert not roll.waits(TERM, a_job(), strange, 3, own=1)


# What is inherited.


def test_a_job_is_gone_on_with_while_one_of_its_nodes_is_there() -> None:
    record = a_job()
    job = inherit(record, {("c", 3), ("z", 9)}, TERM, RUN, LEASE_S)
    assert job is record.job
    assert job.term == TERM
    assert inherit(a_job(), {("a", 1)}, 3, RUN, LEASE_S).term == 8, "later than any, whatever"


def test_of_a_job_nobody_is_left_of_only_its_end_is_inherited() -> None:
    others = {("a", 11), ("z", 9)}
    job = inherit(a_job(), others, TERM, RUN, LEASE_S)
    assert (job.nodes, job.term, job.silence_s) == ({}, TERM, LEASE_S)
    ended = a_job(outcome=JobOutcome.SUCCEEDED, phase=JobPhase.CLOSED)
    assert inherit(ended, set(), TERM, RUN, LEASE_S) is ended.job
    assert inherit(None, others, TERM, RUN, LEASE_S).nodes == {}


# On etcd.


def headless() -> tuple[Scene, NodeOnEtcd, NodeOnEtcd]:
    """Return two of three nodes whose leader has just ended; the second has died too."""
    scene = Scene("abc", THREE)
    a, b, c = scene.nodes.values()
    a.crash()
    c.crash()
    scene.end_lease_at(scene.places.leader)
    scene.run()
    return scene, b, c


def decided(scene: Scene, node: NodeOnEtcd) -> list[Op]:
    """Return what a node has stored of its decisions."""
    return [
        op
        for one in node.sent
        for op in getattr(one, "success", ())
        if isinstance(op, Put) and op.key.startswith((scene.places.job, scene.places.views))
    ]


def test_nothing_is_decided_before_the_fate_of_all_is_known() -> None:
    scene, b, _ = headless()
    assert b.leadership.post is LeaderState.LOADING
    assert decided(scene, b) == []
    assert scene.job.generation == 0
    scene.wait(LEASE_S + 1.0)
    assert scene.leader is b
    job = scene.job
    assert (job.phase, job.round) == (JobPhase.FORMING, 0), "no round was made with the dead"
    assert [*job.nodes] == ["b"]


def test_where_all_live_it_takes_no_time() -> None:
    scene = Scene("abc", THREE)
    scene.leader.crash()
    scene.end_lease_at(scene.places.leader)
    scene.run()
    assert scene.leader.name in "bc"
    assert {node.node.generation for node in scene.nodes.values()} == {1}
    assert {node.record.call for node in scene.nodes.values() if node.record} == {1}


def test_who_leads_on_after_a_lost_session_asks_nobody() -> None:
    scene = Scene("abc", THREE)
    a = scene.leader
    for name in "bc":
        scene.nodes[name].held = {"news"}
    a.drop()
    a.open()
    scene.run()
    assert scene.leader is a
    assert "shared/call" not in scene.keys


def test_a_new_node_does_not_end_the_waiting() -> None:
    scene, b, _ = headless()
    scene.join("d")
    assert b.leadership.post is LeaderState.LOADING
    scene.wait(LEASE_S + 1.0)
    assert scene.leader is b
    assert {info.node for info in scene.job.members} == {"b", "d"}


def test_who_is_to_go_while_it_waits_makes_way() -> None:
    scene, b, _ = headless()
    d = scene.join("d")
    b.leave()
    scene.run()
    assert b.has_left
    assert scene.read(scene.places.leader) is not None, "another is at it"
    scene.wait(LEASE_S + 1.0)
    assert scene.leader is d


def test_who_is_deposed_while_it_waits_waits_no_more() -> None:
    scene, b, _ = headless()
    b.leadership.election.is_open = False
    scene.end_lease_at(scene.places.leader)
    scene.run()
    assert (b.leadership.post, b.leadership.election.term) == (LeaderState.FOLLOWING, 0)
    assert len(b.watches) == 2, "the watch it waited with is ended"


def test_a_session_that_is_lost_while_it_waits_is_gone_on_with() -> None:
    scene, b, _ = headless()
    b.end_watch(GONE)
    assert b.closed
    b.open()
    scene.run()
    assert b.leadership.post is LeaderState.LOADING
    scene.wait(LEASE_S + 1.0)
    assert scene.leader is b
    assert [*scene.job.nodes] == ["b"]


def test_a_call_on_a_lease_that_ended_makes_it_read_again() -> None:
    scene = Scene("abc", THREE)
    a, b, c = scene.nodes.values()
    a.crash()
    b.held = {"asked"}
    c.leadership.election.is_open = False
    scene.end_lease_at(scene.places.leader)
    scene.run()
    while not any(_calls(scene, one.request) for one in b.asked):
        b.carry_out()
        b.answer()
    scene.end_lease_at(scene.places.job)
    b.held = set()
    scene.run()
    scene.wait(6.0)
    assert not b.closed
    assert scene.leader is b
    assert {info.node for info in scene.job.members} == {"b", "c"}


def _calls(scene: Scene, request: object) -> bool:
    ops = getattr(request, "success", ())
    return any(isinstance(op, Put) and op.key == scene.places.call for op in ops)
