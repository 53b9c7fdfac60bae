"""The agent without processes: it drives `core.supervision` and leaves the work to hooks.

`ElasticAgent` is the interface that launchers use. `SimpleElasticAgent` is TorchElastic's class to
derive from: a subclass defines how workers are started, stopped and monitored, and the rest is here.
It polls its workers every `monitor_interval`; `LocalElasticAgent` gets events instead.

One run, spelled out: every fact is given to the machine as an event, every effect the machine
returns is performed here in order, and its outcome comes back as an event.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.agent import rank_exchange
from holdfast.agent.lifecycle_reporter import LifecycleReporter
from holdfast.agent.spec import (
    DEFAULT_ROLE,
    RunResult,
    StateText,
    Worker,
    WorkerGroup,
    WorkerSpec,
    place_workers,
)
from holdfast.core import supervision
from holdfast.core.machine import Effect, Event, InvalidEvent
from holdfast.core.supervision import Outcome, State, StopReason, Supervision
from holdfast.defaults import EXIT_BARRIER_S, SHUTDOWN_S
from holdfast.errors import InternalError, JobStopped
from holdfast.processes.poll import wait_for
from holdfast.processes.signals import (
    DEFAULT_SIGNALS,
    SIGNALS_ENV,
    SignalException,
    SignalWatch,
    as_enum,
    in_words,
    parse_signals,
    signal_name,
)
from holdfast.rendezvous.handler import CoordinatedRendezvousHandler, RendezvousHandler

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable, Iterator

    from holdfast.agent.coordinated_job import CoordinatedJob
    from holdfast.observe.lifecycle import Observers
    from holdfast.processes.failures.failure import ProcessFailure
else:
    import _signal as signal  # Numbers, as in `processes.signals`.


class ElasticAgent(ABC):
    """Runs the workers of one node to their end."""

    @abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers until they are done; raise if that cannot be."""

    @abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """Return the workers. The agent goes on changing what is returned."""


STORY_STEPS_SHOWN = 20
# What an agent of several may need at once: for its connections, the coordinator that it may be and
# the store of its workers; and for each of them.
JOB_DESCRIPTORS = 20
WORKER_DESCRIPTORS = 3


class SimpleElasticAgent(ElasticAgent):
    """An agent of one group of workers; a subclass defines what a worker is."""

    def __init__(
        self,
        spec: WorkerSpec,
        exit_barrier_timeout: float = EXIT_BARRIER_S,
        shutdown_timeout: float = SHUTDOWN_S,
    ) -> None:
        self._worker_group = WorkerGroup(spec)
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        self._total_execution_time = 0
        self._signals = SignalWatch(())
        self._signals_to_handle: str | None = None
        self._round = 0
        self._fence = 0  # Grows with every generation; 0 where nobody counts it.
        self._reporter = LifecycleReporter(self)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Forget the last run, so that there can be another."""
        spec = self._worker_group.spec
        kind: type[Supervision] = Supervision
        if self._is_coordinated():
            from holdfast.core.coordinated_supervision import CoordinatedSupervision

            kind = CoordinatedSupervision
        self._machine = kind(local_world_size=spec.local_world_size, max_restarts=spec.max_restarts)
        self._machine.story.node = self._name_in_story()
        self._job: CoordinatedJob | None = None
        self._pending: list[tuple[Event, str]] = []  # Each with its cause.
        self._stop_step = ""  # The step that had the workers stopped, until others are started.
        self._abandoned = False
        self._is_down = False
        self._result = RunResult(StateText.INIT)
        self._finished: supervision.Finish | None = None
        self._restarts_wanted = True  # What a hook finds wrong may be answered by a restart.

    # What a subclass defines.

    @abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        """Start every worker; return their ids by local rank."""

    @abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop every worker, and return when they are gone."""

    @abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return at once whether the workers are healthy, succeeded, failed or unhealthy."""

    @abstractmethod
    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = SHUTDOWN_S
    ) -> None:
        """Stop every worker by this signal, and release what the agent holds."""

    # The public interface.

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """Return the one group there is, whatever the role."""
        del role
        return self._worker_group

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers until they succeeded or failed for good.

        Raises `SignalException` if a signal ended the run. Whatever happens, the workers are
        gone when this returns or raises. May be called again, with the whole budget of restarts.
        """
        begin = time.monotonic()
        self._begin_anew()
        death_sig: int = signal.SIGTERM
        try:
            with self._reporter, self._watch_signals():
                self._reporter.run_started()
                try:
                    return self._run_ended(self._supervise(role))
                except BaseException as problem:
                    self._abandoned = True
                    self._reporter.run_failed(problem)
                    if isinstance(problem, SignalException):
                        death_sig = problem.sigval
                    raise
                finally:
                    if not self._is_down:
                        self._shut_down(death_sig)
        finally:
            self._total_execution_time = int(time.monotonic() - begin)

    @property
    def machine(self) -> Supervision:
        """The machine that decides about the workers; read-only."""
        return self._machine

    @property
    def observers(self) -> Observers:
        """Whoever receives the lifecycle events of a run."""
        return self._reporter.observers

    @property
    def restart_count(self) -> int:
        """How many restarts were charged so far."""
        return self._machine.restart_count

    @property
    def fence(self) -> int:
        """The number of this generation that only ever grows; 0 where nobody counts it."""
        return self._fence

    @property
    def last_reason(self) -> str:
        """Why whoever decides for all nodes last changed the generation; else nothing."""
        return self._job.last_reason if self._job is not None else ""

    @property
    def standby_s(self) -> float:
        """For how long this node had no part in the rounds of its job."""
        return self._job.standby_s(time.monotonic()) if self._job is not None else 0.0

    @property
    def _remaining_restarts(self) -> int:
        return self._machine.budget.left

    def _watch_signals(self) -> SignalWatch:
        names = self._signals_to_handle
        if names is None:
            names = os.environ.get(SIGNALS_ENV, DEFAULT_SIGNALS)
        self._signals = SignalWatch(parse_signals(names))
        return self._signals

    def _supervise(self, role: str) -> RunResult:
        return self._invoke_run(role)

    def _run_ended(self, result: RunResult) -> RunResult:
        return self._reporter.run_ended(result)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        del role
        if self._is_coordinated():
            self._job = self._join_job()
        try:
            if self._job is not None and self._never_blocks:
                self._job.heartbeat.start()
            finished = self._turn()
        finally:
            if self._job is not None:
                self._job.heartbeat.stop()
        return self._conclude(finished)

    def _turn(self) -> supervision.Finish:
        """Turn the loop until the machine has finished."""
        self._dispatch([supervision.Begun()])
        sources = (
            self._signal_events,
            self._request_events,
            self._job_events,
            self._worker_events,
            self._membership_events,
        )
        while self._finished is None:
            self._wait_for_change()
            for source in sources:
                self._dispatch(source())
        return self._finished

    @property
    def _never_blocks(self) -> bool:
        """Whether no turn of the loop takes long; hooks of a subclass may take as long as they like."""
        return False

    def _conclude(self, finish: supervision.Finish) -> RunResult:
        group = self._worker_group
        if finish.outcome is Outcome.SIGNALLED:
            one = finish.signum
            raise SignalException(f"agent {os.getpid()} was ended by {in_words(one)}", one)
        if finish.outcome is Outcome.STOPPED:
            raise JobStopped(f"the job was stopped: {self._machine.asked}")
        if self._job is not None:
            problem = self._job.error(finish.outcome)
            if problem is not None:
                raise problem
            if finish.outcome is Outcome.FAILED:
                failures = self._job.failures(self._result.failures)
                self._result = RunResult(StateText.FAILED, {}, failures)
        state = StateText.FAILED if finish.outcome is Outcome.FAILED else StateText.SUCCEEDED
        group.state = state
        return RunResult(state, self._result.return_values, self._result.failures)

    # Where events come from; each source is asked when those of the one before are handled.

    def _signal_events(self) -> Iterator[supervision.SignalReceived]:
        while (one := self._signals.take()) is not None:
            machine = self._machine
            notice = signal_notice(
                machine, one, self._shutdown_timeout, interrupted=machine.interrupted
            )
            console.warning(notice)
            yield supervision.SignalReceived(one)

    def _job_events(self) -> list[Event]:
        return self._job.events(time.monotonic()) if self._job is not None else []

    def _request_events(self) -> Iterable[Event]:
        return ()

    def _worker_events(self) -> list[Event]:
        return self._monitor() if self._machine.state is State.RUNNING else []

    def _membership_events(self) -> list[Event]:
        if self._machine.state is not State.RUNNING or not self._polls_membership():
            return []
        waiting = self._nodes_waiting()
        return [supervision.NodesWaiting(waiting)] if waiting > 0 else []

    # Events into the machine, effects out of it. Nothing that performs an effect comes back here:
    # the outcome of an effect is one more event, of this queue or of a source.

    def _dispatch(self, events: Iterable[Event]) -> None:
        for event in events:
            self._post(event)
            while self._pending:
                effects = self._decide(*self._pending.pop(0))
                step = self._machine.story.last
                for effect in effects:
                    outcome = self._perform(effect, step)
                    if outcome is not None:
                        self._pending.append((outcome, step))

    def _post(self, event: Event) -> None:
        if isinstance(event, (supervision.WorkerExited, supervision.WorkersStopped)):
            cause = self._stop_step
        else:
            cause = self._job.cause_of(event) if self._job is not None else ""
        self._pending.append((event, cause))

    def _decide(self, event: Event, cause: str) -> list[Effect]:
        try:
            effects = self._machine.handle(time.monotonic(), event, cause)
            self._machine.check()
        except (InvalidEvent, AssertionError) as problem:
            for step in [*self._machine.story][-STORY_STEPS_SHOWN:]:
                console.error(f"while {step.state.value}: {step.event} -> {list(step.effects)}")
            raise InternalError(f"the supervision of the workers went wrong: {problem}") from None
        return effects

    def _perform(self, effect: Effect, step: str) -> Event | None:
        match effect:
            case supervision.JoinRound():
                return self._join_round()
            case supervision.StartWorkers(generation):
                self._stop_step = ""
                if self._job is not None:
                    self._fence = self._job.take_ranks()
                    self._reporter.rendezvous_ended()
                    self._reporter.ranks_assigned()
                self._start_generation(self._worker_group)
                return supervision.WorkersStarted(generation)
            case supervision.StopWorkers(generation, reason, signum):
                self._stop_step = step
                console.info(f"stopping generation {generation}: {reason.value}")
                self._reporter.generation_stopping(generation, reason)
                return self._begin_stop(reason, signum)
            case supervision.KillWorkers():
                self._kill_workers()
            case supervision.EnterBarrier():
                self._exit_barrier()
                return supervision.BarrierEnded()
            case supervision.Finish():
                self._finished = effect
            case _:
                assert self._job is not None
                self._job.perform(effect, step)
        return None

    def _join_round(self) -> Event:
        if self._machine.generation >= 0:
            log_restart(self._machine, self._result.failures)
        group = self._worker_group
        self._find_round(group)
        assert group.group_rank is not None
        assert group.group_world_size is not None
        joined = supervision.RoundJoined(self._round, group.group_rank, group.group_world_size)
        self._round += 1
        return joined

    def _find_round(self, worker_group: WorkerGroup) -> None:
        """Join until a round holds for as long as its nodes need to exchange their ranks."""
        while True:
            try:
                self._rendezvous(worker_group)
                return
            except rank_exchange.RoundBroken:
                console.info("a node went away before the round began: joining again")
            except Exception as problem:
                self._reporter.rendezvous_ended(problem)
                raise

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Take part in the next round, and learn the ranks of this node's workers."""
        spec = worker_group.spec
        with self._signals.raising():  # A handler may wait for long, in code that is not ours.
            info = spec.rdzv_handler.next_rendezvous()
            worker_group.store = info.store
            worker_group.group_rank = info.rank
            worker_group.group_world_size = info.world_size
            if not self._polls_membership():  # There is no other node.
                self._fence = max(self._fence + 1, int(time.time() * 1000))
            self._reporter.rendezvous_ended()
            meeting_point = info.bootstrap_store_info
            worker_group.master_addr = spec.master_addr or meeting_point.master_addr
            worker_group.master_port = spec.master_port or meeting_point.master_port
            worker_group.workers = self._assign_worker_ranks(
                info.store, info.rank, info.world_size, spec
            )

    def _assign_worker_ranks(
        self, store: object, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        begun = time.monotonic()
        ranks = rank_exchange.node_ranks(
            store, group_rank, group_world_size, spec, lambda: self._nodes_waiting() > 0
        )
        self._reporter.ranks_assigned(time.monotonic() - begun)
        return place_workers(
            spec.local_world_size,
            ranks.first_rank,
            ranks.first_role_rank,
            ranks.world_size,
            ranks.role_world_size,
        )

    def _start_generation(self, group: WorkerGroup) -> None:
        begun = time.monotonic()
        for local_rank, worker_id in self._start_workers(group).items():
            group.workers[local_rank].id = worker_id
        group.state = StateText.HEALTHY
        self._reporter.generation_started(begun)
        log_start(group, self._machine.generation)

    def _begin_stop(self, reason: StopReason, signum: int) -> Event | None:
        """Begin to stop what is left of the workers.

        The hooks of a subclass block until that is done; so the outcome is there at once.
        """
        if reason is StopReason.SIGNAL:
            self._shut_down(signum)
        elif reason is not StopReason.SUCCEEDED:
            self._stop_workers(self._worker_group)
        return self._stopped()

    def _stopped(self, unkillable: int = 0) -> supervision.WorkersStopped:
        generation = self._machine.generation
        self._worker_group.state = StateText.STOPPED
        self._reporter.generation_stopped(generation, self._result.failures)
        failed = any(failure.failed_by_itself() for failure in self._result.failures.values())
        return supervision.WorkersStopped(generation, unkillable, failed)

    def _shut_down(self, death_sig: int) -> None:
        self._shutdown(as_enum(death_sig), timeout=self._shutdown_timeout)
        self._is_down = True

    def _kill_workers(self) -> None:
        """Kill what is being stopped; there is nothing of the kind while a hook blocks."""

    def _exit_barrier(self) -> None:
        with self._signals.raising():
            rank_exchange.exit_barrier(self._worker_group, self._exit_barrier_timeout)

    # A job that a coordinator decides about.

    def _is_coordinated(self) -> bool:
        return isinstance(self._worker_group.spec.rdzv_handler, CoordinatedRendezvousHandler)

    def _name_in_story(self) -> str:
        handler: object = self._worker_group.spec.rdzv_handler
        if isinstance(handler, CoordinatedRendezvousHandler):
            return handler.node_id
        return f"{os.uname().nodename}-{os.getpid()}"

    def _join_job(self) -> CoordinatedJob:
        from holdfast.agent.coordinated_job import CoordinatedJob
        from holdfast.core.coordinated_supervision import CoordinatedSupervision
        from holdfast.net.listening import require_descriptors

        workers = self._worker_group.spec.local_world_size
        require_descriptors(JOB_DESCRIPTORS + WORKER_DESCRIPTORS * workers)
        handler = self._worker_group.spec.rdzv_handler
        assert isinstance(handler, CoordinatedRendezvousHandler)
        assert isinstance(self._machine, CoordinatedSupervision)
        return CoordinatedJob(
            handler,
            self._worker_group,
            self._machine,
            exit_barrier_s=self._exit_barrier_timeout,
            failures=self._failures_so_far,
            requested=self._reporter.requested,
        )

    def _failures_so_far(self) -> dict[int, ProcessFailure]:
        """Return what is known of failed workers by global rank, also while others still run."""
        return self._result.failures

    # Monitoring the workers.

    def _wait_for_change(self) -> None:
        """Wait for a signal or a message, but no longer than until the next poll."""
        next_poll = time.monotonic() + self._worker_group.spec.monitor_interval
        news = [self._job.fileno()] if self._job is not None else []
        wait_for(next_poll, self._signals.fileno(), *news)

    def _monitor(self) -> list[Event]:
        """Ask the hook how the workers are, and put its answer as events."""
        group = self._worker_group
        result = self._monitor_workers(group)
        group.state = result.state
        self._reporter.workers_observed(result.state.name.lower())
        generation = self._machine.generation
        if result.state == StateText.HEALTHY:
            return []
        self._result = result
        if result.state == StateText.SUCCEEDED:
            return [
                supervision.WorkerExited(generation, rank, failed=False)
                for rank in sorted(self._machine.running)
            ]
        if result.state in (StateText.FAILED, StateText.UNHEALTHY):
            why, retryable = result.state.name.lower(), self._restarts_wanted
            return [supervision.WorkersUnhealthy(generation, why, retryable)]
        raise InternalError(
            f"_monitor_workers returned the state {result.state.name}",
            hint="it must be HEALTHY, SUCCEEDED, FAILED or UNHEALTHY",
        )

    def _polls_membership(self) -> bool:
        handler: object = self._worker_group.spec.rdzv_handler
        # One that derives from another project's base class knows only to be polled.
        return not isinstance(handler, RendezvousHandler) or handler.polls_membership

    def _nodes_waiting(self) -> int:
        return self._worker_group.spec.rdzv_handler.num_nodes_waiting()


# Console lines about the workers of this node.

# An exception may have a message of any length; the report has more of it.
NOTICE_CHARS_MAX = 500


def signal_notice(machine: Supervision, one: int, grace_s: float, *, interrupted: bool) -> str:
    """Return what a signal leads to, before it does; `interrupted` if a SIGINT came before it."""
    interrupt, name = one == signal.SIGINT, signal_name(one)
    if interrupt and interrupted:
        return f"{name} again: killing the workers now"
    again = "; again to kill them at once" if interrupt else ""
    if machine.state is State.RUNNING:
        count = len(machine.running)
        whom = "1 worker" if count == 1 else f"{count} workers"
        limit = f"waiting up to {grace_s:g} s for the end"
        return f"{name}: passing it on to {whom} and {limit}{again}"
    if machine.state is State.STOPPING:
        return f"{name}: the workers are being stopped already{again}"
    return f"{name}: stopping"


def log_restart(machine: Supervision, failures: dict[int, ProcessFailure]) -> None:
    """Warn that the workers are restarted, and why."""
    if machine.reason is StopReason.REGROUP:
        console.info("nodes are waiting to join: regrouping")
        return
    if machine.reason is StopReason.ASKED:
        return  # It was said when it came.
    budget = machine.budget
    causes = {rank: failure for rank, failure in failures.items() if not failure.consequence}
    what = machine.unhealthy or "the workers are not healthy"
    if causes and not machine.unhealthy:
        from holdfast.processes.failures.failure import ChildFailedError

        rank, failure = ChildFailedError("", causes).get_first_failure()
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
