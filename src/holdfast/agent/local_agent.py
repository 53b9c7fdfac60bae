"""The agent of a real node: workers are processes, and what happens to them arrives as events.

It waits on descriptors (signals, workers, the coordinator's messages, side services) and on
deadlines where there are any. `_monitor_workers` is there for subclasses that override or call it;
the agent itself does not need it.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.agent import worker_env
from holdfast.agent.agent import SimpleElasticAgent, signal_notice
from holdfast.agent.side_services import NullContext, SideServices
from holdfast.agent.spec import DEFAULT_ROLE, RunResult, StateText, WorkerGroup, WorkerSpec
from holdfast.core import supervision
from holdfast.core.supervision import State, StopReason
from holdfast.defaults import EXIT_BARRIER_S, SHUTDOWN_S
from holdfast.processes.failures.exits import WorkerExit
from holdfast.processes.keeper import client
from holdfast.processes.keeper.client import Keeper
from holdfast.processes.poll import min_of, wait_for
from holdfast.processes.workers.group import StopEnded, WorkersKilled, start_processes
from holdfast.rendezvous.handler import RendezvousHandler
from holdfast.worker import LAST_END_ENV, PREVIOUS_WORLD_SIZE_ENV

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import Any, TypeVar

    from holdfast.agent.coordinated_job import CoordinatedJob
    from holdfast.agent.side_services import HealthServer
    from holdfast.agent.stuck_workers import StuckWorkers
    from holdfast.control.control_point import ControlPoint
    from holdfast.core.machine import Event
    from holdfast.membership.interface import Membership
    from holdfast.processes.failures.exits import RunProcsResult
    from holdfast.processes.failures.failure import ProcessFailure
    from holdfast.processes.keeper.deadline import WorkersDeadline
    from holdfast.processes.logs.specs import LogsSpecs
    from holdfast.processes.workers.group import PContext
    from holdfast.processes.workers.pages import Progress
    from holdfast.processes.zygote.client import WarmStart

    T = TypeVar("T")
else:
    import _signal as signal  # Numbers, as in `processes.signals`.

LAST_END_CHARS_MAX = 500
UNINTERRUPTIBLE_ENV = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"


class LocalElasticAgent(SimpleElasticAgent):
    """Runs commands or functions as the workers of this host.

    `preload` names modules that are imported once, for Python workers to be forked from there.
    With `closes_later` a run that ends well leaves the end of its keeper, which has nothing left to
    keep, to be awaited by `close`, so that the caller has the time for something else.
    """

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
        *,
        stop_signal: int = signal.SIGTERM,
        capture_stderr: bool = True,
        worker_env: Mapping[str, str] | None = None,
        signals_to_handle: str | None = None,
        preload: Sequence[str] = (),
        closes_later: bool = False,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout)
        self._signals_to_handle = signals_to_handle
        self._logs_specs = logs_specs
        self._start_method = start_method
        self._log_line_prefix_template = log_line_prefix_template
        self._stop_signal = stop_signal
        self._capture_stderr = capture_stderr
        self._worker_env = dict(worker_env or {})
        self._preload = tuple(preload)
        self._closes_later = closes_later
        self._warm: WarmStart | None = None
        self._side_services = SideServices(
            spec.rdzv_handler.get_run_id(), self._reporter, health_check_server, self._settle
        )
        self._keeper: Keeper | None = None
        self._group: PContext | None = None
        self._previous: tuple[int, str] | None = None  # World size of the last generation, its end.
        self._stuck = _watch_for_stuck_workers(uninterruptible_state_timeout)
        kind, own = type(self), LocalElasticAgent
        self._monitors_by_hook = kind._monitor_workers is not own._monitor_workers
        self._stops_by_hook = kind._stop_workers is not own._stop_workers
        self._shuts_down_by_hook = kind._shutdown is not own._shutdown
        self._starts_by_hook = kind._start_workers is not own._start_workers

    # The hooks.

    @property
    def _pcontext(self) -> PContext | None:
        """The workers by TorchElastic's name, for the hooks of subclasses."""
        return self._group

    @_pcontext.setter
    def _pcontext(self, context: PContext | None) -> None:
        self._group = context

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        spec = worker_group.spec
        args: dict[int, tuple[Any, ...]] = {}
        envs: dict[int, dict[str, str]] = {}
        prefixes: dict[int, str] = {}
        inherited = {**os.environ, **self._worker_env}
        for worker in worker_group.workers:
            rank = worker.local_rank
            envs[rank] = self._worker_env | worker_env.worker_environment(
                worker_group,
                worker,
                generation=self._machine.generation,
                restart_count=self._machine.restart_count,
                fence=self._fence,
                inherited=inherited,
            )
            envs[rank] |= self._last_generation()
            args[rank] = tuple(worker_env.substitute_local_rank(arg, rank) for arg in spec.args)
            if self._log_line_prefix_template:
                prefixes[rank] = worker_env.log_line_prefix(
                    self._log_line_prefix_template, spec.role, worker
                )
        self._setup_local_watchdog(envs)
        self._setup_healthcheck()
        self._release_group()
        if self._stuck is not None:
            self._stuck.forget()
        self._await_preloads()
        if callable(spec.entrypoint):
            # The user's modules may take for ever while a fork server imports them.
            with self._signals.raising(), self._unattended():
                self._group = self._start_group(args, envs, prefixes)
        else:
            self._group = self._start_group(args, envs, prefixes)
        self._side_services.watchdogs.started(self._group.pids(), self._group.stderrs)
        return dict(self._group.pids())

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        """Prepare timers and progress pages, and tell the workers of them."""
        watchdogs = self._side_services.watchdogs
        watchdogs.begin(envs, {**os.environ, **self._worker_env})
        for rank, env in envs.items():
            env.update(watchdogs.environment(rank))

    def _setup_healthcheck(self) -> None:
        """Do nothing: the health server is there for the whole run, not for a generation."""

    def progress(self) -> list[tuple[int, int | None, float | None, str]]:
        """Return rank, step, age of the last heartbeat and section of workers that report them."""
        workers, now = self._worker_group.workers, time.monotonic()
        return [
            (
                workers[rank].global_rank,
                page.step,
                now - page.heartbeat_ns / 1e9 if page.heartbeat_ns else None,
                page.sections[-1].name if page.sections else "",
            )
            for rank, page in self._side_services.watchdogs.progress()
        ]

    def _last_generation(self) -> dict[str, str]:
        """Return what the workers may know of the generation before theirs."""
        if self._previous is None:
            return {}
        size, why = self._previous
        why = self.last_reason or why  # The coordinator's says more.
        return {PREVIOUS_WORLD_SIZE_ENV: str(size), LAST_END_ENV: why[:LAST_END_CHARS_MAX]}

    def _start_group(
        self,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        prefixes: dict[int, str],
    ) -> PContext:
        spec = self._worker_group.spec
        assert spec.entrypoint is not None
        return start_processes(
            name=spec.role,
            entrypoint=spec.entrypoint,
            args=args,
            envs=envs,
            logs_specs=self._logs_specs,
            log_line_prefixes=prefixes or None,
            start_method=self._start_method,
            numa_options=spec.numa_options,
            duplicate_stdout_filters=spec.duplicate_stdout_filters,
            duplicate_stderr_filters=spec.duplicate_stderr_filters,
            keeper=self._obtain_keeper(),
            warm=self._warm,
            capture_stderr=self._capture_stderr,
            deadline=self._begin_deadline(),
            world_size=self._worker_group.workers[0].world_size,
            attended=self._is_on_demand,
        )

    def _begin_deadline(self) -> WorkersDeadline | None:
        """Return the time at which the workers must be gone, if there is one."""
        if self._job is None:
            return None
        self._job.workers_deadline.begin()
        return self._job.workers_deadline

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        del worker_group
        self._bring_down(self._stop_signal, self._shutdown_timeout)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        del worker_group
        group = self._group
        assert group is not None
        group.poll_events(time.monotonic())
        if group.first_failure() is not None:
            failures = self._by_global_rank(self._explained(group.failures_so_far()))
            return RunResult(StateText.FAILED, failures=failures)
        if group.all_ended():
            values = self._by_global_rank(group.return_values())
            return RunResult(StateText.SUCCEEDED, values)
        return RunResult(StateText.HEALTHY)

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = SHUTDOWN_S
    ) -> None:
        self._bring_down(death_sig, timeout)

    def _shut_down(self, death_sig: int) -> None:
        if self._shuts_down_by_hook:
            super()._shut_down(death_sig)
        else:
            self._bring_down(death_sig, self._shutdown_timeout)
            self._is_down = True

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to their end, as `SimpleElasticAgent.run`; leaves no process behind."""
        with self._reporter:
            self._side_services.begin()
            can_close_later = False
            try:
                result = super().run(role)
                can_close_later = self._closes_later
                return result
            finally:
                # A subclass may have put a context of another kind there.
                unkillable = getattr(self._group, "left_behind", ())
                self._release_group()
                if self._warm is not None:
                    self._warm.close()
                    self._warm = None
                if self._keeper is not None:
                    self._keeper.hang_up()
                self._side_services.end()
                if unkillable:
                    self._keeper = None
                elif not can_close_later:
                    self.close()

    def close(self) -> None:
        """Wait until the keeper of the last run has ended."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.await_end()

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        self._begin_preloads()  # Only now are signals watched: nothing it starts outlives one.
        return super()._invoke_run(role)

    # How the agent waits, and the events of its workers.

    @property
    def _never_blocks(self) -> bool:
        hooks = self._starts_by_hook, self._monitors_by_hook, self._stops_by_hook
        return not any((*hooks, self._shuts_down_by_hook))

    @property
    def _attends_workers(self) -> bool:
        """Whether this loop takes in all events of the workers as they come."""
        return self._never_blocks

    @property
    def _is_on_demand(self) -> bool:
        """Whether threads are started when they are needed: a job of a moment may need none.

        Not for long: what a job needs in the end it should have while there are threads,
        descriptors and the installation's files to be had.
        """
        return self._attends_workers and not self._side_services.is_settled

    @property
    def connection(self) -> Membership | None:
        """That to whoever decides for the job, if it is somebody else."""
        return self._job.connection if self._job is not None else None

    @property
    def log_files(self) -> list[tuple[int, str, str]]:
        """Rank, stream and path of what the workers of this generation write to files."""
        group = self._group
        if group is None:
            return []
        return [
            (worker.global_rank, stream, files[worker.local_rank])
            for stream, files in (("stdout", group.stdouts), ("stderr", group.stderrs))
            for worker in self._worker_group.workers
            if files.get(worker.local_rank, "") not in ("", os.devnull)
        ]

    @property
    def live_workers(self) -> dict[int, int]:
        """Processes by local rank, of workers that have not exited."""
        running = self._machine.running
        pids = self._group.pids() if self._group is not None else {}
        return {rank: pid for rank, pid in pids.items() if rank in running}

    def pages(self) -> dict[int, Progress]:
        """Return the progress that workers report, by local rank."""
        return dict(self._side_services.watchdogs.progress())

    def describe_program(self) -> str:
        """Return the name of what the workers run."""
        return self._reporter.describe_run().program

    def requested(self, request_id: str, what: str) -> None:
        """Tell everybody here of a request that was granted."""
        console.notice(what)
        self._reporter.requested(request_id, what)

    def _join_job(self) -> CoordinatedJob:
        job = super()._join_job()
        job.connection.control.on_watch(self._side_services.watched)
        return job

    def _open_control(self) -> ControlPoint:
        from holdfast.control.control_point import ControlPoint

        control = ControlPoint(self, self._reporter.run_started_at)
        self.observers.add(control)
        return control

    def _request_events(self) -> Iterable[Event]:
        control = self._side_services.control
        return control.take_requests() if control is not None else ()

    def _settle(self) -> None:
        if self._never_blocks:
            control = self._open_control()
            control.open()
            if self._job is not None:
                self._job.on_answer = control.answered
            self._side_services.open_control(control)
        follow = getattr(self._group, "follow_output", None)  # Not any context has it.
        if follow is not None:
            follow()
        handler = self._worker_group.spec.rdzv_handler
        if isinstance(handler, RendezvousHandler):
            handler.serve_now()

    def _wait_for_change(self) -> None:
        deadline = self._job.deadline() if self._job is not None else None
        descriptors = [self._job.fileno()] if self._job is not None else []
        if self._machine.state in (State.RUNNING, State.STOPPING):
            assert self._group is not None
            descriptors.append(self._group.fileno())
            deadline = min_of(deadline, self._group.next_deadline())
            if (alarm := self._store_alarm()) >= 0:
                descriptors.append(alarm)
        if self._machine.state is State.RUNNING:
            if self._stuck is not None:
                deadline = min_of(deadline, self._stuck.next_check(time.monotonic()))
            if self._polls_membership() or self._monitors_by_hook:
                next_poll = time.monotonic() + self._worker_group.spec.monitor_interval
                deadline = min_of(deadline, next_poll)
        self._wait(deadline, *descriptors)

    def _wait(self, deadline: float | None, *descriptors: int) -> None:
        services = self._side_services
        deadline = services.next_deadline(deadline)
        wait_for(deadline, self._signals.fileno(), *descriptors, *services.descriptors())
        services.look(time.monotonic())

    def _worker_events(self) -> list[Event]:
        group, state = self._group, self._machine.state
        if group is None or state not in (State.RUNNING, State.STOPPING):
            return []
        events = self._group_events(group)
        lost = ""
        if self._store_alarm() >= 0:
            lost = self._worker_group.spec.rdzv_handler.take_store_failure()
        if state is State.STOPPING:
            return events
        if lost:
            # Those that failed of it meanwhile are consequences.
            return [supervision.WorkersUnhealthy(self._machine.generation, lost), *events]
        stuck = self._stuck.check(time.monotonic(), group) if self._stuck is not None else ""
        if stuck:
            console.error(stuck)
            generation = self._machine.generation
            return [*events, supervision.WorkersUnhealthy(generation, stuck, retryable=False)]
        if self._monitors_by_hook and not any(is_hopeless(event) for event in events):
            return self._monitor()  # The hook decides what an exit means.
        return events

    def _store_alarm(self) -> int:
        alarm: int = getattr(self._worker_group.spec.rdzv_handler, "store_alarm", -1)
        return alarm  # One that derives from another project's base class has none.

    def _group_events(self, group: PContext) -> list[Event]:
        generation = self._machine.generation
        events: list[Event] = []
        for one in group.poll_events(time.monotonic()):
            match one:
                case WorkerExit(rank=rank, failed=failed, retryable=retryable):
                    self._side_services.watchdogs.ended(rank)
                    self._reporter.worker_ended(rank, failed=failed)
                    events.append(supervision.WorkerExited(generation, rank, failed, retryable))
                case WorkersKilled():
                    assert self._job is not None
                    events.append(self._job.note_expiry(generation))
                case StopEnded(left_behind):
                    self._keep_result(group)
                    events.append(self._stopped(len(left_behind)))
        return events

    # The stop: begun here, ended by an event of the loop.

    def _begin_stop(self, reason: StopReason, signum: int) -> Event | None:
        assert self._group is not None
        self._previous = (self._worker_group.workers[0].world_size, reason.value)
        chosen = signum or self._stop_signal
        asked_s = self._machine.grace_s
        grace_s = self._shutdown_timeout if asked_s < 0 else asked_s
        if reason is StopReason.SIGNAL and self._shuts_down_by_hook:
            self._shut_down(chosen)
        elif reason not in (StopReason.SIGNAL, StopReason.SUCCEEDED) and self._stops_by_hook:
            self._stop_workers(self._worker_group)
        if self._group.stop_ended and not self._is_stop_posted():
            self._keep_result(self._group)  # A hook has closed the context itself.
            return self._stopped(len(self._group.left_behind))
        self._group.begin_stop(
            chosen,
            grace_s,
            unresponsive=self._unresponsive(),
            node=f"{self._machine.story.node}/generation-{self._machine.generation}",
            cause=self._stop_step,
        )
        return None

    def _stopped(self, unkillable: int = 0) -> supervision.WorkersStopped:
        self._side_services.end_samples()
        return super()._stopped(unkillable)

    def _is_stop_posted(self) -> bool:
        return any(isinstance(event, supervision.WorkersStopped) for event, _ in self._pending)

    def _keep_result(self, group: PContext) -> None:
        if self._job is not None:
            self._job.workers_deadline.end()
        self._result = self._outcome(group.result())

    def _outcome(self, result: RunProcsResult) -> RunResult:
        return RunResult(
            StateText.FAILED if result.is_failed() else StateText.SUCCEEDED,
            self._by_global_rank(result.return_values),
            self._by_global_rank(self._explained(result.failures)),
        )

    def _kill_workers(self) -> None:
        if self._group is not None:
            self._group.kill_now()

    def _bring_down(self, signum: int, grace_s: float) -> None:
        """Stop the workers and wait until nothing is left of them.

        For hooks of subclasses, and for the end of a run that failed: the machine does not decide
        any more then, and any signal kills. What happens meanwhile waits in the queue.
        """
        group = self._group
        if group is None or group.stop_ended:
            return
        group.begin_stop(signum, grace_s, unresponsive=self._unresponsive())
        interrupted = self._machine.interrupted
        while True:
            # Signals first: after the end of the stop there may be a wait, for another round.
            while (one := self._signals.take()) is not None:
                if not self._abandoned:
                    console.warning(
                        signal_notice(self._machine, one, grace_s, interrupted=interrupted)
                    )
                if self._abandoned or (interrupted and one == signal.SIGINT):
                    group.kill_now()
                interrupted = interrupted or one == signal.SIGINT
                self._post(supervision.SignalReceived(one))
            if self._abandoned or self._machine.state is State.IDLE:
                group.poll_events(time.monotonic())
            else:
                for event in self._group_events(group):
                    self._post(event)
            if group.stop_ended:
                break
            self._wait(group.next_deadline(), group.fileno())

    def _failures_so_far(self) -> dict[int, ProcessFailure]:
        group = self._group
        if group is None or group.stop_ended:
            return self._result.failures
        return self._by_global_rank(self._explained(group.failures_so_far()))

    def _explained(self, failures: dict[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        for failure in failures.values():
            if self._stuck is not None:
                self._stuck.explain(failure)
            self._side_services.watchdogs.explain(failure)
        return failures

    def _by_global_rank(self, of_workers: dict[int, T]) -> dict[int, T]:
        workers = self._worker_group.workers
        return {workers[rank].global_rank: one for rank, one in of_workers.items()}

    def _unresponsive(self) -> set[int]:
        return self._stuck.ranks() if self._stuck is not None else set()

    def _obtain_keeper(self) -> Keeper | None:
        """Return the keeper of all generations; None where each start makes one of its own."""
        if callable(self._worker_group.spec.entrypoint) and self._start_method != "spawn":
            return None
        if self._keeper is not None and self._keeper.is_gone():
            client.sweep_after_loss()  # Perhaps it was lost while there were no workers.
            self._keeper.close()
            self._keeper = None
        if self._keeper is None:
            self._keeper = Keeper.start()
        return self._keeper

    # Waits for something else than the loop.

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        handler: object = worker_group.spec.rdzv_handler
        if isinstance(handler, RendezvousHandler):
            handler.is_attended = self._is_on_demand
        with self._side_services.away("the rendezvous"):
            super()._rendezvous(worker_group)

    def _exit_barrier(self) -> None:
        with self._side_services.away("the exit barrier"):
            super()._exit_barrier()

    def _unattended(self) -> AbstractContextManager[None]:
        """Return a context in which the loop need not turn."""
        return self._job.heartbeat if self._job is not None else NullContext()

    def _begin_preloads(self) -> None:
        """Have the modules imported while this node joins the others."""
        if not self._preload:
            return
        from holdfast.processes.zygote.client import warm_start

        spec = self._worker_group.spec
        assert spec.entrypoint is not None
        self._warm = warm_start(
            self._preload, spec.entrypoint, spec.args, self._start_method, self._worker_env
        )
        keeper = self._obtain_keeper()
        if self._warm is not None and keeper is not None:
            # It may be held up as it forks, in the user's modules, and lose its keeper then.
            client.become_subreaper_if_wanted()
            self._warm.prepare(keeper)
            # While it imports there is time for what the first start and restart need here.
            import holdfast.processes.failures.failure
            import holdfast.processes.logs.follower
            import holdfast.processes.workers.command_workers  # noqa: F401

    def _await_preloads(self) -> None:
        keeper = self._obtain_keeper() if self._warm is not None else None
        if self._warm is not None and keeper is not None:
            # The user's modules may take for ever as they are imported.
            away = self._side_services.away("imports")
            with self._signals.raising(), away, self._unattended():
                self._warm.await_ready(keeper)

    def _release_group(self) -> None:
        if self._group is not None:
            self._group.release()
            self._group = None


def is_hopeless(event: Event) -> bool:
    """Whether a worker ended in a way that a new start would only repeat."""
    return isinstance(event, supervision.WorkerExited) and not event.retryable


def _watch_for_stuck_workers(limit_s: float | None) -> StuckWorkers | None:
    if limit_s is None:
        limit_s = worker_env.timeout_from_environment(UNINTERRUPTIBLE_ENV)
    if not limit_s or limit_s < 0:
        return None
    from holdfast.agent.stuck_workers import StuckWorkers

    return StuckWorkers(limit_s)
