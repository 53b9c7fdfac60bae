"""Workers that the hooks of a TorchElastic subclass start, stop or monitor, for `AgentLoop`.

A hook blocks until it is done, so the result of a stop is known at once. It may run a user's code, which
may take any time, so the heartbeat of the loop pauses meanwhile. For each hook that a subclass does not
override, the workers are processes, as in Holdfast's own agent.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from holdfast import plugins
from holdfast.agent.spec import RunResult, WorkerState
from holdfast.core import supervision
from holdfast.core.supervision import State, StopReason
from holdfast.errors import PluginError
from holdfast.processes.failures.failure import ChildFailedError
from holdfast.processes.poll import min_of
from holdfast.processes.signals import as_enum

HOOKS = ("_start_workers", "_stop_workers", "_monitor_workers", "_shutdown")

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from holdfast.agent.loop import LongWait
    from holdfast.agent.worker_processes import StartOrder, StopOrder, WorkerProcesses
    from holdfast.core.machine import Event
    from holdfast.elastic._impl.agents import SimpleElasticAgent
    from holdfast.processes.failures.failure import ProcessFailure
    from holdfast.processes.workers.group import RunningGroup


class HookedWorkers:
    """The workers of one agent for one run."""

    def __init__(self, agent: SimpleElasticAgent, processes: WorkerProcesses) -> None:
        self._agent = agent
        self._processes = processes
        self._is_shut_down = False
        processes.result = RunResult(WorkerState.INIT)
        replaced = agent._overridden if agent._has_processes else frozenset(HOOKS)
        self._monitors = "_monitor_workers" in replaced
        self._shuts_down = "_shutdown" in replaced
        self._stops = "_stop_workers" in replaced or self._shuts_down  # Ours calls `_shutdown`.
        self._during_hook: list[Event] = []
        # No hook replaces these.
        self.prepare = processes.prepare
        self.is_ready = processes.is_ready
        self.kill = processes.kill
        self.descriptors = processes.descriptors
        self.start_deferred_services = processes.start_deferred_services
        self.await_keeper = processes.await_keeper

    @property
    def result(self) -> RunResult:
        return self._processes.result

    @property
    def activity(self) -> str:
        return self._processes.activity

    @property
    def context(self) -> RunningGroup | None:
        return self._processes.context

    @property
    def is_active(self) -> bool:
        return self._processes.is_active

    def failures_so_far(self) -> dict[int, ProcessFailure]:
        return self.result.failures or self._processes.failures_so_far()

    def start(self, order: StartOrder, long_wait: LongWait) -> Mapping[int, object]:
        del order, long_wait  # The agent's own `_start_workers` reads both from the loop.
        self._processes.result = RunResult(WorkerState.INIT)  # Not that of the last generation.
        with self._heartbeats_in_hook():
            return self._agent._start_workers(self._agent.get_worker_group())

    def _heartbeats_in_hook(self) -> AbstractContextManager[None]:
        """Return the context in which a hook runs."""
        membership = self._agent._loop.membership
        return membership.heartbeat if membership is not None else nullcontext()

    def begin_stop(self, order: StopOrder) -> Event | None:
        reason = order.reason
        if reason is None or reason is StopReason.SIGNAL:
            self._shut_down(order.signum)
        elif reason is not StopReason.SUCCEEDED and self._stops:
            with self._heartbeats_in_hook():
                self._agent._stop_workers(self._agent.get_worker_group())
        if self._agent._has_processes:
            context = self._processes.context
            if self.is_active and context is not None and context.stop_ended:
                self._processes.keep_result(context)  # A hook has stopped them.
                return context.stopped()
            return self._processes.begin_stop(order)
        failed = any(failure.failed_by_itself() for failure in self.result.failures.values())
        return supervision.WorkersStopped(self._agent._machine.generation, 0, failed)

    def _shut_down(self, signum: int) -> None:
        if self._shuts_down and not self._is_shut_down:
            with self._heartbeats_in_hook():
                timeout = self._agent._shutdown_timeout
                if signum:
                    self._agent._shutdown(as_enum(signum), timeout=timeout)
                else:
                    self._agent._shutdown(timeout=timeout)  # It chooses the signal.
            self._is_shut_down = True

    def events(self, now: float) -> list[Event]:
        events = [*self._during_hook, *self._processes.events(now)]
        self._during_hook.clear()
        if not self._monitors or self._agent._machine.state is not State.RUNNING:
            return events
        exits = [event for event in events if isinstance(event, supervision.WorkerExited)]
        if any(not one.retryable for one in exits):
            return events
        for one in exits:
            self._note_exit(one)
        return [*(one for one in events if one not in exits), *self._monitor()]

    def poll(self, now: float) -> list[Event]:
        """Take the events of the workers during `_monitor_workers`; none is for the machine yet."""
        assert self.context is not None
        for event in self.context.poll_events(now):
            match event:
                case supervision.WorkerExited():
                    self._note_exit(event)
                case supervision.WorkersStopped():
                    pass  # The machine has not decided to stop them yet; see `begin_stop`.
                case _:
                    self._during_hook.append(event)
        return []

    def _note_exit(self, exited: supervision.WorkerExited) -> None:
        """Note an exit, about which the hook decides."""
        self._agent._side_services.watchdogs.ended(exited.local_rank)
        self._agent._reporter.worker_ended(exited.local_rank, failed=exited.failed)

    def _monitor(self) -> list[Event]:
        """Convert the result of the hook to events."""
        agent = self._agent
        group, machine = agent.get_worker_group(), agent._machine
        with self._heartbeats_in_hook():
            result = agent._monitor_workers(group)
        group.state = result.state
        agent._reporter.workers_observed(result.state.name.lower())
        if result.state == WorkerState.HEALTHY:
            return []
        self._processes.result = result
        if result.state == WorkerState.SUCCEEDED:
            return [
                supervision.WorkerExited(machine.generation, rank, failed=False)
                for rank in sorted(machine.running)
            ]
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            why, retryable = result.state.name.lower(), agent._restarts_wanted
            if result.is_failed() and result.failures:
                first, _ = ChildFailedError("", result.failures).get_first_failure()
                rank = first - group.workers[0].global_rank
                if rank in machine.running:
                    generation = machine.generation
                    return [
                        supervision.WorkerExited(generation, rank, failed=True, retryable=retryable)
                    ]
            return [supervision.WorkersUnhealthy(machine.generation, why, retryable)]
        raise unknown_result(agent, result.state)

    def next_deadline(self, now: float) -> float | None:
        deadline = self._processes.next_deadline(now)
        if not self._monitors or self._agent._machine.state is not State.RUNNING:
            return deadline
        return min_of(deadline, now + self._agent.get_worker_group().spec.monitor_interval)

    def close(self) -> None:
        self._agent._close_user_context()
        self._processes.close()


def unknown_result(agent: object, state: WorkerState) -> PluginError:
    """Return the error for a state that `_monitor_workers` must not return."""
    return PluginError(
        f"{plugins.owner_of(agent)}: _monitor_workers returned the state {state.name}",
        hint="it must be HEALTHY, SUCCEEDED, FAILED or UNHEALTHY",
    )
