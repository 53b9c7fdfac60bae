"""The agents that TorchElastic's programs derive from, with the steps of its loop as methods.

Holdfast's own agents need none of these methods: their loop waits for events, and what is recorded
comes from the lifecycle of a run. But classes in the wild override TorchElastic's steps, or call
them from a loop of their own. Which loop an agent has is decided when it is made, by what its class
overrides:

- nothing below: the loop of events;
- a step (`STEPS`): TorchElastic's loop, `_run_by_steps`, out of these methods. It looks at the
  workers every `monitor_interval`, decides for its own node only, and meets the others by
  `next_rendezvous` and `num_nodes_waiting`, whatever the handler;
- `_invoke_run`: the loop is the subclass's, with these methods to call.

- `run`: everything is.

Where the loop is not that of events, a signal raises `SignalException` wherever it is.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.agent import agent, local_agent
from holdfast.agent.spec import DEFAULT_ROLE, RunResult
from holdfast.agent.worker_state import WorkerState
from holdfast.core.policy import RestartBudget
from holdfast.core.supervision import State, StopReason
from holdfast.errors import InternalError
from holdfast.observe.events.event import EventSource
from holdfast.observe.events.event_recorder import EventRecorder
from holdfast.observe.lifecycle import CustomEvent, WorkerInfo
from holdfast.processes.poll import wait_for
from holdfast.processes.signals import SignalException, as_enum
from holdfast.processes.workers.group import PContext

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from holdfast.agent.spec import Worker, WorkerGroup
    from holdfast.observe.events.event import Event
    from holdfast.rendezvous.handler import RendezvousHandler
    from holdfast.store.interface import RoundStore

STEPS = (
    "_initialize_workers",
    "_restart_workers",
    "_rendezvous",
    "_assign_worker_ranks",
    "_exit_barrier",
)
RECORDS = ("_record_worker_events", "_get_worker_state", "_construct_event")


class SimpleElasticAgent(agent.SimpleElasticAgent):
    """An agent of one group of workers; derive from it to say what a worker is."""

    _restarts_set: int | None = None  # What a subclass has set, until the loop of events counts.

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._has_steps = self._overrides(*STEPS)
        self._has_own_loop = self._has_steps or self._overrides("_invoke_run", "run")
        self._records_by_hook = self._overrides(*RECORDS)

    def _overrides(self, *names: str) -> bool:
        """Whether a class that is not Holdfast's has one of these methods."""
        kind = type(self)
        ours = next(one for one in kind.__mro__ if one.__module__ == __name__)
        return any(getattr(kind, name) is not getattr(ours, name) for name in names)

    # What TorchElastic's agents know of themselves.

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
        elif self._job is None:
            machine.budget = RestartBudget(machine.budget.used + max(0, left), machine.budget.used)
        else:
            self._restarts_wanted = left > 0
            if left > machine.budget.left:
                console.warning(
                    f"_remaining_restarts = {left}: the nodes of this job share "
                    f"{machine.budget.left}; only 0 has an effect, use --max-restarts for more"
                )

    def _begin_anew(self) -> None:
        super()._begin_anew()
        if self._restarts_set is not None:
            self._count_restarts(self._restarts_set)

    def _count_restarts(self, left: int) -> None:
        """Have the machine, which does not run, know how many restarts there were."""
        limit = self._worker_group.spec.max_restarts
        used = limit - left if self._has_own_loop else 0
        self._machine.budget = RestartBudget(max(0, left) + used, used)

    # The steps.

    def _supervise(self, role: str) -> RunResult:
        if not self._has_own_loop:
            return super()._supervise(role)
        try:
            with self._signals.raising():
                return super()._supervise(role)
        except SignalException as problem:
            limit = f"waiting up to {self._shutdown_timeout:g} s for their end"
            console.warning(f"{problem.sigval.name}: stopping the workers, {limit}")
            raise

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        if self._has_steps:
            return self._run_by_steps()
        self._signals.raises = False  # The loop of events takes them as events.
        return super()._invoke_run(role)

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
                    agent.log_restart(self._machine, result.failures)
                    self._restart_workers(group)
                case WorkerState.FAILED | WorkerState.UNHEALTHY:
                    self._stop_workers(group)
                    group.state = WorkerState.FAILED
                    return RunResult(group.state, result.return_values, result.failures)
                case WorkerState.HEALTHY:
                    if self._nodes_waiting() > 0:
                        console.info("nodes are waiting to join: regrouping")
                        self._restart_workers(group)
                case other:
                    raise InternalError(
                        f"_monitor_workers returned the state {other.name}",
                        hint="it must be HEALTHY, SUCCEEDED, FAILED or UNHEALTHY",
                    )

    def _wait_for_workers(self, deadline: float) -> None:
        wait_for(deadline)

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Take part in a round, and start the workers with the ranks that it gives them."""
        if self._signals.fileno() < 0:  # No `run` of ours watches them.
            self._signals = self._watch_signals()
            self._signals.__enter__()
            self._signals.raises = True
        self._find_round(worker_group)
        self._machine.generation += 1
        self._start_generation(worker_group)

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
        """Do nothing: metrics are made of the lifecycle of a run. There to be overridden."""

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
        """Return how a worker ended: as all did, or `TERMINATED` if others were the reason."""
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
        """Return the event that the agent has succeeded."""
        return self._construct_event("SUCCEEDED", EventSource.AGENT)

    def get_event_failed(self) -> Event:
        """Return the event that the agent has failed, with the exception being handled."""
        error = traceback.format_exc()
        return self._construct_event("FAILED", EventSource.AGENT, raw_error=error)

    @contextmanager
    def record_duration(self, state: str) -> Iterator[None]:
        """Record an event of this state with the duration of the block.

        During a run it goes where the run's own events go.
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
        from holdfast.events import record

        record(event, self._worker_group.spec.event_log_handler)

    def _event_recorder(self) -> EventRecorder:
        recorder = EventRecorder(lambda _event: None)
        recorder(self._reporter.describe_run())
        recorder(self._reporter.describe_rendezvous())
        return recorder


class _RoleInstanceInfo:
    """A node's role and its number of workers, as subclasses with ranks of their own exchange it."""

    __slots__ = ("local_world_size", "rank", "role")

    def __init__(self, role: str, rank: int, local_world_size: int) -> None:
        self.role = role
        self.rank = rank
        self.local_world_size = local_world_size

    def serialize(self) -> bytes:
        """Return it as the JSON that agents of one round exchange."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()

    @staticmethod
    def deserialize(data: bytes) -> _RoleInstanceInfo:
        """Return what `serialize` made text of."""
        return _RoleInstanceInfo(**json.loads(data))

    @staticmethod
    def compare(obj1: _RoleInstanceInfo, obj2: _RoleInstanceInfo) -> int:
        """Return -1, 0 or 1: by role first, then by rank."""
        first, second = (obj1.role, obj1.rank), (obj2.role, obj2.rank)
        return (first > second) - (first < second)

    @staticmethod
    def find_role_boundaries(roles_infos: list[_RoleInstanceInfo], role: str) -> tuple[int, int]:
        """Return the first and the last place of a role in a sorted list; -1 and -1 if none."""
        places = [place for place, one in enumerate(roles_infos) if one.role == role]
        return (places[0], places[-1]) if places else (-1, -1)


def _get_fq_hostname() -> str:
    """Return this host's name as the kernel has it: no name server is asked."""
    return os.uname().nodename


_STOP_REASONS = {
    WorkerState.FAILED: StopReason.WORKER_FAILED,
    WorkerState.UNHEALTHY: StopReason.UNHEALTHY,
}


class LocalElasticAgent(local_agent.LocalElasticAgent, SimpleElasticAgent):
    """The agent of a real node.

    A subclass may start the workers itself and set `_pcontext` to any context with TorchElastic's
    methods `pids`, `wait` and `close`, if the loop is not that of events.
    """

    # For subclasses that stop these themselves: here both are part of the run.
    _worker_watchdog: Any = None
    _health_check_server: Any = None

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        super()._initialize_workers(worker_group)
        context = self._pcontext
        if isinstance(context, PContext):  # Also of a `_start_workers` that is not ours.
            self._side_services.watchdogs.started(context.pids(), context.stderrs)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        reason = _STOP_REASONS.get(worker_group.state, StopReason.REGROUP)
        self._previous = (worker_group.workers[0].world_size, reason.value)
        super()._restart_workers(worker_group)

    def _wait_for_workers(self, deadline: float) -> None:
        context = self._pcontext
        events: list[int] = []
        if isinstance(context, PContext) and not self._monitors_by_hook:
            events.append(context.fileno())  # Which our `_monitor_workers` reads.
        self._wait(deadline, *events)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._machine.state is not State.IDLE:
            return super()._monitor_workers(worker_group)
        context = self._pcontext
        assert context is not None, "there are no workers to monitor: none were started"
        started = {worker.id for worker in worker_group.workers} - {None}
        if started != set(context.pids().values()):
            console.error(
                f"the workers have other processes ({sorted(started)}) than their context "
                f"({sorted(context.pids().values())})"
            )
            return RunResult(WorkerState.UNKNOWN)
        now = time.monotonic()
        self._side_services.look(now)
        result = context.wait(0)
        if isinstance(context, PContext):
            if result is None and (context.first_failure() or context.all_ended()):
                result = context.wait()  # Until nothing is left of the others.
            if result is None and self._stuck is not None:
                stuck = self._stuck.check(now, context)
                if stuck:
                    console.error(stuck)
                    self._remaining_restarts = 0
                    return RunResult(WorkerState.UNHEALTHY)
        return self._outcome(result) if result is not None else RunResult(WorkerState.HEALTHY)

    def _start_group(self, *args: Any) -> PContext:
        context = super()._start_group(*args)
        context.stop_signal, context.grace_s = self._stop_signal, self._shutdown_timeout
        return context

    @property
    def _attends_workers(self) -> bool:
        return super()._attends_workers and not self._has_own_loop

    def _bring_down(self, signum: int, grace_s: float) -> None:
        context = self._pcontext
        if context is None or isinstance(context, PContext):
            super()._bring_down(signum, grace_s)
        else:
            context.close(as_enum(signum), grace_s)

    def _release_group(self) -> None:
        context = self._pcontext
        if context is None or isinstance(context, PContext):
            super()._release_group()
        else:
            context.close()
            self._pcontext = None
