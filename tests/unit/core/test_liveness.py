"""Which peers are lost, as observed by a watcher that may itself be slow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.limits import PATIENCE_MAX
from holdfast.core.liveness import (
    CLOSED,
    STEPS_PER_SILENCE,
    Lateness,
    Liveness,
    LoopWatch,
    StopDeadline,
)

SILENCE_S, GRACE_S = 5.0, 0.25
STEP_S = SILENCE_S / STEPS_PER_SILENCE
START = 1_000.0


def watch() -> Liveness[str]:
    return Liveness(START, silence_s=SILENCE_S, grace_s=GRACE_S)


def watch_until_lost(liveness: Liveness[str], until: float, at: float) -> dict[str, str]:
    """Call `expired` at every deadline until a peer is lost or the time is over."""
    while True:
        lost = liveness.expired(at)
        deadline = liveness.next_deadline(at)
        if lost or deadline is None or at >= until:
            return lost
        assert deadline > at
        at = min(until, deadline)


@pytest.mark.parametrize("gap_s", [4.9, 5.0, 60.0, 86_400.0])
def test_a_watcher_that_was_suspended_reports_no_loss(gap_s: float) -> None:
    liveness = watch()
    for peer in "abc":
        liveness.received(peer, START)
    assert liveness.expired(START + gap_s) == {}
    # Their messages are still unread, and they get the rest of their time.
    liveness.received("a", START + gap_s)
    lost = watch_until_lost(liveness, START + gap_s + SILENCE_S - STEP_S, START + gap_s)
    assert set(lost) == {"b", "c"}


def test_the_cost_of_a_call_does_not_depend_on_the_number_of_peers() -> None:
    class Counted(dict[str, float]):
        reads = 0

        def items(self) -> object:  # type: ignore[override]
            for item in super().items():
                Counted.reads += 1
                yield item

    costs = []
    for peers in (10, 10_000):
        liveness = watch()
        liveness._received_at, liveness._disconnected_at = Counted(), Counted()
        for i in range(peers):
            liveness.received(str(i), START + i * 1e-6)
        for i in range(peers // 2):
            liveness.disconnected(str(i), START + 0.1 + i * 1e-6)
        Counted.reads = 0
        assert liveness.expired(START + 0.2) == {}
        liveness.next_deadline(START + 0.2)
        costs.append(Counted.reads)
    assert costs == [2, 2]


times = st.lists(
    st.tuples(
        st.sampled_from(["received", "received", "patient", "disconnected", "forget", "expired"]),
        st.sampled_from("abc"),
        st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, 1.5, 7.0]),
    ),
    max_size=60,
)


@given(times)
@settings(deadline=None)
def test_liveness_equals_a_simple_model(story: list[tuple[str, str, float]]) -> None:
    liveness, now, awake_s = watch(), START, 0.0
    received: dict[str, float] = {}
    cut: dict[str, float] = {}
    patience: dict[str, int] = {}
    for what, peer, passed in story:
        now += passed
        if what not in ("forget", "patient"):
            awake_s += min(passed, STEP_S)
        else:
            now -= passed
        match what:
            case "received":
                liveness.received(peer, now)
                received[peer] = awake_s
                cut.pop(peer, None)
            case "disconnected":
                liveness.disconnected(peer, now)
                if peer not in received or peer in cut:
                    awake_s -= min(passed, STEP_S)  # The call does not read the clock.
                    now -= passed
                else:
                    cut[peer] = awake_s
            case "patient":
                patience[peer] = int(4 * passed) % 5
                liveness.be_patient(peer, patience[peer])
            case "forget":
                liveness.forget(peer)
                received.pop(peer, None)
                cut.pop(peer, None)
                patience.pop(peer, None)
            case _:
                closed = {p for p, at in cut.items() if awake_s - at >= GRACE_S}
                limits = {
                    p: SILENCE_S * (1 + min(patience.get(p, 0), PATIENCE_MAX)) for p in received
                }
                silent = {p for p, at in received.items() if awake_s - at >= limits[p]}
                assert set(liveness.expired(now)) == closed | silent
                for one in closed:  # The peer is watched until it was silent for long enough.
                    del cut[one]
                for one in silent - closed:
                    del received[one]
                    cut.pop(one, None)
                    patience.pop(one, None)
        assert len(liveness) == len(received)
        deadline = liveness.next_deadline(now)
        assert (deadline is None) == (not received)
        if deadline is not None:
            assert now <= deadline <= now + STEP_S


def test_a_loop_that_does_not_respond_is_stuck_until_it_responds() -> None:
    watch = LoopWatch(START, SILENCE_S)
    at = START
    while not watch.check(at, responded=False):
        assert not watch.is_stuck
        at += watch.step_s
    assert at == START + SILENCE_S
    assert not watch.check(at + 1, responded=False)
    assert watch.check(at + 2, responded=True)
    assert not watch.is_stuck


def test_a_loop_is_not_stuck_if_its_whole_process_was_stopped() -> None:
    watch = LoopWatch(START, SILENCE_S)
    assert not watch.check(START + 1, responded=False)
    assert not watch.check(START + 86_400, responded=False)
    assert not watch.check(START + 86_401, responded=True)


def test_a_peer_is_reported_after_its_connection_closed_and_again_after_the_silence_limit() -> None:
    liveness = watch()
    liveness.received("a", START)
    liveness.disconnected("a", START)
    assert watch_until_lost(liveness, START + 99, START) == {"a": CLOSED}
    (silent,) = watch_until_lost(liveness, START + 99, START + GRACE_S).values()
    assert silent != CLOSED
    assert "a" not in liveness


def test_the_later_an_agent_is_the_more_patience_it_needs_until_it_is_in_time_for_a_while() -> None:
    lateness = Lateness(5.0)
    assert not lateness.note(START, 0.4)
    asked = []
    for late_s in (0.5, 1.4, 0.7, 99.0):
        lateness.note(START, late_s)
        asked.append(lateness.patience)
    assert asked == [1, 2, 2, PATIENCE_MAX]
    assert not lateness.note(START + 9.9, 0.0)
    assert lateness.note(START + 10.0, 0.0)
    assert lateness.patience == PATIENCE_MAX - 1
    assert not lateness.note(START + 19.9, 0.0)


def test_extra_time_is_for_the_promised_patience_and_ends_with_the_supervision() -> None:
    deadline = StopDeadline(needs_answers=True)
    deadline.answered(START, START)
    assert deadline.extra_s(5.0) == 0.0
    deadline.patience = 2
    assert (deadline.at(5.0), deadline.extra_s(5.0)) == (START + 4.0, 8.0)
    deadline.expire(START)
    assert deadline.extra_s(5.0) == 0.0


def test_a_response_renews_the_deadline_from_the_send_time_of_its_message() -> None:
    deadline = StopDeadline(needs_answers=True)
    assert deadline.at(5.0) is None
    deadline.awake(START)
    assert deadline.at(5.0) is None
    deadline.answered(START + 3, START + 1)
    assert deadline.at(5.0) == START + 1 + 4.0
    deadline.answered(START + 3, START)  # A late response does not shorten the deadline.
    deadline.answered(START + 3, START + 99)  # An impossible send time counts as now.
    assert deadline.at(5.0) == START + 3 + 4.0


def test_without_needs_answers_the_deadline_is_renewed_while_awake() -> None:
    deadline = StopDeadline(needs_answers=False)
    deadline.awake(START)
    deadline.answered(START + 2, START + 2)
    assert deadline.at(5.0) == START + 4.0
    deadline.expire(START + 1)
    assert (deadline.at(5.0) or START) < START
