from __future__ import annotations

from signal import SIGKILL, SIGSEGV, SIGTERM

import pytest

from holdfast.core.stopping import (
    REAP_S,
    REST_S,
    AskLeftovers,
    KillTree,
    SignalLeader,
    Stop,
    StopPhase,
    SweepLeftovers,
)


def begun(*running: int, signum: int = SIGTERM, grace_s: float = 30.0) -> Stop:
    stop = Stop(running, signum=signum, grace_s=grace_s)
    stop.begin(100.0)
    return stop


def stop_in(phase: StopPhase) -> Stop:
    """Return a stop, begun at 100, that has got to this phase."""
    match phase:
        case StopPhase.ASKING:
            stop = begun(0, 1)
        case StopPhase.KILLING:
            stop = begun(0, 1)
            stop.kill_now(101.0)
        case StopPhase.LEFTOVERS:
            stop = begun(0)
            stop.leader_ended(101.0, 0, died_of=SIGTERM)
        case StopPhase.SWEEPING:
            stop = begun(0)
            stop.leader_ended(101.0, 0)
        case StopPhase.ENDED:
            stop = begun(0)
            stop.leader_ended(101.0, 0)
            stop.cleared()
    assert stop.phase is phase
    return stop


def test_every_leader_is_asked_in_the_order_of_the_keys() -> None:
    stop = Stop({2, 0, 1}, signum=SIGTERM, grace_s=30.0)
    assert stop.begin(100.0) == [SignalLeader(key, SIGTERM) for key in (0, 1, 2)]
    assert stop.next_deadline() == 130.0


def test_nothing_is_due_before_it_begins() -> None:
    stop = Stop([0], signum=SIGTERM, grace_s=30.0)
    assert stop.next_deadline() is None
    assert stop.tick(1e9) == []
    assert not stop.ended


def test_the_callers_collection_is_left_alone() -> None:
    running = {0, 1}
    stop = Stop(running, signum=SIGTERM, grace_s=30.0)
    stop.begin(100.0)
    stop.leader_ended(101.0, 0)
    assert running == {0, 1}


@pytest.mark.parametrize(("signum", "grace_s"), [(SIGKILL, 30.0), (SIGTERM, 0.0), (SIGTERM, -1.0)])
def test_without_anything_to_ask_for_leaders_are_killed_at_once(
    signum: int, grace_s: float
) -> None:
    stop = Stop([0, 1], signum=signum, grace_s=grace_s)
    assert stop.begin(100.0) == [KillTree(0), KillTree(1)]
    assert stop.killed == {0, 1}
    assert not stop.grace_expired
    assert stop.next_deadline() == 100.0 + REAP_S


@pytest.mark.parametrize(("signum", "grace_s"), [(SIGKILL, 30.0), (SIGTERM, 0.0), (SIGTERM, 30.0)])
def test_without_leaders_only_what_they_left_is_swept_up(signum: int, grace_s: float) -> None:
    stop = Stop([], signum=signum, grace_s=grace_s)
    assert stop.begin(100.0) == [SweepLeftovers()]
    assert stop.killed == set()
    assert stop.next_deadline() == 100.0 + REAP_S


@pytest.mark.parametrize("died_of", [0, SIGSEGV])
def test_what_leaders_left_that_handled_the_signal_is_swept_up(died_of: int) -> None:
    stop = begun(0, 1)
    assert stop.leader_ended(101.0, 0, died_of=died_of) == []
    assert stop.leader_ended(102.0, 1, died_of=died_of) == [SweepLeftovers()]
    assert stop.next_deadline() == 102.0 + REAP_S


@pytest.mark.parametrize("first_died", [True, False])
def test_one_leader_that_died_of_the_signal_is_enough_to_ask_what_is_left(
    first_died: bool,
) -> None:
    stop = begun(0, 1)
    assert stop.leader_ended(101.0, 0, died_of=SIGTERM if first_died else 0) == []
    last = stop.leader_ended(102.0, 1, died_of=0 if first_died else SIGTERM)
    assert last == [AskLeftovers(SIGTERM)]
    assert stop.next_deadline() == 130.0, "they have the rest of the time, and no more"


def test_the_deadline_kills_the_leaders_that_still_run() -> None:
    stop = begun(0, 1, 2)
    stop.leader_ended(101.0, 1)
    assert stop.tick(129.9) == []
    assert stop.tick(130.0) == [KillTree(0), KillTree(2)]
    assert stop.killed == {0, 2}
    assert stop.grace_expired


def test_the_deadline_kills_what_leaders_left() -> None:
    stop = stop_in(StopPhase.LEFTOVERS)
    assert stop.tick(129.9) == []
    assert stop.tick(130.0) == [SweepLeftovers()]
    assert stop.grace_expired


def test_wanting_it_over_is_not_losing_patience() -> None:
    stop = begun(0, 1)
    assert stop.kill_now(101.0) == [KillTree(0), KillTree(1)]
    assert not stop.grace_expired
    leftovers = stop_in(StopPhase.LEFTOVERS)
    assert leftovers.kill_now(102.0) == [SweepLeftovers()]
    assert not leftovers.grace_expired


@pytest.mark.parametrize("phase", [StopPhase.KILLING, StopPhase.SWEEPING, StopPhase.ENDED])
def test_what_was_killed_is_not_killed_again_nor_given_more_time(phase: StopPhase) -> None:
    stop = stop_in(phase)
    deadline = stop.next_deadline()
    assert stop.kill_now(105.0) == []
    assert stop.phase is phase
    assert stop.next_deadline() == deadline


@pytest.mark.parametrize("died_before", [True, False])
def test_once_anybody_was_killed_nobody_is_asked_any_more(died_before: bool) -> None:
    stop = begun(0, 1)
    if died_before:
        stop.leader_ended(100.5, 0, died_of=SIGTERM)
    stop.kill_now(101.0)
    # It may have died of the signal we asked with, just before it was killed.
    effects = [
        effect for key in (0, 1) for effect in stop.leader_ended(101.1, key, died_of=SIGTERM)
    ]
    assert SweepLeftovers() in effects
    assert stop.phase is StopPhase.SWEEPING


def test_a_leader_that_does_not_die_is_given_up_and_the_rest_swept_up() -> None:
    stop = begun(0, 1)
    stop.tick(130.0)
    stop.leader_ended(131.0, 0, died_of=SIGKILL)
    assert stop.tick(130.0 + REAP_S - 0.1) == []
    assert stop.tick(130.0 + REAP_S) == [SweepLeftovers()]
    assert stop.given_up == {1}
    assert stop.next_deadline() == 130.0 + REAP_S + REST_S, "it has been dying for long"
    assert stop.tick(130.0 + REAP_S + REST_S) == []
    assert stop.ended
    assert stop.given_up == {1}


def test_a_leader_that_ends_after_all_is_not_given_up() -> None:
    stop = begun(0)
    stop.tick(130.0)
    stop.tick(130.0 + REAP_S)
    assert stop.given_up == {0}
    assert stop.leader_ended(130.0 + REAP_S, 0, died_of=SIGKILL) == []
    stop.cleared()
    assert stop.ended
    assert stop.given_up == set()


def test_the_rest_gets_no_longer_than_a_killed_process_gets() -> None:
    stop = Stop([0], signum=SIGKILL, grace_s=30.0, reap_s=REST_S / 4)
    stop.begin(100.0)
    stop.tick(100.0 + REST_S / 4)
    assert stop.next_deadline() == 100.0 + REST_S / 2


def test_leaders_that_cannot_answer_are_killed_at_once_and_the_others_asked() -> None:
    stop = Stop([0, 1, 2], signum=SIGTERM, grace_s=30.0, hopeless=[1])
    assert stop.begin(100.0) == [SignalLeader(0, SIGTERM), KillTree(1), SignalLeader(2, SIGTERM)]
    assert stop.killed == {1}
    assert stop.phase is StopPhase.ASKING
    assert stop.next_deadline() == 130.0


def test_where_no_leader_can_answer_nobody_waits() -> None:
    stop = Stop([0, 1], signum=SIGTERM, grace_s=30.0, hopeless=[0, 1])
    assert stop.begin(100.0) == [KillTree(0), KillTree(1)]
    assert stop.next_deadline() == 100.0 + REAP_S


def test_for_leaders_that_cannot_answer_alone_nobody_waits_until_the_deadline() -> None:
    stop = Stop([0, 1], signum=SIGTERM, grace_s=30.0, hopeless=[1])
    stop.begin(100.0)
    stop.leader_ended(101.0, 0)
    assert stop.phase is StopPhase.KILLING
    assert stop.next_deadline() == 101.0 + REAP_S
    stop.tick(101.0 + REAP_S)
    assert stop.given_up == {1}
    assert not stop.grace_expired


def test_who_could_not_answer_once_but_has_ended_does_not_matter() -> None:
    stop = Stop([0], signum=SIGTERM, grace_s=30.0, hopeless=[1])
    assert stop.begin(100.0) == [SignalLeader(0, SIGTERM)]
    assert stop.killed == set()
    assert stop.leader_ended(101.0, 0) == [SweepLeftovers()]


@pytest.mark.parametrize("phase", list(StopPhase))
def test_news_that_nothing_is_left_ends_it_only_where_that_was_asked(phase: StopPhase) -> None:
    stop = stop_in(phase)
    stop.cleared()
    assert stop.ended == (phase in (StopPhase.LEFTOVERS, StopPhase.SWEEPING, StopPhase.ENDED))


@pytest.mark.parametrize("phase", list(StopPhase))
def test_with_nobody_to_act_on_the_workers_it_is_over(phase: StopPhase) -> None:
    stop = stop_in(phase)
    stop.abandon()
    assert stop.ended
    assert stop.running == set()


def test_the_end_is_final() -> None:
    stop = stop_in(StopPhase.ENDED)
    assert stop.leader_ended(102.0, 0, died_of=SIGTERM) == []
    assert stop.kill_now(103.0) == []
    assert stop.tick(1e9) == []
    assert stop.ended
    assert stop.next_deadline() is None


def test_a_leader_told_of_twice_is_one() -> None:
    stop = begun(0, 1)
    stop.leader_ended(101.0, 0)
    assert stop.leader_ended(102.0, 0) == []
    assert stop.phase is StopPhase.ASKING
    assert stop.running == {1}


def test_what_ended_workers_left_is_given_up_too() -> None:
    stop = stop_in(StopPhase.SWEEPING)
    assert not stop.leftovers_given_up
    assert stop.tick(101.0 + REAP_S) == []
    assert stop.ended
    assert stop.leftovers_given_up
    assert stop.given_up == set()
    stop.abandon()
    assert not stop.leftovers_given_up


def test_of_what_a_leader_that_was_given_up_hides_nothing_is_said() -> None:
    stop = begun(0)
    stop.tick(130.0)
    stop.tick(130.0 + REAP_S)
    stop.tick(130.0 + REAP_S + REST_S)
    assert stop.ended
    assert not stop.leftovers_given_up


def test_it_knows_the_signals_it_has_sent() -> None:
    stop = begun(0, 1)
    assert stop.has_sent(SIGTERM, 0)
    assert not stop.has_sent(SIGSEGV, 0)
    assert not stop.has_sent(SIGKILL, 0)
    stop.leader_ended(101.0, 1)
    stop.kill_now(102.0)
    assert stop.has_sent(SIGKILL, 0)
    assert not stop.has_sent(SIGKILL, 1)
