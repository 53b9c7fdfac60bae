"""The metrics of a run: an observer that renders its history.

`FAMILIES` lists them; docs/guides/metrics.md has the same table. States, stages of restarts and goodput
come from the history of the run (`control.history`). The agent's thread sends lifecycle events, and
another thread collects metrics; a lock guards the history and the counts.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.control.history import (
    RESTART_STAGES,
    History,
    JobState,
    NodeState,
    RestartReason,
    Stage,
    WorkerState,
    eta_s,
    goodput_of,
    outage_s,
    restart_reason,
    restart_stages,
)
from holdfast.observe import lifecycle
from holdfast.observe.metrics.families import Family, Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any, Protocol

    from holdfast.control.history import Generation

    class Progress(Protocol):
        """The progress of a worker: `processes.workers.pages.Progress`."""

        @property
        def step(self) -> int | None: ...
        @property
        def step_ns(self) -> int: ...
        @property
        def total(self) -> int | None: ...
        @property
        def loss(self) -> float | None: ...
        @property
        def pace(self) -> float | None: ...
        @property
        def heartbeat_ns(self) -> int: ...
        @property
        def sections(self) -> Sequence[Any]: ...


class Restarts:
    """Counts restarts by reason, and the durations of their stages."""

    def __init__(self) -> None:
        self.stages = {stage: Histogram() for stage in RESTART_STAGES}
        self.outages = Histogram()
        self.reasons = dict.fromkeys(RestartReason, 0)
        self._warming: Generation | None = None

    def update(self, ended: Generation | None, one: Generation | None) -> None:
        """Update the counts after an event; `ended` is the generation that this one replaced."""
        if ended is not None and one is not None and ended.is_over:
            self._count(ended, one)
        if self._warming is not one:
            self._warming = None
        elif one is not None and (one.is_warm or one.is_over):
            self._observe({Stage.WARMUP: one.stages.get(Stage.WARMUP)})
            self._warming = None

    def _count(self, ended: Generation, one: Generation) -> None:
        reason = restart_reason(ended, one)
        if reason is None:
            return
        self.reasons[reason] += 1
        self._observe(restart_stages(ended, one))
        self.outages.observe(outage_s(ended, one))
        self._warming = one

    def _observe(self, stages: Mapping[Stage, float | None]) -> None:
        for stage, seconds in stages.items():
            if seconds is not None:
                self.stages[stage].observe(seconds)


OTHER_STATES = (
    NodeState.PRELOADING, NodeState.STANDBY, NodeState.DRAINED, NodeState.STUCK,
)  # fmt: skip
"""States that a node's own history never has: only views show them."""
NODE_STATES = [one for one in NodeState if one not in OTHER_STATES]

FAMILIES = {
    "holdfast_job_info": ("gauge", "Always 1; the labels describe the job"),
    "holdfast_job_state": ("gauge", "1 for the state of the job as this node knows it"),
    "holdfast_job_nodes": ("gauge", "Nodes in the job's round"),
    "holdfast_generation": ("gauge", "Number of the newest generation"),
    "holdfast_node_state": ("gauge", "1 for the state of this node"),
    "holdfast_node_rank": ("gauge", "Rank of this node among the nodes"),
    "holdfast_workers": ("gauge", "Workers of this node, by state"),
    "holdfast_worker_up": ("gauge", "Whether a worker of this node runs"),
    "holdfast_worker_exits_total": ("counter", "Workers of this node that exited by themselves"),
    "holdfast_restarts_total": ("counter", "Restarts of the workers, by reason"),
    "holdfast_restarts_remaining": ("gauge", "Failures that will still lead to a restart"),
    "holdfast_recovery_seconds": ("histogram", "How long each stage of a restart took"),
    "holdfast_outage_seconds": ("histogram", "From a failure until the workers were started again"),
    "holdfast_rendezvous_seconds": ("histogram", "How long a rendezvous took"),
    "holdfast_rendezvous_failures_total": ("counter", "Rendezvous that failed"),
    "holdfast_elapsed_seconds_total": ("counter", "Time since the run started"),
    "holdfast_useful_seconds_total": ("counter", "Time that was useful, see goodput"),
    "holdfast_goodput_ratio": (
        "gauge",
        "Share of this run's time that was useful, by this node's record",
    ),
    "holdfast_timers_expired_total": ("counter", "Watchdog timers of workers that expired"),
    "holdfast_worker_step": ("gauge", "Step that a worker reported last"),
    "holdfast_worker_step_target": ("gauge", "Number of steps that a worker reported"),
    "holdfast_worker_eta_seconds": ("gauge", "Estimated time until a worker's last step"),
    "holdfast_worker_loss": ("gauge", "Loss that a worker reported last"),
    "holdfast_worker_heartbeat_age_seconds": ("gauge", "Time since a worker's last heartbeat"),
    "holdfast_worker_section": ("gauge", "1 for the section that a worker is in"),
}


class JobMetrics:
    """An observer that keeps the metrics; any thread can `collect` them.

    `progress` returns the progress of the workers, by rank. `collect` calls it outside the lock; it must not
    wait.
    """

    name = "the job's metrics"

    def __init__(
        self,
        progress: Callable[[], Iterable[tuple[int, Progress]]] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._progress = progress
        self._history = History()
        self._restarts = Restarts()
        self._began: lifecycle.RunStarted | None = None
        self._rank: int | None = None
        self._nodes: int | None = None
        self._remaining: int | None = None
        self._exits = {WorkerState.SUCCEEDED: 0, WorkerState.FAILED: 0}
        self._expired = 0
        self._rendezvous_times = Histogram()
        self._rendezvous_failures = 0
        self._past_elapsed_s = self._past_useful_s = 0.0
        self._shown_elapsed_s = self._shown_useful_s = 0.0

    # In the agent's thread.

    def __call__(self, event: lifecycle.LifecycleEvent) -> None:
        with self._lock:
            history, ended = self._history, None
            match event:
                case lifecycle.RunStarted():
                    self._past_elapsed_s += history.elapsed_s(event.at) if self._began else 0.0
                    self._past_useful_s += history.useful_s(event.at) if self._began else 0.0
                    self._began, self._remaining = event, event.max_restarts
                case lifecycle.RendezvousEnded() if event.error:
                    self._rendezvous_failures += 1
                case lifecycle.RendezvousEnded():
                    self._rendezvous_times.observe(event.took_s)
                    self._rank, self._nodes = event.group_rank, event.group_world_size
                case lifecycle.GenerationStarted():
                    self._rank, self._nodes = event.group_rank, event.group_world_size
                    ended = history.newest
                case lifecycle.WorkersObserved() | lifecycle.RunEnded():
                    self._remaining = event.remaining_restarts
                case lifecycle.WatchdogEvent(what="timer expired"):
                    self._expired += 1
            history.add(event)
            if isinstance(event, lifecycle.WorkerEnded):
                state = history.workers[event.worker.local_rank][1]
                if state in self._exits and history.node_state is not NodeState.STOPPING:
                    self._exits[state] += 1
            self._restarts.update(ended, history.newest)

    # In the thread that collects.

    def collect(self) -> list[Family]:
        """Return all families; those without a value have no samples."""
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
            ("holdfast_job_state", [*JobState], self._history.job_state),
            ("holdfast_node_state", NODE_STATES, self._history.node_state),
        ):
            for state in states:
                found[name].add(int(state == current), run_id=run_id, state=state.value)
        newest = self._history.newest
        for name, value in (
            ("holdfast_job_nodes", self._nodes),
            ("holdfast_node_rank", self._rank),
            ("holdfast_generation", newest.number if newest is not None else None),
            ("holdfast_restarts_remaining", self._remaining),
        ):
            if value is not None:
                found[name].add(value, run_id=run_id)
        workers = self._history.workers.values()
        ended = [state for _, state in workers]
        for one in WorkerState:
            found["holdfast_workers"].add(ended.count(one), run_id=run_id, state=one.value)
        for worker, state in workers:
            found["holdfast_worker_up"].add(
                int(state is WorkerState.RUNNING),
                run_id=run_id,
                rank=worker.global_rank,
                local_rank=worker.local_rank,
            )

    def _add_times(self, found: dict[str, Family], run_id: str) -> None:
        now = self._clock()
        restarts, history = self._restarts, self._history
        for outcome, count in self._exits.items():
            found["holdfast_worker_exits_total"].add(count, run_id=run_id, outcome=outcome.value)
        for reason, count in restarts.reasons.items():
            found["holdfast_restarts_total"].add(count, run_id=run_id, reason=reason.value)
        for stage, times in restarts.stages.items():
            found["holdfast_recovery_seconds"].add(times.copy(), run_id=run_id, stage=stage.value)
        spent = history.time(now)
        elapsed_s = self._past_elapsed_s + spent.elapsed_s
        useful_s = self._past_useful_s + spent.useful_s
        goodput = goodput_of([spent])
        # Counters must never decrease: Prometheus would assume a restart from 0.
        self._shown_elapsed_s = max(self._shown_elapsed_s, elapsed_s)
        self._shown_useful_s = max(self._shown_useful_s, useful_s)
        for name, value in (
            ("holdfast_outage_seconds", restarts.outages.copy()),
            ("holdfast_rendezvous_seconds", self._rendezvous_times.copy()),
            ("holdfast_rendezvous_failures_total", self._rendezvous_failures),
            ("holdfast_elapsed_seconds_total", self._shown_elapsed_s),
            ("holdfast_useful_seconds_total", self._shown_useful_s),
            ("holdfast_goodput_ratio", goodput.share if goodput is not None else None),
            ("holdfast_timers_expired_total", self._expired),
        ):
            if value is None:
                continue
            found[name].add(value, run_id=run_id)

    def _add_progress(self, found: dict[str, Family], run_id: str) -> None:
        progress = self._progress
        if progress is None:
            return
        try:
            reported = [*progress()]
        except Exception as problem:  # noqa: BLE001 (the other metrics are still useful)
            console.warning(f"cannot read the workers' progress: {console.describe(problem)}")
            self._progress = None
            return
        now = self._clock()
        for rank, page in reported:
            left_s = eta_s(page.step, page.total, page.pace, now - page.step_ns / 1e9)
            for name, value in (
                ("step", page.step),
                ("step_target", page.total),
                ("eta_seconds", left_s),
                ("loss", page.loss),
                (
                    "heartbeat_age_seconds",
                    now - page.heartbeat_ns / 1e9 if page.heartbeat_ns else None,
                ),
            ):
                if value is not None:
                    found[f"holdfast_worker_{name}"].add(value, run_id=run_id, rank=rank)
            if page.sections:
                section = page.sections[-1].name
                found["holdfast_worker_section"].add(1, run_id=run_id, rank=rank, section=section)
