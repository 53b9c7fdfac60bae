"""The agent classes of TorchElastic, with the steps of its loop as methods.

Holdfast's own loop (`agent.loop`) needs none of these methods. But users' classes override
TorchElastic's hooks and steps, or call them from their own loop. The methods that a class overrides
determine how its agents run:

- none: `AgentLoop` with processes;
- a hook (`HOOKS`): `AgentLoop` with `HookedWorkers`, which call the hooks;
- a step (`STEPS`): TorchElastic's loop, `_run_by_steps`. It checks the workers every
  `monitor_interval`, decides for its own node only, and uses `next_rendezvous` and
  `num_nodes_waiting` of any handler;
- `_invoke_run`: the subclass's own loop, which calls these methods;
- `run`: the subclass does everything.

If the loop is not `AgentLoop`, the machine stays idle: it only decides about expired timers and blocked
workers. A signal raises `SignalException`.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.agent.assembly import machine_and_job, services_of, stuck_limit
from holdfast.agent.lifecycle_reporter import LifecycleReporter
from holdfast.agent.loop import AgentLoop, LoopSettings, log_restart, signal_notice
from holdfast.agent.polled_job import PolledJob
from holdfast.agent.spec import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerState
from holdfast.agent.worker_processes import ProcessSettings, StopOrder, WorkerProcesses
from holdfast.core.machine import TICK
from holdfast.core.policy import RestartBudget
from holdfast.core.supervision import (
    SignalReceived,
    State,
    StopReason,
    Supervision,
    SupervisionSettings,
)
from holdfast.defaults import EXIT_BARRIER_S, FAILURE_GRACE_S, SHUTDOWN_S
from holdfast.elastic._impl.hooked_workers import HOOKS, HookedWorkers, unknown_result
from holdfast.events import record
from holdfast.observe.events.event import EventSource
from holdfast.observe.events.event_recorder import EventRecorder
from holdfast.observe.lifecycle import CustomEvent, WorkerInfo
from holdfast.processes.logs.specs import DefaultLogsSpecs
from holdfast.processes.poll import wait_for
from holdfast.processes.signals import SignalException, as_enum
from holdfast.processes.workers.group import RunningGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from holdfast.agent.loop import JobPart, Workers
    from holdfast.agent.side_services import HealthServer
    from holdfast.agent.spec import Worker, WorkerSpec
    from holdfast.agent.worker_processes import Environments
    from holdfast.core.machine import Event as MachineEvent
    from holdfast.observe.events.event import Event
    from holdfast.observe.lifecycle import Observers
    from holdfast.processes.logs.specs import LogsSpecs
    from holdfast.rendezvous.handler import RendezvousHandler
    from holdfast.store.store_interface import RoundStore

START_HOOKS = ("_setup_local_watchdog", "_setup_healthcheck")
STEPS = (
    "_initialize_workers",
    "_restart_workers",
    "_rendezvous",
    "_assign_worker_ranks",
    "_exit_barrier",
)
RECORDS = ("_record_worker_events", "_get_worker_state", "_construct_event")


class ElasticAgent(ABC):
    """Runs the workers of one node to their end."""

    @abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to their end; raise if that is impossible."""

    @abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """Return the group of workers, which the agent continues to change."""


class SimpleElasticAgent(ElasticAgent):
    """An agent of one group of workers; a subclass defines how they start and stop."""

    _has_processes = (
        False  # Whether the workers are Holdfast's processes, unless a subclass replaces them.
    )
    _restarts_set: int | None = None  # Set by a subclass, until `AgentLoop` counts restarts.

    def __init__(
        self,
        spec: WorkerSpec,
        exit_barrier_timeout: float = EXIT_BARRIER_S,
        shutdown_timeout: float = SHUTDOWN_S,
    ) -> None:
        settings = ProcessSettings(DefaultLogsSpecs(os.devnull))
        self._make(WorkerGroup(spec), settings, exit_barrier_timeout, shutdown_timeout)

    def _make(
        self,
        group: WorkerGroup,
        settings: ProcessSettings,
        exit_barrier_timeout: float,
        shutdown_timeout: float,
        health_server: HealthServer | None = None,
        stuck_limit_s: float | None = None,
    ) -> None:
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        self._failure_grace = min(shutdown_timeout, FAILURE_GRACE_S)
        self._stuck_limit_s = stuck_limit_s
        self._total_execution_time = 0
        self._reporter = LifecycleReporter(group, settings.logs_specs)
        self._side_services = services_of(group.spec, self._reporter, health_server, stuck_limit_s)
        self._processes = WorkerProcesses(group, settings, self._side_services.watchdogs)
        self._overridden = frozenset(
            name
            for name in (*HOOKS, *START_HOOKS, *STEPS, *RECORDS, "_invoke_run", "run")
            if self._overrides(name)
        )
        self._has_steps = not self._overridden.isdisjoint(STEPS)
        self._has_own_loop = self._has_steps or not self._overridden.isdisjoint(
            ("_invoke_run", "run")
        )
        self._records_by_hook = not self._overridden.isdisjoint(RECORDS)
        self._begin_run()

    def _overrides(self, name: str) -> bool:
        """Whether a class that is not Holdfast's has this method."""
        kind = type(self)
        ours = next(one for one in kind.__mro__ if one.__module__ == __name__)
        return getattr(kind, name, None) is not getattr(ours, name, None)

    def _begin_run(self) -> None:
        """Create the parts of one run."""
        group = self._worker_group
        workers: Workers
        hooks = (*HOOKS, *START_HOOKS)
        if self._has_own_loop or self._overridden.intersection(hooks):
            workers = HookedWorkers(self, self._processes)
        else:
            workers = self._processes
        settings = SupervisionSettings(
            self._exit_barrier_timeout, self._shutdown_timeout, self._failure_grace
        )
        self._machine: Supervision
        self._job: JobPart
        if self._has_own_loop:
            spec = group.spec
            self._machine = self._reporter.machine = Supervision(
                settings,
                local_world_size=spec.local_world_size,
                max_restarts=spec.max_restarts,
                stuck_limit_s=self._stuck_limit_s,
            )
            self._job = PolledJob(group, self._machine, self._reporter)
        else:
            self._machine, self._job = machine_and_job(
                group,
                self._reporter,
                workers,
                settings,
                stuck_limit_s=self._stuck_limit_s,
            )
        self._loop = AgentLoop(
            self._machine,
            workers,
            self._job,
            self._side_services,
            group=group,
            reporter=self._reporter,
            settings=LoopSettings(),
        )
        self._restarts_wanted = True  # Whether a restart may follow a failure that a hook reports.
        if self._restarts_set is not None:
            self._count_restarts(self._restarts_set)

    # Methods that a subclass defines.

    @abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start all workers; return their ids by local rank."""

    @abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop every worker, and return when all have exited."""

    @abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the workers without waiting: healthy, succeeded, failed or unhealthy."""

    @abstractmethod
    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = SHUTDOWN_S
    ) -> None:
        """Stop all workers with this signal, and release the agent's resources."""

    def _close_user_context(self) -> None:
        """Close a context that a subclass has set."""

    # The public interface.

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """Return the agent's only group, whatever the role."""
        del role
        return self._worker_group

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers until they succeed or fail for good.

        Raises `SignalException` if a signal ended the run. When this returns or raises, all workers
        have exited. May be called again, with the full restart budget.
        """
        begin = time.monotonic()
        self._begin_run()
        try:
            with self._loop.running():
                if isinstance(self._loop.workers, HookedWorkers):
                    # A hook may block while workers write output.
                    self._side_services.start_deferred_services()
                return self._run_ended(self._supervise(role))
        finally:
            self._loop.close()
            self._total_execution_time = int(time.monotonic() - begin)

    @property
    def observers(self) -> Observers:
        """The receivers of the lifecycle events of a run."""
        return self._reporter.observers

    @property
    def restart_count(self) -> int:
        """The number of restarts charged so far."""
        return self._machine.restart_count

    # TorchElastic's attributes.

    @property
    def _worker_group(self) -> WorkerGroup:
        return self._reporter.group

    @_worker_group.setter
    def _worker_group(self, group: WorkerGroup) -> None:
        self._reporter.group = self._loop.group = self._job.group = group
        self._processes.group = group

    @property
    def _rdzv_handler(self) -> RendezvousHandler:
        return self._worker_group.spec.rdzv_handler

    @_rdzv_handler.setter
    def _rdzv_handler(self, handler: RendezvousHandler) -> None:
        self._worker_group.spec.rdzv_handler = handler

    @property
    def _store(self) -> RoundStore | None:
        return self._worker_group.store

    @_store.setter
    def _store(self, store: RoundStore | None) -> None:
        self._worker_group.store = store

    @property
    def _remaining_restarts(self) -> int:
        if self._restarts_set is not None and self._machine.state is State.IDLE:
            return self._restarts_set
        return self._machine.budget.left

    @_remaining_restarts.setter
    def _remaining_restarts(self, left: int) -> None:
        self._restarts_set = left
        machine = self._machine
        if machine.state is State.IDLE:
            self._count_restarts(left)
        elif self._loop.membership is None:
            machine.budget = RestartBudget(machine.budget.used + max(0, left), machine.budget.used)
        else:
            self._restarts_wanted = left > 0
            if left > machine.budget.left:
                console.warning(
                    f"_remaining_restarts = {left}: the nodes of this job share "
                    f"{machine.budget.left}; only 0 has an effect, use --max-restarts for more"
                )

    def _count_restarts(self, left: int) -> None:
        """Set the restart budget of the machine, which is idle."""
        limit = self._worker_group.spec.max_restarts
        used = limit - left if self._has_own_loop else 0
        self._machine.budget = RestartBudget(max(0, left) + used, used)

    # The steps.

    def _supervise(self, role: str) -> RunResult:
        if not self._has_own_loop:
            return self._invoke_run(role)
        try:
            with self._loop.signals.raising():
                return self._invoke_run(role)
        except SignalException as problem:
            limit = f"{self._shutdown_timeout:g} s"
            console.warning(
                f"{problem.sigval.name}: stopping the workers, then waiting up to {limit}"
            )
            raise

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        del role
        if self._has_steps:
            self._loop.workers.prepare()
            return self._run_by_steps()
        self._loop.signals.raises = False  # `AgentLoop` takes them as events.
        return self._loop.supervise()

    def _run_by_steps(self) -> RunResult:
        group = self._worker_group
        spec = group.spec
        self._initialize_workers(group)
        while True:
            self._wait_for_workers(time.monotonic() + spec.monitor_interval)
            result = self._monitor_workers(group)
            group.state = result.state
            self._reporter.workers_observed(result.state.name.lower())
            match result.state:
                case WorkerState.SUCCEEDED:
                    self._exit_barrier()
                    return result
                case WorkerState.FAILED | WorkerState.UNHEALTHY if self._remaining_restarts > 0:
                    self._remaining_restarts -= 1
                    log_restart(self._machine, result.failures)
                    self._restart_workers(group)
                case WorkerState.FAILED | WorkerState.UNHEALTHY:
                    self._stop_workers(group)
                    group.state = WorkerState.FAILED
                    return RunResult(group.state, result.return_values, result.failures)
                case WorkerState.HEALTHY:
                    if self._polled.nodes_waiting() > 0:
                        console.info("nodes are waiting to join: regrouping")
                        self._restart_workers(group)
                case other:
                    raise unknown_result(self, other)

    def _wait_for_workers(self, deadline: float) -> None:
        wait_for(deadline)

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Join a round, and start the workers with its ranks."""
        if self._loop.signals.fileno() < 0:  # The agent's own `run` was not called.
            self._loop.watched_signals().__enter__()
            self._loop.signals.raises = True
        self._polled.find_round(lambda: self._rendezvous(worker_group))
        self._machine.generation += 1
        self._loop.start_generation()

    @property
    def _polled(self) -> PolledJob:
        job = self._job
        if isinstance(job, PolledJob):
            return job
        return PolledJob(self._worker_group, self._machine, self._reporter)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Join the next round, and assign the ranks of this node's workers."""
        spec = worker_group.spec
        with self._loop.long_wait("the rendezvous"):
            self._polled.next_round(
                lambda store, rank, size: self._assign_worker_ranks(store, rank, size, spec)
            )

    def _assign_worker_ranks(
        self, store: object, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Return this node's workers with their ranks."""
        del spec
        return self._polled.exchange_ranks(store, group_rank, group_world_size)

    def _exit_barrier(self) -> None:
        """Wait until the workers of the other nodes have exited."""
        with self._loop.long_wait("the exit barrier"):
            self._polled.exit_barrier(self._exit_barrier_timeout)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers, and start them in the next round."""
        generation = self._machine.generation
        reason = _STOP_REASONS.get(worker_group.state, StopReason.REGROUP)
        self._reporter.generation_stopping(generation, reason)
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED
        self._reporter.generation_stopped(generation)
        self._initialize_workers(worker_group)

    # Records.

    def _run_ended(self, result: RunResult) -> RunResult:
        self._record_metrics(result)
        if self._records_by_hook:
            self._record_worker_events(result)
        return self._reporter.run_ended(result, workers_recorded=self._records_by_hook)

    def _record_metrics(self, group_results: RunResult) -> None:
        """Do nothing: lifecycle events provide the metrics. A subclass may override this."""

    def _record_worker_events(self, result: RunResult) -> None:
        """Record how each worker ended."""
        for worker in self._worker_group.workers:
            failure = result.failures.get(worker.global_rank)
            error = json.dumps(failure.error_file_data, default=str) if failure else None
            code = failure.exitcode if failure else None
            state = self._get_worker_state(worker, result)
            self._record(
                self._construct_event(state, EventSource.WORKER, worker, error, exit_code=code)
            )

    def _get_worker_state(self, worker: Worker, result: RunResult) -> str:
        """Return the state of a worker at the end; `TERMINATED` if other workers failed."""
        failed = worker.global_rank in result.failures
        if not failed and result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            return "TERMINATED"
        if failed or worker.global_rank in result.return_values:
            return str(result.state.value)
        raise ValueError(f"the result has no worker of rank {worker.global_rank}")

    def _construct_event(
        self,
        state: str,
        source: EventSource,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
    ) -> Event:
        """Return an event about the agent or about one of its workers, without recording it."""
        recorder, now = self._event_recorder(), time.time()
        if source is EventSource.AGENT or worker is None:
            return recorder.agent_event(state, now, raw_error or "", duration_ms)
        pid = worker.id if isinstance(worker.id, int) else 0
        ranks = (worker.local_rank, worker.global_rank, worker.role_rank, worker.role_world_size)
        info = WorkerInfo(*ranks, pid)
        return recorder.worker_event(state, now, info, raw_error or "", exit_code)

    def get_event_succeeded(self) -> Event:
        """Return an event that reports the agent's success."""
        return self._construct_event("SUCCEEDED", EventSource.AGENT)

    def get_event_failed(self) -> Event:
        """Return an event that reports the agent's failure, with the exception being handled."""
        error = traceback.format_exc()
        return self._construct_event("FAILED", EventSource.AGENT, raw_error=error)

    @contextmanager
    def record_duration(self, state: str) -> Iterator[None]:
        """Record an event of this state with the duration of the block.

        During a run, the event has the same destination as the run's own events.
        """
        begun = time.perf_counter()
        try:
            yield
        finally:
            took_ms = (time.perf_counter() - begun) * 1000
            self._record(self._construct_event(state, EventSource.AGENT, duration_ms=took_ms))

    def _record(self, event: Event) -> None:
        if self._reporter.observers:
            self._reporter.report(CustomEvent(event))
            return
        record(event, self._worker_group.spec.event_log_handler)

    def _event_recorder(self) -> EventRecorder:
        recorder = EventRecorder(lambda _event: None)
        recorder(self._reporter.describe_run())
        recorder(self._reporter.describe_rendezvous())
        return recorder


class _RoleInstanceInfo:
    """A node's role and number of workers. Subclasses that assign ranks exchange it."""

    __slots__ = ("local_world_size", "rank", "role")

    def __init__(self, role: str, rank: int, local_world_size: int) -> None:
        self.role = role
        self.rank = rank
        self.local_world_size = local_world_size

    def serialize(self) -> bytes:
        """Return the JSON that the agents of one round exchange."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()

    @staticmethod
    def deserialize(data: bytes) -> _RoleInstanceInfo:
        """Return the object that `serialize` encoded."""
        return _RoleInstanceInfo(**json.loads(data))

    @staticmethod
    def compare(obj1: _RoleInstanceInfo, obj2: _RoleInstanceInfo) -> int:
        """Return -1, 0 or 1: by role first, then by rank."""
        first, second = (obj1.role, obj1.rank), (obj2.role, obj2.rank)
        return (first > second) - (first < second)

    @staticmethod
    def find_role_boundaries(roles_infos: list[_RoleInstanceInfo], role: str) -> tuple[int, int]:
        """Return the first and the last index of a role in a sorted list; -1 and -1 if none."""
        places = [place for place, one in enumerate(roles_infos) if one.role == role]
        return (places[0], places[-1]) if places else (-1, -1)


def _get_fq_hostname() -> str:
    """Return the kernel's name of this host, without a name lookup."""
    return os.uname().nodename


_STOP_REASONS = {
    WorkerState.FAILED: StopReason.WORKER_FAILED,
    WorkerState.UNHEALTHY: StopReason.UNHEALTHY,
}


class LocalElasticAgent(SimpleElasticAgent):
    """The agent of a real node: its workers are processes.

    If the loop is not `AgentLoop`, a subclass may start the workers itself and set `_pcontext` to any
    context with TorchElastic's methods `pids`, `wait` and `close`.
    """

    _has_processes = True
    # For subclasses that stop these themselves. Here the end of the run stops both.
    _worker_watchdog: Any = None
    _health_check_server: Any = None

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float = EXIT_BARRIER_S,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: float = SHUTDOWN_S,
        health_check_server: HealthServer | None = None,
        uninterruptible_state_timeout: float | None = None,
    ) -> None:
        # For subclasses that start the workers themselves.
        self._logs_specs = logs_specs
        self._start_method = start_method
        self._log_line_prefix_template = log_line_prefix_template
        self._foreign: Any = None  # A foreign context that a subclass has set.
        self._make(
            WorkerGroup(spec),
            ProcessSettings(
                logs_specs,
                start_method=start_method,
                log_line_prefix_template=log_line_prefix_template,
            ),
            exit_barrier_timeout,
            shutdown_timeout,
            health_check_server,
            stuck_limit(uninterruptible_state_timeout),
        )

    @property
    def _pcontext(self) -> Any:
        """The workers' context, for hooks."""
        return self._foreign or self._processes.context

    @_pcontext.setter
    def _pcontext(self, context: Any) -> None:
        self._foreign = None
        if isinstance(context, RunningGroup):
            self._processes.adopt(context)
        else:
            self._processes.context, self._processes.is_active = None, False
            self._foreign = context

    # The hooks.

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        del worker_group
        order = self._loop.start_order()
        given: Environments = self._processes.environments(order)
        self._setup_local_watchdog(given.envs)
        self._setup_healthcheck()
        self._machine.forget_workers()
        return dict(self._processes.launch(order, given, self._loop.long_wait))

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        """Prepare timers and progress pages, and add them to the workers' environments."""
        self._processes.add_watchdogs(envs)

    def _setup_healthcheck(self) -> None:
        """Do nothing: the health server runs for the whole run, not for one generation."""

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        del worker_group
        self._shutdown(timeout=self._machine.grace_s)

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = SHUTDOWN_S
    ) -> None:
        self._stop_and_reap(death_sig, timeout)

    def _stop_and_reap(self, signum: int, grace_s: float) -> None:
        """Stop the workers, and wait until all their processes have exited."""
        if self._foreign is not None:
            self._foreign.close(as_enum(signum), grace_s)
            return
        context = self._processes.context
        if context is None or context.stop_ended:
            return
        self._processes.begin_stop(StopOrder(None, signum, grace_s, self._machine.stuck))
        if self._loop.has_failed:
            self._loop.await_exits(self._processes)
        else:
            self._await_stop(grace_s, self._processes.events)

    def _await_stop(self, grace_s: float, poll: Callable[[float], list[MachineEvent]]) -> None:
        """Wait until a stop has ended. The machine does not decide; a second SIGINT kills the workers.

        The loop's machine handles the events of `poll` when the hook has returned.
        """
        loop, machine, workers = self._loop, self._machine, self._processes
        context = workers.context
        assert context is not None
        interrupted = machine.interrupted
        while True:
            # Signals first: once the stop has ended, the caller may wait for another round.
            while (one := loop.signals.take()) is not None:
                console.warning(signal_notice(machine, one, grace_s, interrupted=interrupted))
                if interrupted and one == signal.SIGINT:
                    workers.kill()
                interrupted = interrupted or one == signal.SIGINT
                loop.post(SignalReceived(one))
            for event in poll(time.monotonic()):
                if machine.state is not State.IDLE:
                    loop.post(event)
            if context.stop_ended:
                return
            loop.wait(workers.next_deadline(time.monotonic()), *workers.descriptors())

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        processes, hooked = self._processes, self._loop.workers
        if self._machine.state is State.IDLE:
            return self._monitor_in_own_loop(worker_group)
        context = processes.context
        assert context is not None
        assert isinstance(hooked, HookedWorkers)
        hooked.poll(time.monotonic())
        if not context.is_over:
            return RunResult(WorkerState.HEALTHY)
        if context.first_failure() is None:
            return RunResult(
                WorkerState.SUCCEEDED, processes.by_global_rank(context.return_values())
            )
        # As in TorchElastic, a failure stops the other workers before the caller learns of it.
        grace_s = self._failure_grace
        processes.begin_stop(StopOrder(None, 0, grace_s, self._machine.stuck))
        self._await_stop(grace_s, hooked.poll)
        return processes.outcome(context.result())

    def _close_user_context(self) -> None:
        if self._foreign is not None:
            self._foreign.close()
            self._foreign = None

    # TorchElastic's loop, or the subclass's own.

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        reason = _STOP_REASONS.get(worker_group.state, StopReason.REGROUP)
        self._loop.previous = (worker_group.workers[0].world_size, reason.value)
        super()._restart_workers(worker_group)

    def _wait_for_workers(self, deadline: float) -> None:
        events: list[int] = []
        if self._foreign is None and "_monitor_workers" not in self._overridden:
            events = self._processes.descriptors()  # Our `_monitor_workers` reads them.
        self._loop.wait(deadline, *events)

    def _monitor_in_own_loop(self, worker_group: WorkerGroup) -> RunResult:
        context = self._pcontext
        assert context is not None, "no workers were started, so there are none to monitor"
        started = {worker.id for worker in worker_group.workers} - {None}
        if started != set(context.pids().values()):
            console.error(
                f"the processes of the workers ({sorted(started)}) differ from those of their context "
                f"({sorted(context.pids().values())})"
            )
            return RunResult(WorkerState.UNKNOWN)
        self._side_services.poll(time.monotonic())
        self._loop.dispatch([*self._side_services.take_events(), TICK])
        result = context.wait(0)
        if isinstance(context, RunningGroup) and result is None:
            if context.first_failure() or context.all_ended():
                context.grace_s = self._failure_grace
                result = context.wait()  # Until the others have exited.
            elif self._machine.stuck:
                console.error(self._machine.unhealthy)
                self._remaining_restarts = 0
                return RunResult(WorkerState.UNHEALTHY)
        if result is None:
            return RunResult(WorkerState.HEALTHY)
        if not isinstance(context, RunningGroup):
            for failure in result.failures.values():
                self._processes.explain(failure)
        return self._processes.outcome(result)
