"""Supervision in an environment with a will of its own.

`World` keeps its own record of the events it gave and the effects it got, and never reads the
machine's state. From this record it knows what each effect must be, or must not.
"""

from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdfast.core.supervision import (
    BarrierEnded,
    Begun,
    EnterBarrier,
    Finish,
    JoinRound,
    KillWorkers,
    NodesWaiting,
    Outcome,
    RoundJoined,
    SignalReceived,
    StartWorkers,
    StopReason,
    StopWorkers,
    Supervision,
    WorkerExited,
    WorkersStarted,
    WorkersStopped,
    WorkersUnhealthy,
)

if TYPE_CHECKING:
    from holdfast.core.machine import Effect, Event

FAILURES = (StopReason.WORKER_FAILED, StopReason.UNHEALTHY)
# How many answers come in before something unasked happens: four are one whole restart.
answers = st.sampled_from([0, 0, 0, 1, 2, 3, 4])
signals = st.sampled_from([SIGINT, SIGINT, SIGTERM, SIGHUP])
mostly_true = st.sampled_from([True, True, True, False])


class World(RuleBasedStateMachine):
    """What an agent meets: workers that end, nodes that come, signals, and answers it waits for."""

    @initialize(
        workers=st.integers(1, 4),
        max_restarts=st.integers(0, 3),
        doomed=st.booleans(),
        quiet_generations=st.integers(-1, 3),
    )
    def make(self, workers: int, max_restarts: int, doomed: bool, quiet_generations: int) -> None:
        self.machine = Supervision(local_world_size=workers, max_restarts=max_restarts)
        self.everyone = frozenset(range(workers))
        self.max_restarts = max_restarts
        self.doomed = doomed  # Whether workers left to themselves fail, in the end.
        # Without a time that no signal disturbs, most lives would be short.
        self.quiet_generations = quiet_generations
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
        self.cause: StopReason | None = None  # The first fact that no generation outlives.
        self.retryable = True
        self.fatal = False
        self.first_failed: int | None = None

    # What the world knows of itself.

    def situation(self) -> str:
        if self.finish is not None:
            return "done"
        if not self.begun:
            return "idle"
        match self.owed:
            case JoinRound():
                return "joining"
            case StartWorkers():
                return "starting"
            case StopWorkers():
                return "stopping"
            case EnterBarrier():
                return "leaving"
        return "running"

    def is_running(self) -> bool:
        return self.situation() == "running"

    def is_stopping(self) -> bool:
        return self.situation() == "stopping"

    def has_workers(self) -> bool:
        return self.is_running() or self.is_stopping()

    # Giving events, and judging effects.

    def give(self, event: Event) -> list[Effect]:
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
                assert signum == (self.wanted_signal() if reason is StopReason.SIGNAL else 0)
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
                assert self.cause is StopReason.SUCCEEDED
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

    def wanted_signal(self) -> int:
        impatient = self.signals.count(SIGINT) >= 2  # Both came while the workers were started.
        return SIGKILL if impatient else self.signals[0]

    def note_cause(self, cause: StopReason, *, retryable: bool = True) -> None:
        if self.is_running() and self.cause is None:
            self.cause, self.retryable = cause, retryable

    # Answers.

    @rule(unkillable=st.integers(0, 2))
    def answer(self, unkillable: int) -> None:
        owed, self.owed = self.owed, None
        match owed:
            case None if self.situation() == "idle":
                self.begun = True
                assert self.give(Begun()) == [JoinRound()]
            case JoinRound():
                self.give(RoundJoined(self.rounds, 0, 1))
                self.rounds += 1
                assert self.situation() == "starting"
            case StartWorkers(generation):
                self.alive = set(self.everyone)
                if self.signals:
                    self.note_cause(StopReason.SIGNAL)
                self.give(WorkersStarted(generation))
                assert self.situation() == ("stopping" if self.signals else "running")
            case StopWorkers(generation):
                self.workers_are_gone(generation, unkillable)
            case EnterBarrier():
                assert self.give(BarrierEnded()) == [Finish(Outcome.SUCCEEDED)]

    def workers_are_gone(self, generation: int, unkillable: int) -> None:
        self.alive.clear()
        failed = self.cause in FAILURES or (self.cause is StopReason.REGROUP and unkillable > 0)
        spent = self.charged == self.max_restarts
        self.fatal = failed and (spent or not self.retryable or unkillable > 0)
        goes_on = not self.fatal and not self.signals
        if goes_on and failed:
            self.charged += 1
        (effect,) = self.give(WorkersStopped(generation, unkillable))
        if self.cause is not StopReason.SUCCEEDED:
            assert isinstance(effect, JoinRound if goes_on else Finish)
        elif not self.signals:
            assert isinstance(effect, EnterBarrier)

    def go_on(self, count: int) -> None:
        for _ in range(count):
            self.answer(unkillable=0)

    # What happens unasked.

    @rule(after=answers, which=st.integers(0, 3), failed=st.booleans(), retryable=mostly_true)
    def worker_ends(self, after: int, which: int, failed: bool, retryable: bool) -> None:
        self.go_on(after)
        if not self.has_workers() or not self.alive:
            return
        local_rank = sorted(self.alive)[which % len(self.alive)]
        self.alive.discard(local_rank)
        must_stop = self.is_running() and (failed or not self.alive)
        if failed:
            if self.is_running():
                self.first_failed = local_rank
            self.note_cause(StopReason.WORKER_FAILED, retryable=retryable)
        else:
            self.succeeded.add(local_rank)
            if not self.alive:
                self.note_cause(StopReason.SUCCEEDED)
        effects = self.give(WorkerExited(self.generation, local_rank, failed, retryable))
        assert len(effects) == must_stop

    @rule(after=answers, retryable=mostly_true)
    def workers_are_found_unhealthy(self, after: int, retryable: bool) -> None:
        self.go_on(after)
        if not self.has_workers():
            return
        must_stop = self.is_running()
        self.note_cause(StopReason.UNHEALTHY, retryable=retryable)
        effects = self.give(WorkersUnhealthy(self.generation, "no progress", retryable))
        assert len(effects) == must_stop

    @rule(after=answers, count=st.integers(0, 2))
    def nodes_wait(self, after: int, count: int) -> None:
        self.go_on(after)
        if self.situation() == "idle":
            return
        must_stop = self.is_running() and count > 0
        if count > 0:
            self.note_cause(StopReason.REGROUP)
        assert len(self.give(NodesWaiting(count))) == must_stop

    @rule(after=answers, signums=st.lists(signals, min_size=1, max_size=3))
    def signals_come(self, after: int, signums: list[int]) -> None:
        self.go_on(after)
        if self.generation >= self.quiet_generations:
            for signum in signums:
                self.signal_comes(signum)

    def signal_comes(self, signum: int) -> None:
        before = self.situation()
        if before != "done":
            self.signals.append(signum)
        self.note_cause(StopReason.SIGNAL)
        effects = self.give(SignalReceived(signum))
        match before:
            case "running":
                assert effects == [StopWorkers(self.generation, StopReason.SIGNAL, signum)]
            case "stopping" if signum == SIGINT and self.signals.count(SIGINT) >= 2:
                assert effects == [KillWorkers(self.generation)]
            case "starting" | "stopping":
                assert self.situation() == before
            case _:
                assert self.situation() == "done"

    # What holds at all times.

    @invariant()
    def the_books_agree(self) -> None:
        assert self.machine.generation == self.generation
        assert self.machine.restart_count == self.charged <= self.max_restarts
        assert self.machine.budget.left == self.max_restarts - self.charged
        assert self.machine.first_failed == self.first_failed
        if not isinstance(self.owed, StartWorkers):
            assert self.machine.running == self.alive
        if self.cause in FAILURES or self.cause is StopReason.REGROUP:
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
            if self.is_running():
                self.worker_ends(after=0, which=0, failed=self.doomed, retryable=True)
            else:
                self.answer(unkillable=0)


World.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestSupervisionInTheWorld = World.TestCase
