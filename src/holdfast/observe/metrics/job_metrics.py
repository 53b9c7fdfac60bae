"""The metrics of a run as Prometheus shows them: an observer that keeps them.

`FAMILIES` lists them all; docs/guides/metrics.md has the same table. Lifecycle events come in the
agent's thread, and metrics are collected in another; a lock guards them, and is held no longer than
it takes to write down a number.

How long each stage of a recovery took is counted from the first sign of trouble to the first user
line, and only once the workers run again: what a job did before it gave up is no recovery. ::

    trouble --detect--> stopping --stop--> stopped --regroup--> ranked --start--> started
                                                              --first_line--> first heartbeat
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from holdfast import console
from holdfast.core.supervision import StopReason
from holdfast.observe import lifecycle
from holdfast.observe.metrics.families import Family, Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Progress = tuple[int, int | None, float | None, str | None]
    """A worker's rank, its step, the age of its heartbeat in seconds, and the section it is in."""


STAGES = ("detect", "stop", "regroup", "start", "first_line")

# Why a generation was stopped, as a label: few and fixed.
REASONS: Mapping[StopReason, str] = {
    StopReason.WORKER_FAILED: "worker_failed",
    StopReason.UNHEALTHY: "unhealthy",
    StopReason.REGROUP: "nodes_waiting",
    StopReason.COORDINATOR: "coordinator",
    StopReason.ASKED: "asked",
}
NODES_LOST = "nodes_lost"
OTHER = "other"
NO_RECOVERY = (StopReason.SUCCEEDED, StopReason.SIGNAL)


class RecoveryTimes:
    """Adds up how long recoveries took, by stage, and what they were for."""

    def __init__(self) -> None:
        self.stages = {stage: Histogram() for stage in STAGES}
        self.outages = Histogram()
        self.restarts = dict.fromkeys((*REASONS.values(), NODES_LOST, OTHER), 0)
        self._last: lifecycle.GenerationStarted | None = None
        self._awaits_first_line = False
        self._reset()

    def _reset(self) -> None:
        self._trouble_at: float | None = None
        self._stopping: lifecycle.GenerationStopping | None = None
        self._stopped_at: float | None = None
        self._ranked_at: float | None = None

    def take(self, event: lifecycle.LifecycleEvent) -> None:
        match event:
            case lifecycle.RunStarted():
                self._last = None
                self._reset()
            case lifecycle.WorkerEnded(at=at, failed=True):
                if self._trouble_at is None and self._last is not None:
                    self._trouble_at = at
            case lifecycle.GenerationStopping() if event.reason not in NO_RECOVERY:
                if self._trouble_at is None:
                    self._trouble_at = event.at
                self._stopping = event
            case lifecycle.GenerationStopped(at=at) if self._stopping is not None:
                self._stopped_at = at
            case lifecycle.RendezvousEnded(at=at, error="") | lifecycle.RanksAssigned(at=at):
                self._ranked_at = at
            case lifecycle.GenerationStarted():
                self._started(event)
            case lifecycle.FirstHeartbeat():  # Only the first of a generation counts.
                if self._last is not None and self._awaits_first_line:
                    self.stages["first_line"].observe(event.at - self._last.at)
                self._awaits_first_line = False

    def _started(self, started: lifecycle.GenerationStarted) -> None:
        self._awaits_first_line = self._stopping is not None
        if self._stopping is not None:
            self._count(self._stopping, started.at)
            self.restarts[self._reason(self._stopping, started)] += 1
        self._last = started
        self._reset()

    def _count(self, stopping: lifecycle.GenerationStopping, started_at: float) -> None:
        assert self._trouble_at is not None
        stopped_at = stopping.at if self._stopped_at is None else self._stopped_at
        # A node may learn its rank in the next round while it still stops its workers.
        ranked_at = stopped_at if self._ranked_at is None else max(stopped_at, self._ranked_at)
        self.stages["detect"].observe(stopping.at - self._trouble_at)
        self.stages["stop"].observe(stopped_at - stopping.at)
        self.stages["regroup"].observe(ranked_at - stopped_at)
        self.stages["start"].observe(started_at - ranked_at)
        self.outages.observe(started_at - self._trouble_at)

    def _reason(
        self, stopping: lifecycle.GenerationStopping, started: lifecycle.GenerationStarted
    ) -> str:
        """Return why there was a restart; a coordinator's reason shows in what came of it."""
        last = self._last
        if stopping.reason != StopReason.COORDINATOR or last is None:
            return REASONS.get(stopping.reason, OTHER)
        if started.restart_count > last.restart_count:
            return REASONS[StopReason.WORKER_FAILED]
        more = (started.group_world_size or 0) - (last.group_world_size or 0)
        if more:
            return REASONS[StopReason.REGROUP] if more > 0 else NODES_LOST
        return REASONS[StopReason.COORDINATOR]


JOB_STATES = ("starting", "running", "recovering", "succeeded", "failed")
NODE_STATES = ("joining", "starting", "running", "stopping", "leaving", "ended")
WORKER_STATES = ("running", "succeeded", "failed", "terminated")

FAMILIES = {
    "holdfast_job_info": ("gauge", "Always 1; what the job is, in labels"),
    "holdfast_job_state": ("gauge", "1 for the state the job is in as this node knows it"),
    "holdfast_job_nodes": ("gauge", "Nodes in the job's round"),
    "holdfast_generation": ("gauge", "Number of the generation that was started last"),
    "holdfast_node_state": ("gauge", "1 for what this node's agent is doing"),
    "holdfast_node_rank": ("gauge", "Rank of this node among the nodes"),
    "holdfast_workers": ("gauge", "Workers of this node, by state"),
    "holdfast_worker_up": ("gauge", "Whether a worker of this node runs"),
    "holdfast_worker_exits_total": ("counter", "Workers of this node that ended by themselves"),
    "holdfast_restarts_total": ("counter", "Restarts of the workers, by reason"),
    "holdfast_restarts_remaining": ("gauge", "Failures that will still be answered by a restart"),
    "holdfast_recovery_seconds": ("histogram", "How long each stage of a recovery took"),
    "holdfast_outage_seconds": ("histogram", "From the first sign of trouble until workers ran"),
    "holdfast_rendezvous_seconds": ("histogram", "How long a rendezvous took"),
    "holdfast_rendezvous_failures_total": ("counter", "Rendezvous that failed"),
    "holdfast_elapsed_seconds_total": ("counter", "Time since the run started"),
    "holdfast_running_seconds_total": ("counter", "Time in which the job was running"),
    "holdfast_goodput_ratio": ("gauge", "Share of the time in which the job was running"),
    "holdfast_timers_expired_total": ("counter", "Watchdog timers of workers that expired"),
    "holdfast_worker_step": ("gauge", "Step that a worker reported last"),
    "holdfast_worker_heartbeat_age_seconds": ("gauge", "Time since a worker's last heartbeat"),
    "holdfast_worker_section": ("gauge", "1 for the section that a worker is in"),
}


class _Meter:
    """A clock that runs for some of the time.

    Its total never falls, even if it turns out to have stopped a moment earlier: Prometheus takes a
    falling counter for a restarted one, and adds all of it once more.
    """

    def __init__(self) -> None:
        self._so_far = 0.0
        self._since: float | None = None
        self._shown = 0.0

    def run(self, at: float) -> None:
        if self._since is None:
            self._since = at

    def stop(self, at: float) -> None:
        if self._since is not None:
            self._so_far += max(0.0, at - self._since)
            self._since = None

    def total(self, now: float) -> float:
        running = 0.0 if self._since is None else max(0.0, now - self._since)
        self._shown = max(self._shown, self._so_far + running)
        return self._shown


class _WorkerState(NamedTuple):
    worker: lifecycle.WorkerInfo
    state: str


class JobMetrics:
    """An observer that keeps the metrics; `collect` returns them, in any thread.

    `progress` returns what the workers report of themselves. It is called by `collect`, outside the
    lock, and must not wait.
    """

    name = "the job's metrics"

    def __init__(
        self,
        progress: Callable[[], Iterable[Progress]] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._progress = progress
        self._began: lifecycle.RunStarted | None = None
        self._job_state = "starting"
        self._node_state = "joining"
        self._rank: int | None = None
        self._nodes: int | None = None
        self._generation: int | None = None
        self._remaining: int | None = None
        self._stop_reason: StopReason | None = None
        self._workers: dict[int, _WorkerState] = {}
        self._exits = {"succeeded": 0, "failed": 0}
        self._expired = 0
        self._rendezvous_times = Histogram()
        self._rendezvous_failures = 0
        self._recovery = RecoveryTimes()
        self._elapsed, self._running = _Meter(), _Meter()

    # In the agent's thread.

    def __call__(self, event: lifecycle.LifecycleEvent) -> None:
        with self._lock:
            self._recovery.take(event)
            self._take(event)

    def _take(self, event: lifecycle.LifecycleEvent) -> None:
        match event:
            case lifecycle.RunStarted():
                self._began = event
                self._job_state, self._node_state = "starting", "joining"
                self._remaining = event.max_restarts
                self._elapsed.run(event.at)
            case lifecycle.RendezvousEnded():
                self._rendezvous_ended(event)
            case lifecycle.GenerationStarted():
                self._generation_started(event)
            case lifecycle.WorkersObserved():
                self._remaining = event.remaining_restarts
            case lifecycle.WorkerEnded():
                self._worker_ended(event)
            case lifecycle.GenerationStopping():
                self._generation_stopping(event)
            case lifecycle.GenerationStopped():
                self._generation_stopped()
            case lifecycle.RunEnded():
                self._run_ended(event)
            case lifecycle.WatchdogEvent(what="timer expired"):
                self._expired += 1

    def _rendezvous_ended(self, ended: lifecycle.RendezvousEnded) -> None:
        if ended.error:
            self._rendezvous_failures += 1
            return
        self._rendezvous_times.observe(ended.took_s)
        self._rank, self._nodes = ended.group_rank, ended.group_world_size
        self._node_state = "starting"

    def _generation_started(self, started: lifecycle.GenerationStarted) -> None:
        self._job_state = self._node_state = "running"
        self._generation = started.generation
        self._rank, self._nodes = started.group_rank, started.group_world_size
        self._workers = {one.local_rank: _WorkerState(one, "running") for one in started.workers}
        self._running.run(started.at)

    def _worker_ended(self, exited: lifecycle.WorkerEnded) -> None:
        state = "failed" if exited.failed else "succeeded"
        stopping = self._node_state == "stopping"  # Most likely it was asked to.
        self._workers[exited.worker.local_rank] = _WorkerState(
            exited.worker, "terminated" if stopping and exited.failed else state
        )
        if stopping:
            return
        self._exits[state] += 1
        if exited.failed:
            self._running.stop(exited.at)
            self._job_state = "recovering"

    def _generation_stopping(self, stopping: lifecycle.GenerationStopping) -> None:
        self._stop_reason = stopping.reason
        self._node_state = "stopping"
        if stopping.reason != StopReason.SUCCEEDED:  # Else those of other nodes go on.
            self._running.stop(stopping.at)
            self._job_state = "recovering"

    def _generation_stopped(self) -> None:
        done = self._stop_reason == StopReason.SUCCEEDED
        self._node_state = "leaving" if done else "joining"
        for rank, (worker, state) in self._workers.items():
            if state == "running":
                self._workers[rank] = _WorkerState(worker, "terminated")

    def _run_ended(self, ended: lifecycle.RunEnded) -> None:
        self._running.stop(ended.at)
        self._elapsed.stop(ended.at)
        succeeded = not ended.error and ended.state == "succeeded"
        self._job_state = "succeeded" if succeeded else "failed"
        self._node_state = "ended"
        self._remaining = ended.remaining_restarts
        for end in ended.outcomes:
            if end.state in WORKER_STATES:
                self._workers[end.worker.local_rank] = _WorkerState(end.worker, end.state)

    # In the thread that collects.

    def collect(self) -> list[Family]:
        """Return all families as they are now; those without a value yet have no samples."""
        found = {name: Family(name, kind, text) for name, (kind, text) in FAMILIES.items()}
        with self._lock:
            began = self._began
            if began is None:
                return [*found.values()]
            self._add_states(found, began)
            self._add_times(found, began.run_id)
        self._add_progress(found, began.run_id)
        return [*found.values()]

    def _add_states(self, found: dict[str, Family], began: lifecycle.RunStarted) -> None:
        run_id = began.run_id
        entry_point = began.program or began.entry_point
        found["holdfast_job_info"].add(
            1, run_id=run_id, role=began.role, backend=began.backend, entry_point=entry_point
        )
        for name, states, current in (
            ("holdfast_job_state", JOB_STATES, self._job_state),
            ("holdfast_node_state", NODE_STATES, self._node_state),
        ):
            for state in states:
                found[name].add(int(state == current), run_id=run_id, state=state)
        for name, value in (
            ("holdfast_job_nodes", self._nodes),
            ("holdfast_node_rank", self._rank),
            ("holdfast_generation", self._generation),
            ("holdfast_restarts_remaining", self._remaining),
        ):
            if value is not None:
                found[name].add(value, run_id=run_id)
        workers = [worker.state for worker in self._workers.values()]
        for state in WORKER_STATES:
            found["holdfast_workers"].add(workers.count(state), run_id=run_id, state=state)
        for worker, state in self._workers.values():
            found["holdfast_worker_up"].add(
                int(state == "running"),
                run_id=run_id,
                rank=worker.global_rank,
                local_rank=worker.local_rank,
            )

    def _add_times(self, found: dict[str, Family], run_id: str) -> None:
        now = self._clock()
        recovery = self._recovery
        for outcome, count in self._exits.items():
            found["holdfast_worker_exits_total"].add(count, run_id=run_id, outcome=outcome)
        for reason, count in recovery.restarts.items():
            found["holdfast_restarts_total"].add(count, run_id=run_id, reason=reason)
        for stage, times in recovery.stages.items():
            found["holdfast_recovery_seconds"].add(times.copy(), run_id=run_id, stage=stage)
        elapsed, running = self._elapsed.total(now), self._running.total(now)
        for name, value in (
            ("holdfast_outage_seconds", recovery.outages.copy()),
            ("holdfast_rendezvous_seconds", self._rendezvous_times.copy()),
            ("holdfast_rendezvous_failures_total", self._rendezvous_failures),
            ("holdfast_elapsed_seconds_total", elapsed),
            ("holdfast_running_seconds_total", running),
            ("holdfast_goodput_ratio", running / elapsed if elapsed else 0.0),
            ("holdfast_timers_expired_total", self._expired),
        ):
            found[name].add(value, run_id=run_id)

    def _add_progress(self, found: dict[str, Family], run_id: str) -> None:
        progress = self._progress
        if progress is None:
            return
        try:
            reported = [*progress()]
        except Exception as problem:  # noqa: BLE001 (the other metrics are worth having alone)
            console.warning(f"cannot read the workers' progress: {console.describe(problem)}")
            self._progress = None
            return
        for rank, step, age_s, section in reported:
            if step is not None:
                found["holdfast_worker_step"].add(step, run_id=run_id, rank=rank)
            if age_s is not None:
                found["holdfast_worker_heartbeat_age_seconds"].add(age_s, run_id=run_id, rank=rank)
            if section:
                found["holdfast_worker_section"].add(1, run_id=run_id, rank=rank, section=section)
