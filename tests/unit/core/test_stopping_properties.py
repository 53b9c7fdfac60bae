"""A stop of workers that exit, crash, leave child processes, or cannot be killed.

`Workers` records which workers are alive, when the stop began and which effects it got, and checks each
effect against this record.
"""

from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGKILL, SIGSEGV, SIGTERM
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.core.machine import TICK
from holdfast.core.stopping import (
    LEFTOVERS_EXIT_S,
    KeeperLost,
    KillLeftovers,
    KillRequested,
    KillTree,
    LeaderExited,
    LeftoversGone,
    SignalLeader,
    SignalLeftovers,
    Stop,
    StopRequested,
)

if TYPE_CHECKING:
    from holdfast.core.machine import Effect

# Times are multiples of 1/1024 s, so that their sums are exact.
TICK_S = 1 / 1024
BEGIN_S = 1000.0

# How a leader exits: it handles the signal or dies of it, crashes, or is killed by another process.
endings = st.sampled_from(["handled", "died of it", "died of it", "crashed", "killed"])
seconds = st.integers(1, 40 * 1024).map(lambda ticks: ticks * TICK_S)
fractions = st.integers(0, 4).map(lambda quarters: quarters / 4)


class Workers(RuleBasedStateMachine):
    """Workers that are being stopped, and the caller that performs the stop."""

    @initialize(
        count=st.integers(0, 4),
        unresponsive=st.one_of(
            *[st.just(frozenset())] * 3, st.frozensets(st.integers(0, 2), min_size=1)
        ),
        signum=st.sampled_from([SIGTERM, SIGTERM, SIGINT, SIGHUP, SIGKILL]),
        grace_s=st.one_of(seconds, seconds, seconds, st.just(0.0)),
        reap_s=seconds,
    )
    def begin(
        self, count: int, unresponsive: frozenset[int], signum: int, grace_s: float, reap_s: float
    ) -> None:
        self.alive = set(range(count))
        self.unresponsive = unresponsive
        self.signum = signum
        self.deadline = BEGIN_S + grace_s
        # The stop must end by then if the caller reads the clock in time.
        self.latest_end = BEGIN_S + grace_s + 2 * reap_s
        self.now = BEGIN_S
        self.signalled: set[int] = set()
        self.killed: set[int] = set()
        self.leftovers_signalled = False
        self.swept = False
        self.kills = signum == SIGKILL or grace_s == 0
        self.waits_for_signal = not self.kills and not self.alive <= unresponsive
        self.reap_s = reap_s
        self.died_of_signal = False
        self.grace_expired = False
        self.was_ended = False
        self.abandoned = False
        self.stop = Stop(
            sorted(self.alive),
            signum=signum,
            grace_s=grace_s,
            reap_s=reap_s,
            unresponsive=unresponsive,
        )
        self.check_effects(self.stop.handle(self.now, StopRequested()))
        assert self.signalled == (set() if self.kills else self.alive - unresponsive)
        assert self.killed == self.alive - self.signalled
        assert self.swept == (not self.alive)

    def check_effects(self, effects: list[Effect]) -> list[Effect]:
        assert not (self.was_ended and effects), "an effect after the end"
        for effect in effects:
            may_kill = self.kills or self.now >= self.deadline
            match effect:
                case SignalLeader(key, signum):
                    assert key in self.alive - self.signalled - self.unresponsive
                    assert signum == self.signum
                    self.signalled.add(key)
                case KillTree(key):
                    assert key in self.alive
                    assert key in self.unresponsive or key not in self.killed, "killed twice"
                    assert key in self.unresponsive or may_kill, "killed before the deadline"
                    self.killed.add(key)
                case SignalLeftovers(signum):
                    assert not self.alive
                    assert not may_kill
                    assert not self.leftovers_signalled
                    assert signum == self.signum
                    self.leftovers_signalled = True
                case KillLeftovers():
                    assert not self.swept
                    assert self.alive <= self.killed, "leftovers killed before leaders"
                    assert may_kill or not self.leftovers_signalled, "killed before the deadline"
                    self.swept = True
        if KillTree in map(type, effects) and not self.waits_for_signal:
            self.check_deadline(self.reap_s)
        if KillLeftovers() in effects:
            self.check_deadline(
                min(LEFTOVERS_EXIT_S, self.reap_s) if self.stop.given_up else self.reap_s
            )
        return effects

    def check_deadline(self, patience_s: float) -> None:
        """Check the time that killed processes have to exit."""
        assert self.stop.next_deadline() == self.now + patience_s

    def is_running(self) -> bool:
        return not self.stop.ended

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 3), how=endings)
    def one_leader_exits(self, which: int, how: str) -> None:
        self.leader_exits(sorted(self.alive)[which % len(self.alive)], how)

    @rule(how=endings, last=endings)
    def all_leaders_exit(self, how: str, last: str) -> None:
        while self.alive:
            self.leader_exits(min(self.alive), how if len(self.alive) > 1 else last)

    def leader_exits(self, key: int, how: str) -> None:
        self.alive.discard(key)
        signals = {"handled": 0, "died of it": self.signum, "crashed": SIGSEGV, "killed": SIGKILL}
        died_of = signals[how]
        was_waiting, was_over = self.waits_for_signal, self.swept or self.abandoned
        if was_waiting and died_of == self.signum:
            self.died_of_signal = True
        if self.alive <= self.unresponsive:
            self.waits_for_signal = False
        effects = self.check_effects(self.stop.handle(self.now, LeaderExited(key, died_of)))
        if was_over:
            assert effects == []
        elif not self.alive:
            asks = was_waiting and self.died_of_signal
            assert effects == [SignalLeftovers(self.signum) if asks else KillLeftovers()]
        elif was_waiting and not self.waits_for_signal:
            assert effects == [KillTree(each) for each in sorted(self.alive)]
        else:
            assert effects == []

    @precondition(lambda self: self.is_running())
    @rule(fraction=fractions)
    def time_passes(self, fraction: float) -> None:
        """Sleep until the deadline, or for a part of that time."""
        deadline = self.stop.next_deadline()
        assert deadline is not None
        assert deadline >= self.now
        ticks = int((deadline - self.now) / TICK_S * fraction)
        self.now = deadline if fraction == 1 else self.now + ticks * TICK_S
        self.tick()

    @precondition(lambda self: self.is_running())
    @rule(late_s=seconds)
    def the_deadline_is_missed(self, late_s: float) -> None:
        deadline = self.stop.next_deadline()
        assert deadline is not None
        self.now = deadline + late_s
        self.latest_end += late_s
        self.tick()

    def tick(self) -> None:
        waits = self.waits_for_signal or (self.leftovers_signalled and not self.swept)
        if self.now >= self.deadline and waits and not self.was_ended:
            self.grace_expired, self.waits_for_signal = True, False
        self.check_effects(self.stop.handle(self.now, TICK))
        if self.now >= self.deadline and not self.stop.ended:
            assert self.alive <= self.killed, "a leader outlived the deadline"
        next_deadline = self.stop.next_deadline()
        assert next_deadline is None or next_deadline > self.now, "the deadline has passed"

    # Not at once; otherwise leaders would rarely exit of the signal.
    @precondition(lambda self: self.kills or self.now > BEGIN_S or self.signalled > self.alive)
    @rule()
    def a_kill_is_requested(self) -> None:
        self.kills, self.waits_for_signal = True, False
        self.check_effects(self.stop.handle(self.now, KillRequested()))
        assert self.stop.ended or self.alive <= self.killed
        assert self.stop.ended or self.alive or self.swept

    @precondition(lambda self: self.swept or self.leftovers_signalled)
    @rule()
    def all_processes_have_exited(self) -> None:
        self.alive.clear()  # Leaders, too: those that were given up have exited after all.
        for key in sorted(self.stop.given_up):
            self.check_effects(self.stop.handle(self.now, LeaderExited(key, SIGKILL)))
        self.stop.handle(self.now, LeftoversGone())
        assert self.stop.ended
        assert not self.stop.given_up

    @precondition(lambda self: not self.swept and not self.leftovers_signalled)
    @rule()
    def a_late_event_of_an_earlier_stop_arrives(self) -> None:
        ended = self.stop.ended
        self.stop.handle(self.now, LeftoversGone())
        assert self.stop.ended == ended

    @precondition(lambda self: self.now >= self.deadline)  # Otherwise most runs would end early.
    @rule()
    def keeper_is_lost(self) -> None:
        self.alive.clear()
        self.abandoned, self.waits_for_signal = True, False
        self.stop.handle(self.now, KeeperLost())
        assert self.stop.ended

    @invariant()
    def the_record_agrees(self) -> None:
        stop = self.stop
        assert stop.running == self.alive
        assert stop.killed == self.killed
        assert (stop.next_deadline() is None) == stop.ended
        assert stop.ended or not self.was_ended, "the end is final"
        self.was_ended = stop.ended
        assert self.abandoned or stop.given_up <= self.alive & self.killed
        assert stop.grace_expired == self.grace_expired

    @invariant()
    def it_ends_in_time(self) -> None:
        deadline = self.stop.next_deadline()
        assert deadline is None or deadline <= self.latest_end

    def teardown(self) -> None:
        """From any state, the stop ends after at most three deadlines."""
        if not hasattr(self, "stop"):
            return
        alive = set(self.alive)
        for _ in range(3):
            if self.is_running():
                self.time_passes(fraction=1)
            self.the_record_agrees()
        assert self.stop.ended
        assert self.now <= self.latest_end
        assert self.stop.given_up == alive or self.abandoned


Workers.TestCase.settings = settings(max_examples=500, stateful_step_count=20, deadline=None)
TestStopUnderRandomEvents = Workers.TestCase
