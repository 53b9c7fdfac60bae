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

The rules:

1.  If one worker fails, all workers of the node are stopped. Exits after the stop began are
    consequences of it and change nothing.
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
    gets the first answer. If a request is impossible now, it is refused with a reason.
8.  If a timer of a worker expires, the stacks of its process are dumped, and the process gets the
    timer's signal. All stacks are dumped before the first process is signalled.
9.  If a worker is in uninterruptible sleep for the limit, the workers are unhealthy, and a restart would
    not help, because SIGKILL cannot end that worker.
10. An agent with a loop of its own leaves its machine idle. Only rules 8 and 9 apply then: send it the
    events of timers and blocked workers, and call `find_stuck` instead of sending a `TICK`.

Use, in addition to the contract of `core.machine`: report the outcome of each effect as exactly one event
(`JoinRound`: `RoundJoined`; `StartWorkers`: `WorkersStarted`; `StopWorkers`: `WorkersStopped`;
`EnterBarrier`: `BarrierEnded`; `DumpStacks`: `StacksDumped`). `KillWorkers` only shortens a stop, and
`Finish` is the last effect. Late reports of an earlier generation are ignored. The machine has deadlines:
send it a `TICK` at `next_deadline`.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from holdfast.core.machine import TICK, Effect, Event, InvalidEvent, Story, TableMachine, Tick
from holdfast.core.policy import RestartBudget, Verdict, judge
from holdfast.core.requests import GRANTED, Action, RequestRefusal, unknown_action, with_answer
from holdfast.core.values import Value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.core.requests import Refused

SIGINT, SIGKILL = 2, 9


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
    COORDINATOR = "the coordinator changed the generation"
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
    """Whether, as detected during the stop, a worker had failed before the stop began."""


class WorkersExpired(Event):
    """The keeper killed the workers, because they may have been replaced elsewhere.

    This happens only in a job with a coordinator, if this node could not reach it for too long.
    """

    generation: int


class BarrierEnded(Event):
    """All other nodes are done, or the time limit for them is over."""


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
    """Write the stacks of these processes to their logs, and of those whose timers expire meanwhile."""

    timers: tuple[ExpiredTimer, ...]


class SignalProcess(Effect):
    """Send a signal to a process of a worker."""

    pid: int
    signum: int


class EnterBarrier(Effect):
    """Wait until the other nodes are done."""


class Finish(Effect):
    """End the run with this outcome."""

    outcome: Outcome
    signum: int = 0


class Supervision(TableMachine):
    """The machine of an agent without a coordinator.

    `core.coordinated_supervision` has the machine of an agent with a coordinator.
    """

    state: State

    def __init__(
        self, *, local_world_size: int, max_restarts: int, stuck_limit_s: float | None = None
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
        """Of each blocked worker, by local rank: since when, and its pid."""

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
        """How long workers have to exit when they are stopped; below 0 for the configured time."""
        return self.stop_grace_s

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
        return []

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
        refusal = self._objection(event.action)
        self.answers = with_answer(self.answers, event.id, refusal)
        if refusal != GRANTED:
            return []
        self.request_text = event.request_text
        if event.action == Action.STOP.value:
            self._stop_requested, self.stop_grace_s = True, event.grace_s
        return self._stop(StopReason.REQUESTED) if self.state is State.RUNNING else []

    def _objection(self, action: str) -> Refused:
        """Return why a request is refused, or `GRANTED`."""
        if action in (Action.DRAIN.value, Action.UNDRAIN.value):
            return RequestRefusal.TOO_FEW_NODES, "the job has no other node"
        unknown = unknown_action(action)
        if unknown != GRANTED or self.state is State.RUNNING:
            return unknown
        if self.state in (State.LEAVING, State.DONE) or self.signum or self._stop_requested:
            return RequestRefusal.OVER, "the job is about to end"
        if self._after_stop is StopReason.SUCCEEDED:
            return RequestRefusal.OVER, "the workers are done"
        return GRANTED  # The workers are being stopped and restart after that.

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
            return [EnterBarrier()]
        if failed and judge(self.budget, retryable=self.retryable) is Verdict.GIVE_UP:
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
        if self.state is not State.RUNNING or not self.find_stuck(now):
            return []
        return self._unhealthy(WorkersUnhealthy(self.generation, self.unhealthy, retryable=False))

    def find_stuck(self, now: float) -> bool:
        """Note which workers stayed blocked for the limit; return whether there are any."""
        limit_s = self._stuck_limit_s
        for rank, (since, pid) in sorted(self._blocked.items()):
            if limit_s is not None and now - since >= limit_s:
                self.stuck[rank] = _stuck_for(now - since, limit_s)
                self.unhealthy = self.unhealthy or f"worker {rank} (pid {pid}) {self.stuck[rank]}"
        return bool(self.stuck)

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
    (_S.STARTING, SignalReceived): Supervision._signal_starting,
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
