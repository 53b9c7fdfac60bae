"""A stop among workers that end, die, leave things behind, or do not end at all.

`Workers` keeps its own record of who is alive, when the stop began and what it was asked to do, and
judges each effect by them.
"""

from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGKILL, SIGSEGV, SIGTERM
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.core.machine import TICK
from holdfast.core.stopping import (
    REST_S,
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

# Times are whole numbers of 1/1024 s, so that sums of them are exact.
TICK_S = 1 / 1024
BEGIN_S = 1000.0

# How a leader ends: it handles our signal or dies of it, crashes, or somebody kills it.
endings = st.sampled_from(["handled", "died of it", "died of it", "crashed", "killed"])
seconds = st.integers(1, 40 * 1024).map(lambda ticks: ticks * TICK_S)
fractions = st.integers(0, 4).map(lambda quarters: quarters / 4)


class Workers(RuleBasedStateMachine):
    """Workers that are being stopped, and whoever performs it."""

    @initialize(
        count=st.integers(0, 4),
        unresponsive=st.one_of(st.just(frozenset()), st.frozensets(st.integers(0, 2), min_size=1)),
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
        # Nothing may take longer, if the clock is looked at in time.
        self.latest_end = BEGIN_S + grace_s + 2 * reap_s
        self.now = BEGIN_S
        self.asked: set[int] = set()
        self.killed: set[int] = set()
        self.leftovers_asked = False
        self.swept = False
        self.hurried = signum == SIGKILL or grace_s == 0
        self.asking = not self.hurried and not self.alive <= unresponsive
        self.reap_s = reap_s
        self.died_untold = False
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
        self.judge(self.stop.handle(self.now, StopRequested()))
        assert self.asked == (set() if self.hurried else self.alive - unresponsive)
        assert self.killed == self.alive - self.asked
        assert self.swept == (not self.alive)

    def judge(self, effects: list[Effect]) -> list[Effect]:
        assert not (self.was_ended and effects), "something is done after the end"
        for effect in effects:
            may_kill = self.hurried or self.now >= self.deadline
            match effect:
                case SignalLeader(key, signum):
                    assert key in self.alive - self.asked - self.unresponsive
                    assert signum == self.signum
                    self.asked.add(key)
                case KillTree(key):
                    assert key in self.alive
                    assert key in self.unresponsive or key not in self.killed, "killed twice"
                    assert key in self.unresponsive or may_kill, "killed before the deadline"
                    self.killed.add(key)
                case SignalLeftovers(signum):
                    assert not self.alive
                    assert not may_kill
                    assert not self.leftovers_asked
                    assert signum == self.signum
                    self.leftovers_asked = True
                case KillLeftovers():
                    assert not self.swept
                    assert self.alive <= self.killed, "swept up beside leaders not yet killed"
                    assert may_kill or not self.leftovers_asked, "killed before the deadline"
                    self.swept = True
        if KillTree in map(type, effects) and not self.asking:
            self.judge_patience(self.reap_s)
        if KillLeftovers() in effects:
            self.judge_patience(min(REST_S, self.reap_s) if self.stop.given_up else self.reap_s)
        return effects

    def judge_patience(self, patience_s: float) -> None:
        """What was killed has so much time to go."""
        assert self.stop.next_deadline() == self.now + patience_s

    def can_go_on(self) -> bool:
        return not self.stop.ended

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 3), how=endings)
    def one_leader_ends(self, which: int, how: str) -> None:
        self.leader_ends(sorted(self.alive)[which % len(self.alive)], how)

    @rule(how=endings, last=endings)
    def all_leaders_end(self, how: str, last: str) -> None:
        while self.alive:
            self.leader_ends(min(self.alive), how if len(self.alive) > 1 else last)

    def leader_ends(self, key: int, how: str) -> None:
        self.alive.discard(key)
        signals = {"handled": 0, "died of it": self.signum, "crashed": SIGSEGV, "killed": SIGKILL}
        died_of = signals[how]
        was_asking, was_over = self.asking, self.swept or self.abandoned
        if was_asking and died_of == self.signum:
            self.died_untold = True
        if self.alive <= self.unresponsive:
            self.asking = False
        effects = self.judge(self.stop.handle(self.now, LeaderExited(key, died_of)))
        if was_over:
            assert effects == []
        elif not self.alive:
            asks = was_asking and self.died_untold
            assert effects == [SignalLeftovers(self.signum) if asks else KillLeftovers()]
        elif was_asking and not self.asking:
            assert effects == [KillTree(each) for each in sorted(self.alive)]
        else:
            assert effects == []

    @precondition(lambda self: self.can_go_on())
    @rule(fraction=fractions)
    def time_passes(self, fraction: float) -> None:
        """Sleep until the deadline or a part of the way there, as whoever performs it does."""
        deadline = self.stop.next_deadline()
        assert deadline is not None
        assert deadline >= self.now
        ticks = int((deadline - self.now) / TICK_S * fraction)
        self.now = deadline if fraction == 1 else self.now + ticks * TICK_S
        self.tick()

    @precondition(lambda self: self.can_go_on())
    @rule(late_s=seconds)
    def it_is_overslept(self, late_s: float) -> None:
        deadline = self.stop.next_deadline()
        assert deadline is not None
        self.now = deadline + late_s
        self.latest_end += late_s
        self.tick()

    def tick(self) -> None:
        waits = self.asking or (self.leftovers_asked and not self.swept)
        if self.now >= self.deadline and waits and not self.was_ended:
            self.grace_expired, self.asking = True, False
        self.judge(self.stop.handle(self.now, TICK))
        if self.now >= self.deadline and not self.stop.ended:
            assert self.alive <= self.killed, "a leader outlived the deadline"
        next_deadline = self.stop.next_deadline()
        assert next_deadline is None or next_deadline > self.now, "it would spin"

    @rule()
    def somebody_wants_it_over(self) -> None:
        self.hurried, self.asking = True, False
        self.judge(self.stop.handle(self.now, KillRequested()))
        assert self.stop.ended or self.alive <= self.killed
        assert self.stop.ended or self.alive or self.swept

    @precondition(lambda self: self.swept or self.leftovers_asked)
    @rule()
    def nothing_is_left(self) -> None:
        self.alive.clear()  # Leaders too: those given up have ended after all.
        for key in sorted(self.stop.given_up):
            self.judge(self.stop.handle(self.now, LeaderExited(key, SIGKILL)))
        self.stop.handle(self.now, LeftoversGone())
        assert self.stop.ended
        assert not self.stop.given_up

    @precondition(lambda self: not self.swept and not self.leftovers_asked)
    @rule()
    def stale_news_of_an_earlier_stop(self) -> None:
        ended = self.stop.ended
        self.stop.handle(self.now, LeftoversGone())
        assert self.stop.ended == ended

    @precondition(lambda self: self.now >= self.deadline)  # Else few runs would get that far.
    @rule()
    def keeper_is_lost(self) -> None:
        self.alive.clear()
        self.abandoned, self.asking = True, False
        self.stop.handle(self.now, KeeperLost())
        assert self.stop.ended

    @invariant()
    def the_books_agree(self) -> None:
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
        """From wherever it is, time alone brings it to its end, in the three waits there are."""
        if not hasattr(self, "stop"):
            return
        alive = set(self.alive)
        for _ in range(3):
            if self.can_go_on():
                self.time_passes(fraction=1)
            self.the_books_agree()
        assert self.stop.ended
        assert self.now <= self.latest_end
        assert self.stop.given_up == alive or self.abandoned


Workers.TestCase.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)
TestStopAmongWorkers = Workers.TestCase
