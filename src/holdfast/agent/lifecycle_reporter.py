"""Creates an agent's lifecycle events and sends them to the observers.

The agent calls one method per event; the method adds ranks, generation and times. Without observers,
the methods do nothing.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import TYPE_CHECKING

from holdfast.agent.spec import run_script_path
from holdfast.errors import JobStopped
from holdfast.observe import lifecycle, standalone
from holdfast.observe.lifecycle import (
    FAILURES_MAX,
    TEXT_CHARS_MAX,
    LifecycleEvent,
    Observers,
    WorkerFailure,
    WorkerInfo,
    WorkerOutcome,
    now,
)
from holdfast.processes.failures import failure as process_failure
from holdfast.processes.signals import SignalException
from holdfast.rendezvous.rendezvous_errors import RendezvousError

if TYPE_CHECKING:
    from holdfast.agent.spec import RunResult, Worker, WorkerGroup, WorkerSpec
    from holdfast.core.supervision import StopReason, Supervision
    from holdfast.observe.standalone import StandaloneRecords
    from holdfast.processes.failures.failure import ProcessFailure


FAILURES_AFTER_S = 1.0
"""Read tracebacks after the restart, or after this time if the restart takes longer."""


class LifecycleReporter:
    """Reports the lifecycle events of one agent to its observers.

    Use it as a context manager around one run. If a handler is configured and no launcher records the
    run, the reporter records it. Nested use has no effect.
    """

    def __init__(self, group: WorkerGroup, logs_specs: object = None) -> None:
        self.observers = Observers()
        self.group = group
        self.machine: Supervision
        """The machine of the current run."""
        self._logs_specs = logs_specs
        self._own_records: StandaloneRecords | None = None
        self._run_started = (0.0, 0.0)
        self._rendezvous_since = 0.0
        self._rendezvous_is_over = False
        self._entered = 0
        self._ended: set[int] = set()  # Local ranks of this generation.
        self._stopping = -1  # The newest generation whose workers the agent stopped.
        self._failed: tuple[int, dict[int, ProcessFailure]] | None = None
        self.failures_due: float | None = None
        """The latest time to call `report_failures`, on the monotonic clock."""

    def __enter__(self) -> None:
        """Start recording. Raise `UsageError` if that is not possible."""
        if not self._entered and not self.observers.recorded:
            self._begin_own_records()
        self._entered += 1

    def __exit__(self, *problem: object) -> None:
        """Wait until the handlers have received the records, for a limited time."""
        self._entered -= 1
        if not self._entered and self._own_records is not None:
            self._own_records.end()

    def _begin_own_records(self) -> None:
        destination = self.group.spec.event_log_handler
        if self._own_records is None:
            if not standalone.records_wanted(destination):
                return
            self._own_records = standalone.StandaloneRecords(
                destination, lambda: getattr(self._logs_specs, "run_dir", None)
            )
            self.observers.add(self._own_records)
        self._own_records.begin()

    def report(self, event: LifecycleEvent) -> None:
        """Send a lifecycle event to all observers."""
        self.observers.notify(event)

    def run_started(self) -> None:
        self._run_started = now()
        self._rendezvous_since = self._run_started[0]
        self._rendezvous_is_over = False
        if self.observers:
            self.report(self.describe_run())

    def describe_run(self) -> lifecycle.RunStarted:
        spec = self.group.spec
        handler = spec.rdzv_handler
        return lifecycle.RunStarted(
            *self._run_started,
            handler.get_run_id(),
            spec.role,
            handler.get_backend(),
            spec.get_entrypoint_name(),
            spec.local_world_size,
            spec.max_restarts,
            _program_name(spec),
            self.machine.story.node,
        )

    def standby_changed(self, *, is_standby: bool) -> None:
        if self.observers:
            self.report(lifecycle.StandbyChanged(now()[0], is_standby))

    def describe_rendezvous(self, error: BaseException | None = None) -> lifecycle.RendezvousEnded:
        at, wall = now()
        took_s = at - self._rendezvous_since
        restarts = self.machine.restart_count
        return lifecycle.RendezvousEnded(
            at, wall, took_s, *self._node_rank(), _traceback(error), restarts
        )

    def rendezvous_ended(self, error: BaseException | None = None) -> None:
        self._rendezvous_is_over = True
        if self.observers:
            self.report(self.describe_rendezvous(error))

    def ranks_assigned(self, took_s: float = 0.0) -> None:
        if self.observers:
            restarts = self.machine.restart_count
            self.report(lifecycle.RanksAssigned(*now(), took_s, *self._node_rank(), restarts))

    def generation_started(
        self, since: float, fence: int, why: str, members: tuple[str, ...]
    ) -> None:
        if not self.observers:
            return
        self._ended.clear()
        at, wall = now()
        machine, started = self.machine, self.group.workers
        workers = tuple(_worker_info(one) for one in started)
        self.report(
            lifecycle.GenerationStarted(
                at,
                wall,
                at - since,
                machine.generation,
                machine.restart_count,
                *self._node_rank(),
                workers,
                started[0].world_size if started else 0,
                fence,
                why,
                getattr(self._logs_specs, "attempt_dir", None) or "",
                members,
            )
        )
        self.workers_observed("healthy")
        self.report_failures()

    def workers_observed(self, state: str) -> None:
        if self.observers:
            left = self.machine.budget.left
            self.report(lifecycle.WorkersObserved(now()[0], state, left))

    def worker_ended(self, local_rank: int, *, failed: bool) -> None:
        """Report the exit of a worker, once per generation."""
        if self.observers and local_rank not in self._ended:
            self._ended.add(local_rank)
            generation = self.machine.generation
            worker, stopped = self._worker(local_rank), generation == self._stopping
            self.report(lifecycle.WorkerEnded(*now(), generation, worker, failed, stopped))

    def first_heartbeat(self, local_rank: int) -> None:
        if self.observers:
            generation = self.machine.generation
            self.report(lifecycle.FirstHeartbeat(now()[0], generation, self._worker(local_rank)))

    def progress_sampled(self, steps: tuple[tuple[int, int, float], ...]) -> None:
        """Report progress: tuples of local rank, step and time."""
        if self.observers:
            workers = self.group.workers
            known = tuple((workers[rank].global_rank, step, at) for rank, step, at in steps)
            generation = self.machine.generation
            self.report(lifecycle.ProgressSampled(now()[0], generation, known))

    def requested(self, request: str, what: str) -> None:
        if self.observers:
            self.report(lifecycle.RequestCarriedOut(*now(), request, what))

    def protection_changed(self, missing: str) -> None:
        if self.observers:
            self.report(lifecycle.ProtectionChanged(*now(), missing))

    def generation_stopping(self, generation: int, reason: StopReason) -> None:
        self._stopping = generation
        if self.observers:
            detail = self.machine.unhealthy[:TEXT_CHARS_MAX]
            self.report(lifecycle.GenerationStopping(now()[0], generation, reason, detail))

    def generation_stopped(
        self, generation: int, failures: dict[int, ProcessFailure] | None = None
    ) -> None:
        """Report that all workers have exited. `failures` maps global ranks to failures."""
        at = self._rendezvous_since = now()[0]
        self._rendezvous_is_over = False
        if self.observers:
            self.report(lifecycle.GenerationStopped(at, generation))
            if failures:
                self._failed, self.failures_due = (generation, failures), at + FAILURES_AFTER_S

    def report_failures(self) -> None:
        """Report why workers of the last generation failed, unless this was reported before."""
        failed, self._failed, self.failures_due = self._failed, None, None
        if failed is not None:
            generation, failures = failed
            self.report(lifecycle.WorkersFailed(now()[0], generation, _failures_of(failures)))

    def run_ended(self, result: RunResult, *, workers_recorded: bool = False) -> RunResult:
        if self.observers:
            self._report_end(result, None, workers_recorded)
        return result

    def run_failed(self, error: BaseException) -> None:
        """Report that an error of the agent ended the run."""
        if not self.observers:
            return
        if isinstance(error, RendezvousError) and not self._rendezvous_is_over:
            self.rendezvous_ended(error)
        self._report_end(None, error)

    def _report_end(
        self,
        result: RunResult | None,
        error: BaseException | None,
        workers_recorded: bool = False,
    ) -> None:
        self.report_failures()
        at, wall = now()
        machine = self.machine
        self.report(
            lifecycle.RunEnded(
                at,
                wall,
                at - self._run_started[0],
                result.state.value.lower() if result is not None else "",
                machine.restart_count,
                machine.budget.left,
                self.group.spec.max_restarts,
                *self._node_rank(),
                self._outcomes(result) if result is not None else (),
                _traceback(error),
                workers_recorded,
                _end_kind(error),
            )
        )

    def _node_rank(self) -> tuple[int | None, int | None]:
        group = self.group
        return group.group_rank, group.group_world_size

    def _worker(self, local_rank: int) -> WorkerInfo:
        return _worker_info(self.group.workers[local_rank])

    def _outcomes(self, result: RunResult) -> tuple[WorkerOutcome, ...]:
        outcomes = []
        for worker in self.group.workers:
            info, failure = _worker_info(worker), result.failures.get(worker.global_rank)
            if failure is not None and not failure.consequence:
                error = _json(failure.error_file_data)
                outcomes.append(WorkerOutcome(info, "failed", failure.exitcode, error))
            elif result.is_failed():
                code = failure.exitcode if failure is not None else None
                outcomes.append(WorkerOutcome(info, "terminated", code))
            else:
                outcomes.append(WorkerOutcome(info, "succeeded", 0))
        return tuple(outcomes)


def _program_name(spec: WorkerSpec) -> str:
    """Return the name of the workers' program.

    If the entry point is a Python interpreter, this is the name of its script or module. For code passed
    with `-c`, it is the interpreter's name.
    """
    name = spec.get_entrypoint_name()
    if spec.entrypoint not in (sys.executable, run_script_path):
        return name
    for word in map(str, spec.args):
        if word == "-c":
            break
        if word and not word.startswith("-"):
            return os.path.basename(word)
    return name


def _worker_info(worker: Worker) -> WorkerInfo:
    pid = worker.id if isinstance(worker.id, int) else 0
    return WorkerInfo(
        worker.local_rank, worker.global_rank, worker.role_rank, worker.role_world_size, pid
    )


def _failures_of(failures: dict[int, ProcessFailure]) -> tuple[WorkerFailure, ...]:
    described: list[WorkerFailure] = []
    for rank, one in process_failure.ChildFailedError("", failures).in_order()[:FAILURES_MAX]:
        limit = TEXT_CHARS_MAX // 4 if described else TEXT_CHARS_MAX
        described.append(
            WorkerFailure(
                rank,
                one.local_rank,
                one.pid,
                one.exitcode,
                one.happened_ns() / 1e9,
                one.consequence,
                one.ending(),
                one.detail[:limit],
                one.recorded_message()[:limit],
                one.traceback_text()[-limit:],
                one.stderr_tail[-limit:],
            )
        )
    return tuple(described)


def _json(data: object) -> str:
    return json.dumps(data, default=str)


def _end_kind(error: BaseException | None) -> str:
    if error is None:
        return ""
    if isinstance(error, SignalException):
        return "left"
    if isinstance(error, JobStopped):
        return "stopped"
    return "error" if getattr(error, "exit_code", 1) else "standby"


def _traceback(error: BaseException | None) -> str:
    if error is None:
        return ""
    return "".join(traceback.format_exception(error))
