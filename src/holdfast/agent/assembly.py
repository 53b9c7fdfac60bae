"""Assembles an agent: the machine, workers, job and services of one `AgentLoop`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast.agent import blocked_workers
from holdfast.agent.lifecycle_reporter import LifecycleReporter
from holdfast.agent.loop import AgentLoop, LoopSettings
from holdfast.agent.polled_job import PolledJob
from holdfast.agent.side_services import SideServices
from holdfast.agent.spec import WorkerGroup
from holdfast.agent.worker_processes import WorkerProcesses
from holdfast.core.supervision import DEFAULT_SETTINGS, CoordinatedSupervision, Supervision
from holdfast.rendezvous.handler import follows_views, host_label

if TYPE_CHECKING:
    from holdfast.agent.loop import JobPart, Workers
    from holdfast.agent.side_services import HealthServer
    from holdfast.agent.spec import WorkerSpec
    from holdfast.agent.worker_processes import ProcessSettings
    from holdfast.core.supervision import SupervisionSettings

DEFAULTS = LoopSettings()
UNINTERRUPTIBLE_ENV = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"


def agent_of(
    spec: WorkerSpec,
    settings: ProcessSettings,
    *,
    supervision: SupervisionSettings = DEFAULT_SETTINGS,
    loop: LoopSettings = DEFAULTS,
    health_server: HealthServer | None = None,
    stuck_limit_s: float | None = None,
) -> AgentLoop:
    """Return the agent of a node whose workers are processes."""
    group = WorkerGroup(spec)
    reporter = LifecycleReporter(group, settings.logs_specs)
    limit_s = stuck_limit(stuck_limit_s)
    services = services_of(spec, reporter, health_server, limit_s)
    workers = WorkerProcesses(group, settings, services.watchdogs)
    machine, job = machine_and_job(group, reporter, workers, supervision, stuck_limit_s=limit_s)
    return AgentLoop(
        machine,
        workers,
        job,
        services,
        group=group,
        reporter=reporter,
        settings=loop,
    )


def services_of(
    spec: WorkerSpec,
    reporter: LifecycleReporter,
    health_server: HealthServer | None,
    stuck_limit_s: float | None,
) -> SideServices:
    """Return the side services of an agent."""
    blocked = None
    if stuck_limit_s is not None:
        blocked = blocked_workers.BlockedWorkers(stuck_limit_s)
    return SideServices(spec.rdzv_handler.get_run_id(), reporter, health_server, blocked)


def machine_and_job(
    group: WorkerGroup,
    reporter: LifecycleReporter,
    workers: Workers,
    settings: SupervisionSettings,
    *,
    stuck_limit_s: float | None,
) -> tuple[Supervision, JobPart]:
    """Return the machine and this node's part in the job, for one run."""
    spec = group.spec
    handler: object = spec.rdzv_handler
    if follows_views(handler):
        from holdfast.agent.coordinated_job import CoordinatedJob  # Imports msgspec.

        coordinated = reporter.machine = CoordinatedSupervision(
            settings,
            local_world_size=spec.local_world_size,
            max_restarts=spec.max_restarts,
            stuck_limit_s=stuck_limit_s,
            join_timeout_s=handler.join_timeout_s,
        )
        coordinated.story.node = handler.node_id
        job = CoordinatedJob(handler, group, coordinated, reporter, workers.failures_so_far)
        return coordinated, job
    machine = reporter.machine = Supervision(
        settings,
        local_world_size=spec.local_world_size,
        max_restarts=spec.max_restarts,
        stuck_limit_s=stuck_limit_s,
    )
    machine.story.node = host_label()
    return machine, PolledJob(group, machine, reporter)


def stuck_limit(given_s: float | None) -> float | None:
    """Return how long a worker may stay in uninterruptible sleep; None without a limit."""
    if given_s is None:
        given_s = timeout_from_environment(UNINTERRUPTIBLE_ENV)
    return given_s if given_s and given_s > 0 else None


def timeout_from_environment(name: str) -> float | None:
    """Return the seconds in a variable; None if it is unset, not a number, or not positive."""
    try:
        seconds = float(os.environ.get(name, ""))
    except ValueError:
        return None
    return seconds if seconds > 0 else None
