"""A node's side of the talk, beyond its transcripts: bounds that hold whatever happens."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_node import RUN, a_job_of
from holdfast.coordinator.connect import CONNECT_S
from holdfast.core import session as ms
from holdfast.core.protocol import Ack, Heartbeat, NodeInfo, NodePhase, NodeRole, Status, View
from holdfast.core.rounds import RECOVER_S_MAX
from holdfast.core.session import (
    RETRY_FIRST_S,
    RETRY_MAX_S,
    ConnectionState,
    Session,
    SessionTimeouts,
)

untimed = settings(deadline=None)


def member(draw: float = 1.0, **times: float) -> Session:
    return Session(
        0.0,
        run_id=RUN,
        info=NodeInfo(node="a", incarnation=1),
        settings=a_job_of(2, 3),
        times=SessionTimeouts(**times),
        draw=lambda: draw,
    )


def a_view(role: NodeRole, revision: int, *, term: int = 1, incarnation: int = 1) -> View:
    return View(
        run_id=RUN, node="a", incarnation=incarnation, term=term, revision=revision, role=role
    )


def run(machine: Session, now: float, until: float) -> list[tuple[float, ms.Effect]]:
    """Tick at every deadline; links cannot be opened."""
    happened: list[tuple[float, ms.Effect]] = []
    while now < until:
        for effect in machine.handle(now, ms.Tick()):
            happened.append((now, effect))
            if isinstance(effect, ms.Connect):
                happened += [(now, e) for e in machine.handle(now, ms.Disconnected("refused"))]
        deadline = machine.next_deadline(now)
        assert deadline > now, "it asks for a tick that does nothing"
        now = min(until, deadline)
    return happened


def up(machine: Session, now: float = 0.0) -> Session:
    assert machine.handle(now, ms.Tick()) == [ms.Connect()]
    (sent,) = machine.handle(now, ms.Connected())
    assert isinstance(sent, ms.Send)
    return machine


@untimed
@given(st.floats(0, 1))
def test_retries_are_ever_further_apart_within_bounds_and_spread(draw: float) -> None:
    happened = run(member(draw), 0.0, 30.0)
    opened = [at for at, effect in happened if isinstance(effect, ms.Connect)]
    gaps = [later - earlier for earlier, later in pairwise(opened)]
    for i, gap in enumerate(gaps):
        longest = min(RETRY_MAX_S, RETRY_FIRST_S * 2**i)
        assert gap == pytest.approx(longest * (0.5 + draw / 2), abs=1e-6)
    assert max(gaps) <= RETRY_MAX_S


def test_a_coordinator_that_returns_is_found_before_it_gives_up_on_nodes() -> None:
    assert RETRY_MAX_S + CONNECT_S < RECOVER_S_MAX


def test_after_a_link_that_worked_the_next_try_is_soon_again() -> None:
    machine = member()
    run(machine, 0.0, 20.0)
    machine.handle(20.0, ms.Tick())
    while machine.link is not ConnectionState.CONNECTING:
        machine.handle(machine.next_deadline(20.0), ms.Tick())
    machine.handle(21.0, ms.Connected())
    machine.handle(21.0, ms.Disconnected("reset"))
    assert machine.next_deadline(21.0) == pytest.approx(21.0 + RETRY_FIRST_S)


def test_a_beat_comes_every_beat_s_while_nothing_else_is_said() -> None:
    machine, now, beats = up(member(beat_s=0.5, silence_s=100.0)), 0.0, []
    while now < 10.0:
        now = machine.next_deadline(now)
        for effect in machine.handle(now, ms.Tick()):
            assert isinstance(effect, ms.Send)
            assert isinstance(effect.message, Heartbeat)
            beats.append(now)
    assert beats == pytest.approx([0.5 * i for i in range(1, 21)])


def test_a_beat_says_what_the_node_has() -> None:
    machine = up(member())
    machine.handle(0.1, a_view(NodeRole.WAITING, 7, term=3))
    (effect,) = machine.handle(1.0, ms.Tick())
    beat = Heartbeat(run_id=RUN, node="a", incarnation=1, seq=1, term=3, revision=7)
    assert effect == ms.Send(beat)


@pytest.mark.parametrize(
    "sign",
    [a_view(NodeRole.WAITING, 1), Ack(run_id=RUN, node="a", incarnation=1, seq=1)],
    ids=["a view", "an ack"],
)
def test_whatever_comes_breaks_the_silence(sign: View | Ack) -> None:
    machine = up(member(silence_s=2.0, beat_s=1.0))
    for now in (1.0, 1.9):
        machine.handle(now, ms.Tick())
    machine.handle(1.9, sign)
    machine.handle(2.9, ms.Tick())
    assert machine.link.value == "up"
    effects = machine.handle(3.9, ms.Tick())
    assert isinstance(effects[0], ms.Disconnect)
    assert machine.link.value == "down"


def test_what_is_said_while_the_link_is_down_is_said_once_it_is_up() -> None:
    machine = member()
    for generation in range(50):
        assert machine.handle(0.0, ms.StatusChanged(NodePhase.RUNNING, generation)) == []
    machine.handle(0.0, ms.Tick())
    (sent,) = machine.handle(0.0, ms.Connected())
    assert isinstance(sent, ms.Send)
    assert isinstance(sent.message, Status)
    assert (sent.message.phase, sent.message.generation) == (NodePhase.RUNNING, 49)


def test_every_status_has_a_higher_number() -> None:
    machine = up(member())
    seqs = []
    for at in range(5):
        for effect in machine.handle(at * 0.6, ms.StatusChanged(NodePhase.READY, -1)):
            assert isinstance(effect, ms.Send)
            seqs.append(effect.message.seq)
        for effect in machine.handle(
            at * 0.6 + 0.55, Ack(run_id=RUN, node="a", incarnation=1, seq=0)
        ):
            assert isinstance(effect, ms.Send)
            seqs.append(effect.message.seq)
    assert seqs == list(range(2, 12))


views = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 2)), max_size=30)


@untimed
@given(views)
def test_views_only_ever_get_newer(story: list[tuple[int, int, int]]) -> None:
    machine, newest = up(member()), (0, 0)
    for term, revision, incarnation in story:
        view = a_view(NodeRole.WAITING, revision, term=term, incarnation=incarnation)
        effects = machine.handle(0.0, view)
        if incarnation == 1 and (term, revision) > newest:
            newest = (term, revision)
            assert effects == [ms.DeliverView(view)]
            assert machine.view == view
        else:
            assert effects == []
    assert machine.status.term == newest[0]


@pytest.mark.parametrize(
    ("ever_up", "role", "limit_s"),
    # A link that opened and brought no word is no contact.
    [
        (False, None, 20.0),
        (True, None, 20.0),
        (True, NodeRole.CLOSED, 5.0),
        (True, NodeRole.MEMBER, 10.0),
    ],
)
def test_it_gives_up_once_and_not_before_the_limit(
    ever_up: bool, role: NodeRole | None, limit_s: float
) -> None:
    machine = member(away_s=10.0, first_contact_s=20.0)
    if ever_up:
        up(machine)
        if role is not None:
            machine.handle(0.0, a_view(role, 1))
        machine.handle(0.0, ms.Disconnected("reset"))
    happened = run(machine, 0.0, 60.0)
    given_up = [(at, effect) for at, effect in happened if isinstance(effect, ms.GiveUp)]
    assert len(given_up) == 1
    ((at, effect),) = given_up
    assert at == pytest.approx(limit_s, abs=0.01)
    assert isinstance(effect, ms.GiveUp)
    assert effect.away_s == pytest.approx(limit_s, abs=0.01)
    assert effect.why == "refused"


def refused_each_time(machine: Session, until: float) -> list[tuple[float, ms.Effect]]:
    """Tick at every deadline; links open, bring a word and are closed for good at once."""
    happened: list[tuple[float, ms.Effect]] = []
    now = 0.0
    while now < until:
        for effect in machine.handle(now, ms.Tick()):
            happened.append((now, effect))
            if isinstance(effect, ms.Connect):
                machine.handle(now, ms.Connected())
                machine.handle(now, Ack(run_id=RUN, node="a", incarnation=1, seq=1))
                closed = machine.handle(now, ms.Disconnected("too large", permanent=True))
                happened += [(now, one) for one in closed]
        deadline = machine.next_deadline(now)
        assert deadline > now, "it asks for a tick that does nothing"
        now = min(until, deadline)
    return happened


def test_links_that_open_to_be_refused_are_tried_ever_less_often_and_count_as_away() -> None:
    happened = refused_each_time(member(away_s=10.0), 30.0)
    opened = [at for at, effect in happened if isinstance(effect, ms.Connect)]
    gaps = [later - earlier for earlier, later in pairwise(opened)]
    assert gaps == pytest.approx(
        [min(RETRY_MAX_S, RETRY_FIRST_S * 2**i) for i in range(len(gaps))], abs=1e-6
    )
    ((at, effect),) = [(at, one) for at, one in happened if isinstance(one, ms.GiveUp)]
    assert at == pytest.approx(10.0, abs=RETRY_MAX_S)
    assert isinstance(effect, ms.GiveUp)
    assert effect.why == "too large"


def test_a_link_that_lasts_after_refusals_is_one_again() -> None:
    machine = member(away_s=10.0, beat_s=1.0, silence_s=5.0)
    refused_each_time(machine, 9.0)
    assert machine.is_refused
    now = 9.0
    while machine.link is not ConnectionState.CONNECTING:
        now = machine.next_deadline(now)
        machine.handle(now, ms.Tick())
    machine.handle(now, ms.Connected())
    while now < 30.0:
        now = machine.next_deadline(now) + 1e-6
        effects = machine.handle(now, ms.Tick())
        assert {type(one) for one in effects} <= {ms.Send}, "neither dropped nor given up"
        machine.handle(now, Ack(run_id=RUN, node="a", incarnation=1, seq=99))
    assert not machine.is_refused
    machine.handle(now, ms.Disconnected("reset"))
    assert machine.next_deadline(now) == pytest.approx(now + RETRY_FIRST_S)


def test_a_node_that_slept_does_not_give_up_on_anybody() -> None:
    machine = up(member(away_s=10.0))
    assert [type(effect) for effect in machine.handle(3_600.0, ms.Tick())] == [ms.Send]
    machine.handle(3_600.0, ms.Disconnected("reset"))
    assert not any(isinstance(e, ms.GiveUp) for e in machine.handle(7_200.0, ms.Tick()))


def test_a_new_incarnation_has_no_round_and_no_view_but_the_term() -> None:
    machine = up(member())
    view = View(
        run_id=RUN,
        node="a",
        incarnation=1,
        term=4,
        revision=9,
        role=NodeRole.MEMBER,
        round_term=4,
        round=2,
        generation=5,
        rank=1,
        size=2,
    )
    machine.handle(0.0, view)
    machine.handle(0.0, ms.StatusChanged(NodePhase.RUNNING, 5))
    assert (machine.status.round_term, machine.status.rank, machine.status.size) == (4, 1, 2)
    machine.handle(0.0, a_view(NodeRole.FENCED, 10, term=4))
    machine.handle(0.0, ms.Rejoined(77))
    status = machine.status
    assert (status.info.incarnation, status.phase, status.generation) == (77, NodePhase.READY, 5)
    assert (status.term, status.round_term, status.round, status.rank) == (4, 0, -1, -1)
    assert machine.view is None
    assert machine.heard_seq == -1


def test_something_that_listens_but_never_answers_is_given_up() -> None:
    machine = up(member(away_s=10.0, first_contact_s=20.0, silence_s=5.0))
    now, dropped, given_up = 0.0, 0, []
    while now < 40.0:
        effects = machine.handle(now, ms.Tick())
        while effects:
            effect = effects.pop(0)
            if isinstance(effect, ms.Connect):
                effects += machine.handle(now, ms.Connected())
            dropped += isinstance(effect, ms.Disconnect)
            if isinstance(effect, ms.GiveUp):
                given_up.append(now)
        now = machine.next_deadline(now)
    assert given_up == [pytest.approx(20.0, abs=0.01)]
    assert dropped >= 7


@pytest.mark.parametrize(
    ("nodes", "beat_s"), [(1, 1.0), (5_000, 1.0), (7_500, 1.5), (10_000, 2.0), (10**6, 2.0)]
)
def test_in_large_jobs_nodes_beat_less_often_but_often_enough(nodes: int, beat_s: float) -> None:
    machine = up(member(silence_s=5.0))
    view = msgspec.structs.replace(a_view(NodeRole.MEMBER, 1), present=nodes)
    machine.handle(0.0, view)
    now, beats = 0.0, []
    while now < 20.0:
        for effect in machine.handle(now, ms.Tick()):
            if isinstance(effect, ms.Send):
                beats.append(now)
                machine.handle(
                    now, Ack(run_id=RUN, node="a", incarnation=1, seq=machine.status.seq)
                )
        now = machine.next_deadline(now)
    gaps = [later - earlier for earlier, later in pairwise([0.0, *beats])]
    assert gaps == [pytest.approx(beat_s, abs=0.01)] * len(gaps)


def test_a_node_beats_often_enough_for_a_coordinator_with_less_patience() -> None:
    machine = up(member(beat_s=6.0, silence_s=18.0))
    machine.handle(0.0, msgspec.structs.replace(a_view(NodeRole.MEMBER, 1), silence_s=5.0))
    now, beats = 0.0, 0
    while now < 10.0:
        beats += sum(isinstance(one, ms.Send) for one in machine.handle(now, ms.Tick()))
        now = machine.next_deadline(now)
    assert beats >= 4
