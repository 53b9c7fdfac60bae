"""One node at etcd: its lease, what it says and hears, and what ends its session."""

from __future__ import annotations

import msgspec
import pytest

from etcd_machines import GONE, LEASE_S, TWO, NodeOnEtcd, Scene, settled
from fake_node import RUN, a_job_of
from holdfast.core.etcd.calls import (
    Compare,
    Field,
    Grant,
    KeepAlive,
    KeptAlive,
    Problem,
    ProblemKind,
    Put,
    Revoke,
    SendRequest,
    Txn,
)
from holdfast.core.etcd.keys import NodeRecord, pack, unpack
from holdfast.core.etcd.leader import LeaderState
from holdfast.core.etcd.session import RENEWALS_PER_LEASE, UNSAID_MAX, EtcdSession
from holdfast.core.protocol import NodeInfo, NodePhase, NodeRole, Status, View

THREE = a_job_of(2, 3, max_restarts=3, settle_s=0.5)


def alone(*, obeys: bool = False) -> tuple[Scene, NodeOnEtcd]:
    """Return a node that is open, leads nobody and says nothing by itself, and where it is."""
    scene = Scene()
    node = scene.add("a")
    node.obeys = obeys
    node.leadership.election.is_open = False
    node.open()
    scene.run()
    assert node.is_open
    return scene, node


def at(node: NodeOnEtcd, seq: int) -> Status:
    """Return the status of a number; what it says is its generation."""
    node.node.seq, node.node.generation = seq, seq
    return node.node.last_status()


def stored(scene: Scene, node: NodeOnEtcd) -> int:
    """Return the number of the status that is stored, -1 if there is none."""
    found = scene.read(scene.places.node(node.name, node.node.info.incarnation))
    record = unpack(NodeRecord, found.value) if found else None
    return record.status.seq if record else -1


# Opening.


def test_a_session_is_a_lease_and_a_look_and_two_watches() -> None:
    scene = Scene()
    node = scene.add("a")
    node.obeys = False
    node.open()
    assert node.carry_out() == Grant(5)
    node.answer()
    look = node.carry_out()
    assert isinstance(look, Txn)
    assert not look.compare
    assert not node.is_open
    node.answer()
    assert node.is_open
    assert node.session.is_up


def test_short_leases_are_a_second_at_least() -> None:
    info = NodeInfo(node="a", incarnation=1)
    quick = EtcdSession(run_id=RUN, info=info, prefix="/p", lease_s=0.2)
    assert quick.open() == [SendRequest(1, Grant(1))]


def test_what_lies_ready_is_heard_at_once() -> None:
    scene, node = alone()
    node.drop()
    view = View(run_id=RUN, node="a", incarnation=1, term=1, revision=1, role=NodeRole.WAITING)
    scene.ask(
        Put(scene.places.view("a", 1), pack(view)),
        Put(scene.places.view("a", 2), b"nothing that can be read"),
        Put(scene.places.view("a", 3), pack(msgspec.structs.replace(view, run_id="another"))),
        Put(scene.places.view("b", 1), pack(msgspec.structs.replace(view, node="b"))),
    )
    node.open()
    scene.run()
    assert node.views == [view]


def test_the_lease_outlives_the_session() -> None:
    scene, node = alone()
    node.say(at(node, 1))
    scene.run()
    node.drop()
    assert not node.session.is_up
    node.open()
    assert isinstance(node.carry_out(), KeepAlive)
    node.answer()
    scene.run()
    assert node.is_open
    assert stored(scene, node) == 1, "whoever comes back in time is not missed"


def test_a_lease_that_ended_meanwhile_is_replaced_when_it_opens() -> None:
    scene, node = alone()
    node.say(at(node, 1))
    scene.run()
    node.drop()
    scene.now += 10.0
    scene.etcd.expire(scene.now)
    assert stored(scene, node) == -1
    node.open()
    scene.run()
    assert node.is_open
    node.say(at(node, 2))
    scene.run()
    assert stored(scene, node) == 2


# What it says.


def test_what_is_stored_is_acknowledged() -> None:
    scene, node = alone()
    node.say(at(node, 1))
    assert node.acks == []
    node.carry_out()
    assert node.acks == []
    node.answer()
    assert node.acks == [1]
    found = scene.read(scene.places.node("a", 1))
    assert found is not None
    assert found.lease == node.session._lease


def test_statements_are_stored_one_after_another_in_order() -> None:
    scene, node = alone()
    for seq in range(1, 5):
        node.say(at(node, seq))
        assert len(node.asked) == 1
    scene.run()
    assert node.acks == [1, 2, 3, 4]
    assert stored(scene, node) == 4


def test_of_more_statements_than_there_is_room_for_the_oldest_go() -> None:
    scene, node = alone()
    for seq in range(1, UNSAID_MAX + 4):
        node.say(at(node, seq))
    scene.run()
    assert node.acks == [1, *range(4, UNSAID_MAX + 4)]


def test_a_statement_without_a_session_is_not_kept() -> None:
    scene = Scene()
    node = scene.add("a")
    node.obeys = False
    node.leadership.election.is_open = False
    node.say(at(node, 1))
    node.beat()
    assert node.asked == []
    node.open()
    scene.run()
    node.say(at(node, 2))
    node.say(at(node, 3))
    node.asked.clear()
    node.drop()
    node.say(at(node, 4))
    node.beat()
    assert node.asked == []
    node.open()
    scene.run()
    node.say(at(node, 5))
    scene.run()
    assert node.acks == [5], "what waited is not said: the newest status says all"


def test_a_put_that_came_late_does_not_undo_a_newer_one() -> None:
    scene, node = alone()
    node.say(at(node, 1))
    scene.run()
    node.say(at(node, 2))
    (late,) = node.asked
    node.lose(GONE)
    node.open()
    scene.run()
    node.say(at(node, 3))
    scene.run()
    assert stored(scene, node) == 3
    scene.etcd.perform(scene.now, late.request)
    assert stored(scene, node) == 3


def test_a_put_that_was_overtaken_by_its_own_late_one_is_made_all_the_same() -> None:
    scene, node = alone()
    node.say(at(node, 1))
    (late,) = node.asked
    node.lose(GONE)
    node.open()
    scene.run()
    scene.etcd.perform(scene.now, late.request)
    node.say(at(node, 2))
    node.carry_out()
    assert stored(scene, node) == 1
    node.answer()
    assert node.acks == []
    scene.run()
    assert node.acks == [2]
    assert stored(scene, node) == 2


def test_a_node_that_begins_anew_takes_away_what_it_was() -> None:
    scene, node = alone()
    node.say(at(node, 1))
    scene.run()
    node.node.begin_anew(55)
    node.say(at(node, 2))
    scene.run()
    assert [key for key in scene.keys if key.startswith("nodes/")] == ["nodes/a/37"]
    assert node.heard[-1].incarnation == 55


def test_where_it_is_reached_is_added_if_it_does_not_say() -> None:
    scene, node = alone()
    node.session.address = "10.0.0.7"
    node.say(at(node, 1))
    scene.run()
    assert node.record is not None
    assert node.record.status.info.address == "a.example"
    node.node.info = msgspec.structs.replace(node.node.info, address="")
    node.say(at(node, 2))
    scene.run()
    assert node.record is not None
    assert node.record.status.info.address == "10.0.0.7"


# Its lease.


def test_a_beat_renews_the_lease_and_is_acknowledged() -> None:
    scene, node = alone()
    node.beat()
    node.beat()
    assert [type(one.request) for one in node.asked] == [KeepAlive], "one at a time"
    scene.run()
    assert node.acks == [-1], "nothing was said yet"
    node.say(at(node, 3))
    scene.run()
    node.beat()
    scene.run()
    assert node.acks == [-1, 3, 3]


def test_who_has_much_to_say_renews_its_lease_all_the_same() -> None:
    scene, node = alone()
    for seq in range(1, 40):
        scene.now += LEASE_S / RENEWALS_PER_LEASE / 2
        node.say(at(node, seq))
        scene.run()
        scene.etcd.expire(scene.now)
        assert stored(scene, node) == seq
    renewals = [one for one in node.sent if isinstance(one, KeepAlive)]
    assert 15 <= len(renewals) <= 25


def test_a_lease_that_ended_is_replaced_and_the_status_said_again() -> None:
    scene, node = alone()
    node.say(at(node, 4))
    scene.run()
    scene.end_lease_of(node)
    assert stored(scene, node) == -1
    node.beat()
    scene.run()
    assert stored(scene, node) == 4
    assert node.acks == [4, 4]
    assert not node.closed
    assert len([one for one in node.sent if isinstance(one, Grant)]) == 2


def test_a_put_on_a_lease_that_ended_is_made_on_the_next() -> None:
    scene, node = alone()
    node.say(at(node, 1))
    scene.run()
    scene.end_lease_of(node)
    node.say(at(node, 2))
    node.say(at(node, 3))
    node.beat()
    scene.run()
    assert stored(scene, node) == 3
    assert node.acks[-1] == 3
    assert len([one for one in node.sent if isinstance(one, Grant)]) == 2, "one lease is enough"


def test_of_what_could_not_be_stored_only_the_newest_is_said_again() -> None:
    scene, node = alone()
    node.say(at(node, 1))
    node.say(at(node, 2))
    scene.etcd.perform(scene.now, Revoke(node.session._lease))
    scene.run()
    assert node.acks == [2]
    assert stored(scene, node) == 2


def test_what_was_stored_and_went_with_its_lease_is_said_again_whatever_is_heard_first() -> None:
    scene, node = alone()
    node.say(at(node, 1))
    node.carry_out()  # Stored; the answer takes a while.
    scene.end_lease_of(node)
    node.beat()
    node.carry_out()
    node.answer(1)  # The lease is gone.
    scene.run()
    assert stored(scene, node) == 1, "nobody would ever miss it"
    assert node.acks[-1] == 1


@pytest.mark.parametrize("late", ["the renewal", "the put"])
def test_of_a_lease_that_ended_is_heard_twice_and_the_next_one_is_kept(late: str) -> None:
    scene, node = alone()
    node.say(at(node, 1))
    scene.run()
    node.held = {"answers"}
    scene.end_lease_of(node)
    node.beat()
    node.say(at(node, 2))
    node.carry_out()
    node.carry_out()
    node.answer(1)  # What it would replace is gone, so it is made as if it were the first,
    node.carry_out()  # and then there is no lease for it.
    renewal, put = (answer for _, answer in node.answers)
    assert isinstance(renewal, KeptAlive)
    assert isinstance(put, Problem)
    assert put.kind is ProblemKind.LEASE_GONE
    held = node.answers.pop(0 if late == "the renewal" else 1)
    node.held = set()
    scene.run()
    lease = node.session._lease
    node.answers.append(held)
    scene.run()
    assert node.session._lease == lease != 0
    assert stored(scene, node) == 2


def test_a_new_lease_that_is_not_granted_ends_the_session() -> None:
    scene, node = alone()
    node.say(at(node, 1))
    scene.run()
    scene.end_lease_of(node)
    node.beat()
    node.carry_out()
    node.answer()
    node.lose(GONE)
    assert [one.why for one in node.closed] == [GONE.why]
    node.open()
    scene.run()
    assert node.is_open


def test_the_leader_fences_who_lost_its_lease_and_lives() -> None:
    scene = Scene("abc", THREE)
    a, b, c = scene.nodes.values()
    assert scene.leader is a
    b.held = {"asked"}
    scene.end_lease_of(b)
    scene.run()
    assert {info.node for info in scene.job.members} == {"a", "c"}
    b.held = set()
    b.beat()
    scene.run()
    assert NodeRole.FENCED in [view.role for view in b.views]
    scene.wait(1.0)
    assert {info.node for info in scene.job.members} == {"a", "b", "c"}
    assert b.node.info.incarnation > 100
    assert {node.node.phase for node in (a, b, c)} == {NodePhase.RUNNING}


def test_a_leader_that_lost_its_lease_leads_no_more_and_is_fenced() -> None:
    scene = Scene("abc", THREE)
    a = scene.leader
    scene.end_lease_of(a)
    for name in "bc":
        scene.nodes[name].held = {"answers"}
    a.beat()
    a.carry_out()
    a.answer()
    assert a.leadership.post is LeaderState.FOLLOWING, "at once, whoever leads now"
    a.held = {"asked"}
    for name in "bc":
        scene.nodes[name].held = set()
    scene.run()
    assert scene.leader.name in "bc"
    a.held = set()
    scene.run()
    assert NodeRole.FENCED in [view.role for view in a.views]


def test_a_leader_that_lost_its_lease_leads_again_if_nobody_else_does() -> None:
    scene = Scene("a", a_job_of(1, 1))
    a = scene.leader
    before = a.leadership.election.term
    scene.end_lease_of(a)
    scene.run()
    assert a.leadership.post is LeaderState.FOLLOWING, "without a lease nobody can lead"
    a.beat()
    scene.run()
    assert scene.leader is a
    assert a.leadership.election.term > before
    assert not a.closed


# Roll calls.


def test_a_roll_call_is_answered_by_the_same_record_with_its_number() -> None:
    scene, node = alone()
    node.say(at(node, 1))
    scene.run()
    scene.ask(Put(scene.places.call, b"7"))
    scene.run()
    assert node.record == NodeRecord(at(node, 1), 7)
    before = len(node.sent)
    scene.ask(Put(scene.places.call, b"7"))
    scene.ask(Put(scene.places.call, b"3"))
    scene.ask(Put(scene.places.call, b"who knows"))
    scene.run()
    assert len(node.sent) == before, "it has answered that"


def test_a_roll_call_that_comes_while_something_is_stored_is_answered_after_it() -> None:
    scene, node = alone()
    node.say(at(node, 1))
    node.carry_out()
    scene.ask(Put(scene.places.call, b"1"))
    node.hear()
    assert node.asked == []
    scene.run()
    assert node.record == NodeRecord(at(node, 1), 1)


def test_a_roll_call_before_the_first_word_is_answered_with_it() -> None:
    scene = Scene()
    scene.ask(Put(scene.places.call, b"5"))
    node = scene.add("a")
    node.leadership.election.is_open = False
    node.open()
    scene.run()
    assert node.record is not None
    assert node.record.call == 5
    puts = [one for one in node.sent if isinstance(one, Txn) and one.compare]
    assert len(puts) == 1


# What goes wrong.

TROUBLES = [
    (ProblemKind.UNREACHABLE, False),
    (ProblemKind.NO_SPACE, False),
    (ProblemKind.DENIED, True),
    (ProblemKind.REFUSED, True),
]


@pytest.mark.parametrize(("kind", "permanent"), TROUBLES)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_session_that_cannot_be_opened(kind: ProblemKind, steps: int, *, permanent: bool) -> None:
    scene = Scene()
    node = scene.add("a")
    node.open()
    for _ in range(steps):
        node.carry_out()
        node.answer()
    node.lose(settled(kind))
    assert [(one.why, one.permanent) for one in node.closed] == [(settled(kind).why, permanent)]
    assert not node.is_open
    node.open()
    scene.run()
    assert node.is_open


@pytest.mark.parametrize(("kind", "permanent"), TROUBLES)
@pytest.mark.parametrize("what", ["put", "beat"])
def test_a_session_that_ends(kind: ProblemKind, what: str, *, permanent: bool) -> None:
    _, node = alone()
    if what == "put":
        node.say(at(node, 1))
        node.say(at(node, 2))
    else:
        node.beat()
    node.lose(settled(kind))
    assert [(one.why, one.permanent) for one in node.closed] == [(settled(kind).why, permanent)]
    assert not node.session.is_up
    assert node.asked == []
    assert not node.watches


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_watch_that_ends_ends_the_session_which_then_looks_at_everything_again(
    index: int,
) -> None:
    scene = Scene("ab")
    a = scene.leader
    a.end_watch(GONE, index)
    assert [one.why for one in a.closed] == [GONE.why]
    assert a.leadership.post is LeaderState.FOLLOWING
    a.open()
    scene.run()
    assert scene.leader is a
    assert scene.job.generation == 0


def test_a_watch_that_fell_behind_is_no_reason_to_give_up() -> None:
    _, node = alone()
    node.end_watch(settled(ProblemKind.COMPACTED))
    (closed,) = node.closed
    assert not closed.permanent
    assert closed.why == "a watch fell behind: it is compacted"


def test_a_watch_that_begins_too_late_ends_the_session_until_it_begins_in_time() -> None:
    scene = Scene()
    node = scene.add("a")
    node.obeys = False
    node.leadership.election.is_open = False
    node.held = {"answers"}
    node.open()
    scene.run()
    node.answer()
    scene.run()
    for _ in range(3):
        scene.ask(Put(b"/elsewhere", b""))
    scene.etcd.compact(scene.etcd.revision)
    node.held = set()
    scene.run()
    assert "a watch fell behind" in node.closed[-1].why
    node.open()
    scene.run()
    assert node.is_open
    assert len(node.closed) == 1


def test_what_a_watch_says_after_its_end_means_nothing() -> None:
    scene = Scene("ab")
    a, b = scene.nodes.values()
    b.held = {"news"}
    a.say(a.node.fail())
    scene.run()
    assert b.news
    b.drop()
    effects = len(b.heard)
    b.held = set()
    scene.run()
    assert len(b.heard) == effects
    assert b.session.watch_ended(999, GONE) == []


def test_an_etcd_that_takes_no_writes_is_none_until_one_was_taken() -> None:
    scene = Scene("ab")
    a, b = scene.nodes.values()
    scene.etcd.full = True
    b.say(b.node.fail())
    scene.run()
    (closed,) = b.closed
    assert not closed.permanent
    assert "space" in closed.why
    b.open()
    scene.run()
    assert len(b.closed) == 2, "it answers, and is of no use"
    assert not b.is_open
    scene.etcd.full = False
    b.open()
    scene.run()
    assert b.is_open
    scene.run()
    assert scene.job.restarts == 1
    assert {a.node.generation, b.node.generation} == {1}


def test_a_first_word_that_is_refused_is_tried_before_a_session_is_open() -> None:
    scene, node = alone()
    scene.etcd.full = True
    node.say(at(node, 1))
    scene.run()
    node.open()
    scene.run()
    assert len(node.closed) == 2
    assert not node.is_open
    scene.etcd.full = False
    node.open()
    scene.run()
    assert node.is_open
    assert stored(scene, node) == 1
    before = len(node.sent)
    node.drop()
    node.open()
    scene.run()
    assert [bool(getattr(one, "compare", ())) for one in node.sent[before:]] == [False, False]


def test_a_leader_whose_write_is_refused_has_no_session_before_one_is_taken() -> None:
    scene = Scene("a", a_job_of(1, 3, settle_s=9.0))
    a = scene.leader
    a.held = {"asked"}
    scene.join("b")
    a.held = set()
    scene.etcd.full = True
    scene.run()
    assert "space" in a.closed[-1].why
    before = a.opened
    a.open()
    scene.run()
    assert a.opened == before
    scene.etcd.full = False
    a.open()
    scene.run()
    assert scene.leader is a
    assert [*scene.job.nodes] == ["a", "b"]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_lease_that_ends_before_what_was_refused_is_tried_again(when: str) -> None:
    scene, node = alone()
    node.say(at(node, 1))
    scene.run()
    scene.etcd.full = True
    node.say(at(node, 2))
    scene.run()
    scene.etcd.full = False
    if when == "before":
        scene.end_lease_of(node)
    node.open()
    if when == "meanwhile":
        node.carry_out()
        node.answer()
        scene.end_lease_of(node)
    scene.run()
    assert node.is_open
    assert stored(scene, node) == 2


def test_a_first_lease_that_is_not_granted_for_want_of_space() -> None:
    scene = Scene()
    scene.etcd.full = True
    node = scene.join("a")
    assert [(one.why, one.permanent) for one in node.closed] == [("database space exceeded", False)]


def test_answers_of_a_session_that_is_over_mean_nothing() -> None:
    scene, node = alone()
    node.say(at(node, 1))
    node.carry_out()
    node.drop()
    node.answer()
    assert (node.acks, node.asked) == ([], [])
    node.open()
    scene.run()
    node.say(at(node, 2))
    scene.run()
    assert (node.acks, stored(scene, node)) == ([2], 2)


def test_who_leads_is_watched_with_what_all_share() -> None:
    scene = Scene("ab")
    a, b = scene.nodes.values()
    assert b.leadership.post is LeaderState.FOLLOWING
    a.leave()
    scene.run()
    assert a.has_left
    assert scene.leader is b
    fence = Compare(scene.places.leader, Field.CREATE, b.leadership.election.term)
    assert b.leadership.election.still() == fence


def test_etcd_beginning_its_leases_anew_is_not_noticed() -> None:
    scene = Scene("ab", TWO)
    scene.now += 4.0
    scene.etcd.failover(scene.now)
    scene.wait(5.0)
    assert scene.job.generation == 0
    assert scene.job.round == 0
    assert not scene.nodes["a"].closed
