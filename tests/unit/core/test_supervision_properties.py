"""Supervision in an environment with a will of its own.

`World` keeps its own books of what it told the machine and what it was asked to do, and never
reads the machine's state. From these books it says what each effect must be, or must not.
"""

from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGTERM
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from holdfast.core.supervision import (
    BarrierEnded,
    Begun,
    EnterBarrier,
    Finish,
    InvalidEvent,
    JoinRound,
    KillWorkers,
    NodesWaiting,
    Outcome,
    Reason,
    RoundJoined,
    SignalReceived,
    StartWorkers,
    StopWorkers,
    Supervision,
    WorkerExited,
    WorkersStarted,
    WorkersStopped,
    WorkersUnhealthy,
)

if TYPE_CHECKING:
    from holdfast.core.supervision import Effect, Event

FAILURES = (Reason.WORKER_FAILED, Reason.UNHEALTHY)


class World(RuleBasedStateMachine):
    """What an agent meets: workers that end, nodes that come, signals, and answers it waits for."""

    @initialize(
        workers=st.integers(1, 4),
        max_restarts=st.integers(0, 3),
        doomed=st.booleans(),
        quiet_steps=st.sampled_from([0, 5, 10, 20, 1000]),
    )
    def make(self, workers: int, max_restarts: int, doomed: bool, quiet_steps: int) -> None:
        self.machine = Supervision(local_world_size=workers, max_restarts=max_restarts)
        self.everyone = frozenset(range(workers))
        self.max_restarts = max_restarts
        self.doomed = doomed  # Whether workers left to themselves fail, in the end.
        # No signal comes before so many steps: most lives would otherwise be short ones.
        self.quiet_until = float(quiet_steps)
        self.now = 0.0
        self.begun = False
        self.rounds = 0
        self.signals: list[int] = []
        self.charged = 0
        self.generation = -1
        self.owed: Effect | None = None  # What was asked for and not yet answered.
        self.finish: Finish | None = None
        self.forget_workers()

    def forget_workers(self) -> None:
        self.alive: set[int] = set()
        self.succeeded: set[int] = set()
        self.cause: Reason | None = None  # The first fact that no generation outlives.
        self.mendable = True
        self.fatal = False

    # What the world knows of itself.

    def is_running(self) -> bool:
        return self.begun and self.owed is None and self.finish is None

    def is_stopping(self) -> bool:
        return isinstance(self.owed, StopWorkers)

    def has_workers(self) -> bool:
        return self.is_running() or self.is_stopping()

    # Telling the machine, and judging what it wants.

    def tell(self, event: Event) -> list[Effect]:
        self.now += 1.0
        effects = self.machine.handle(self.now, event)
        self.machine.check()
        for effect in effects:
            assert self.finish is None, "something was asked for after the end"
            self.judge(effect)
        return effects

    def judge(self, effect: Effect) -> None:
        match effect:
            case JoinRound():
                assert self.owed is None
                assert not self.signals
                self.owed = effect
            case StartWorkers(generation, restart_count):
                assert self.owed is None
                assert not self.signals
                assert generation == self.generation + 1
                assert restart_count == self.charged
                self.forget_workers()
                self.generation = generation
                self.owed = effect
            case StopWorkers(generation, reason, signum):
                assert self.owed is None, "two things are asked for at once"
                assert generation == self.generation
                assert reason is self.cause
                assert signum == (self.signals[0] if reason is Reason.SIGNAL else 0)
                self.owed = effect
            case KillWorkers(generation):
                assert self.is_stopping()
                assert generation == self.generation
                assert self.signals.count(SIGINT) >= 2, "killed by a first SIGINT"
            case EnterBarrier():
                assert self.owed is None
                assert self.succeeded == self.everyone
                self.owed = effect
            case Finish():
                self.judge_end(effect)
                self.finish, self.owed = effect, None

    def judge_end(self, end: Finish) -> None:
        match end.outcome:
            case Outcome.SUCCEEDED:
                assert self.succeeded == self.everyone
                assert self.cause is Reason.SUCCEEDED
                assert end.signum == 0
            case Outcome.FAILED:
                assert self.fatal
                assert end.signum == 0
            case Outcome.SIGNALLED:
                assert not self.fatal
                assert end.signum == self.signals[0]
        if self.owed is not None:  # Only a signal breaks off waiting for other nodes.
            assert isinstance(self.owed, JoinRound | EnterBarrier)
            assert end.outcome is Outcome.SIGNALLED

    def note_cause(self, cause: Reason, *, mendable: bool = True) -> None:
        if self.is_running() and self.cause is None:
            self.cause, self.mendable = cause, mendable

    # Answers.

    @precondition(lambda self: not self.begun and self.finish is None)
    @rule()
    def begin(self) -> None:
        self.begun = True
        assert self.tell(Begun()) == [JoinRound()]

    @precondition(lambda self: isinstance(self.owed, JoinRound))
    @rule()
    def round_forms(self) -> None:
        self.owed = None
        self.tell(RoundJoined(self.rounds, 0, 1))
        self.rounds += 1
        assert isinstance(self.owed, StartWorkers)

    @precondition(lambda self: isinstance(self.owed, StartWorkers))
    @rule()
    def workers_come_up(self) -> None:
        self.owed = None
        self.alive = set(self.everyone)
        if self.signals:
            self.note_cause(Reason.SIGNAL)
        self.tell(WorkersStarted(self.generation))
        assert self.is_stopping() == bool(self.signals)

    @precondition(lambda self: self.is_stopping())
    @rule(unkillable=st.sampled_from([0, 0, 0, 1, 2]))
    def workers_are_gone(self, unkillable: int) -> None:
        self.owed = None
        self.alive.clear()
        failed = self.cause in FAILURES or (self.cause is Reason.REGROUP and unkillable > 0)
        spent = self.charged == self.max_restarts
        self.fatal = failed and (spent or not self.mendable or unkillable > 0)
        goes_on = not self.fatal and not self.signals
        if goes_on and failed:
            self.charged += 1
        (effect,) = self.tell(WorkersStopped(self.generation, unkillable))
        if self.cause is not Reason.SUCCEEDED:
            assert isinstance(effect, JoinRound if goes_on else Finish)
        elif not self.signals:
            assert isinstance(effect, EnterBarrier)

    @precondition(lambda self: isinstance(self.owed, EnterBarrier))
    @rule()
    def others_are_done(self) -> None:
        self.owed = None
        assert self.tell(BarrierEnded()) == [Finish(Outcome.SUCCEEDED)]

    # What happens unasked.

    @precondition(lambda self: self.has_workers() and self.alive)
    @rule(
        which=st.integers(0, 3),
        failed=st.booleans(),
        mendable=st.sampled_from([True] * 3 + [False]),
    )
    def worker_ends(self, which: int, failed: bool, mendable: bool) -> None:
        local_rank = sorted(self.alive)[which % len(self.alive)]
        self.alive.discard(local_rank)
        if not failed:
            self.succeeded.add(local_rank)
        must_stop = self.is_running() and (failed or not self.alive)
        if failed:
            self.note_cause(Reason.WORKER_FAILED, mendable=mendable)
        elif not self.alive:
            self.note_cause(Reason.SUCCEEDED)
        effects = self.tell(WorkerExited(self.generation, local_rank, failed, mendable))
        assert len(effects) == must_stop

    @precondition(lambda self: self.has_workers())
    @rule(mendable=st.booleans())
    def workers_are_found_unhealthy(self, mendable: bool) -> None:
        must_stop = self.is_running()
        self.note_cause(Reason.UNHEALTHY, mendable=mendable)
        effects = self.tell(WorkersUnhealthy(self.generation, "no progress", mendable))
        assert len(effects) == must_stop

    @precondition(lambda self: self.begun)
    @rule(count=st.integers(0, 2))
    def nodes_wait(self, count: int) -> None:
        must_stop = self.is_running() and count > 0
        if count > 0:
            self.note_cause(Reason.REGROUP)
        assert len(self.tell(NodesWaiting(count))) == must_stop

    @precondition(lambda self: self.now >= self.quiet_until)
    @rule(signum=st.sampled_from([SIGINT, SIGINT, SIGTERM, SIGHUP]))
    def signal_comes(self, signum: int) -> None:
        stopping, starting = self.is_stopping(), isinstance(self.owed, StartWorkers)
        if self.finish is None:
            self.signals.append(signum)
        self.note_cause(Reason.SIGNAL)
        effects = self.tell(SignalReceived(signum))
        if stopping and signum == SIGINT and self.signals.count(SIGINT) >= 2:
            assert effects == [KillWorkers(self.generation)]
        elif not stopping and not starting:
            assert self.is_stopping() or self.finish is not None

    # News that comes late: see test_supervision for the states that still refuse it.

    @precondition(lambda self: self.generation > 0 and not isinstance(self.owed, StartWorkers))
    @rule(back=st.integers(1, 3), local_rank=st.integers(0, 3), failed=st.booleans())
    def an_exit_is_told_late(self, back: int, local_rank: int, failed: bool) -> None:
        generation = max(0, self.generation - back)
        assert self.tell(WorkerExited(generation, local_rank, failed, mendable=False)) == []

    @precondition(lambda self: self.generation > 0 and self.has_workers())
    @rule(back=st.integers(1, 3))
    def bad_health_is_told_late(self, back: int) -> None:
        generation = max(0, self.generation - back)
        assert self.tell(WorkersUnhealthy(generation, "no progress", mendable=False)) == []

    @precondition(lambda self: self.finish is None)
    @rule(kind=st.sampled_from([JoinRound, StartWorkers, StopWorkers, EnterBarrier]))
    def something_is_answered_that_was_not_asked(self, kind: type[Effect]) -> None:
        if isinstance(self.owed, kind):
            return
        answers: dict[type, Event] = {
            JoinRound: RoundJoined(self.rounds, 0, 1),
            StartWorkers: WorkersStarted(self.generation),
            StopWorkers: WorkersStopped(self.generation),
            EnterBarrier: BarrierEnded(),
        }
        before = {**vars(self.machine), "story": list(self.machine.story)}
        with pytest.raises(InvalidEvent):
            self.machine.handle(self.now, answers[kind])
        assert {**vars(self.machine), "story": list(self.machine.story)} == before

    # What holds at all times.

    @invariant()
    def the_books_agree(self) -> None:
        assert self.machine.generation == self.generation
        assert self.machine.restart_count == self.charged <= self.max_restarts
        assert self.machine.budget.left == self.max_restarts - self.charged
        if not isinstance(self.owed, StartWorkers):
            assert self.machine.running == self.alive
        if self.cause in FAILURES or self.cause is Reason.REGROUP:
            assert self.machine.reason is self.cause

    def teardown(self) -> None:
        """From wherever it is, a fair world brings the run to its end, and within bounds."""
        if not hasattr(self, "machine"):
            return
        starts_left = self.max_restarts - self.charged + 2
        events_left = starts_left * (len(self.everyone) + 4)
        while self.finish is None:
            assert events_left > 0, "the run does not end"
            events_left -= 1
            self.be_fair()

    def be_fair(self) -> None:
        if not self.begun:
            self.begin()
        elif isinstance(self.owed, JoinRound):
            self.round_forms()
        elif isinstance(self.owed, StartWorkers):
            self.workers_come_up()
        elif self.is_stopping():
            self.workers_are_gone(unkillable=0)
        elif isinstance(self.owed, EnterBarrier):
            self.others_are_done()
        else:
            self.worker_ends(which=0, failed=self.doomed, mendable=True)


World.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestSupervisionInTheWorld = World.TestCase
