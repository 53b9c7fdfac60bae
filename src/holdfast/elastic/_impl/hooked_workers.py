"""Workers that the hooks of a TorchElastic subclass start, stop or monitor, for `AgentLoop`.

A hook blocks until it is done, so the outcome of a stop is there at once. Where a subclass leaves a
hook as it is, the workers are processes as in Holdfast's own agent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.agent.spec import RunResult, WorkerState
from holdfast.core import supervision
from holdfast.core.supervision import State, StopReason
from holdfast.errors import InternalError
from holdfast.processes.poll import min_of
from holdfast.processes.signals import as_enum

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.agent.loop import Busy
    from holdfast.agent.worker_processes import StartOrder, WorkerProcesses
    from holdfast.core.machine import Event
    from holdfast.elastic._impl.agents import SimpleElasticAgent
    from holdfast.processes.failures.failure import ProcessFailure


class HookedWorkers:
    """The workers of one agent for one run; `processes` is None if hooks define what a worker is."""

    def __init__(self, agent: SimpleElasticAgent, processes: WorkerProcesses | None) -> None:
        self._agent = agent
        self._processes = processes
        self._result = RunResult(WorkerState.INIT)
        self._is_shut_down = False
        hooks = agent._overridden
        self._monitors = processes is None or "_monitor_workers" in hooks
        self._stops = processes is None or "_stop_workers" in hooks
        self._shuts_down = processes is None or "_shutdown" in hooks
        self.blocks = (
            self._monitors
            or self._stops
            or self._shuts_down
            or "_start_workers" in hooks
            or agent._has_own_loop
        )

    @property
    def result(self) -> RunResult:
        return self._result if self._processes is None else self._processes.result

    @property
    def is_active(self) -> bool:
        return self._processes is not None and self._processes.is_active

    def prepare(self) -> None:
        if self._processes is not None:
            self._processes.prepare()

    def start(self, order: StartOrder, busy: Busy) -> Mapping[int, object]:
        del order, busy  # The agent's own `_start_workers` knows them.
        return self._agent._start_workers(self._agent.get_worker_group())

    def begin_stop(
        self,
        reason: StopReason | None,
        signum: int,
        grace_s: float,
        *,
        stuck: Mapping[int, str],
        node: str,
        cause: str,
    ) -> Event | None:
        if reason is None or reason is StopReason.SIGNAL:
            self._shut_down(signum)
        elif reason is not StopReason.SUCCEEDED and self._stops:
            self._agent._stop_workers(self._agent.get_worker_group())
        if self._processes is not None:
            return self._processes.begin_stop(
                reason, signum, grace_s, stuck=stuck, node=node, cause=cause
            )
        failed = any(failure.failed_by_itself() for failure in self._result.failures.values())
        return supervision.WorkersStopped(self._agent._machine.generation, 0, failed)

    def _shut_down(self, signum: int) -> None:
        if self._shuts_down and not self._is_shut_down:
            self._agent._shutdown(as_enum(signum), timeout=self._agent._shutdown_timeout)
            self._is_shut_down = True

    def kill(self) -> None:
        if self._processes is not None:
            self._processes.kill()

    def events(self, now: float) -> list[Event]:
        events = self._processes.events(now) if self._processes is not None else []
        agent = self._agent
        if not self._monitors or agent._machine.state is not State.RUNNING:
            return events
        exits = [event for event in events if isinstance(event, supervision.WorkerExited)]
        if any(not one.retryable for one in exits):
            return events
        for one in exits:  # The hook decides what an exit means.
            agent._side_services.worker_ended(one.local_rank)
            agent._reporter.worker_ended(one.local_rank, failed=one.failed)
        return self._monitor()

    def _monitor(self) -> list[Event]:
        """Turn what the hook finds into events."""
        agent = self._agent
        group, machine = agent.get_worker_group(), agent._machine
        result = agent._monitor_workers(group)
        group.state = result.state
        agent._reporter.workers_observed(result.state.name.lower())
        if result.state == WorkerState.HEALTHY:
            return []
        if self._processes is None:
            self._result = result
        else:
            self._processes.result = result
        if result.state == WorkerState.SUCCEEDED:
            return [
                supervision.WorkerExited(machine.generation, rank, failed=False)
                for rank in sorted(machine.running)
            ]
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            why, retryable = result.state.name.lower(), agent._restarts_wanted
            return [supervision.WorkersUnhealthy(machine.generation, why, retryable)]
        raise InternalError(
            f"_monitor_workers returned the state {result.state.name}",
            hint="it must be HEALTHY, SUCCEEDED, FAILED or UNHEALTHY",
        )

    def descriptors(self) -> list[int]:
        return self._processes.descriptors() if self._processes is not None else []

    def next_deadline(self, now: float) -> float | None:
        deadline = self._processes.next_deadline(now) if self._processes is not None else None
        if not self._monitors or self._agent._machine.state is not State.RUNNING:
            return deadline
        return min_of(deadline, now + self._agent.get_worker_group().spec.monitor_interval)

    def failures_so_far(self) -> dict[int, ProcessFailure]:
        if self._processes is None:
            return self._result.failures
        return self._processes.failures_so_far()

    def settle(self) -> None:
        if self._processes is not None:
            self._processes.settle()

    def close(self) -> None:
        self._agent._release_foreign()
        if self._processes is not None:
            self._processes.close()

    def await_keeper(self) -> None:
        if self._processes is not None:
            self._processes.await_keeper()
