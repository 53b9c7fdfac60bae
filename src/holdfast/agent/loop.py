"""The agent: one loop that runs the workers of a node from the first start to the end.

`AgentLoop` is composed of a machine that decides (`core.supervision`), the node's workers
(`agent.worker_processes`), its part in the job (`agent.coordinated_job` or `agent.polled_job`) and
its side services (`agent.side_services`: watchdogs, health server and control socket, which the loop
serves whenever it waits). One turn of the loop::

    wait until a descriptor is readable or a deadline passes
    for each event of the signals, requests, job, workers and services, in this order:
        effects = machine.handle(now, event, cause)
        perform the effects IN ORDER; the outcome of an effect is one more event
    machine.handle(now, TICK), if the machine's deadline has passed

Only the machine decides. Workers, job and services report events and perform effects; none of them
restarts, stops or kills anything by itself. Their events::

    signals             SignalReceived
    services.control    Requested, if there is no membership; otherwise the membership gets the request
    job                 ViewReceived, CoordinatorLost, NeededByOthers; or without a membership: NodesWaiting
    workers' store      WorkersUnhealthy
    workers             WorkerExited, WorkersStopped, WorkersExpired
    services.watchdogs  TimersExpired, WorkerBlocked, WorkerUnblocked
    performed effects   RoundJoined, WorkersStarted, StartCancelled, StacksDumped, BarrierEnded

For example, a worker fails. `workers.events` returns `WorkerExited`, the machine returns `StopWorkers`, and
`workers.begin_stop` signals the others. When all have exited, `workers.events` returns `WorkersStopped`, and the
machine returns `JoinRound`. `job.perform` joins a round and returns `RoundJoined`, the machine returns
`StartWorkers`, and `workers.start` starts the next generation. In a job with a coordinator, the machine returns
`ReportStatus` instead of `JoinRound`. It returns `StartWorkers` for a later `ViewReceived`.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.agent.spec import RunResult, WorkerState
from holdfast.agent.worker_processes import StartOrder, StopOrder
from holdfast.control.control_point import ControlPoint
from holdfast.core import supervision
from holdfast.core.machine import TICK, InvalidEvent
from holdfast.core.supervision import Outcome, State, StopReason
from holdfast.core.values import Value
from holdfast.errors import InternalError, JobStopped
from holdfast.processes.failures import failure as process_failure
from holdfast.processes.poll import min_of, wait_for
from holdfast.processes.signals import (
    DEFAULT_SIGNALS,
    SIGNALS_ENV,
    SignalException,
    SignalWatch,
    describe_signal,
    parse_signals,
    signal_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from typing import Protocol

    from holdfast.agent.lifecycle_reporter import LifecycleReporter
    from holdfast.agent.side_services import SideServices
    from holdfast.agent.spec import WorkerGroup
    from holdfast.core.machine import Effect, Event
    from holdfast.core.protocol import RequestAnswer
    from holdfast.core.supervision import Supervision
    from holdfast.membership.interface import Membership
    from holdfast.processes.failures.failure import ProcessFailure
    from holdfast.processes.keeper.deadline import WorkersDeadline
    from holdfast.processes.workers.group import RunningGroup
    from holdfast.processes.workers.pages import Progress

    LongWait = Callable[[str], AbstractContextManager[None]]
    """`AgentLoop.long_wait`: a context for a wait that a signal interrupts."""

    class JobPart(Protocol):
        """This node's part in the job: `agent.coordinated_job` or `agent.polled_job`."""

        group: WorkerGroup
        fence: int
        on_answer: Callable[[RequestAnswer], None] | None
        """Receives the answer to a request that a client sent through this node."""

        @property
        def membership(self) -> Membership | None:
            """The membership in a job of several nodes; None if this agent decides alone."""

        @property
        def is_polled(self) -> bool:
            """Whether a user's rendezvous handler forms the rounds, for which the loop has to wait."""

        @property
        def workers_deadline(self) -> WorkersDeadline | None:
            """When the keeper kills the workers, unless the membership extends it."""

        @property
        def last_reason(self) -> str:
            """Why the round or the generation last changed."""

        @property
        def members(self) -> tuple[str, ...]:
            """The nodes of the round by rank; empty if they are unknown."""

        def join(self) -> None:
            """Enter the job."""

        def events(self, now: float) -> list[Event]:
            """Return events about the other nodes."""

        def waiting_nodes(self) -> list[Event]:
            """Return an event if nodes wait to join; the loop calls this after all other events."""

        def descriptors(self) -> list[int]:
            """Return the descriptors that become readable when `events` has something to return."""

        def next_deadline(self, now: float) -> float | None:
            """Return the latest time for the next call of `waiting_nodes`."""

        def cause_of(self, event: Event) -> str:
            """Return the id of the message that caused an event."""

        def perform(self, effect: Effect, cause: str, *, defers_threads: bool) -> Event | None:
            """Perform an effect that concerns other nodes; return its outcome if it is known at once."""

        def assign_ranks(self) -> None:
            """Give the workers their ranks in the newest round."""

        def workers_stopped(self) -> None:
            """Note that all workers have exited."""

        def explain_expiry(self) -> None:
            """Report why the keeper killed the workers."""

        def start_deferred_services(self) -> None:
            """Start the services that a short run does not need."""

        def failures(self, local: dict[int, ProcessFailure]) -> dict[int, ProcessFailure]:
            """Return the known failures of the whole job."""

        def error(self, outcome: Outcome) -> Exception | None:
            """Return the error that replaces this node's result; None if there is a result."""

    class Workers(Protocol):
        """The workers of one node: `agent.worker_processes`, or hooks of a TorchElastic subclass."""

        @property
        def result(self) -> RunResult:
            """How the workers of the last generation ended."""

        @property
        def context(self) -> RunningGroup | None:
            """The processes of the workers; None before the first start, or if hooks start them."""

        @property
        def is_active(self) -> bool:
            """Whether there are workers, or some are being stopped."""

        def prepare(self) -> None:
            """Begin work that speeds up the first start, such as importing modules to fork from."""

        def is_ready(self) -> bool:
            """Return whether workers can start. If not, call this again after `descriptors` were readable."""

        @property
        def activity(self) -> str:
            """What delays the start, such as imports; empty if nothing does."""

        def start(self, order: StartOrder, long_wait: LongWait) -> Mapping[int, object]:
            """Start a generation; return the workers' ids by local rank. `long_wait` wraps long waits."""

        def begin_stop(self, order: StopOrder) -> Event | None:
            """Begin to stop the workers; return the outcome if it is known at once."""

        def kill(self) -> None:
            """Shorten a stop: kill at once."""

        def events(self, now: float) -> list[Event]:
            """Return events about the workers."""

        def descriptors(self) -> list[int]:
            """Return the descriptors that become readable when `events` has something to return."""

        def next_deadline(self, now: float) -> float | None:
            """Return the latest time for the next call of `events`."""

        def failures_so_far(self) -> dict[int, ProcessFailure]:
            """Return the known failures by global rank, even while other workers still run."""

        def start_deferred_services(self) -> None:
            """Start the services that a short run does not need."""

        def close(self) -> None:
            """Release everything at the end of a run."""

        def await_keeper(self) -> None:
            """Wait until the helper processes of the last run have exited."""


STORY_STEPS_SHOWN = 20
NOTICE_AFTER_S = 2.0
"""The agent announces a longer wait before a start."""
NOTICE_CHARS_MAX = 500
"""The limit for an exception in a console line. The report contains more of it."""


class LoopSettings(Value):
    """Settings of an agent, named as in `LaunchConfig`; `ProcessSettings` has those of its workers."""

    signals_to_handle: str | None = None


class AgentLoop:
    """One node's part of a job, from `run` to its result."""

    def __init__(
        self,
        machine: Supervision,
        workers: Workers,
        job: JobPart,
        services: SideServices,
        *,
        group: WorkerGroup,
        reporter: LifecycleReporter,
        settings: LoopSettings,
    ) -> None:
        self.machine = machine
        self.workers = workers
        self.job = job
        self.services = services
        self.group = group
        self.reporter = reporter
        self.signals = SignalWatch(())
        self.previous: tuple[int, str] | None = None
        """World size of the last generation, and why it ended."""
        self._settings = settings
        self._queue: list[tuple[Event, str]] = []  # Each with its cause.
        self._stop_step = ""  # The step that stopped the workers, until others are started.
        self.has_failed = False
        """Whether the run failed with an exception: only a stop of the workers remains."""
        self._finish: supervision.Finish | None = None

    # The run.

    def run(self) -> RunResult:
        """Run the workers until they succeed or fail for good.

        Raises `SignalException` if a signal ended the run. When this returns or raises, all workers
        have exited.
        """
        with self.running():
            return self.reporter.run_ended(self.supervise())

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return the context of one run. It ends when all workers have exited."""
        with self.reporter:
            self.services.begin(self._start_deferred_services)
            try:
                with self.watched_signals():
                    self.reporter.run_started()
                    signum = 0
                    try:
                        yield
                    except BaseException as problem:
                        self.has_failed = True
                        self.reporter.run_failed(problem)
                        if isinstance(problem, SignalException):
                            signum = problem.sigval
                        raise
                    finally:
                        self._begin_stop(None, signum)
                        self.await_exits(self.workers)
            finally:
                self.workers.close()
                self.services.end()

    def watched_signals(self) -> SignalWatch:
        """Return a context that collects the signals of this agent."""
        names = self._settings.signals_to_handle
        if names is None:
            names = os.environ.get(SIGNALS_ENV, DEFAULT_SIGNALS)
        self.signals.signals = parse_signals(names)
        return self.signals

    def close(self) -> None:
        """Wait until the helper processes of the run have exited.

        They have no more work to do, so the caller need not call this directly after `run`.
        """
        self.workers.await_keeper()

    def await_exits(self, workers: Workers) -> None:
        """Wait until a stop at the end of a run has ended. Any signal kills the workers."""
        while workers.is_active:
            if self.signals.take() is not None:
                workers.kill()
            workers.events(time.monotonic())
            if workers.is_active:
                self.wait(workers.next_deadline(time.monotonic()), *workers.descriptors())

    def supervise(self) -> RunResult:
        """Follow the machine from its first event to its end; raise if the run has no result."""
        self.workers.prepare()  # Signals are handled already, so a signal also stops this.
        self.job.join()
        membership = self.membership
        control = self._begin_control()
        if membership is not None or self.job.is_polled:
            control.open()  # The job is visible while the node waits for others.
        if membership is None:
            return self._conclude(self._run_machine())
        membership.control.on_watch(control.watched)
        try:
            membership.heartbeat.start()  # It stops if this loop no longer responds.
            return self._conclude(self._run_machine())
        finally:
            membership.heartbeat.stop()

    def _run_machine(self) -> supervision.Finish:
        """Run the loop until the machine has finished."""
        self.dispatch([supervision.Begun()])
        while self._finish is None:
            self._turn()
        return self._finish

    def _turn(self, limit: float | None = None) -> None:
        """Wait for a change, at most until `limit`, and pass all events to the machine."""
        self._wait_for_change(limit)
        now = time.monotonic()
        self.dispatch(self._signal_events())
        self.dispatch(self.services.take_requests())
        self.dispatch(self.job.events(now))
        self.dispatch(self._store_events())
        self.dispatch(self.workers.events(now))
        self.dispatch(self.services.take_events())
        self.dispatch(self.job.waiting_nodes())
        deadline = self.machine.next_deadline(now)
        if deadline is not None and deadline <= now:
            self.dispatch([TICK])

    def _can_start(self) -> bool:
        """Return whether the workers are to be started, once they can be.

        Meanwhile the loop turns: it serves clients, and obeys signals, requests and the job.
        """
        notice_at: float | None = None
        is_noticed = False
        while not self.machine.is_start_useless:
            if self.workers.is_ready():
                return True
            now = time.monotonic()
            notice_at = notice_at or now + NOTICE_AFTER_S
            if now >= notice_at and not is_noticed:
                is_noticed = True
                console.notice(f"{self.workers.activity}; workers start after that")
            self._turn(None if is_noticed else notice_at)
        return False

    def _conclude(self, finish: supervision.Finish) -> RunResult:
        """Return the result of a finished run; raise if it has none."""
        result = self.workers.result
        if finish.outcome is Outcome.SIGNALLED:
            one = finish.signum
            raise SignalException(f"agent {os.getpid()} received {describe_signal(one)}", one)
        if finish.outcome is Outcome.STOPPED:
            raise JobStopped(f"the job was stopped: {self.machine.request_text}")
        problem = self.job.error(finish.outcome)
        if problem is not None:
            raise problem
        failures = result.failures
        if finish.outcome is Outcome.FAILED:
            failures = self.job.failures(failures)
        state = WorkerState.FAILED if finish.outcome is Outcome.FAILED else WorkerState.SUCCEEDED
        self.group.state = state
        return RunResult(state, result.return_values, failures)

    # Waiting.

    def _wait_for_change(self, limit: float | None = None) -> None:
        """Wait until any part may have events, or a deadline passes."""
        now = time.monotonic()
        deadline = min_of(limit, self.machine.next_deadline(now))
        deadline = min_of(deadline, self.job.next_deadline(now))
        deadline = min_of(deadline, self.workers.next_deadline(now))
        alarm = self._store_alarm()
        self.wait(
            deadline,
            *self.job.descriptors(),
            *self.workers.descriptors(),
            *([alarm] if alarm >= 0 else []),
        )

    def wait(self, deadline: float | None, *descriptors: int) -> None:
        """Wait for a signal, a descriptor or the deadline, and serve the side services."""
        services = self.services
        deadline = services.next_deadline(deadline)
        wait_for(deadline, self.signals.fileno(), *descriptors, *services.descriptors())
        services.poll(time.monotonic())

    @contextmanager
    def long_wait(self, what: str) -> Iterator[None]:
        """Let a signal interrupt a wait outside of the loop, such as in a user's code."""
        with ExitStack() as stack:
            stack.enter_context(self.signals.raising())
            stack.enter_context(self.services.suspend_probe(what))
            if self.membership is not None:
                # Meanwhile the loop need not respond.
                stack.enter_context(self.membership.heartbeat)
            if self.services.control is not None and self.job.is_polled:
                stack.enter_context(self.services.control.waiting_for(what))
            yield

    # Events.

    def _signal_events(self) -> Iterator[supervision.SignalReceived]:
        while (one := self.signals.take()) is not None:
            machine = self.machine
            console.warning(
                signal_notice(
                    machine, one, machine.settings.shutdown_timeout, interrupted=machine.interrupted
                )
            )
            yield supervision.SignalReceived(one)

    def _store_alarm(self) -> int:
        """Return a descriptor that is readable once the workers' store has failed; or -1."""
        if self.machine.state not in (State.RUNNING, State.STOPPING):
            return -1
        alarm: int = getattr(self.group.spec.rdzv_handler, "store_alarm", -1)
        return alarm  # A handler that derives from another project's base class has none.

    def _store_events(self) -> list[Event]:
        """Return the failure of the workers' store.

        The machine receives it before the exits of the workers that fail because of it.
        """
        lost = self.group.spec.rdzv_handler.take_store_failure() if self._store_alarm() >= 0 else ""
        if not lost or self.machine.state is not State.RUNNING:
            return []
        return [supervision.WorkersUnhealthy(self.machine.generation, lost)]

    # Events into the machine, effects out of it.

    def dispatch(self, events: Iterable[Event]) -> None:
        """Pass each event to the machine, and perform its effects; pass it their outcomes too."""
        for event in events:
            self.post(event)
            while self._queue:
                effects = self._decide(*self._queue.pop(0))
                step = self.machine.story.last
                for effect in effects:
                    outcome = self._perform(effect, step)
                    if outcome is not None:
                        self.post(outcome, step)

    def post(self, event: Event, cause: str = "") -> None:
        """Queue an event for the machine, and update the parts that it concerns."""
        match event:
            case supervision.WorkerExited(local_rank=rank, failed=failed):
                cause = cause or self._stop_step
                self.services.watchdogs.ended(rank)
                self.reporter.worker_ended(rank, failed=failed)
            case supervision.WorkersStopped(generation):
                cause = cause or self._stop_step
                self.job.workers_stopped()
                self.services.workers_stopped()
                self.group.state = WorkerState.STOPPED
                self.reporter.generation_stopped(generation, self.workers.result.failures)
            case supervision.WorkersExpired():
                self.job.explain_expiry()
            case _:
                cause = cause or self.job.cause_of(event)
        self._queue.append((event, cause))

    def _decide(self, event: Event, cause: str) -> list[Effect]:
        """Return the machine's effects; raise `InternalError` if the event is invalid."""
        try:
            effects = self.machine.handle(time.monotonic(), event, cause)
            self.machine.check()
        except (InvalidEvent, AssertionError) as problem:
            for step in [*self.machine.story][-STORY_STEPS_SHOWN:]:
                console.error(f"while {step.state.value}: {step.event} -> {list(step.effects)}")
            raise InternalError(f"the supervision of the workers failed: {problem}") from None
        return effects

    def _perform(self, effect: Effect, step: str) -> Event | None:
        """Perform an effect of a step of the machine; return its outcome if it is known at once."""
        match effect:
            case supervision.JoinRound():
                if self.machine.generation >= 0:
                    log_restart(self.machine, self.workers.result.failures)
                with self.long_wait("the rendezvous"):
                    return self._perform_in_job(effect, step)
            case supervision.StartWorkers(generation):
                self._stop_step = ""
                if self.services.control is not None:
                    self.services.control.open()
                if not self._can_start():
                    return supervision.StartCancelled(generation)
                self.job.assign_ranks()
                self.start_generation()
                return supervision.WorkersStarted(generation)
            case supervision.StopWorkers(generation, reason, signum):
                self._stop_step = step
                if self.machine.stuck:
                    console.error(self.machine.unhealthy)
                console.info(f"stopping generation {generation}: {reason.value}")
                self.reporter.generation_stopping(generation, reason)
                return self._begin_stop(reason, signum)
            case supervision.KillWorkers():
                self.workers.kill()
            case supervision.DumpStacks(timers):
                return supervision.StacksDumped(self.services.watchdogs.dump(timers))
            case supervision.SignalProcess(pid, signum):
                self.services.watchdogs.signal(pid, signum)
            case supervision.EnterBarrier():
                with self.long_wait("the exit barrier"):
                    return self._perform_in_job(effect, step)
            case supervision.Finish():
                self._finish = effect
            case _:
                return self._perform_in_job(effect, step)
        return None

    def _perform_in_job(self, effect: Effect, step: str) -> Event | None:
        return self.job.perform(effect, step, defers_threads=self.defers_threads)

    def start_generation(self) -> None:
        """Start the workers of the machine's generation, and report it."""
        begun, group, machine = time.monotonic(), self.group, self.machine
        for local_rank, worker_id in self.workers.start(self.start_order(), self.long_wait).items():
            group.workers[local_rank].id = worker_id
        group.state = WorkerState.HEALTHY
        job = self.job
        self.reporter.generation_started(begun, job.fence, job.last_reason, job.members)
        log_start(group, machine.generation)

    def start_order(self) -> StartOrder:
        """Return how to start the workers of the machine's generation."""
        world_size, why = self.previous or (0, "")
        return StartOrder(
            generation=self.machine.generation,
            restart_count=self.machine.restart_count,
            fence=self.job.fence,
            previous_world_size=world_size,
            last_end=self.job.last_reason or why if self.previous else "",
            deadline=self.job.workers_deadline,
            defers_threads=self.defers_threads,
        )

    def _begin_stop(self, reason: StopReason | None, signum: int) -> Event | None:
        """Begin to stop the workers; `reason` is None at the end of a run."""
        machine = self.machine
        if reason is not None:
            self.previous = (self.group.workers[0].world_size, reason.value)
        grace_s = machine.settings.shutdown_timeout if reason is None else machine.grace_s
        node = f"{machine.story.node}/generation-{machine.generation}"
        return self.workers.begin_stop(
            StopOrder(reason, signum, grace_s, machine.stuck, node, self._stop_step)
        )

    def _start_deferred_services(self) -> None:
        """Start the services that a short run does not need."""
        self.workers.start_deferred_services()
        self.job.start_deferred_services()

    def _begin_control(self) -> ControlPoint:
        """Prepare the control point, at which `holdfast ps` and other commands find the job."""
        control = self.services.control = ControlPoint(self, self.reporter.describe_run)
        self.reporter.observers.add(control)
        self.job.on_answer = control.answered
        return control

    # For readers outside the loop.

    @property
    def membership(self) -> Membership | None:
        """The membership in a job of several nodes; None if this agent decides alone."""
        return self.job.membership

    @property
    def activity(self) -> str:
        """What delays the start of the workers; empty if nothing does."""
        return self.workers.activity

    @property
    def defers_threads(self) -> bool:
        """Whether this is the first second of a run, in which threads start only when they are needed.

        After it, the agent starts all of them, because threads, descriptors or the installed files may
        become unavailable later.
        """
        return not self.services.has_started_deferred_services

    @property
    def log_files(self) -> list[tuple[int, str, str]]:
        """Rank, stream and path of each file with output of the workers of this generation."""
        context = self.workers.context
        if context is None:
            return []
        workers = {worker.local_rank: worker for worker in self.group.workers}
        return [
            (workers[rank].global_rank, stream, path)
            for rank, stream, path in context.log_files()
            if rank in workers
        ]

    @property
    def live_workers(self) -> dict[int, int]:
        """The process ids of workers that have not exited, by local rank."""
        running, context = self.machine.running, self.workers.context
        pids = context.pids() if context is not None else {}
        return {rank: pid for rank, pid in pids.items() if rank in running}

    def pages(self) -> dict[int, Progress]:
        """Return the progress that workers report, by local rank."""
        return dict(self.services.watchdogs.progress())

    @property
    def past_memory(self) -> list[tuple[float, int]]:
        """The memory of all workers, in bytes, at past times, as far as the agent noted it."""
        return [*self.services.memory]

    def curves(self) -> list[list[bytes]]:
        """Return the past progress of some workers, by generation; see `WorkerPages.curves`."""
        return self.services.watchdogs.curves()

    def progress(self) -> list[tuple[int, Progress]]:
        """Return the progress that workers report, by global rank."""
        return [(self.group.workers[rank].global_rank, page) for rank, page in self.pages().items()]

    def describe_program(self) -> str:
        """Return the name of the workers' program."""
        return self.reporter.describe_run().program

    def requested(self, request_id: str, what: str) -> None:
        """Report a request that the job accepted."""
        console.notice(what)
        self.reporter.requested(request_id, what)


# Console lines about the workers of this node.


def signal_notice(machine: Supervision, one: int, grace_s: float, *, interrupted: bool) -> str:
    """Return a line that announces the effect of a signal; `interrupted` if a SIGINT preceded it."""
    interrupt, name = one == signal.SIGINT, signal_name(one)
    if interrupt and interrupted:
        return f"{name} again: killing the workers now"
    again = "; send it again to kill them at once" if interrupt else ""
    if machine.state is State.RUNNING:
        count = len(machine.running)
        whom = "1 worker" if count == 1 else f"{count} workers"
        return f"{name}: forwarding it to {whom}, then waiting up to {grace_s:g} s{again}"
    if machine.state is State.STOPPING:
        return f"{name}: already stopping the workers{again}"
    return f"{name}: stopping"


def log_restart(machine: Supervision, failures: dict[int, ProcessFailure]) -> None:
    """Warn that the workers are restarted, and why."""
    if machine.reason is StopReason.REGROUP:
        console.info("nodes are waiting to join: regrouping")
        return
    if machine.reason is StopReason.REQUESTED:
        return  # The agent reported the request when the job accepted it.
    budget = machine.budget
    causes = {rank: failure for rank, failure in failures.items() if not failure.consequence}
    what = machine.unhealthy or "the workers are not healthy"
    if causes and not machine.unhealthy:
        rank, failure = process_failure.ChildFailedError("", causes).get_first_failure()
        lines = failure.traceback_text().strip().splitlines()
        what = f"rank {rank} (pid {failure.pid}) failed: {failure.detail or failure.ending()}"
        what += f": {lines[-1]}" if lines else ""
        if len(what) > NOTICE_CHARS_MAX:
            what = what[:NOTICE_CHARS_MAX] + " ..."
    console.warning(
        f"{what}; restarting all workers (restart {budget.used} of {budget.max_restarts})"
    )


def log_start(group: WorkerGroup, generation: int) -> None:
    """Log the workers of a generation on this node."""
    started = ", ".join(f"{worker.global_rank} (pid {worker.id})" for worker in group.workers)
    console.info(
        f"generation {generation} on node {group.group_rank} of {group.group_world_size}: started "
        f"ranks {started}; MASTER_ADDR={group.master_addr}, MASTER_PORT={group.master_port}"
    )
