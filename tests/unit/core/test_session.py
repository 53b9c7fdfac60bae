"""Limits of a node's session under any events; the transcripts of `session` show the rest."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_node import RUN, a_job_of
from holdfast.coordinator.connect import CONNECT_S
from holdfast.core.machine import TICK, InvalidEvent
from holdfast.core.phases import NodePhase, NodeRole
from holdfast.core.protocol import Ack, Heartbeat, NodeInfo, View
from holdfast.core.rounds import RECOVER_S_MAX
from holdfast.core.session import (
    RETRY_FIRST_S,
    RETRY_MAX_S,
    Connect,
    Connected,
    Disconnect,
    Disconnected,
    GiveUp,
    Rejoined,
    Send,
    Session,
    SessionTimeouts,
    StatusChanged,
)

if TYPE_CHECKING:
    from holdfast.core.session import SessionEffect, SessionEvent

untimed = settings(deadline=None)
ACK = Ack(run_id=RUN, node="a", incarnation=1, seq=99)
REFUSED = Disconnected("refused")


def a_session(draw: float = 1.0, **times: Any) -> Session:
    return Session(
        0.0,
        run_id=RUN,
        info=NodeInfo(node="a", incarnation=1),
        settings=a_job_of(2, 3),
        timeouts=SessionTimeouts(**times),
        draw=lambda: draw,
    )


def a_view(role: NodeRole, revision: int, *, term: int = 1, incarnation: int = 1) -> View:
    return View(
        run_id=RUN, node="a", incarnation=incarnation, term=term, revision=revision, role=role
    )


def up(machine: Session) -> Session:
    assert machine.handle(0.0, TICK) == [Connect()]
    (sent,) = machine.handle(0.0, Connected())
    assert isinstance(sent, Send)
    return machine


def run(
    machine: Session, until: float, *, since: float = 0.0, answers: list[SessionEvent] | None = None
) -> list[tuple[float, SessionEffect]]:
    """Tick at every deadline, with these events after each `Connect`; return all effects."""
    happened: list[tuple[float, SessionEffect]] = []
    now = since
    while now < until:
        effects = machine.handle(now, TICK)
        happened += [(now, effect) for effect in effects]
        if Connect() in effects:
            for event in [REFUSED] if answers is None else answers:
                happened += [(now, effect) for effect in machine.handle(now, event)]
        deadline = machine.next_deadline(now)
        assert deadline > now, "the deadline does not advance"
        now = min(until, deadline)
    return happened


def times_of(happened: list[tuple[float, SessionEffect]], kind: type) -> list[float]:
    return [at for at, effect in happened if isinstance(effect, kind)]


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


@untimed
@given(st.floats(0, 1))
def test_retry_delays_grow_to_a_limit_and_are_randomized(draw: float) -> None:
    found = gaps(times_of(run(a_session(draw), 30.0), Connect))
    longest = [min(RETRY_MAX_S, RETRY_FIRST_S * 2**i) for i in range(len(found))]
    assert found == pytest.approx([gap * (0.5 + draw / 2) for gap in longest], abs=1e-6)
    assert RETRY_MAX_S + CONNECT_S < RECOVER_S_MAX, (
        "otherwise nodes reconnect too late for a new coordinator"
    )


def test_refused_connections_are_retried_with_growing_delays_and_count_as_away() -> None:
    refused: list[SessionEvent] = [Connected(), ACK, Disconnected("too large", permanent=True)]
    happened = run(a_session(unreachable_s=10.0), 30.0, answers=refused)
    found = gaps(times_of(happened, Connect))
    assert found == pytest.approx(
        [min(RETRY_MAX_S, RETRY_FIRST_S * 2**i) for i in range(len(found))], abs=1e-6
    )
    ((at, effect),) = [(at, one) for at, one in happened if isinstance(one, GiveUp)]
    assert at == pytest.approx(10.0, abs=RETRY_MAX_S)
    assert isinstance(effect, GiveUp)
    assert effect.why == "too large"


def test_connection_that_lasts_after_refusals_counts_as_contact() -> None:
    machine = a_session(unreachable_s=10.0, silence_s=5.0)
    run(machine, 9.0, answers=[Connected(), ACK, Disconnected("too large", permanent=True)])
    assert machine.is_refused
    now = 9.0
    while Connect() not in machine.handle(now, TICK):
        now = machine.next_deadline(now)
    machine.handle(now, Connected())
    while now < 30.0:
        now = machine.next_deadline(now) + 1e-6
        effects = machine.handle(now, TICK)
        assert {type(one) for one in effects} <= {Send}, (
            "the connection is neither closed nor given up"
        )
        machine.handle(now, ACK)
    assert not machine.is_refused
    machine.handle(now, Disconnected("reset"))
    assert machine.next_deadline(now) == pytest.approx(now + RETRY_FIRST_S)


def test_session_gives_up_on_a_listener_that_never_responds() -> None:
    machine = up(a_session(unreachable_s=10.0, first_contact_s=20.0, silence_s=5.0))
    happened = run(machine, 40.0, answers=[Connected()])
    assert times_of(happened, GiveUp) == [pytest.approx(20.0, abs=0.01)]
    assert len(times_of(happened, Disconnect)) >= 7


@pytest.mark.parametrize(
    ("nodes", "silence_s", "heartbeat_s"),
    [(1, 5.0, 1.0), (7_500, 5.0, 1.5), (10_000, 5.0, 2.0), (10**6, 5.0, 2.0), (1, 1.5, 0.6)],
)
def test_heartbeat_interval_depends_on_nodes_and_silence_limit(
    nodes: int, silence_s: float, heartbeat_s: float
) -> None:
    """Longer in large jobs, and shorter if the coordinator has a shorter silence limit."""
    machine = up(a_session(silence_s=5.0))
    view = a_view(NodeRole.MEMBER, 1)
    machine.handle(0.0, msgspec.structs.replace(view, present=nodes, silence_s=silence_s))
    now, beats = 0.0, [0.0]
    while now < 20.0:
        for effect in machine.handle(now, TICK):
            assert isinstance(effect, Send)
            assert isinstance(effect.message, Heartbeat)
            beats.append(now)
            machine.handle(now, ACK)
        now = machine.next_deadline(now) + 1e-9
    assert gaps(beats) == [pytest.approx(heartbeat_s, abs=0.01)] * (len(beats) - 1)


def test_a_new_incarnation_drops_the_round_and_the_failure_of_the_last() -> None:
    machine = up(a_session())
    view = a_view(NodeRole.MEMBER, 9, term=4)
    machine.handle(0.0, msgspec.structs.replace(view, round_term=4, round=2, rank=1, size=2))
    machine.handle(0.0, StatusChanged(NodePhase.FAILED, 5, None, b"report"))
    machine.handle(0.0, a_view(NodeRole.FENCED, 10, term=4))
    machine.handle(0.0, Rejoined(77))
    status = machine.status
    assert (status.info.incarnation, status.phase, status.generation) == (77, NodePhase.READY, 5)
    assert (status.term, status.round_term, status.round, status.rank) == (4, 0, -1, -1)
    assert (status.report, machine.view, machine.acked_seq) == (b"", None, -1)
    with pytest.raises(InvalidEvent):
        machine.handle(0.0, status)  # type: ignore[arg-type]


def test_only_a_coordinator_that_knows_the_node_postpones_its_stop_deadline() -> None:
    machine = up(a_session(needs_answers=True))
    machine.handle(1.0, a_view(NodeRole.MEMBER, 1))
    known = Ack(run_id=RUN, node="a", incarnation=1, seq=1, sent_at=1.0)
    machine.handle(1.0, known)
    before = machine.stop_at
    assert before is not None
    machine.handle(2.0, msgspec.structs.replace(known, seq=-1, sent_at=2.0))
    assert machine.stop_at == before, "the node is lost, and others may take its place"
    machine.handle(2.0, msgspec.structs.replace(known, sent_at=2.0))
    assert machine.stop_at == before + 1.0
