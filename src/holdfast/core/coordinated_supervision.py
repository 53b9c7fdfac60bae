"""The machine of one agent in a job with a coordinator, which decides for all nodes.

The states are those of `core.supervision`, and so are the rules for one node's workers. The
difference: the node reports failures and successes to the coordinator, and follows its newest view.
The rules:

1.  Only the newest view counts. The node keeps every view that arrives, and applies it as soon as the
    state of the workers allows it. A newer view replaces one that was not applied.
2.  A member runs the generation of its view, once. If the view has a higher generation, or the node
    is no longer a member, it stops its workers first. If the view says not to start yet, the node
    waits: another node still has workers of an earlier generation.
3.  If a worker fails, the node reports that at once, before it stops the others, so that all nodes
    stop at the same time. It reports again, with the full report, when they have exited.
4.  If all its workers are done, the node waits for the job to close. It may have to start them again
    before that.
5.  If the node is fenced, it rejoins as another incarnation. If it is refused, or its coordinator
    does not respond for too long, it ends without knowing how the job ended. But if its workers were
    done in the newest generation it knows, fenced or not, it ends with success.
6.  On a signal the node reports at once that it leaves. Then it stops its workers and ends.
7.  If the keeper killed the workers because others may have their ranks (`core.liveness.StopDeadline`),
    that is not a failure: the node is ready for the next generation.
8.  When the job is closed, the node ends as the job did, once its view is final or the connection is
    lost. Closed is final: the node leaves a later coordinator that does not know of the end.
9.  If no round with this node forms within the join timeout, the node ends. A node that stands by
    does not wait. If the others' workers are not done within the exit barrier's limit, the node
    ends with success; a node that the others need waits without a limit.
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
"""The user is told of a longer wait."""


class ViewReceived(Event):
    """A new view for this node arrived."""

    view: View


class CoordinatorLost(Event):
    """The coordinator did not respond within the limit, or this side of the connection failed."""

    why: str
    """Without the endpoint, which the message to the user adds."""
    away_s: float = 0.0


class NeededByOthers(Event):
    """Whether other nodes need this process changed: it coordinates, or serves their store."""

    needed: bool


class ReportStatus(Effect):
    """Report this to the coordinator."""

    phase: NodePhase
    generation: int
    clear: int = -1
    """This node has no workers of earlier generations than this one, and will start none."""


class Rejoin(Effect):
    """Become a new incarnation, and report that it is ready."""


class NoticeWait(Effect):
    """Tell the user that this node waits for others, or that it stopped waiting at the limit."""

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
        """The limits of a wait for a round, and of a wait for the others' workers once done."""
        super().__init__(
            local_world_size=local_world_size,
            max_restarts=max_restarts,
            stuck_limit_s=stuck_limit_s,
        )
        self._join_timeout_s = join_timeout_s
        self._exit_barrier_s = exit_barrier_s
        self._needed = False
        self._since = 0.0  # When the wait began, if this node waits.
        self._is_noticed = False  # Whether the user was told of this wait.
        self.view: View | None = None
        self._was_in = False
        self._done = -1  # The generation in which its workers were done, while that still counts.
        self._coordinator_lost = False
        self._has_workers = False
        self._reported_clear = (0, -1)  # In the term of the view that was known then.

    @property
    def grace_s(self) -> float:
        """How long workers have to end; a request to stop the job may limit it."""
        return self.view.grace_s if self.view is not None else -1.0

    def handle(self, now: float, event: Event, cause: str = "") -> list[Effect]:
        if isinstance(event, NeededByOthers):
            self._needed = event.needed
            return []
        before = (self.state, self._stands_by())
        effects = super().handle(now, event, cause)
        if (self.state, self._stands_by()) != before:
            self._since, self._is_noticed = now, False
        return effects

    def next_deadline(self, now: float) -> float | None:
        waits, limit_s = self._wait_limit()
        if not waits:
            return super().next_deadline(now)
        limits = [limit_s, None if self._is_noticed else WAIT_NOTICE_AFTER_S]
        return min((self._since + one for one in limits if one is not None), default=None)

    def _due(self, now: float) -> list[Effect]:
        waits, limit_s = self._wait_limit()
        if not waits:
            return super()._due(now)
        waited_s = now - self._since
        if limit_s is not None and waited_s >= limit_s:
            if self.state is State.LEAVING:
                return [NoticeWait(limit_s, has_ended=True), *self._barrier_ended(BarrierEnded())]
            return self._finish(Outcome.JOIN_TIMED_OUT)
        if self._is_noticed or waited_s < WAIT_NOTICE_AFTER_S:
            return []
        self._is_noticed = True
        return [NoticeWait(limit_s)]

    def _wait_limit(self) -> tuple[bool, float | None]:
        """Return whether this node waits for others, and for how long at most."""
        if self.state is State.LEAVING:
            return True, None if self._needed else self._exit_barrier_s
        waits = self.view is None or self.view.role is NodeRole.WAITING
        return self.state is State.JOINING and waits, self._join_timeout_s

    def _stands_by(self) -> bool:
        return self.view is not None and self.view.role is NodeRole.STANDBY

    # Handlers, in the order of a generation's life.

    def _begin(self, _event: Begun) -> list[Effect]:
        self.state = State.JOINING
        return [self._report(NodePhase.READY)]

    def _view_received(self, event: ViewReceived) -> list[Effect]:
        over = self.view is not None and self.view.role is NodeRole.CLOSED
        if over and event.view.role is not NodeRole.CLOSED:
            return self._closed_before()
        self.view = event.view
        self._was_in = self._was_in or event.view.role in (
            NodeRole.WAITING,
            NodeRole.STANDBY,
            NodeRole.MEMBER,
        )
        if event.view.role is NodeRole.MEMBER:  # The job's count replaces this node's.
            self.budget = RestartBudget(self.budget.max_restarts, event.view.restarts)
        return self._apply()

    def _closed_before(self) -> list[Effect]:
        """Keep the known end of the job, which a later coordinator does not know."""
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
            goes_on = view.role is NodeRole.MEMBER and view.generation <= self.generation
            return [] if goes_on else self._stop(StopReason.COORDINATOR)
        if self.state not in (State.JOINING, State.LEAVING):
            return []
        if view.role is NodeRole.WAITING or view.generation > self._done:
            self._done = -1  # The job goes on, and workers are needed again.
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
        """Report that this node has no workers, unless the coordinator knows it."""
        term = self.view.term if self.view is not None else 0
        told = (term, self._clear()) <= self._reported_clear
        return [] if told else [self._report(NodePhase.READY)]

    def _report(self, phase: NodePhase) -> Effect:
        clear = self._clear()
        self._reported_clear = (self.view.term if self.view is not None else 0, clear)
        return ReportStatus(phase, self.generation, clear)

    def _clear(self) -> int:
        """Return the first generation of which this node may have workers, now or later."""
        if self._has_workers:
            return self.generation
        told = -1
        if self.view is not None:  # A member may start this generation, others only the next one.
            told = self.view.generation + (self.view.role is not NodeRole.MEMBER)
        return max(self.generation + 1, told)

    def _start(self, view: View) -> list[Effect]:
        self.generation = view.generation
        self._done = -1
        self.state = State.STARTING
        self.running = frozenset(range(self._local_world_size))
        self._forget_workers()
        self._has_workers = True
        return [
            self._report(NodePhase.RUNNING),
            StartWorkers(self.generation, self.restart_count),
        ]

    def _started(self, event: WorkersStarted) -> list[Effect]:
        self._expect_generation(event.generation)
        self.state = State.RUNNING
        if self.signum:  # It came while they were being started.
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
        if first and self._after_stop is StopReason.SUCCEEDED:  # The success of its workers counts.
            first.insert(0, self._report(NodePhase.SUCCEEDED))
        return [*first, *super()._signal_stopping(event)]

    def _signal_idle(self, event: SignalReceived) -> list[Effect]:
        self._note_signal(event)
        return [
            self._report(NodePhase.LEAVING),
            *self._end_by_signal(failed=False),
        ]

    def _end_by_signal(self, *, failed: bool) -> list[Effect]:
        """End; a failure that ends the job in any case remains the reason."""
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
        """Assert what must hold after every step; the budget is the job's, older than this node."""
        assert not self.running or self.state in (State.STARTING, State.RUNNING, State.STOPPING)
        if self.view is not None and self.state is State.STARTING:
            assert self.generation >= 0

    # Steps that several handlers share.

    def _end_without_coordinator(self) -> list[Effect]:
        if self.view is not None and self.view.role is NodeRole.CLOSED:
            return self._end_with_job(self.view)
        cleared = self.state is State.STOPPING and self._after_stop is StopReason.SUCCEEDED
        done = cleared or self._done >= 0
        return self._finish(Outcome.SUCCEEDED if done else Outcome.COORDINATOR_LOST)

    def _end_with_job(self, view: View) -> list[Effect]:
        if not self._was_in:
            return self._finish(Outcome.REFUSED)
        well = view.outcome is JobOutcome.SUCCEEDED
        return self._finish(Outcome.SUCCEEDED if well else Outcome.FAILED)


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
