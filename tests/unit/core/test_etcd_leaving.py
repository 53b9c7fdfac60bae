"""Who goes takes its own things, and the last one what nobody needs any more."""

from __future__ import annotations

import pytest

from etcd_machines import GONE, TWO, NodeOnEtcd, Scene
from holdfast.core.etcd.calls import Delete, Put, Revoke, Txn
from holdfast.core.etcd.leader import LeaderState
from holdfast.core.protocol import JobOutcome, NodeRole
from holdfast.core.rounds import JobPhase


def a_job(names: str = "ab") -> tuple[Scene, list[NodeOnEtcd]]:
    """Return a job of nodes that have said all they have to, one of whom leads; all are to go."""
    scene = Scene(names, TWO)
    scene.ask(Put(scene.places.store + b"port", b"1234"))
    nodes = [*scene.nodes.values()]
    for node in nodes:
        node.leadership.election.is_open = False
    nodes[0].do([*nodes[0].leadership.resign()])
    scene.run()
    assert "shared/leader" not in scene.keys
    return scene, nodes


def test_who_goes_while_others_stay_takes_its_own_things_only() -> None:
    scene, (a, _) = a_job()
    before = {*scene.keys}
    a.leave()
    scene.run()
    assert a.has_left
    assert before - {*scene.keys} == {"nodes/a/1", "views/a/1"}


def test_the_last_one_takes_everything_of_a_job_that_did_not_end() -> None:
    scene, nodes = a_job()
    for node in nodes:
        node.leave()
        scene.run()
    assert all(node.has_left for node in nodes)
    assert scene.keys == []
    assert scene.etcd.next_expiry() is None, "not even a lease is left"


def test_of_those_who_go_at_the_same_moment_one_is_the_last() -> None:
    scene, (a, b) = a_job()
    a.held = b.held = {"asked"}
    a.leave()
    b.leave()
    for node in (a, b):
        node.carry_out()
    a.held = b.held = set()
    scene.run()
    assert a.has_left
    assert b.has_left
    assert scene.keys == []


def test_how_a_job_ended_is_left_for_those_who_come_late() -> None:
    scene = Scene("ab", TWO)
    a, b = scene.nodes.values()
    for node in (a, b):
        node.say(node.node.succeed())
    scene.run()
    for node in (a, b):
        node.leave()
        scene.run()
    assert scene.keys == ["job"]
    assert scene.job.outcome is JobOutcome.SUCCEEDED
    assert scene.etcd.next_expiry() is not None, "on a lease, so not for ever"
    assert scene.join("c").node.role is NodeRole.CLOSED


def test_a_job_that_begins_while_the_last_one_clears_up_keeps_what_it_has() -> None:
    scene, (a, b) = a_job()
    a.leave()
    scene.run()
    b.held = {"asked"}
    b.leave()
    b.carry_out()  # It looks, and is the last.
    b.answer()
    c = scene.join("c")
    d = scene.join("d")
    before = scene.job
    assert before.phase is JobPhase.ACTIVE
    kept = {*scene.keys}
    b.held = set()
    scene.run()
    assert b.has_left
    assert {*scene.keys} == kept
    assert {c.node.role, d.node.role} == {NodeRole.MEMBER}
    assert scene.leader is c


def test_who_has_come_to_lead_meanwhile_is_not_deposed() -> None:
    scene, (a, b) = a_job()
    scene.etcd.perform(scene.now, Txn((), (Delete(scene.places.job),)))
    a.leave()
    scene.run()
    b.held = {"asked"}
    b.leave()
    b.carry_out()
    b.answer()
    c = scene.add("c")
    c.held = {"asked"}
    c.open()
    while c.leadership.post is not LeaderState.LOADING:
        c.carry_out()
        c.answer()
    b.held = set()
    scene.run()
    assert b.has_left
    assert scene.read(scene.places.leader) is not None
    c.held = set()
    scene.run()
    assert scene.leader is c


def test_a_job_that_was_stored_meanwhile_is_not_removed() -> None:
    scene, (a, b) = a_job()
    a.leave()
    scene.run()
    b.held = {"asked"}
    b.leave()
    b.carry_out()
    b.answer()
    found = scene.read(scene.places.job)
    assert found is not None
    scene.ask(Put(scene.places.job, found.value, found.lease))
    b.held = set()
    scene.run()
    assert b.has_left
    assert "job" in scene.keys


@pytest.mark.parametrize("steps", range(4))
def test_whatever_goes_wrong_on_the_way_it_has_left(steps: int) -> None:
    scene, (a, b) = a_job()
    a.leave()
    scene.run()
    lease = b.session._lease
    b.held = {"asked"}
    b.leave()
    for _ in range(steps):
        b.carry_out()
        b.answer()
    while not b.has_left:
        b.lose()
    assert not b.closed
    scene.now += 1_000.0
    scene.etcd.expire(scene.now)
    assert [key for key in scene.keys if not key.startswith("store/")] == []
    assert lease


def test_a_watch_that_ends_on_the_way_does_not_keep_it() -> None:
    scene, (a, _) = a_job()
    a.held = {"asked"}
    a.leave()
    while a.watches:
        a.end_watch(GONE)
    a.held = set()
    scene.run()
    assert a.has_left
    assert not a.closed


def test_who_goes_has_nothing_more_to_say() -> None:
    scene, (a, _) = a_job()
    a.leave()
    a.say(a.node.status())
    a.beat()
    scene.run()
    assert a.has_left
    assert not [key for key in scene.keys if key.startswith("nodes/a")]


def test_what_was_on_its_way_when_it_went_does_not_bring_it_back() -> None:
    scene, (a, _) = a_job()
    a.held = {"asked"}
    a.say(a.node.status())
    a.leave()
    a.carry_out(1)  # It takes itself out; then what it said arrives.
    a.carry_out(0)
    a.held = set()
    scene.run()
    assert a.has_left
    assert not [key for key in scene.keys if key.startswith("nodes/a")]


@pytest.mark.parametrize("name", ["a", "b"], ids=["the leader", "another"])
def test_a_link_that_is_dropped_and_opened_while_it_goes_does_not_bring_it_back(name: str) -> None:
    scene = Scene("abc", TWO)
    node = scene.nodes[name]
    assert (scene.leader is node) == (name == "a")
    node.held = {"asked"}
    node.leave()
    node.drop()
    node.open()
    assert [one.permanent for one in node.closed] == [False]
    node.held = set()
    scene.run()
    assert node.has_left
    assert not node.is_open
    assert not [key for key in scene.keys if key.startswith(f"nodes/{name}")]
    assert scene.leader is not node


def test_who_never_spoke_has_a_lease_to_give_back_and_no_more() -> None:
    scene = Scene()
    node = scene.add("a")
    node.obeys = False
    node.leadership.election.is_open = False
    node.open()
    scene.run()
    node.leave()
    scene.run()
    assert node.has_left
    assert isinstance(node.sent[-1], Revoke)
    assert scene.etcd.next_expiry() is None


def test_who_was_never_there_leaves_nothing_and_disturbs_nobody() -> None:
    scene = Scene("ab", TWO)
    node = scene.add("z")
    before = {*scene.keys}
    node.leave()
    scene.run()
    assert node.has_left
    assert {*scene.keys} == before
    assert not [one for one in node.sent if isinstance(one, Revoke)]
