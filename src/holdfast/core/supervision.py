"""The machine of one agent: it decides about the workers of one node.

::

    IDLE ─Begun─► JOINING ─RoundJoined─► STARTING ─WorkersStarted─► RUNNING
                     ▲ restart, regroup                                │ an exit, a signal, nodes
                     └───────────────── WorkersStopped ◄────────── STOPPING
                                             │
                       all succeeded ◄───────┴───────► failed, or a signal
                             │                               │
                             ▼                               ▼
                          LEAVING ─BarrierEnded──────────► DONE

The rules for the workers of a node:

1.  If one worker fails, all workers of the node are stopped. Exits after the stop began are
    consequences of it and change nothing. A stop because of a failure, here or elsewhere, leaves the
    workers less time to exit (`grace_s`).
2.  If a worker fails, all workers restart while the restart budget lasts, and the restart is charged
    (`core.policy`). A regroup because nodes wait is not charged.
3.  If a restart would only repeat the failure (the program cannot be started, or a process survives
    SIGKILL), the job ends.
4.  If the agent receives a signal, the workers get the same signal, and none starts after it. A
    second SIGINT kills them immediately. If a failure before the signal would have ended the job, the
    failure remains the reason.
5.  If every worker exits with code 0, the node has succeeded. Leftover child processes are killed; then
    the node waits for the others at the barrier.
6.  A generation is one start of the workers; its number only increases.
7.  A restart that an operator requests is not charged. After an operator requests a stop, no worker
    starts; if an earlier failure would have ended the job, it remains the reason. A repeated request id
    gets the first answer. If a request is impossible now, it is refused with a reason. If a signal, a
    request or the job's newest view makes a start useless (`is_start_useless`), the agent may cancel it
    before a worker exists (`StartCancelled`).
8.  If a timer of a worker expires, the stacks of its process are dumped, and the process gets the
    timer's signal. All stacks are dumped before the first process is signalled.
9.  If a worker is in uninterruptible sleep for the limit, the workers are unhealthy, and a restart would
    not help, because SIGKILL cannot end that worker.
10. An agent with a loop of its own leaves its machine idle. Only rules 8 and 9 apply then. The machine
    notes which workers are stuck (`stuck`), and the agent's own loop stops them.

Without a coordinator (`Supervision`) the agent joins each round itself, and decides by rules 2, 3 and 7. With a
coordinator (`CoordinatedSupervision`) views take the place of rounds (`ViewReceived`, and `ReportStatus` for
`JoinRound`). The coordinator decides about restarts and requests. The node reports failures and successes to
it, and follows its newest view:

11. Only the newest view counts. The node keeps every view that arrives, and applies it as soon as the
    state of the workers allows it. A newer view replaces one that was not applied.
12. A member runs the generation of its view, once. If the view has a higher generation, or the node
    is no longer a member, it first stops its workers. If the view says not to start yet, the node
    waits, because another node still has workers of an earlier generation.
13. If a worker fails, the node reports this immediately, before it stops the others, so that all nodes
    stop at the same time. Once they have exited, it reports again. A report of a failure that ends
    the job (`core.policy`) includes the full failure report.
14. If all its workers have succeeded, the node waits for the job to close. A new generation may start
    them again before that.
15. If the node is fenced, it rejoins as another incarnation. If it is refused, or its coordinator
    does not respond for too long, it exits without knowing the job's outcome. But if its workers
    succeeded in the newest generation that it knows, fenced or not, it exits with success.
16. On a signal the node immediately reports that it leaves. Then it stops its workers and exits.
17. If the keeper killed the workers because they may have been replaced elsewhere
    (`core.liveness.StopDeadline`), this is not a failure: the node is ready for the next generation.
18. If the job is closed, the node exits with the job's outcome, once its view is final or the connection
    is lost. A closed job stays closed: if a later coordinator does not know that it is over,
    the node leaves that coordinator.
19. If no round with this node forms within the join timeout, the node exits. The timeout does not apply to
    standbys. If the other nodes' workers do not finish within the exit barrier's limit, the node exits
    with success. If the other nodes need this one, it waits without a limit.

Use, in addition to the contract of `core.machine`: report the outcome of each effect as exactly one event
(`JoinRound`: `RoundJoined`; `StartWorkers`: `WorkersStarted` or `StartCancelled`; `StopWorkers`:
`WorkersStopped`; `EnterBarrier`: `BarrierEnded`; `DumpStacks`: `StacksDumped`). `KillWorkers` only shortens a stop, and
`Finish` is the last effect. Late reports of an earlier generation are ignored. The machine has deadlines:
send it a `TICK` at `next_deadline`.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from holdfast.core.machine import TICK, Effect, Event, InvalidEvent, Story, TableMachine, Tick
from holdfast.core.phases import JobOutcome, NodePhase, NodeRole
from holdfast.core.policy import RestartBudget, Verdict, judge
from holdfast.core.requests import GRANTED, Action, RequestRefusal, unknown_action, with_answer
from holdfast.core.values import Value
from holdfast.defaults import EXIT_BARRIER_S, FAILURE_GRACE_S, SHUTDOWN_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.core.protocol import View
    from holdfast.core.requests import Refused

SIGINT, SIGKILL = 2, 9
WAIT_NOTICE_AFTER_S = 2.0
"""The agent informs the user about longer waits."""


class State(Enum):
    """The state of the agent."""

    IDLE = "idle"
    JOINING = "joining"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    LEAVING = "leaving"
    DONE = "done"


class StopReason(Enum):
    """Why workers are being stopped."""

    SUCCEEDED = "all workers succeeded"
    WORKER_FAILED = "a worker failed"
    UNHEALTHY = "the workers are not healthy"
    SIGNAL = "a signal was received"
    REGROUP = "nodes are waiting to join"
    GENERATION_CHANGED = "the job changed the generation"
    COORDINATOR_LOST = "the coordinator was lost"
    CUT_OFF = "workers may have been replaced elsewhere"
    REQUESTED = "an operator requested it"


class Outcome(Enum):
    """How the run of the agent ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SIGNALLED = "signalled"
    STOPPED = "stopped"
    """An operator requested it."""
    REFUSED = "refused"
    COORDINATOR_LOST = "coordinator lost"
    JOIN_TIMED_OUT = "no round within the join timeout"


# Events.


class Begun(Event):
    """The agent's run began."""


class RoundJoined(Event):
    """A round with this node has formed."""

    round: int
    group_rank: int
    group_world_size: int


class WorkersStarted(Event):
    """Every worker of the generation has started."""

    generation: int


class StartCancelled(Event):
    """The agent cancelled a start that had become useless; no worker of the generation exists."""

    generation: int


class WorkerExited(Event):
    """A worker exited; `failed` unless it succeeded."""

    generation: int
    local_rank: int
    failed: bool
    retryable: bool = True


class WorkersUnhealthy(Event):
    """The workers make no progress, or lost a resource that they need, such as their store."""

    generation: int
    why: str
    retryable: bool = True


class WorkerBlocked(Event):
    """A worker entered uninterruptible sleep, waiting for a device or a file system."""

    generation: int
    local_rank: int
    pid: int = 0


class WorkerUnblocked(Event):
    """A blocked worker left uninterruptible sleep."""

    generation: int
    local_rank: int


class ExpiredTimer(Value):
    """A timer of a worker's process that expired."""

    pid: int
    scope: str
    signum: int
    """The signal to send; 0 or less for none."""


class TimersExpired(Event):
    """Timers of workers expired, at most one per process."""

    timers: tuple[ExpiredTimer, ...]


class StacksDumped(Event):
    """The stacks of processes with expired timers were dumped.

    `timers` includes those that expired during the dump.
    """

    timers: tuple[ExpiredTimer, ...]


class NodesWaiting(Event):
    """Nodes outside the round wait to join."""

    count: int


class SignalReceived(Event):
    """The agent received a signal that it handles."""

    signum: int


class Requested(Event):
    """An operator sent a request. The fields are a subset of `core.protocol.Request`."""

    id: str
    action: str
    request_text: str
    """The request as text."""
    grace_s: float = -1.0


class WorkersStopped(Event):
    """All processes of the generation have exited, except those that cannot be killed."""

    generation: int
    unkillable: int = 0
    failed: bool = False
    """Whether the stop revealed that a worker had failed before the stop began."""


class BarrierEnded(Event):
    """All other nodes are done, or the time limit for them is over."""


# Events of an agent with a coordinator.


class ViewReceived(Event):
    """A new view for this node arrived."""

    view: View


class WorkersExpired(Event):
    """The keeper killed the workers, because they may have been replaced elsewhere.

    This happens if this node could not reach the coordinator for too long.
    """

    generation: int


class CoordinatorLost(Event):
    """The coordinator did not respond within the limit, or this side of the connection failed."""

    why: str
    """The reason without the endpoint; the message to the user adds the endpoint."""
    unreachable_s: float = 0.0


class NeededByOthers(Event):
    """Other nodes began or ceased to need this process, which runs the coordinator or their store."""

    needed: bool


# Effects.


class JoinRound(Effect):
    """Join the next round."""


class StartWorkers(Effect):
    """Start every worker of a new generation."""

    generation: int
    restart_count: int


class StopWorkers(Effect):
    """Stop the remaining workers of a generation; `signum` 0 is the configured stop signal."""

    generation: int
    reason: StopReason
    signum: int = 0


class KillWorkers(Effect):
    """Immediately kill the workers that are being stopped."""

    generation: int


class DumpStacks(Effect):
    """Write the stacks of these processes, and of those whose timers expire meanwhile, to their logs."""

    timers: tuple[ExpiredTimer, ...]


class SignalProcess(Effect):
    """Send a signal to a process of a worker."""

    pid: int
    signum: int


class EnterBarrier(Effect):
    """Wait until the other nodes are done."""

    limit_s: float | None = EXIT_BARRIER_S


class Finish(Effect):
    """End the run with this outcome."""

    outcome: Outcome
    signum: int = 0


# Effects of an agent with a coordinator.


class ReportStatus(Effect):
    """Report this to the coordinator."""

    phase: NodePhase
    generation: int
    clear: int = -1
    """This node has no workers of generations before this one and will not start any."""
    ends_job: bool = False
    """Whether this failure will end the job, as far as this node knows. Then the full report is needed."""


class Rejoin(Effect):
    """Become a new incarnation, and report that it is ready."""


class ReportWait(Effect):
    """Inform the user that this node waits for others, or that it stopped waiting at the limit."""

    limit_s: float | None
    has_ended: bool = False


class SupervisionSettings(Value):
    """Settings of a machine, named as in `LaunchConfig`."""

    exit_barrier_timeout: float | None = EXIT_BARRIER_S
    """How long a node whose workers succeeded waits for the other nodes; None for no limit."""
    shutdown_timeout: float = SHUTDOWN_S
    """How long workers may take to exit when they are stopped."""
    failure_grace: float = FAILURE_GRACE_S
    """The same if they are stopped because of a failure."""


DEFAULT_SETTINGS = SupervisionSettings()


class Supervision(TableMachine):
    """The machine of an agent without a coordinator."""

    state: State

    def __init__(
        self,
        settings: SupervisionSettings = DEFAULT_SETTINGS,
        *,
        local_world_size: int,
        max_restarts: int,
        stuck_limit_s: float | None = None,
    ) -> None:
        """`stuck_limit_s` limits how long a worker may stay blocked; None for no limit."""
        if local_world_size < 1:
            raise ValueError(f"{local_world_size} workers cannot run")
        super().__init__(Story("supervision"))
        self.state = State.IDLE
        self.generation = -1
        self.budget = RestartBudget(max_restarts)
        self.running: frozenset[int] = frozenset()
        self.first_failed: int | None = None
        self.unhealthy = ""  # Why this generation was stopped although no worker failed.
        self.settings = settings
        self._local_world_size = local_world_size
        self._after_stop = StopReason.SUCCEEDED
        self._alone = True
        self.retryable = True  # Whether a restart may help after this generation's failure.
        self.signum = 0  # The signal that ends the run, if one was received.
        self._interrupts = 0
        self.request_text = ""  # The newest granted request, as text.
        self.stop_grace_s = -1.0  # How long workers have to exit, if a request sets it.
        self.answers: Mapping[str, Refused] = {}
        """By request id."""
        self._stop_requested = False
        self.stuck: dict[int, str] = {}
        """Descriptions of the workers that stayed blocked for the limit, by local rank."""
        self._stuck_limit_s = stuck_limit_s
        self._blocked: dict[int, tuple[float, int]] = {}
        """The blocked workers by local rank: since when each is blocked, and its pid."""

    @property
    def restart_count(self) -> int:
        """The restarts charged so far; workers see the number as `TORCHELASTIC_RESTART_COUNT`."""
        return self.budget.used

    @property
    def failed_generation(self) -> int:
        """The generation that failed, if the job failed."""
        return self.generation

    @property
    def interrupted(self) -> bool:
        """Whether a SIGINT was received; the next one kills the workers."""
        return self._interrupts > 0

    @property
    def reason(self) -> StopReason:
        """Why the last stop began."""
        return self._after_stop

    @property
    def grace_s(self) -> float:
        """How long workers have to exit in the stop that has begun."""
        if self._requested_grace_s >= 0:
            return self._requested_grace_s
        if self.follows_failure:
            return self.settings.failure_grace
        return self.settings.shutdown_timeout

    @property
    def follows_failure(self) -> bool:
        """Whether the last stop began because of a failure."""
        return self._after_stop in (StopReason.WORKER_FAILED, StopReason.UNHEALTHY)

    @property
    def _requested_grace_s(self) -> float:
        """The time to exit that a request sets; below 0 for none."""
        return self.stop_grace_s

    @property
    def is_start_useless(self) -> bool:
        """Whether the workers that are being started would be stopped at once."""
        return bool(self.signum) or self._stop_requested

    def handle(self, now: float, event: Event, cause: str = "") -> list[Effect]:
        if isinstance(event, Tick):
            return self._tick(now, cause)
        if isinstance(event, (WorkerBlocked, WorkerUnblocked)):
            self._note_blocked(now, event)
            return []
        if isinstance(event, _REPORTS) and event.generation < self.generation:
            return []  # A late report.
        return super().handle(now, event, cause)

    def next_deadline(self, now: float) -> float | None:
        """Return when the machine needs a `TICK`."""
        del now
        if self.state is not State.RUNNING or self._stuck_limit_s is None or not self._blocked:
            return None
        return min(since for since, _ in self._blocked.values()) + self._stuck_limit_s

    def check(self) -> None:
        if self.state is State.IDLE:
            return  # An agent with a loop of its own counts its restarts itself.
        assert not self.budget.is_exceeded
        assert self.budget.used <= max(0, self.generation + 1)
        if self.running:
            assert self.state in (State.STARTING, State.RUNNING, State.STOPPING)
        if self.state is State.DONE:
            assert not self.running

    # Handlers, in the order of a generation's lifecycle.

    def _begin(self, _event: Begun) -> list[Effect]:
        self.state = State.JOINING
        return [JoinRound()]

    def _joined(self, event: RoundJoined) -> list[Effect]:
        self._alone = event.group_world_size == 1
        self.generation += 1
        self.state = State.STARTING
        self.running = frozenset(range(self._local_world_size))
        self.forget_workers()
        return [StartWorkers(self.generation, self.restart_count)]

    def _started(self, event: WorkersStarted) -> list[Effect]:
        self._expect_generation(event.generation)
        self.state = State.RUNNING
        if self.signum:  # Received during the start.
            signum = SIGKILL if self._interrupts >= 2 else self.signum
            return self._stop(StopReason.SIGNAL, signum)
        if self._stop_requested:
            return self._stop(StopReason.REQUESTED)
        return []

    def _cancelled(self, event: StartCancelled) -> list[Effect]:
        """Continue as after the stop of a generation without workers."""
        self._expect_generation(event.generation)
        self._after_stop = StopReason.SIGNAL if self.signum else StopReason.REQUESTED
        return self._stopped(WorkersStopped(event.generation))

    def _exited(self, event: WorkerExited) -> list[Effect]:
        self._expect_generation(event.generation)
        self.running -= {event.local_rank}
        self._blocked.pop(event.local_rank, None)
        if event.failed:
            self.first_failed = event.local_rank
            self.retryable = event.retryable
            return self._stop(StopReason.WORKER_FAILED)
        if not self.running:
            return self._stop(StopReason.SUCCEEDED)
        return []

    def _exited_while_stopping(self, event: WorkerExited) -> list[Effect]:
        self._expect_generation(event.generation)
        self.running -= {event.local_rank}
        return []

    def _unhealthy(self, event: WorkersUnhealthy) -> list[Effect]:
        self._expect_generation(event.generation)
        self.retryable, self.unhealthy = event.retryable, event.why
        return self._stop(StopReason.UNHEALTHY)

    def _timers_expired(self, event: TimersExpired) -> list[Effect]:
        return [DumpStacks(event.timers)]

    def _stacks_dumped(self, event: StacksDumped) -> list[Effect]:
        return [SignalProcess(one.pid, one.signum) for one in event.timers if one.signum > 0]

    def _nodes_wait(self, event: NodesWaiting) -> list[Effect]:
        return self._stop(StopReason.REGROUP) if event.count > 0 else []

    def _signal_running(self, event: SignalReceived) -> list[Effect]:
        self._note_signal(event)
        return self._stop(StopReason.SIGNAL, event.signum)

    def _signal_starting(self, event: SignalReceived) -> list[Effect]:
        self._note_signal(event)
        return []

    def _signal_stopping(self, event: SignalReceived) -> list[Effect]:
        self._note_signal(event)
        return [KillWorkers(self.generation)] if self._interrupts >= 2 else []

    def _signal_idle(self, event: SignalReceived) -> list[Effect]:
        self._note_signal(event)
        return self._finish(Outcome.SIGNALLED)

    def _requested(self, event: Requested) -> list[Effect]:
        if event.id in self.answers:
            return []
        refusal = self._refusal_of(event.action)
        self.answers = with_answer(self.answers, event.id, refusal)
        if refusal != GRANTED:
            return []
        self.request_text = event.request_text
        if event.action == Action.STOP.value:
            self._stop_requested, self.stop_grace_s = True, event.grace_s
        return self._stop(StopReason.REQUESTED) if self.state is State.RUNNING else []

    def _refusal_of(self, action: str) -> Refused:
        """Return why a request is refused, or `GRANTED`."""
        if action in (Action.DRAIN.value, Action.UNDRAIN.value):
            return RequestRefusal.TOO_FEW_NODES, "the job has no other node"
        unknown = unknown_action(action)
        if unknown != GRANTED or self.state is State.RUNNING:
            return unknown
        if self.state in (State.LEAVING, State.DONE) or self.signum or self._stop_requested:
            return RequestRefusal.OVER, "the job is about to end"
        if self.state is not State.STARTING and self._after_stop is StopReason.SUCCEEDED:
            return RequestRefusal.OVER, "the workers are done"
        return GRANTED  # The workers are being started, or stopped before a restart.

    def _stopped(self, event: WorkersStopped) -> list[Effect]:
        self._expect_generation(event.generation)
        self.running = frozenset()
        reason = self._after_stop
        failed = reason in (StopReason.WORKER_FAILED, StopReason.UNHEALTHY)
        if event.unkillable:
            self.retryable = False
            failed = failed or reason in (StopReason.REGROUP, StopReason.REQUESTED)
        if reason is StopReason.SUCCEEDED and (self._alone or not self.signum):
            self.state = State.LEAVING
            return [EnterBarrier(self.settings.exit_barrier_timeout)]
        if failed and self._gives_up():
            return self._finish(Outcome.FAILED)
        if self.signum:
            return self._finish(Outcome.SIGNALLED)
        if self._stop_requested:
            return self._finish(Outcome.STOPPED)
        if failed:
            self.budget = self.budget.charge()
        self.state = State.JOINING
        return [JoinRound()]

    def _barrier_ended(self, _event: BarrierEnded) -> list[Effect]:
        return self._finish(Outcome.SUCCEEDED)

    # Time.

    def _tick(self, now: float, cause: str) -> list[Effect]:
        state = self.state
        effects = self._due(now)
        if effects:
            self.story.record(now, state, TICK, effects, cause)
        return effects

    def _due(self, now: float) -> list[Effect]:
        """Return the effects that are due at this time."""
        if self.state not in _FOLLOWS_BLOCKED:
            return []
        self._note_stuck(now)
        if not self.stuck or self.state is State.IDLE:
            return []
        return self._unhealthy(WorkersUnhealthy(self.generation, self.unhealthy, retryable=False))

    def _note_stuck(self, now: float) -> None:
        """Note which workers stayed blocked for the limit."""
        limit_s = self._stuck_limit_s
        for rank, (since, pid) in sorted(self._blocked.items()):
            if limit_s is not None and now - since >= limit_s:
                self.stuck[rank] = _stuck_for(now - since, limit_s)
                self.unhealthy = self.unhealthy or f"worker {rank} (pid {pid}) {self.stuck[rank]}"

    def _note_blocked(self, now: float, event: WorkerBlocked | WorkerUnblocked) -> None:
        if self.state not in _FOLLOWS_BLOCKED or event.generation != self.generation:
            return
        if isinstance(event, WorkerBlocked):
            self._blocked.setdefault(event.local_rank, (now, event.pid))
        else:
            self._blocked.pop(event.local_rank, None)

    # Steps that several handlers share.

    def forget_workers(self) -> None:
        """Reset the state of the previous generation's workers."""
        self.first_failed = None
        self.unhealthy = ""
        self.retryable = True
        self._blocked, self.stuck = {}, {}

    def _gives_up(self) -> bool:
        """Whether a failure of this generation ends the job."""
        return judge(self.budget, retryable=self.retryable) is Verdict.GIVE_UP

    def _stop(self, reason: StopReason, signum: int = 0) -> list[Effect]:
        self.state = State.STOPPING
        self._after_stop = reason
        return [StopWorkers(self.generation, reason, signum)]

    def _finish(self, outcome: Outcome) -> list[Effect]:
        self.state = State.DONE
        return [Finish(outcome, self.signum if outcome is Outcome.SIGNALLED else 0)]

    def _note_signal(self, event: SignalReceived) -> None:
        self.signum = self.signum or event.signum
        self._interrupts += event.signum == SIGINT

    def _expect_generation(self, generation: int) -> None:
        if generation != self.generation:
            raise InvalidEvent(f"generation {generation} is not the current one, {self.generation}")


def _stuck_for(seconds: float, limit_s: float) -> str:
    """Describe a worker that stayed blocked for the limit."""
    return (
        f"was stuck in uninterruptible sleep for {seconds:.1f} s (limit {limit_s:g} s): a disk, "
        "network file system or device does not respond"
    )


_S = State
_FOLLOWS_BLOCKED = (_S.IDLE, _S.RUNNING)
Supervision._handlers = {
    (_S.IDLE, Begun): Supervision._begin,
    (_S.IDLE, SignalReceived): Supervision._signal_idle,
    (_S.IDLE, TimersExpired): Supervision._timers_expired,
    (_S.IDLE, StacksDumped): Supervision._stacks_dumped,
    (_S.JOINING, RoundJoined): Supervision._joined,
    (_S.JOINING, SignalReceived): Supervision._signal_idle,
    (_S.STARTING, WorkersStarted): Supervision._started,
    (_S.STARTING, StartCancelled): Supervision._cancelled,
    (_S.STARTING, SignalReceived): Supervision._signal_starting,
    (_S.STARTING, Requested): Supervision._requested,
    (_S.RUNNING, WorkerExited): Supervision._exited,
    (_S.RUNNING, WorkersUnhealthy): Supervision._unhealthy,
    (_S.RUNNING, TimersExpired): Supervision._timers_expired,
    (_S.RUNNING, StacksDumped): Supervision._stacks_dumped,
    (_S.STOPPING, TimersExpired): Supervision._timers_expired,
    (_S.STOPPING, StacksDumped): Supervision._stacks_dumped,
    (_S.RUNNING, NodesWaiting): Supervision._nodes_wait,
    (_S.RUNNING, SignalReceived): Supervision._signal_running,
    (_S.STOPPING, WorkerExited): Supervision._exited_while_stopping,
    (_S.STOPPING, SignalReceived): Supervision._signal_stopping,
    (_S.STOPPING, WorkersStopped): Supervision._stopped,
    (_S.LEAVING, BarrierEnded): Supervision._barrier_ended,
    (_S.LEAVING, SignalReceived): Supervision._signal_idle,
    (_S.RUNNING, Requested): Supervision._requested,
    (_S.STOPPING, Requested): Supervision._requested,
    (_S.LEAVING, Requested): Supervision._requested,
    (_S.DONE, Requested): Supervision._requested,
}
# Events that may arrive too late to matter. In DONE, the outcome of an interrupted wait may arrive, too.
_REPORTS = (WorkerExited, WorkersUnhealthy)
_TIMERS = (TimersExpired, StacksDumped)
_LATE = (*_REPORTS, *_TIMERS, NodesWaiting)
Supervision._ignored = {
    _S.JOINING: _LATE,
    _S.STARTING: (*_TIMERS, NodesWaiting),
    _S.STOPPING: (WorkersUnhealthy, NodesWaiting),
    _S.LEAVING: (WorkerExited, *_TIMERS, NodesWaiting),
    _S.DONE: (*_LATE, SignalReceived, RoundJoined, BarrierEnded),
}


class CoordinatedSupervision(Supervision):
    """The machine of an agent with a coordinator."""

    def __init__(
        self,
        settings: SupervisionSettings = DEFAULT_SETTINGS,
        *,
        local_world_size: int,
        max_restarts: int,
        stuck_limit_s: float | None = None,
        join_timeout_s: float | None = None,
    ) -> None:
        """`join_timeout_s` limits the wait for a round; None for no limit."""
        super().__init__(
            settings,
            local_world_size=local_world_size,
            max_restarts=max_restarts,
            stuck_limit_s=stuck_limit_s,
        )
        self._join_timeout_s = join_timeout_s
        self._needed = False
        self._since = 0.0  # When the current wait began.
        self._is_reported = False  # Whether the user was informed about this wait.
        self.view: View | None = None
        self._was_admitted = False
        self._done = -1  # The generation in which this node succeeded, unless the job continued.
        self._coordinator_lost = False
        self._has_workers = False
        self._reported_clear = (0, -1)  # The newest report: the term of its view, and `clear`.

    @property
    def failed_generation(self) -> int:
        """The generation that failed, if the job failed; this node may have had no part in it."""
        return max(self.generation, self.view.generation if self.view is not None else -1)

    @property
    def follows_failure(self) -> bool:
        """Whether the last stop began because of a failure, here or on another node, or a lost node."""
        view = self.view
        if view is None or self._after_stop is not StopReason.GENERATION_CHANGED:
            return super().follows_failure
        return view.after_failure or view.role is NodeRole.FENCED

    @property
    def _requested_grace_s(self) -> float:
        return self.view.grace_s if self.view is not None else -1.0

    @property
    def is_start_useless(self) -> bool:
        """Whether the workers that are being started would be stopped at once."""
        return bool(self.signum) or self._coordinator_lost or not self._continues()

    def _continues(self) -> bool:
        """Whether the newest view keeps this generation on this node."""
        view = self.view
        return (
            view is not None and view.role is NodeRole.MEMBER and view.generation <= self.generation
        )

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
            return True, None if self._needed else self.settings.exit_barrier_timeout
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
        self.view = self.view.as_final()
        effects = self._apply()
        left = self.state is State.DONE
        return [self._report(NodePhase.LEAVING), *effects] if left else effects

    def _apply(self) -> list[Effect]:
        """Follow the newest view, if the state of the workers allows it."""
        view = self.view
        if view is None:
            return []
        if self.state is State.RUNNING:
            return [] if self._continues() else self._stop(StopReason.GENERATION_CHANGED)
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
        ends_job = phase is NodePhase.FAILED and self._gives_up()
        return ReportStatus(phase, self.generation, clear, ends_job)

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

    def _cancelled(self, event: StartCancelled) -> list[Effect]:
        self._expect_generation(event.generation)
        self._after_stop = StopReason.GENERATION_CHANGED
        if self.signum:
            self._after_stop = StopReason.SIGNAL
        elif self._coordinator_lost:
            self._after_stop = StopReason.COORDINATOR_LOST
        return self._stopped(WorkersStopped(event.generation))

    def _exited(self, event: WorkerExited) -> list[Effect]:
        effects = super()._exited(event)
        if event.failed:
            effects = [self._report(NodePhase.FAILED), *effects]
        return effects

    def _unhealthy(self, event: WorkersUnhealthy) -> list[Effect]:
        effects = super()._unhealthy(event)
        return [self._report(NodePhase.FAILED), *effects]

    def _stopped(self, event: WorkersStopped) -> list[Effect]:
        self._expect_generation(event.generation)
        self.running = frozenset()
        self._has_workers = event.unkillable > 0
        reason = self._after_stop
        if event.unkillable:  # No other worker may run beside the unkillable ones.
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
        failed = failed or (reason is StopReason.GENERATION_CHANGED and event.failed)
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
        if failed and self._gives_up():
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


_T = CoordinatedSupervision
_T._handlers = {
    (_S.IDLE, Begun): _T._begin,
    (_S.IDLE, SignalReceived): _T._signal_idle,
    (_S.JOINING, ViewReceived): _T._view_received,
    (_S.JOINING, CoordinatorLost): _T._lost_idle,
    (_S.JOINING, SignalReceived): _T._signal_idle,
    (_S.STARTING, ViewReceived): _T._view_received,
    (_S.STARTING, CoordinatorLost): _T._lost_busy,
    (_S.STARTING, WorkersStarted): _T._started,
    (_S.STARTING, StartCancelled): _T._cancelled,
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
