"""The leader of a job on etcd: what it stores, when, and what its successors make of it."""

from __future__ import annotations

import msgspec
import pytest

from etcd_machines import GONE, LEASE_S, TWO, NodeOnEtcd, Scene, settled
from fake_node import a_job_of, a_node
from holdfast.core.etcd.calls import (
    Delete,
    Grant,
    KeepAlive,
    KeptAlive,
    Op,
    ProblemKind,
    Put,
    Revoke,
    Txn,
)
from holdfast.core.etcd.keys import JobRecord, pack, unpack
from holdfast.core.etcd.leader import JOB_KEEP_ALIVE_S, JOB_KEEP_S, LeaderState
from holdfast.core.protocol import JobOutcome, NodePhase, NodeRole, View
from holdfast.core.rounds import JobPhase

THREE = a_job_of(2, 3, max_restarts=3, settle_s=0.5)


def writes_of(scene: Scene, node: NodeOnEtcd) -> list[tuple[Op, ...]]:
    """Return what a node asked for as the leader, transaction by transaction."""
    leader = scene.places.leader
    return [
        one.success
        for one in node.sent
        if isinstance(one, Txn) and any(each.key == leader and each.equals for each in one.compare)
    ]


def kinds_of(scene: Scene, ops: tuple[Op, ...]) -> list[str]:
    root = len(scene.places.root)
    return [f"{type(op).__name__} {op.key[root:].decode().split('/')[0]}" for op in ops]


# Deciding and storing.


def test_nodes_are_told_of_their_round_by_whoever_leads() -> None:
    scene = Scene("ab")
    a, b = scene.nodes.values()
    assert scene.leader is a
    assert [view.role for view in b.views] == [NodeRole.MEMBER]
    assert {one.node.rank for one in (a, b)} == {0, 1}
    assert (scene.job.phase, scene.job.generation) == (JobPhase.ACTIVE, 0)
    assert a.views[-1].silence_s == LEASE_S


def test_the_job_is_stored_before_what_nodes_are_told_of_it() -> None:
    scene = Scene("ab")
    ops = [kinds_of(scene, ops) for ops in writes_of(scene, scene.leader)]
    assert ["Put job", "Put views"] in ops
    assert ["Put job", "Put views", "Put views"] in ops
    assert not [one for one in ops if "Put views" in one and one[0] != "Put job"]


def test_one_write_is_under_way_at_a_time_and_the_next_takes_all() -> None:
    scene = Scene("a", a_job_of(1, 9, settle_s=5.0))
    a = scene.leader
    a.held = {"asked"}
    for name in "bcde":
        scene.join(name)
    assert len(a.asked) == 1
    a.carry_out()
    a.answer()
    assert len(a.asked) == 1
    before = len(a.sent)
    a.held = set()
    scene.run()
    assert len(a.sent) == before + 1
    assert scene.job.nodes.keys() == set("abcde")
    assert all(scene.nodes[name].node.role is NodeRole.WAITING for name in "bcde")


def test_large_decisions_are_stored_in_portions() -> None:
    scene = Scene("", a_job_of(8, 8))
    for name in "abcdefgh":
        node = scene.add(name)
        node.leadership.ops_max = 4
        node.open()
        scene.run()
    sizes = [len(ops) for ops in writes_of(scene, scene.leader)]
    assert sizes[-3:] == [4, 4, 1]
    assert {node.node.role for node in scene.nodes.values()} == {NodeRole.MEMBER}
    assert {node.node.rank for node in scene.nodes.values()} == set(range(8))


def test_a_deposed_leaders_write_does_nothing() -> None:
    scene = Scene("ab")
    a, b = scene.nodes.values()
    a.held = {"asked", "news"}
    b.say(b.node.fail())
    scene.run()
    a.hear()
    assert a.leadership.lead is not None
    (write,) = [one for one in a.asked if isinstance(one.request, Txn)]
    scene.end_lease_at(scene.places.leader)
    scene.run()
    assert scene.read(scene.places.leader) is not None, "another leads"
    before = scene.keys, scene.job, scene.etcd.revision
    a.carry_out(a.asked.index(write))
    assert (scene.keys, scene.job, scene.etcd.revision) == before
    a.answer()
    assert a.leadership.post is LeaderState.FOLLOWING
    assert not a.closed, "its session goes on"


def test_who_is_deposed_while_it_takes_over_stops_at_once() -> None:
    scene = Scene()
    a = scene.add("a")
    a.held = {"asked", "news"}
    a.open()
    while a.leadership.post is not LeaderState.LOADING:
        a.carry_out()
        a.answer()
    scene.end_lease_at(scene.places.leader)
    while a.asked and a.leadership.post is LeaderState.LOADING:
        a.carry_out()
        a.answer()
    assert (a.leadership.post, a.leadership.election.term) == (LeaderState.FOLLOWING, 0)


def test_answers_to_what_it_asked_in_an_earlier_term_mean_nothing() -> None:
    scene = Scene("a", a_job_of(1, 5, settle_s=9.0))
    a = scene.leader
    first = a.leadership.election.term
    a.held = {"asked"}
    scene.join("b")
    a.carry_out()
    late = a.answers.pop()
    scene.nodes["b"].leadership.election.is_open = False
    scene.etcd.perform(scene.now, Txn((), (Delete(scene.places.leader),)))
    a.held = set()
    scene.run()
    assert scene.leader is a
    assert a.leadership.election.term > first
    a.held = {"asked"}
    for name in "cd":
        scene.join(name)
    assert len(a.asked) == 1
    a.answers.append(late)
    scene.run()
    assert len(a.asked) == 1, "one write is under way, and that was not its answer"
    a.held = set()
    scene.run()
    assert [*scene.job.nodes] == [*"abcd"]


def test_a_late_write_of_its_own_does_nothing_and_makes_it_read_again() -> None:
    """The first write is slow, is given up, and is carried out after the session was replaced."""
    scene = Scene("a", a_job_of(1, 3, settle_s=5.0))
    a = scene.leader
    a.held = {"asked"}
    scene.join("b")
    (late,) = a.asked
    a.lose(GONE)
    assert a.closed[-1].why == GONE.why
    a.asked.clear()
    a.open()
    a.held = set()
    scene.run()
    assert scene.leader is a
    term = a.leadership.election.term
    stored = scene.job
    assert [*stored.nodes] == ["a", "b"]
    revision = scene.etcd.revision
    scene.etcd.perform(scene.now, late.request)
    assert scene.etcd.revision == revision, "the job is not what it was when that was decided"

    # The other way round: what was given up is carried out between its reading and its writing.
    a.held = {"asked"}
    scene.join("c")
    (late,) = a.asked
    a.lose(GONE)
    a.asked.clear()
    a.open()
    while a.leadership.post is not LeaderState.LEADING:
        a.carry_out()
        a.answer()
    assert [*scene.job.nodes] == ["a", "b"]
    scene.etcd.perform(scene.now, late.request)
    assert [*scene.job.nodes] == ["a", "b", "c"]
    a.held = set()
    scene.run()
    assert a.leadership.election.term == term
    assert scene.leader is a
    assert [*scene.job.nodes] == ["a", "b", "c"]
    assert a.job.revision >= scene.job.revision
    assert {node.node.role for node in scene.nodes.values()} == {NodeRole.MEMBER}


def test_numbers_of_views_are_never_given_twice() -> None:
    """A leader whose session is replaced again and again, each time in the same term."""
    scene = Scene("ab", a_job_of(3, 3))
    a = scene.leader
    for session in range(3):
        a.drop()
        if session == 2:
            scene.join("c")
        a.open()
        scene.run()
    told = [(view.term, view.revision, view.role, view.present) for view in a.views]
    assert len({one[:2] for one in told}) == len({*told})
    assert a.node.role is NodeRole.MEMBER, "it would pass over a view whose number it has"


def test_who_is_out_and_gone_is_told_nothing() -> None:
    scene = Scene("abc", THREE)
    b = scene.nodes["b"]
    assert "views/b/2" in scene.keys
    b.node.begin_anew(55)
    b.say(b.node.status())
    scene.run()
    assert [key for key in scene.keys if key.startswith("views/b")] == ["views/b/37"]


def test_the_leader_knows_which_node_is_its_own() -> None:
    scene = Scene("ab")
    a = scene.leader
    assert a.leadership.lead is not None
    assert a.leadership.lead.own == a.node.info.incarnation
    a.obeys = False
    a.drop()
    a.open()
    scene.run()
    assert a.leadership.lead.own == a.node.info.incarnation, "it has not spoken since"
    a.node.begin_anew(77)
    a.say(a.node.status())
    scene.run()
    assert a.leadership.lead.own == 77


# Successors.


def test_where_everybody_knows_everything_nothing_is_written() -> None:
    scene = Scene("abc", THREE)
    a = scene.leader
    before = scene.etcd.load.writes
    a.obeys = False
    a.drop()
    a.open()
    scene.run()
    assert scene.leader is a
    assert scene.etcd.load.writes == before


def test_what_was_decided_and_not_told_is_told_by_who_leads_next() -> None:
    scene = Scene("abc", THREE)
    a, b, c = scene.nodes.values()
    a.held = {"asked"}
    c.say(c.node.leave())
    scene.run()
    (write,) = a.asked
    assert isinstance(write.request, Txn)
    job_only = tuple(op for op in write.request.success if op.key == scene.places.job)
    scene.etcd.perform(scene.now, Txn(write.request.compare, job_only))
    assert (scene.job.generation, b.node.generation) == (1, 0)
    a.asked.clear()
    a.drop()
    a.held = set()
    a.open()
    scene.run()
    assert {a.node.generation, b.node.generation} == {1}
    assert (scene.job.round, scene.job.generation) == (1, 1), "it is the same decision"


def test_a_view_that_cannot_be_read_is_told_again() -> None:
    scene = Scene("ab", a_job_of(2, 3, max_restarts=3, settle_s=0.5))
    a, b = scene.nodes.values()
    scene.wait(1.0)
    assert b.node.generation == 0
    scene.ask(Put(scene.places.view("b", 2), b"nothing that can be read"))
    a.drop()
    a.open()
    scene.run()
    assert scene.leader is a
    found = scene.read(scene.places.view("b", 2))
    assert found is not None
    view = unpack(View, found.value)
    assert view is not None
    assert (view.role, view.generation) == (NodeRole.MEMBER, 0)


def test_lost_new_and_failed_nodes_found_by_a_successor_cost_one_round() -> None:
    scene = Scene("abc", THREE)
    a, b, c = scene.nodes.values()
    for node in (b, c):
        node.held = {"news"}  # Nobody takes over yet.
    a.crash()
    scene.end_lease_at(scene.places.leader)
    b.say(b.node.fail())
    d = scene.add("d")
    d.held = {"news"}
    d.session.leadership.election.is_open = False
    d.open()
    scene.run()
    assert d.record is not None
    for node in (b, c, d):
        node.held = set()
    scene.run()
    job = scene.job
    assert (job.round, job.generation, job.restarts) == (1, 1, 0)
    assert {info.node for info in job.members} == set("bcd")
    assert "a was lost" in job.why
    assert {node.node.generation for node in scene.nodes.values()} == {1}


def test_a_job_nobody_is_left_of_begins_anew() -> None:
    scene = Scene("ab")
    a, b = scene.nodes.values()
    a.say(a.node.fail())
    scene.run()
    assert scene.job.restarts == 1
    a.crash()
    b.crash()
    scene.now += 10.0
    scene.etcd.expire(scene.now)
    assert scene.keys == ["job", "shared/call", "views/a/1", "views/b/2"]
    for name in "cd":
        scene.join(name)
    job = scene.job
    assert (job.restarts, job.generation, job.round) == (0, 0, 0)
    assert [*job.nodes] == ["c", "d"]
    assert not [key for key in scene.keys if key.startswith(("views/a", "views/b"))]


def test_a_job_that_ended_stays_ended() -> None:
    scene = Scene("ab")
    for node in [*scene.nodes.values()]:
        node.say(node.node.succeed())
    scene.run()
    assert {node.node.role for node in scene.nodes.values()} == {NodeRole.CLOSED}
    for node in [*scene.nodes.values()]:
        node.crash()
    scene.now += 10.0
    scene.etcd.expire(scene.now)
    late = scene.join("c")
    assert (late.node.role, late.views[-1].outcome) == (NodeRole.CLOSED, JobOutcome.SUCCEEDED)


def without_leases(scene: Scene) -> list[NodeOnEtcd]:
    """Take all sessions and all leases from nodes that live; return them."""
    nodes = [*scene.nodes.values()]
    for node in nodes:
        node.drop()
    scene.now += 20.0
    scene.etcd.expire(scene.now)
    assert not [key for key in scene.keys if key.startswith(("nodes/", "shared/leader"))]
    return nodes


@pytest.mark.parametrize("first_leads", [True, False])
def test_all_leases_lost_at_once_and_all_nodes_back_the_round_is_carried_on(
    *, first_leads: bool
) -> None:
    scene = Scene("abc", THREE)
    before = scene.job
    assert len(before.members) == 3
    nodes = without_leases(scene)
    if first_leads:  # Before anybody has said anything.
        nodes[0].obeys = False
        nodes[0].open()
        scene.run()
        assert scene.leader is nodes[0]
        nodes[0].obeys = True
        nodes[0].say(nodes[0].node.status())
    for node in nodes[int(first_leads) :]:
        node.open()
    scene.run()
    scene.wait(2.0)
    job = scene.leader.job
    assert (job.phase, job.round, job.generation) == (JobPhase.ACTIVE, 0, 0)
    assert [info.incarnation for info in job.members] == [
        info.incarnation for info in before.members
    ]
    assert {node.node.generation for node in nodes} == {0}
    assert {node.node.phase for node in nodes} == {NodePhase.RUNNING}
    assert job.term > before.term


def test_a_round_that_is_not_whole_again_is_mended() -> None:
    scene = Scene("abc", THREE)
    first, second, third = without_leases(scene)
    third.crash()
    first.obeys = False
    first.open()
    scene.run()
    first.obeys = True
    first.say(first.node.status())
    second.open()
    scene.run()
    assert scene.job.phase is JobPhase.RECOVERING
    scene.wait(6.0)
    assert (scene.job.phase, scene.job.generation, scene.job.restarts) == (JobPhase.ACTIVE, 1, 0)
    assert {first.node.generation, second.node.generation} == {1}


def test_the_order_of_nodes_is_that_of_their_coming() -> None:
    scene = Scene("", a_job_of(3, 3))
    nodes = [scene.add(name) for name in "cab"]
    for node in nodes:
        node.session.leadership.election.is_open = False
        node.open()
        scene.run()
    leader = nodes[2]
    leader.session.leadership.election.is_open = True
    leader.drop()
    leader.open()
    scene.run()
    assert [info.node for info in scene.job.members] == ["c", "a", "b"]


# Roll calls on etcd.


def test_a_failure_waits_until_the_others_have_put_their_records_again() -> None:
    scene = Scene("abc", THREE)
    a, b, c = scene.nodes.values()
    c.held = {"news"}
    b.say(b.node.fail())
    scene.run()
    assert scene.read(scene.places.call) is not None
    assert (scene.job.generation, scene.job.restarts) == (0, 0)
    assert b.record is not None
    assert b.record.call == 1
    c.held = set()
    scene.run()
    assert (scene.job.generation, scene.job.restarts) == (1, 1)
    assert c.record is not None
    assert (c.record.call, c.record.status.phase) == (1, NodePhase.RUNNING)
    assert a.node.generation == 1


def test_a_failure_that_another_nodes_end_brought_about_is_not_charged() -> None:
    scene = Scene("abc", THREE)
    a, b, c = scene.nodes.values()
    c.crash()
    b.say(b.node.fail())
    scene.run()
    a.say(a.node.fail())
    scene.run()
    assert (scene.job.generation, scene.job.restarts) == (0, 0)
    scene.wait(LEASE_S + 1.0)
    assert (scene.job.generation, scene.job.restarts) == (1, 0)
    assert "c was lost" in scene.job.why
    assert {a.node.generation, b.node.generation} == {1}


# Going.


def test_a_leader_that_goes_is_out_of_the_job_before_it_hands_over() -> None:
    scene = Scene("abc", THREE)
    a, b, c = scene.nodes.values()
    a.say(a.node.leave())
    a.carry_out()
    a.answer()  # Stored, and decided; the decision is not stored yet.
    assert a.acks[-1] == a.node.seq
    a.leave()
    assert not a.has_left
    scene.run()
    assert a.has_left
    ops = [kinds_of(scene, ops) for ops in writes_of(scene, a)]
    assert ops[-1] == ["Delete shared"]
    assert "Put job" in ops[-2]
    assert scene.leader.name in "bc"
    assert (scene.job.round, scene.job.restarts) == (1, 0)
    assert scene.job.why == "a left"
    assert {b.node.generation, c.node.generation} == {1}
    assert not [key for key in scene.keys if key.startswith("nodes/a")]


def test_the_last_node_leaves_nothing() -> None:
    scene = Scene("ab")
    scene.ask(Put(scene.places.store + b"port", b"1234"))
    a, b = scene.nodes.values()
    b.say(b.node.fail())
    scene.run()
    for node in (a, b):
        node.say(node.node.leave())
        scene.run()
        node.leave()
        scene.run()
        assert node.has_left
    assert scene.keys == []


def test_of_a_job_that_ended_its_end_is_left() -> None:
    scene = Scene("ab")
    scene.ask(Put(scene.places.store + b"port", b"1234"))
    for node in [*scene.nodes.values()]:
        node.say(node.node.succeed())
    scene.run()
    for node in scene.nodes.values():
        node.leave()
        scene.run()
    assert scene.keys == ["job"]
    assert scene.job.outcome is JobOutcome.SUCCEEDED


def test_while_others_are_there_nothing_of_theirs_is_removed() -> None:
    scene = Scene("ab")
    scene.ask(Put(scene.places.store + b"port", b"1234"))
    a, b = scene.nodes.values()
    b.held = {"news"}
    a.leave()
    scene.run()
    assert a.has_left
    assert {"job", "nodes/b/2", "views/b/2", "store/port"} <= {*scene.keys}


def test_resigned_while_it_campaigns() -> None:
    scene = Scene()
    a = scene.add("a")
    a.held = {"answers"}
    a.open()
    scene.run()
    a.answer()
    scene.run()
    a.answer()  # It has looked, and campaigns.
    scene.run()
    a.leave()
    assert not a.has_left
    a.held = set()
    scene.run()
    assert a.has_left
    assert scene.keys == []


def test_resigned_while_it_takes_over() -> None:
    scene = Scene("ab")
    a, b = scene.nodes.values()
    b.held = {"answers"}
    a.crash()
    scene.end_lease_at(scene.places.leader)
    scene.run()
    b.answer()
    assert b.leadership.post is LeaderState.LOADING
    b.leave()
    b.held = set()
    scene.run()
    assert b.has_left
    assert not [key for key in scene.keys if key.startswith(("nodes/", "shared/leader"))]


def test_who_goes_while_it_reads_the_job_does_not_wait_for_who_is_silent() -> None:
    scene = Scene("abcd", a_job_of(2, 4, settle_s=0.5))
    scene.wait(1.0)
    a, b, c, d = scene.nodes.values()
    assert scene.leader is a
    c.held = {"asked", "answers", "news"}  # Its lease lasts a little longer than it did.
    d.held = {"news"}
    b.held = {"answers"}
    a.crash()
    scene.end_lease_at(scene.places.leader)
    scene.run()
    b.answer()
    assert b.leadership.post is LeaderState.LOADING
    b.leave()
    b.held = set()
    scene.run()
    assert b.has_left
    d.held = set()
    scene.run()
    assert d.leadership.post is LeaderState.LOADING


def test_a_leader_that_leaves_while_etcd_goes_away_has_left() -> None:
    scene = Scene("ab")
    a, _ = scene.nodes.values()
    a.held = {"asked"}
    a.leave()
    assert not a.has_left
    a.asked.clear()
    a.end_watch(GONE)
    a.held = set()
    scene.run()
    assert a.has_left, "nobody would answer what it waited for"


# The lease of the job.


def test_the_lease_of_the_job_is_kept_alive_by_who_leads() -> None:
    scene = Scene("ab")
    a, b = scene.nodes.values()
    found = scene.read(scene.places.job)
    assert found is not None
    lease = found.lease
    assert Grant(JOB_KEEP_S) in a.sent
    assert a.session.next_deadline(0.0) == pytest.approx(JOB_KEEP_ALIVE_S)
    assert b.session.next_deadline(0.0) is None
    scene.now = JOB_KEEP_ALIVE_S
    a.do(a.session.tick(scene.now))
    assert [one.request for one in a.asked] == [KeepAlive(lease)]
    assert a.session.next_deadline(scene.now) == pytest.approx(2 * JOB_KEEP_ALIVE_S)
    scene.run()
    assert scene.leader is a


def test_how_a_job_ended_is_not_kept_for_longer_by_who_asks() -> None:
    scene = Scene("ab")
    found = scene.read(scene.places.job)
    assert found is not None
    for node in [*scene.nodes.values()]:
        node.say(node.node.succeed())
    scene.run()
    a = scene.leader
    scene.now = JOB_KEEP_ALIVE_S
    a.do(a.session.tick(scene.now))
    assert a.asked == []
    assert a.session.next_deadline(scene.now) == pytest.approx(2 * JOB_KEEP_ALIVE_S)
    for node in [*scene.nodes.values()]:
        node.leave()
        scene.run()
        node.crash()
    late = scene.join("c")
    assert late.node.role is NodeRole.CLOSED
    assert KeepAlive(found.lease) not in late.sent
    late.leave()
    scene.run()
    scene.now = JOB_KEEP_S + 1.0
    scene.etcd.expire(scene.now)
    assert scene.keys == []


def test_a_lease_of_the_job_that_ended_is_replaced_and_the_round_goes_on() -> None:
    scene = Scene("ab")
    a, b = scene.nodes.values()
    scene.end_lease_at(scene.places.job)
    assert "job" not in scene.keys
    a.do(a.session.tick(JOB_KEEP_ALIVE_S))
    scene.run()
    found = scene.read(scene.places.job)
    assert found is not None
    record = unpack(JobRecord, found.value)
    assert record is not None
    assert found.lease == record.lease
    assert (record.job.phase, record.job.generation) == (JobPhase.ACTIVE, 0)
    assert {a.node.generation, b.node.generation} == {0}
    assert {a.node.phase, b.node.phase} == {NodePhase.RUNNING}


def test_a_write_on_a_lease_that_ended_makes_it_read_again() -> None:
    scene = Scene("a", a_job_of(1, 3, settle_s=9.0))
    a = scene.leader
    scene.end_lease_at(scene.places.job)
    b = scene.join("b")
    assert scene.leader is a
    assert [*scene.job.nodes] == ["a", "b"]
    assert b.node.role is not None
    assert not a.closed


def test_a_lease_that_ends_before_anything_is_on_it_is_replaced() -> None:
    scene = Scene()
    a = scene.add("a")
    a.held = {"asked"}
    a.open()
    while a.leadership.post is not LeaderState.LEADING:
        a.carry_out()
        a.answer()
    scene.etcd.perform(scene.now, Revoke(a.leadership._job_lease))
    a.held = set()
    scene.run()
    assert not a.closed
    assert scene.leader is a
    assert [*scene.job.nodes] == ["a"]


def test_roll_calls_work_after_the_lease_of_the_job_was_replaced() -> None:
    scene = Scene("abc", THREE)
    a, b, c = scene.nodes.values()
    b.say(b.node.fail())
    scene.run()
    assert (scene.job.generation, scene.job.restarts) == (1, 1)
    scene.end_lease_at(scene.places.job)
    a.do(a.session.tick(JOB_KEEP_ALIVE_S))
    scene.run()
    c.held = {"news"}
    b.say(b.node.fail())
    scene.run()
    assert scene.job.generation == 1, "`c` has not answered this call, only an earlier one"
    c.held = set()
    scene.run()
    assert (scene.job.generation, scene.job.restarts) == (2, 2)


def test_a_lease_that_ends_while_its_job_is_read_is_replaced() -> None:
    scene = Scene("ab")
    a, _ = scene.nodes.values()
    a.drop()
    a.held = {"answers"}
    a.open()
    while a.leadership.post is not LeaderState.LOADING:
        scene.run()
        a.answer()
    scene.run()
    scene.end_lease_at(scene.places.job)
    a.held = set()
    scene.run()
    lease = KeepAlive(a.leadership._job_lease)
    assert scene.etcd.perform(scene.now, lease) == KeptAlive(JOB_KEEP_S)
    scene.join("c")
    assert scene.leader is a
    assert (scene.job.phase, scene.job.generation) == (JobPhase.ACTIVE, 0)


# What goes wrong.


def test_what_lies_where_the_job_should_is_refused_in_words() -> None:
    scene = Scene()
    scene.ask(Put(scene.places.job, b"hf9=something"))
    a = scene.join("a")
    (closed,) = a.closed
    assert closed.permanent
    assert "/jobs/run/job" in closed.why
    assert "another program or version" in closed.why
    found = scene.read(scene.places.job)
    assert found is not None
    assert found.value == b"hf9=something", "it is not ours to remove"


@pytest.mark.parametrize(
    ("kind", "permanent"),
    [
        (ProblemKind.UNREACHABLE, False),
        (ProblemKind.NO_SPACE, False),
        (ProblemKind.DENIED, True),
        (ProblemKind.REFUSED, True),
    ],
)
def test_a_write_that_is_not_made_ends_the_leaders_session(
    kind: ProblemKind, *, permanent: bool
) -> None:
    scene = Scene("a", a_job_of(1, 3, settle_s=9.0))
    a = scene.leader
    a.held = {"asked"}
    scene.join("b")
    a.lose(settled(kind))
    (closed,) = a.closed
    assert (closed.why, closed.permanent) == (settled(kind).why, permanent)
    assert a.leadership.post is LeaderState.FOLLOWING
    assert a.leadership.lead is None
    a.held = set()
    a.open()
    scene.run()
    assert scene.leader is a, "its lease and its key are still there"
    assert [*scene.job.nodes] == ["a", "b"]


@pytest.mark.parametrize("step", range(3))
def test_a_taking_over_that_fails_is_begun_again_with_the_next_session(step: int) -> None:
    scene = Scene()
    a = scene.add("a")
    a.obeys = False
    a.open()
    a.held = {"asked"}
    scene.run()
    for _ in range(2 + step):  # The lease, a look; then the campaign, all there is, the lease.
        a.carry_out()
        a.answer()
    a.lose()
    assert a.closed[-1].why == GONE.why
    assert a.leadership.post is LeaderState.FOLLOWING
    a.held = set()
    a.obeys = True
    a.open()
    scene.run()
    assert scene.leader is a
    assert [*scene.job.nodes] == ["a"]


def test_records_that_cannot_be_read_are_nobodys() -> None:
    scene = Scene("a")
    other = a_node("x", TWO, 77)
    elsewhere = msgspec.structs.replace(other.status(), run_id="another")
    a = scene.leader
    record = a.record
    assert record is not None
    strange = pack(msgspec.structs.replace(record, status=elsewhere))
    for value in (b"hf9=", b"", strange):
        scene.ask(Put(scene.places.node("x", 77), value))
        scene.run()
    scene.ask(Put(scene.places.nodes + b"no/such/name", b"x"))
    scene.run()
    a.drop()
    a.open()  # And when it takes over.
    scene.run()
    assert [*scene.job.nodes] == ["a"]


def test_views_of_who_is_gone_are_taken_away() -> None:
    scene = Scene("abc", THREE)
    a, b, _ = scene.nodes.values()
    b.crash()
    scene.wait(LEASE_S + 1.0)
    assert "views/b/2" not in scene.keys
    scene.ask(Put(scene.places.view("z", 9), b"old"))
    a.drop()
    a.open()
    scene.run()
    assert "views/z/9" not in scene.keys
    assert any(Delete(scene.places.view("z", 9)) in ops for ops in writes_of(scene, a))


def test_who_comes_back_while_its_loss_is_being_stored_is_fenced() -> None:
    scene = Scene("abc", THREE)
    a, b, c = scene.nodes.values()
    a.held = {"asked"}
    c.say(c.node.succeed())
    scene.run()
    assert len(a.asked) == 1, "a write is under way"
    scene.end_lease_of(b)
    b.beat()
    scene.run()
    a.held = set()
    scene.run()
    assert NodeRole.FENCED in [view.role for view in b.views]
    assert not a.closed, "what it stored was taken"
    assert scene.job.nodes["b"].info.incarnation == b.node.info.incarnation > 100


def test_who_went_and_came_back_in_what_is_heard_as_one_is_fenced() -> None:
    scene = Scene("abc", THREE)
    a, _, c = scene.nodes.values()
    assert scene.leader is a
    a.held = {"news"}
    scene.end_lease_of(c)
    c.beat()
    scene.run()
    ((number, gone), (again, back)) = a.news
    assert number == again
    assert isinstance(gone, tuple)
    assert isinstance(back, tuple)
    assert [change.value is None for change in gone + back] == [True, False]
    a.news[:] = [(number, gone + back)]
    a.held = set()
    scene.run()
    assert NodeRole.FENCED in [view.role for view in c.views]
    assert scene.job.nodes["c"].info.incarnation == c.node.info.incarnation > 100
