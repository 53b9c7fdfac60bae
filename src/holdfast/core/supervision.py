"""What one agent does about its workers: the machine that makes every decision of one node.

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

1.  One worker's failure stops all workers of the node. What comes after the stop began is a
    consequence of it and changes nothing.
2.  A failure is answered by a restart while the budget lasts, and charged to it. A regroup
    because nodes wait is not.
3.  A failure that a new start would only repeat (the program cannot be started, a process that
    SIGKILL does not end) is answered by giving up.
4.  A signal stops the workers with that same signal, and nothing starts after it. A second SIGINT
    kills them at once. A failure before the signal stays the reason if it ended the job anyway.
5.  Success is when every worker exited with code 0. What they left is cleaned up all the same;
    then the node waits for the others at the barrier.
6.  A generation is one start of the workers; its number only grows.
7.  A restart that somebody asks for is not charged. After a stop that somebody asks for nothing
    starts; a failure before it stays the reason if it ended the job anyway. What is asked again
    under the same id is answered as before, and what cannot be now is refused with why.
8.  If a timer of a worker expires, the stacks of its process are dumped, and the process gets the
    timer's signal. The stacks of all late processes are dumped before the first is signalled.
9.  If a worker stays in uninterruptible sleep for the limit, the workers are unhealthy, and a new
    start would not help: SIGKILL cannot end that worker.

Use, besides the contract of `core.machine`: bring the outcome of each effect back as exactly one
event (`JoinRound`: `RoundJoined`; `StartWorkers`: `WorkersStarted`; `StopWorkers`:
`WorkersStopped`; `EnterBarrier`: `BarrierEnded`). `KillWorkers` only shortens a stop, and `Finish`
is the last effect. `DumpStacks` has the outcome `StacksDumped`. A late report of an earlier
generation is ignored. The machine has deadlines: send it a `TICK` at `next_deadline`.
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
    """Where the agent is with its workers."""

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
    SIGNAL = "a signal asked to stop"
    REGROUP = "nodes are waiting to join"
    COORDINATOR = "the coordinator decided so"
    COORDINATOR_LOST = "the coordinator was lost"
    CUT_OFF = "others may have taken their place"
    ASKED = "somebody asked for it"


class Outcome(Enum):
    """How the agent's work ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SIGNALLED = "signalled"
    STOPPED = "stopped"
    """Somebody asked for it."""
    REFUSED = "refused"
    COORDINATOR_LOST = "coordinator lost"
    JOIN_TIMED_OUT = "no round within the join timeout"


# Events.


class Begun(Event):
    """The agent was asked to run."""


class RoundJoined(Event):
    """A round has formed, and this node is in it."""

    round: int
    group_rank: int
    group_world_size: int


class WorkersStarted(Event):
    """Every worker of the generation was started."""

    generation: int


class WorkerExited(Event):
    """A worker exited; `failed` for anything but success."""

    generation: int
    local_rank: int
    failed: bool
    retryable: bool = True


class WorkersUnhealthy(Event):
    """The workers run but make no progress any more, or what they need is gone."""

    generation: int
    why: str
    retryable: bool = True


class WorkerBlocked(Event):
    """A worker entered uninterruptible sleep: it waits for a device or a file system."""

    generation: int
    local_rank: int
    pid: int = 0


class WorkerUnblocked(Event):
    """A blocked worker left uninterruptible sleep."""

    generation: int
    local_rank: int


class ExpiredTimer(Value):
    """A timer, or a section with a timeout, that a worker's process did not leave in time."""

    pid: int
    scope: str
    signum: int
    """The signal that the timer names; 0 or less for none."""


class TimersExpired(Event):
    """Timers of workers expired, at most one of each process."""

    timers: tuple[ExpiredTimer, ...]


class StacksDumped(Event):
    """The stacks of processes with expired timers were dumped.

    It names the timers that expired during the dump, too.
    """

    timers: tuple[ExpiredTimer, ...]


class NodesWaiting(Event):
    """Nodes outside the round want in."""

    count: int


class SignalReceived(Event):
    """The agent got a signal it handles."""

    signum: int


class Requested(Event):
    """Somebody asks for something: a `core.protocol.Request`, in what is needed here."""

    id: str
    action: str
    asked: str
    """All of it in words."""
    grace_s: float = -1.0


class WorkersStopped(Event):
    """Nothing is left of the generation, but for so many processes that cannot be killed."""

    generation: int
    unkillable: int = 0
    failed: bool = False
    """Whether a worker had failed before the stop began, though that was seen only later."""


class WorkersExpired(Event):
    """The keeper kills the workers: others may have taken their ranks.

    Only in a job with a coordinator, which this node could not reach for too long.
    """

    generation: int


class BarrierEnded(Event):
    """The other nodes are done too, or the wait for them is over."""


# Effects.


class JoinRound(Effect):
    """Join the next round."""


class StartWorkers(Effect):
    """Start every worker of a new generation."""

    generation: int
    restart_count: int


class StopWorkers(Effect):
    """Stop what is left of a generation; `signum` 0 is the configured stop signal."""

    generation: int
    reason: StopReason
    signum: int = 0


class KillWorkers(Effect):
    """Kill at once what is being stopped."""

    generation: int


class DumpStacks(Effect):
    """Write the stacks of these processes, and of those that expire meanwhile, to their logs."""

    timers: tuple[ExpiredTimer, ...]


class SignalProcess(Effect):
    """Send a signal to a process of a worker."""

    pid: int
    signum: int


class EnterBarrier(Effect):
    """Wait for the other nodes to be done."""


class Finish(Effect):
    """End the agent's work with this outcome."""

    outcome: Outcome
    signum: int = 0


class Supervision(TableMachine):
    """The machine of an agent that decides for itself.

    `core.coordinated_supervision` has that of an agent for which a coordinator decides.
    """

    state: State

    def __init__(
        self, *, local_world_size: int, max_restarts: int, stuck_limit_s: float | None = None
    ) -> None:
        """`stuck_limit_s` limits how long a worker may stay blocked; None for no limit."""
        if local_world_size < 1:
            raise ValueError(f"{local_world_size} workers would never be done")
        super().__init__(Story("supervision"))
        self.state = State.IDLE
        self.generation = -1
        self.budget = RestartBudget(max_restarts)
        self.running: frozenset[int] = frozenset()
        self.first_failed: int | None = None
        self.unhealthy = ""  # Why this generation was stopped, if no worker failed.
        self._local_world_size = local_world_size
        self._after_stop = StopReason.SUCCEEDED
        self._alone = True
        self.retryable = True  # Whether a new start could help against this generation's failure.
        self.signum = 0  # The signal that ends it all, if one came.
        self._interrupts = 0
        self.asked = ""  # The newest request that was granted, in words.
        self.stop_grace_s = -1.0  # How long workers have, if somebody said so.
        self.answers: Mapping[str, Refused] = {}
        """Of requests, by their id."""
        self._stop_asked = False
        self.stuck: dict[int, str] = {}
        """Workers that stayed blocked for the limit, by local rank, each with a description."""
        self._stuck_limit_s = stuck_limit_s
        self._blocked: dict[int, tuple[float, int]] = {}
        """Since when each blocked worker has been so, and its process, by local rank."""

    @property
    def restart_count(self) -> int:
        """Restarts charged so far; what workers see as `TORCHELASTIC_RESTART_COUNT`."""
        return self.budget.used

    @property
    def interrupted(self) -> bool:
        """Whether a SIGINT came already, so that the next one kills."""
        return self._interrupts > 0

    @property
    def reason(self) -> StopReason:
        """Why the last stop began."""
        return self._after_stop

    @property
    def grace_s(self) -> float:
        """How long workers have to end when they are stopped; below 0 as long as configured."""
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
        assert not self.budget.is_exceeded
        assert self.budget.used <= max(0, self.generation + 1)
        if self.running:
            assert self.state in (State.STARTING, State.RUNNING, State.STOPPING)
        if self.state is State.DONE:
            assert not self.running

    # Handlers, in the order of a generation's life.

    def _begin(self, _event: Begun) -> list[Effect]:
        self.state = State.JOINING
        return [JoinRound()]

    def _joined(self, event: RoundJoined) -> list[Effect]:
        self._alone = event.group_world_size == 1
        self.generation += 1
        self.state = State.STARTING
        self.running = frozenset(range(self._local_world_size))
        self._forget_workers()
        return [StartWorkers(self.generation, self.restart_count)]

    def _started(self, event: WorkersStarted) -> list[Effect]:
        self._expect_generation(event.generation)
        self.state = State.RUNNING
        if self.signum:  # It came while they were being started.
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
        self.asked = event.asked
        if event.action == Action.STOP.value:
            self._stop_asked, self.stop_grace_s = True, event.grace_s
        return self._stop(StopReason.ASKED) if self.state is State.RUNNING else []

    def _objection(self, action: str) -> Refused:
        """Return why a request is refused, if it is."""
        if action in (Action.DRAIN.value, Action.UNDRAIN.value):
            return RequestRefusal.TOO_FEW_NODES, "the job has one node, and needs it"
        unknown = unknown_action(action)
        if unknown != GRANTED or self.state is State.RUNNING:
            return unknown
        if self.state in (State.LEAVING, State.DONE) or self.signum or self._stop_asked:
            return RequestRefusal.OVER, "the job is about to end"
        if self._after_stop is StopReason.SUCCEEDED:
            return RequestRefusal.OVER, "the workers are done"
        return GRANTED  # They are being stopped, and start again after that.

    def _stopped(self, event: WorkersStopped) -> list[Effect]:
        self._expect_generation(event.generation)
        self.running = frozenset()
        reason = self._after_stop
        failed = reason in (StopReason.WORKER_FAILED, StopReason.UNHEALTHY)
        if event.unkillable:
            self.retryable = False
            failed = failed or reason in (StopReason.REGROUP, StopReason.ASKED)
        if reason is StopReason.SUCCEEDED and (self._alone or not self.signum):
            self.state = State.LEAVING
            return [EnterBarrier()]
        if failed and judge(self.budget, retryable=self.retryable) is Verdict.GIVE_UP:
            return self._finish(Outcome.FAILED)
        if self.signum:
            return self._finish(Outcome.SIGNALLED)
        if self._stop_asked:
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
        """Decide what follows from the time that has passed."""
        limit_s = self._stuck_limit_s
        if self.state is not State.RUNNING or limit_s is None:
            return []
        for rank, (since, pid) in sorted(self._blocked.items()):
            if now - since >= limit_s:
                self.stuck[rank] = stuck_for(now - since, limit_s)
                self.unhealthy = self.unhealthy or f"worker {rank} (pid {pid}) {self.stuck[rank]}"
        if not self.stuck:
            return []
        return self._unhealthy(WorkersUnhealthy(self.generation, self.unhealthy, retryable=False))

    def _note_blocked(self, now: float, event: WorkerBlocked | WorkerUnblocked) -> None:
        if self.state is not State.RUNNING or event.generation != self.generation:
            return
        if isinstance(event, WorkerBlocked):
            self._blocked.setdefault(event.local_rank, (now, event.pid))
        else:
            self._blocked.pop(event.local_rank, None)

    # Steps that several handlers share.

    def _forget_workers(self) -> None:
        """Forget what happened to the workers of the generation before."""
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


def stuck_for(seconds: float, limit_s: float) -> str:
    """Describe a worker that stayed blocked for the limit."""
    return (
        f"was stuck in uninterruptible sleep for {seconds:.1f} s (limit {limit_s:g} s): a disk, "
        "network file system or device does not respond"
    )


_S = State
Supervision._handlers = {
    (_S.IDLE, Begun): Supervision._begin,
    (_S.IDLE, SignalReceived): Supervision._signal_idle,
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
# What may still arrive when it no longer matters; in DONE also the outcome of a wait broken off.
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
