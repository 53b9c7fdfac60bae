"""The messages that clients get from an agent about its node: workers, state and events."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import msgspec

from holdfast.control.history import WorkerState
from holdfast.core.limits import WHY_CHARS_MAX
from holdfast.observe import lifecycle
from holdfast.printable import one_line
from holdfast.processes.procfs import usage_of
from holdfast.wire.messages import (
    EventKind,
    EventRecord,
    JobSummary,
    NodeReport,
    NodeSummary,
    WorkerReport,
)
from holdfast.wire.wire_limits import WORKERS_REPORTED_MAX

if TYPE_CHECKING:
    from typing import Any

    from holdfast.control.control_point import ControlledAgent
    from holdfast.control.history import History

    Kept = tuple[float, lifecycle.LifecycleEvent]
    """An event, and the time of day at which it became known."""


def live_workers(agent: ControlledAgent) -> list[tuple[int, int]]:
    """Return rank and process id of the workers that have not exited."""
    workers = agent.group.workers
    return [(workers[rank].global_rank, pid) for rank, pid in sorted(agent.live_workers.items())]


def report_of(agent: ControlledAgent, history: History, *, workers: bool = True) -> NodeReport:
    """Return the state of an agent and its workers; call it in the agent's loop."""
    machine = agent.machine
    handler: Any = agent.group.spec.rdzv_handler
    now = time.monotonic()
    reports: list[WorkerReport] = []
    if workers:
        live = agent.live_workers
        pages = agent.pages()
        for worker in agent.group.workers[:WORKERS_REPORTED_MAX]:
            pid = live.get(worker.local_rank, 0)
            page = pages.get(worker.local_rank)
            cpu_s, rss_bytes = usage_of(pid) if pid else (-1.0, 0)
            step = page.step if page is not None else None
            reports.append(
                WorkerReport(
                    rank=worker.global_rank,
                    local_rank=worker.local_rank,
                    pid=pid,
                    state=_worker_state(history, worker.local_rank, pid),
                    step=-1 if step is None else step,
                    step_age_s=_age(now, page.step_ns if page is not None else 0),
                    heartbeat_age_s=_age(now, page.heartbeat_ns if page is not None else 0),
                    section=page.sections[-1].name[:255] if page and page.sections else "",
                    cpu_s=cpu_s,
                    rss_bytes=rss_bytes,
                )
            )
    return NodeReport(
        run_id=handler.get_run_id(),
        node=node_name(agent),
        state=history.node_state,
        generation=machine.generation,
        elapsed_s=history.elapsed_s(now),
        standby_s=history.standby_s(now),
        useful_s=history.useful_s(now),
        counts_steps=history.counts_steps,
        workers=reports,
    )


def _worker_state(history: History, local_rank: int, pid: int) -> WorkerState:
    if pid:
        return WorkerState.RUNNING
    _, state = history.workers.get(local_rank, (None, WorkerState.TERMINATED))
    return state if state is not WorkerState.RUNNING else WorkerState.TERMINATED


def node_name(agent: ControlledAgent) -> str:
    """Return the name of this node in its job."""
    handler: object = agent.group.spec.rdzv_handler
    return getattr(handler, "node_id", "") or os.uname().nodename


def own_summary(agent: ControlledAgent, report: NodeReport) -> JobSummary:
    """Return the state of a job that has no coordinator, as far as this node knows it.

    If the rendezvous handler is the user's own, there may be other nodes, which the agent can count
    but not reach.
    """
    machine, group = agent.machine, agent.group
    spec, nodes = group.spec, group.group_world_size or 1
    node = NodeSummary(
        node=report.node,
        host=os.uname().nodename,
        role=spec.role,
        phase=report.state,
        rank=group.group_rank or 0,
        generation=report.generation,
        first_rank=max(0, group.workers[0].global_rank),
        size=spec.local_world_size,
        report=report,
    )
    return JobSummary(
        run_id=report.run_id,
        phase="active" if report.state in ("running", "stopping") else report.state,
        round=machine.generation,
        generation=machine.generation,
        restarts=machine.restart_count,
        max_restarts=machine.budget.max_restarts,
        present=nodes,
        members=nodes,
        min_nodes=nodes,
        max_nodes=nodes,
        nodes=[node],
        why=machine.request_text,
    )


def _age(now: float, at_ns: int) -> float:
    return max(0.0, now - at_ns / 1e9) if at_ns else -1.0


def with_report(summary: JobSummary, report: NodeReport) -> JobSummary:
    """Return a job with the report of this node."""
    nodes = [
        msgspec.structs.replace(one, report=report) if one.node == report.node else one
        for one in summary.nodes
    ]
    return msgspec.structs.replace(summary, nodes=nodes)


KINDS = {
    lifecycle.RunStarted: EventKind.RUN_STARTED,
    lifecycle.RunEnded: EventKind.RUN_ENDED,
    lifecycle.RendezvousEnded: EventKind.RENDEZVOUS_ENDED,
    lifecycle.RanksAssigned: EventKind.RANKS_ASSIGNED,
    lifecycle.GenerationStarted: EventKind.GENERATION_STARTED,
    lifecycle.GenerationStopping: EventKind.GENERATION_STOPPING,
    lifecycle.GenerationStopped: EventKind.GENERATION_STOPPED,
    lifecycle.FirstHeartbeat: EventKind.FIRST_HEARTBEAT,
    lifecycle.WorkerEnded: EventKind.WORKER_ENDED,
    lifecycle.WorkersFailed: EventKind.WORKERS_FAILED,
    lifecycle.WatchdogEvent: EventKind.WATCHDOG,
    lifecycle.Requested: EventKind.REQUESTED,
}


def record_of(node: str, kept: Kept) -> EventRecord:
    """Return a lifecycle event as a message."""
    wall, event = kept
    if isinstance(event, lifecycle.WorkersFailed):  # Its details became known later.
        wall = event.failures[0].wall
    fields = {name: value for name, value in vars(event).items() if value not in (None, "")}
    worker = fields.get("worker")
    rank = worker.global_rank if isinstance(worker, lifecycle.WorkerInfo) else -1
    generation = fields.get("generation", -1)
    return EventRecord(
        wall=max(0.0, wall),
        source=node,
        kind=KINDS.get(type(event), EventKind.CUSTOM),
        generation=generation if isinstance(generation, int) else -1,
        rank=rank,
        is_problem=_is_problem(event),
        text=one_line(text_of(event), WHY_CHARS_MAX),
    )


def _is_problem(event: lifecycle.LifecycleEvent) -> bool:
    match event:
        case lifecycle.WorkerEnded():
            return event.failed and not event.stopped
        case lifecycle.RunEnded() | lifecycle.RendezvousEnded() if event.error:
            return True
        case lifecycle.RunEnded():
            return event.state == WorkerState.FAILED
    return isinstance(event, lifecycle.WorkersFailed)


def text_of(event: lifecycle.LifecycleEvent) -> str:
    """Return a lifecycle event as a line."""
    match event:
        case lifecycle.GenerationStarted():
            ranks = ", ".join(f"{one.global_rank} (pid {one.pid})" for one in event.workers)
            return f"generation {event.generation} started: ranks {ranks}"
        case lifecycle.GenerationStopping():
            return f"stopping generation {event.generation}: {event.reason.value}"
        case lifecycle.GenerationStopped():
            return f"generation {event.generation}: all workers exited"
        case lifecycle.WorkersFailed():
            return "; ".join(
                f"rank {one.global_rank} failed: {one.ending}"
                for one in event.failures
                if not one.consequence
            )
        case lifecycle.WorkerEnded():
            how = "was stopped" if event.stopped else "succeeded"
            if event.failed and not event.stopped:
                how = "failed"
            return f"rank {event.worker.global_rank} (pid {event.worker.pid}) {how}"
        case lifecycle.FirstHeartbeat():
            return f"rank {event.worker.global_rank} is running"
        case lifecycle.RunEnded():
            return f"the run ended: {event.state or event.cut_short}"
        case lifecycle.RendezvousEnded():
            return f"node {event.group_rank} of {event.group_world_size}" if not event.error else ""
        case lifecycle.RanksAssigned():
            return "the workers have their ranks"
        case lifecycle.Requested():
            return event.what
        case lifecycle.WatchdogEvent():
            return f"{event.what} {event.scope}".strip()
    return ""
