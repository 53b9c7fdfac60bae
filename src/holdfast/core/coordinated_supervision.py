"""The machine of one agent in a job with a coordinator, which decides for all nodes.

States and rules for one node's workers are those of `core.supervision`. In addition, the node reports
failures and successes to the coordinator, and follows its newest view. The rules:

1.  Only the newest view counts. The node keeps every view that arrives, and applies it as soon as the
    state of the workers allows it. A newer view replaces one that was not applied.
2.  A member runs the generation of its view, once. If the view has a higher generation, or the node
    is no longer a member, it first stops its workers. If the view says not to start yet, the node
    waits, because another node still has workers of an earlier generation.
3.  If a worker fails, the node reports this immediately, before it stops the others, so that all nodes
    stop at the same time. Once they have exited, it reports again, with the failure report.
4.  If all its workers have succeeded, the node waits for the job to close. A new generation may start
    them again before that.
5.  If the node is fenced, it rejoins as another incarnation. If it is refused, or its coordinator
    does not respond for too long, it exits without knowing the job's outcome. But if its workers
    succeeded in the newest generation that it knows, fenced or not, it exits with success.
6.  On a signal the node immediately reports that it leaves. Then it stops its workers and exits.
7.  If the keeper killed the workers because they may have been replaced elsewhere
    (`core.liveness.StopDeadline`), this is not a failure: the node is ready for the next generation.
8.  If the job is closed, the node exits with the job's outcome, once its view is final or the connection
    is lost. Closed is final: if a later coordinator does not know the end, the node leaves it.
9.  If no round with this node forms within the join timeout, the node exits. The timeout does not apply to
    standbys. If the other nodes' workers do not finish within the exit barrier's limit, the node exits
    with success. If the other nodes need this one, it waits without a limit.
"""

from __future__ import annotations

import msgspec

from holdfast.core.machine import Effect, Event
from holdfast.core.policy import RestartBudget, Verdict, judge
from holdfast.core.protocol import JobOutcome, NodePhase, NodeRole, View
from holdfast.core.supervision import (
    SIGKILL,
    BarrierEnded,
    Begun,
    Outcome,
    SignalReceived,
    StacksDumped,
    StartWorkers,
    State,
    StopReason,
    Supervision,
    TimersExpired,
    WorkerExited,
    WorkersExpired,
    WorkersStarted,
    WorkersStopped,
    WorkersUnhealthy,
)

WAIT_NOTICE_AFTER_S = 2.0
"""The agent informs the user about longer waits."""


class ViewReceived(Event):
    """A new view for this node arrived."""

    view: View


class CoordinatorLost(Event):
    """The coordinator did not respond within the limit, or this side of the connection failed."""

    why: str
    """The reason without the endpoint; the message to the user adds it."""
    away_s: float = 0.0


class NeededByOthers(Event):
    """Other nodes began or ceased to need this process, which runs the coordinator or their store."""

    needed: bool


class ReportStatus(Effect):
    """Report this to the coordinator."""

    phase: NodePhase
    generation: int
    clear: int = -1
    """This node has no workers of generations before this one and will not start any."""


class Rejoin(Effect):
    """Become a new incarnation, and report that it is ready."""


class ReportWait(Effect):
    """Inform the user that this node waits for others, or that it stopped waiting at the limit."""

    limit_s: float | None
    has_ended: bool = False


class CoordinatedSupervision(Supervision):
    """The machine of an agent that follows a coordinator."""

    def __init__(
        self,
        *,
        local_world_size: int,
        max_restarts: int,
        stuck_limit_s: float | None = None,
        join_timeout_s: float | None = None,
        exit_barrier_s: float | None = None,
    ) -> None:
        """`join_timeout_s` limits the wait for a round, `exit_barrier_s` that for other nodes to finish."""
        super().__init__(
            local_world_size=local_world_size,
            max_restarts=max_restarts,
            stuck_limit_s=stuck_limit_s,
        )
        self._join_timeout_s = join_timeout_s
        self._exit_barrier_s = exit_barrier_s
        self._needed = False
        self._since = 0.0  # When the current wait began.
        self._is_reported = False  # Whether the user was informed about this wait.
        self.view: View | None = None
        self._was_admitted = False
        self._done = -1  # The generation in which its workers succeeded, unless the job went on.
        self._coordinator_lost = False
        self._has_workers = False
        self._reported_clear = (0, -1)  # The term of the view at that time, and the generation.

    @property
    def failed_generation(self) -> int:
        """The generation that failed, if the job failed; this node may have had no part in it."""
        return max(self.generation, self.view.generation if self.view is not None else -1)

    @property
    def grace_s(self) -> float:
        """How long workers have to exit; a request to stop the job may set it."""
        return self.view.grace_s if self.view is not None else -1.0

    def handle(self, now: float, event: Event, cause: str = "") -> list[Effect]:
        if isinstance(event, NeededByOthers):
            self._needed = event.needed
            return []
        before = (self.state, self._is_standby())
        effects = super().handle(now, event, cause)
        if (self.state, self._is_standby()) != before:
            self._since, self._is_reported = now, False
        return effects

    def next_deadline(self, now: float) -> float | None:
        waits, limit_s = self._wait_limit()
        if not waits:
            return super().next_deadline(now)
        limits = [limit_s, None if self._is_reported else WAIT_NOTICE_AFTER_S]
        return min((self._since + one for one in limits if one is not None), default=None)

    def _due(self, now: float) -> list[Effect]:
        waits, limit_s = self._wait_limit()
        if not waits:
            return super()._due(now)
        waited_s = now - self._since
        if limit_s is not None and waited_s >= limit_s:
            if self.state is State.LEAVING:
                return [ReportWait(limit_s, has_ended=True), *self._barrier_ended(BarrierEnded())]
            return self._finish(Outcome.JOIN_TIMED_OUT)
        if self._is_reported or waited_s < WAIT_NOTICE_AFTER_S:
            return []
        self._is_reported = True
        return [ReportWait(limit_s)]

    def _wait_limit(self) -> tuple[bool, float | None]:
        """Return whether this node waits for others, and the limit of the wait."""
        if self.state is State.LEAVING:
            return True, None if self._needed else self._exit_barrier_s
        waits = self.view is None or self.view.role is NodeRole.WAITING
        return self.state is State.JOINING and waits, self._join_timeout_s

    def _is_standby(self) -> bool:
        return self.view is not None and self.view.role is NodeRole.STANDBY

    # Handlers, in the order of a generation's lifecycle.

    def _begin(self, _event: Begun) -> list[Effect]:
        self.state = State.JOINING
        return [self._report(NodePhase.READY)]

    def _view_received(self, event: ViewReceived) -> list[Effect]:
        is_over = self.view is not None and self.view.role is NodeRole.CLOSED
        if is_over and event.view.role is not NodeRole.CLOSED:
            return self._keep_closed()
        self.view = event.view
        self._was_admitted = self._was_admitted or event.view.role in (
            NodeRole.WAITING,
            NodeRole.STANDBY,
            NodeRole.MEMBER,
        )
        if event.view.role in (NodeRole.MEMBER, NodeRole.CLOSED):
            # The job's count replaces this node's.
            self.budget = RestartBudget(self.budget.max_restarts, event.view.restarts)
        return self._apply()

    def _keep_closed(self) -> list[Effect]:
        """Ignore the view of a later coordinator that does not know that the job is over."""
        assert self.view is not None
        self.view = msgspec.structs.replace(self.view, final=True)
        effects = self._apply()
        left = self.state is State.DONE
        return [self._report(NodePhase.LEAVING), *effects] if left else effects

    def _apply(self) -> list[Effect]:
        """Follow the newest view, if the state of the workers allows it."""
        view = self.view
        if view is None:
            return []
        if self.state is State.RUNNING:
            continues = view.role is NodeRole.MEMBER and view.generation <= self.generation
            return [] if continues else self._stop(StopReason.COORDINATOR)
        if self.state not in (State.JOINING, State.LEAVING):
            return []
        if view.role is NodeRole.WAITING or view.generation > self._done:
            self._done = -1  # The job continues and needs the workers again.
        if view.role is NodeRole.MEMBER and view.generation > self.generation:
            if view.start:
                return self._start(view)
            self.state = State.JOINING
            return self._report_clear()
        if view.role is NodeRole.FENCED:
            self.view = None
            self.state = State.JOINING
            return [Rejoin()]
        if view.role is NodeRole.REFUSED:
            return self._finish(Outcome.REFUSED)
        if view.role is NodeRole.CLOSED and view.final:
            return self._end_with_job(view)
        if view.role in (NodeRole.WAITING, NodeRole.STANDBY):
            if self.state is State.LEAVING:
                self.state = State.JOINING
                return [self._report(NodePhase.READY)]
            return self._report_clear()
        return []

    def _report_clear(self) -> list[Effect]:
        """Report that this node has no workers, unless it did so already."""
        term = self.view.term if self.view is not None else 0
        is_reported = (term, self._clear()) <= self._reported_clear
        return [] if is_reported else [self._report(NodePhase.READY)]

    def _report(self, phase: NodePhase) -> Effect:
        clear = self._clear()
        self._reported_clear = (self.view.term if self.view is not None else 0, clear)
        return ReportStatus(phase, self.generation, clear)

    def _clear(self) -> int:
        """Return the lowest generation of which this node may have workers, now or later."""
        if self._has_workers:
            return self.generation
        first = -1
        if self.view is not None:  # A member may start this generation, other nodes only the next.
            first = self.view.generation + (self.view.role is not NodeRole.MEMBER)
        return max(self.generation + 1, first)

    def _start(self, view: View) -> list[Effect]:
        self.generation = view.generation
        self._done = -1
        self.state = State.STARTING
        self.running = frozenset(range(self._local_world_size))
        self.forget_workers()
        self._has_workers = True
        return [
            self._report(NodePhase.RUNNING),
            StartWorkers(self.generation, self.restart_count),
        ]

    def _started(self, event: WorkersStarted) -> list[Effect]:
        self._expect_generation(event.generation)
        self.state = State.RUNNING
        if self.signum:  # Received during the start.
            signum = SIGKILL if self._interrupts >= 2 else self.signum
            return self._stop(StopReason.SIGNAL, signum)
        if self._coordinator_lost:
            return self._stop(StopReason.COORDINATOR_LOST)
        return self._apply()

    def _exited(self, event: WorkerExited) -> list[Effect]:
        effects = super()._exited(event)
        if event.failed:
            effects = [self._report(NodePhase.FAILED), *effects]
        return effects

    def _unhealthy(self, event: WorkersUnhealthy) -> list[Effect]:
        return [self._report(NodePhase.FAILED), *super()._unhealthy(event)]

    def _stopped(self, event: WorkersStopped) -> list[Effect]:
        self._expect_generation(event.generation)
        self.running = frozenset()
        self._has_workers = event.unkillable > 0
        reason = self._after_stop
        if event.unkillable:  # No other worker may run beside those that remain.
            return [self._report(NodePhase.LEAVING), *self._finish(Outcome.FAILED)]
        failed = reason in (StopReason.WORKER_FAILED, StopReason.UNHEALTHY)
        if self.signum:
            return self._end_by_signal(failed=failed)
        if self._coordinator_lost:
            return self._end_without_coordinator()
        if reason is StopReason.SUCCEEDED:
            self.state = State.LEAVING
            self._done = self.generation
            return [self._report(NodePhase.SUCCEEDED), *self._apply()]
        self.state = State.JOINING
        # A worker that failed before the stop may be the cause of other failures.
        failed = failed or (reason is StopReason.COORDINATOR and event.failed)
        report = self._report(NodePhase.FAILED if failed else NodePhase.READY)
        return [report, *self._apply()]

    def _barrier_ended(self, _event: BarrierEnded) -> list[Effect]:
        return [self._report(NodePhase.LEAVING), *self._finish(Outcome.SUCCEEDED)]

    # Signals, and the loss of the coordinator.

    def _signal_running(self, event: SignalReceived) -> list[Effect]:
        return [self._report(NodePhase.LEAVING), *super()._signal_running(event)]

    def _signal_starting(self, event: SignalReceived) -> list[Effect]:
        return [self._report(NodePhase.LEAVING), *super()._signal_starting(event)]

    def _signal_stopping(self, event: SignalReceived) -> list[Effect]:
        first = [] if self.signum else [self._report(NodePhase.LEAVING)]
        if first and self._after_stop is StopReason.SUCCEEDED:  # Report the success before leaving.
            first.insert(0, self._report(NodePhase.SUCCEEDED))
        return [*first, *super()._signal_stopping(event)]

    def _signal_idle(self, event: SignalReceived) -> list[Effect]:
        self._note_signal(event)
        return [
            self._report(NodePhase.LEAVING),
            *self._end_by_signal(failed=False),
        ]

    def _end_by_signal(self, *, failed: bool) -> list[Effect]:
        """Finish after a signal. If a failure ends the job anyway, it remains the reason."""
        if self.view is not None and self.view.role is NodeRole.CLOSED:
            return self._end_with_job(self.view)
        if failed and judge(self.budget, retryable=self.retryable) is Verdict.GIVE_UP:
            return self._finish(Outcome.FAILED)
        return self._finish(Outcome.SIGNALLED)

    def _expired(self, event: WorkersExpired) -> list[Effect]:
        self._expect_generation(event.generation)
        return self._stop(StopReason.CUT_OFF, SIGKILL)

    def _lost_running(self, _event: CoordinatorLost) -> list[Effect]:
        self._coordinator_lost = True
        return self._stop(StopReason.COORDINATOR_LOST)

    def _lost_busy(self, _event: CoordinatorLost) -> list[Effect]:
        self._coordinator_lost = True
        return []

    def _lost_idle(self, _event: CoordinatorLost) -> list[Effect]:
        return self._end_without_coordinator()

    def check(self) -> None:
        """Assert the invariants. The budget belongs to the job, so it is not compared with generations."""
        assert not self.running or self.state in (State.STARTING, State.RUNNING, State.STOPPING)
        if self.view is not None and self.state is State.STARTING:
            assert self.generation >= 0

    # Steps that several handlers share.

    def _end_without_coordinator(self) -> list[Effect]:
        if self.view is not None and self.view.role is NodeRole.CLOSED:
            return self._end_with_job(self.view)
        has_succeeded = self.state is State.STOPPING and self._after_stop is StopReason.SUCCEEDED
        has_succeeded = has_succeeded or self._done >= 0
        return self._finish(Outcome.SUCCEEDED if has_succeeded else Outcome.COORDINATOR_LOST)

    def _end_with_job(self, view: View) -> list[Effect]:
        if not self._was_admitted:
            return self._finish(Outcome.REFUSED)
        succeeded = view.outcome is JobOutcome.SUCCEEDED
        return self._finish(Outcome.SUCCEEDED if succeeded else Outcome.FAILED)


_S, _T = State, CoordinatedSupervision
_TIMERS = (TimersExpired, StacksDumped)
_T._handlers = {
    (_S.IDLE, Begun): _T._begin,
    (_S.IDLE, SignalReceived): _T._signal_idle,
    (_S.JOINING, ViewReceived): _T._view_received,
    (_S.JOINING, CoordinatorLost): _T._lost_idle,
    (_S.JOINING, SignalReceived): _T._signal_idle,
    (_S.STARTING, ViewReceived): _T._view_received,
    (_S.STARTING, CoordinatorLost): _T._lost_busy,
    (_S.STARTING, WorkersStarted): _T._started,
    (_S.STARTING, SignalReceived): _T._signal_starting,
    (_S.RUNNING, ViewReceived): _T._view_received,
    (_S.RUNNING, CoordinatorLost): _T._lost_running,
    (_S.RUNNING, WorkerExited): _T._exited,
    (_S.RUNNING, TimersExpired): _T._timers_expired,
    (_S.RUNNING, StacksDumped): _T._stacks_dumped,
    (_S.RUNNING, WorkersExpired): _T._expired,
    (_S.RUNNING, WorkersUnhealthy): _T._unhealthy,
    (_S.RUNNING, SignalReceived): _T._signal_running,
    (_S.STOPPING, ViewReceived): _T._view_received,
    (_S.STOPPING, CoordinatorLost): _T._lost_busy,
    (_S.STOPPING, WorkerExited): _T._exited_while_stopping,
    (_S.STOPPING, SignalReceived): _T._signal_stopping,
    (_S.STOPPING, TimersExpired): _T._timers_expired,
    (_S.STOPPING, StacksDumped): _T._stacks_dumped,
    (_S.STOPPING, WorkersStopped): _T._stopped,
    (_S.LEAVING, ViewReceived): _T._view_received,
    (_S.LEAVING, CoordinatorLost): _T._lost_idle,
    (_S.LEAVING, BarrierEnded): _T._barrier_ended,
    (_S.LEAVING, SignalReceived): _T._signal_idle,
}
_T._ignored = {
    _S.JOINING: (WorkerExited, WorkersUnhealthy, WorkersExpired, *_TIMERS, BarrierEnded),
    _S.STOPPING: (WorkersUnhealthy, WorkersExpired, BarrierEnded),
    _S.RUNNING: (BarrierEnded,),
    _S.STARTING: (*_TIMERS, BarrierEnded),
    _S.LEAVING: (WorkerExited, WorkersExpired, *_TIMERS),
    _S.DONE: (
        WorkerExited,
        WorkersExpired,
        WorkersUnhealthy,
        *_TIMERS,
        SignalReceived,
        ViewReceived,
        CoordinatorLost,
        BarrierEnded,
    ),
}
