"""Supervision under random events.

`World` records the events that it sends and the effects that it gets, and never reads the machine's state.
From this record it derives which effects are required and which are forbidden.
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
# The number of answers before an unsolicited event; four answers are one restart.
answers = st.sampled_from([0, 0, 0, 1, 2, 3, 4])
signals = st.sampled_from([SIGINT, SIGINT, SIGTERM, SIGHUP])
mostly_true = st.sampled_from([True, True, True, False])


class World(RuleBasedStateMachine):
    """The environment of an agent: exits, waiting nodes, signals, and the answers to its effects."""

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
        self.doomed = doomed  # Whether workers fail at the end of their work.
        # Signals only arrive after this many generations; otherwise most runs would be short.
        self.quiet_generations = quiet_generations
        self.now = 0.0
        self.begun = False
        self.rounds = 0
        self.signals: list[int] = []
        self.charged = 0
        self.generation = -1
        self.pending: Effect | None = None  # The effect that has yet to be answered.
        self.finish: Finish | None = None
        self.forget_workers()

    def forget_workers(self) -> None:
        self.alive: set[int] = set()
        self.succeeded: set[int] = set()
        self.cause: StopReason | None = None  # The first reason to stop this generation.
        self.retryable = True
        self.fatal = False
        self.first_failed: int | None = None

    # The recorded state.

    def situation(self) -> str:
        if self.finish is not None:
            return "done"
        if not self.begun:
            return "idle"
        match self.pending:
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

    # Sending events and checking effects.

    def send(self, event: Event) -> list[Effect]:
        self.now += 1.0
        effects = self.machine.handle(self.now, event)
        self.machine.check()
        for effect in effects:
            assert self.finish is None, "an effect after the end"
            self.check_effect(effect)
        return effects

    def check_effect(self, effect: Effect) -> None:
        match effect:
            case JoinRound():
                assert self.pending is None
                assert not self.signals
                self.pending = effect
            case StartWorkers(generation, restart_count):
                assert self.pending is None
                assert not self.signals
                assert generation == self.generation + 1
                assert restart_count == self.charged
                self.forget_workers()
                self.generation = generation
                self.pending = effect
            case StopWorkers(generation, reason, signum):
                assert self.pending is None, "two effects at once"
                assert generation == self.generation
                assert reason is self.cause
                assert signum == (self.expected_signal() if reason is StopReason.SIGNAL else 0)
                self.pending = effect
            case KillWorkers(generation):
                assert self.is_stopping()
                assert generation == self.generation
                assert self.signals.count(SIGINT) >= 2, "killed by a first SIGINT"
            case EnterBarrier():
                assert self.pending is None
                assert self.succeeded == self.everyone
                self.pending = effect
            case Finish():
                self.check_finish(effect)
                self.finish, self.pending = effect, None

    def check_finish(self, end: Finish) -> None:
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
        if self.pending is not None:  # Only a signal interrupts a wait for other nodes.
            assert isinstance(self.pending, JoinRound | EnterBarrier)
            assert end.outcome is Outcome.SIGNALLED

    def expected_signal(self) -> int:
        is_second = self.signals.count(SIGINT) >= 2  # Both were received during the start.
        return SIGKILL if is_second else self.signals[0]

    def note_cause(self, cause: StopReason, *, retryable: bool = True) -> None:
        if self.is_running() and self.cause is None:
            self.cause, self.retryable = cause, retryable

    # Answers.

    @rule(unkillable=st.integers(0, 2))
    def answer(self, unkillable: int) -> None:
        owed, self.pending = self.pending, None
        match owed:
            case None if self.situation() == "idle":
                self.begun = True
                assert self.send(Begun()) == [JoinRound()]
            case JoinRound():
                self.send(RoundJoined(self.rounds, 0, 1))
                self.rounds += 1
                assert self.situation() == "starting"
            case StartWorkers(generation):
                self.alive = set(self.everyone)
                if self.signals:
                    self.note_cause(StopReason.SIGNAL)
                self.send(WorkersStarted(generation))
                assert self.situation() == ("stopping" if self.signals else "running")
            case StopWorkers(generation):
                self.workers_have_stopped(generation, unkillable)
            case EnterBarrier():
                assert self.send(BarrierEnded()) == [Finish(Outcome.SUCCEEDED)]

    def workers_have_stopped(self, generation: int, unkillable: int) -> None:
        self.alive.clear()
        failed = self.cause in FAILURES or (self.cause is StopReason.REGROUP and unkillable > 0)
        spent = self.charged == self.max_restarts
        self.fatal = failed and (spent or not self.retryable or unkillable > 0)
        continues = not self.fatal and not self.signals
        if continues and failed:
            self.charged += 1
        (effect,) = self.send(WorkersStopped(generation, unkillable))
        if self.cause is not StopReason.SUCCEEDED:
            assert isinstance(effect, JoinRound if continues else Finish)
        elif not self.signals:
            assert isinstance(effect, EnterBarrier)

    def answer_pending(self, count: int) -> None:
        for _ in range(count):
            self.answer(unkillable=0)

    # Unsolicited events.

    @rule(after=answers, which=st.integers(0, 3), failed=st.booleans(), retryable=mostly_true)
    def worker_exits(self, after: int, which: int, failed: bool, retryable: bool) -> None:
        self.answer_pending(after)
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
        effects = self.send(WorkerExited(self.generation, local_rank, failed, retryable))
        assert len(effects) == must_stop

    @rule(after=answers, retryable=mostly_true)
    def workers_become_unhealthy(self, after: int, retryable: bool) -> None:
        self.answer_pending(after)
        if not self.has_workers():
            return
        must_stop = self.is_running()
        self.note_cause(StopReason.UNHEALTHY, retryable=retryable)
        effects = self.send(WorkersUnhealthy(self.generation, "no progress", retryable))
        assert len(effects) == must_stop

    @rule(after=answers, count=st.integers(0, 2))
    def nodes_wait(self, after: int, count: int) -> None:
        self.answer_pending(after)
        if self.situation() == "idle":
            return
        must_stop = self.is_running() and count > 0
        if count > 0:
            self.note_cause(StopReason.REGROUP)
        assert len(self.send(NodesWaiting(count))) == must_stop

    @rule(after=answers, signums=st.lists(signals, min_size=1, max_size=3))
    def signals_arrive(self, after: int, signums: list[int]) -> None:
        self.answer_pending(after)
        if self.generation >= self.quiet_generations:
            for signum in signums:
                self.signal_arrives(signum)

    def signal_arrives(self, signum: int) -> None:
        before = self.situation()
        if before != "done":
            self.signals.append(signum)
        self.note_cause(StopReason.SIGNAL)
        effects = self.send(SignalReceived(signum))
        match before:
            case "running":
                assert effects == [StopWorkers(self.generation, StopReason.SIGNAL, signum)]
            case "stopping" if signum == SIGINT and self.signals.count(SIGINT) >= 2:
                assert effects == [KillWorkers(self.generation)]
            case "starting" | "stopping":
                assert self.situation() == before
            case _:
                assert self.situation() == "done"

    # Invariants.

    @invariant()
    def the_record_agrees(self) -> None:
        assert self.machine.generation == self.generation
        assert self.machine.restart_count == self.charged <= self.max_restarts
        assert self.machine.budget.left == self.max_restarts - self.charged
        assert self.machine.first_failed == self.first_failed
        if not isinstance(self.pending, StartWorkers):
            assert self.machine.running == self.alive
        if self.cause in FAILURES or self.cause is StopReason.REGROUP:
            assert self.machine.reason is self.cause

    def teardown(self) -> None:
        """From any state, the run ends within a limited number of events."""
        if not hasattr(self, "machine"):
            return
        starts_left = self.max_restarts - self.charged + 2
        events_left = starts_left * (len(self.everyone) + 4)
        while self.finish is None:
            assert events_left > 0, "the run does not end"
            events_left -= 1
            if self.is_running():
                self.worker_exits(after=0, which=0, failed=self.doomed, retryable=True)
            else:
                self.answer(unkillable=0)


World.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestSupervisionUnderRandomEvents = World.TestCase
