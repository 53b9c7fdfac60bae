"""Who is lost, in the eyes of an observer that may itself be slow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.liveness import (
    CLOSED,
    STEPS_PER_SILENCE,
    Liveness,
    LoopWatch,
    StopDeadline,
)

SILENCE_S, GRACE_S = 5.0, 0.25
STEP_S = SILENCE_S / STEPS_PER_SILENCE
START = 1_000.0


def watch() -> Liveness[str]:
    return Liveness(START, silence_s=SILENCE_S, grace_s=GRACE_S)


def attend(liveness: Liveness[str], until: float, at: float) -> dict[str, str]:
    """Look as often as asked for, until somebody is lost or the time is over."""
    while True:
        lost = liveness.expired(at)
        deadline = liveness.next_deadline(at)
        if lost or deadline is None or at >= until:
            return lost
        assert deadline > at
        at = min(until, deadline)


@pytest.mark.parametrize("gap_s", [4.9, 5.0, 60.0, 86_400.0])
def test_a_starved_observer_accuses_nobody(gap_s: float) -> None:
    liveness = watch()
    for peer in "abc":
        liveness.received(peer, START)
    assert liveness.expired(START + gap_s) == {}
    # Their messages lie unread; they have the rest of their time to be received.
    liveness.received("a", START + gap_s)
    lost = attend(liveness, START + gap_s + SILENCE_S - STEP_S, START + gap_s)
    assert set(lost) == {"b", "c"}


def test_a_look_costs_the_same_however_many_are_watched() -> None:
    class Counted(dict[str, float]):
        looked_at = 0

        def items(self) -> object:  # type: ignore[override]
            for item in super().items():
                Counted.looked_at += 1
                yield item

    costs = []
    for peers in (10, 10_000):
        liveness = watch()
        liveness._received_at, liveness._disconnected_at = Counted(), Counted()
        for i in range(peers):
            liveness.received(str(i), START + i * 1e-6)
        for i in range(peers // 2):
            liveness.disconnected(str(i), START + 0.1 + i * 1e-6)
        Counted.looked_at = 0
        assert liveness.expired(START + 0.2) == {}
        liveness.next_deadline(START + 0.2)
        costs.append(Counted.looked_at)
    assert costs == [2, 2]


times = st.lists(
    st.tuples(
        st.sampled_from(["received", "received", "disconnected", "forget", "look"]),
        st.sampled_from("abc"),
        st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, 1.5, 7.0]),
    ),
    max_size=60,
)


@given(times)
@settings(deadline=None)
def test_it_agrees_with_a_simple_account(story: list[tuple[str, str, float]]) -> None:
    liveness, now, attended = watch(), START, 0.0
    received: dict[str, float] = {}
    cut: dict[str, float] = {}
    for what, peer, passed in story:
        now += passed
        if what != "forget":
            attended += min(passed, STEP_S)
        else:
            now -= passed
        match what:
            case "received":
                liveness.received(peer, now)
                received[peer] = attended
                cut.pop(peer, None)
            case "disconnected":
                liveness.disconnected(peer, now)
                if peer not in received or peer in cut:
                    attended -= min(passed, STEP_S)  # It is not even looked at.
                    now -= passed
                else:
                    cut[peer] = attended
            case "forget":
                liveness.forget(peer)
                received.pop(peer, None)
                cut.pop(peer, None)
            case _:
                closed = {p for p, at in cut.items() if attended - at >= GRACE_S}
                silent = {p for p, at in received.items() if attended - at >= SILENCE_S}
                assert set(liveness.expired(now)) == closed | silent
                for one in closed:  # It stays until it has been silent for long enough.
                    del cut[one]
                for one in silent - closed:
                    del received[one]
                    cut.pop(one, None)
        assert len(liveness) == len(received)
        deadline = liveness.next_deadline(now)
        assert (deadline is None) == (not received)
        if deadline is not None:
            assert now <= deadline <= now + STEP_S


def test_a_loop_that_does_not_answer_is_stuck_until_it_does() -> None:
    watch = LoopWatch(START, SILENCE_S)
    at = START
    while not watch.look(at, answered=False):
        assert not watch.is_stuck
        at += watch.step_s
    assert at == START + SILENCE_S
    assert not watch.look(at + 1, answered=False)
    assert watch.look(at + 2, answered=True)
    assert not watch.is_stuck


def test_a_process_that_was_stopped_as_a_whole_has_no_stuck_loop() -> None:
    watch = LoopWatch(START, SILENCE_S)
    assert not watch.look(START + 1, answered=False)
    assert not watch.look(START + 86_400, answered=False)
    assert not watch.look(START + 86_401, answered=True)


def test_a_closed_connection_is_one_loss_and_the_silence_after_it_another() -> None:
    liveness = watch()
    liveness.received("a", START)
    liveness.disconnected("a", START)
    assert attend(liveness, START + 99, START) == {"a": CLOSED}
    (silent,) = attend(liveness, START + 99, START + GRACE_S).values()
    assert silent != CLOSED
    assert "a" not in liveness


def test_the_deadline_counts_from_what_was_answered_when_it_was_sent() -> None:
    deadline = StopDeadline(needs_answers=True)
    assert deadline.at(5.0) is None
    deadline.awake(START)
    assert deadline.at(5.0) is None
    deadline.answered(START + 3, START + 1)
    assert deadline.at(5.0) == START + 1 + 4.0
    deadline.answered(START + 3, START)  # A late answer takes nothing back.
    deadline.answered(START + 3, START + 99)  # Nor does one that cannot be promise anything.
    assert deadline.at(5.0) == START + 3 + 4.0


def test_who_needs_no_answers_must_be_awake() -> None:
    deadline = StopDeadline(needs_answers=False)
    deadline.awake(START)
    deadline.answered(START + 2, START + 2)
    assert deadline.at(5.0) == START + 4.0
    deadline.expire(START + 1)
    assert (deadline.at(5.0) or START) < START
