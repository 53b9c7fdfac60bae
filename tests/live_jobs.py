"""Summaries of fictitious jobs, as a coordinator would send them to a client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from holdfast.wire.messages import JobSummary, NodeReport, NodeSummary, WorkerReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STEPS_PER_S = 10.0


def steady(rank: int, at_s: float) -> int:
    """Return the step of a rank that makes the same number of steps every second."""
    del rank
    return int(at_s * STEPS_PER_S)


def summary(
    at_s: float,
    nodes: int = 3,
    size: int = 2,
    *,
    step_of: Callable[[int, float], int] = steady,
    generation: int = 0,
    pid: int = 100,
    more: Mapping[str, Any] | None = None,
    gpus: int = 0,
    **fields: Any,
) -> JobSummary:
    """Return a running job at this time; `more` has fields of its workers."""
    job = JobSummary(
        run_id="nightly",
        phase="active",
        round=0,
        generation=generation,
        max_restarts=3,
        present=nodes,
        members=nodes,
        min_nodes=1,
        max_nodes=nodes,
        nodes=[
            NodeSummary(
                node=f"node{at:03d}",
                host=f"host{at:03d}",
                phase="running",
                rank=at,
                generation=generation,
                first_rank=at * size,
                size=size,
                report=NodeReport(
                    run_id="nightly",
                    node=f"node{at:03d}",
                    incarnation=1,
                    state="running",
                    generation=generation,
                    useful_s=at_s * 0.9,
                    elapsed_s=at_s,
                    gpus=gpus,
                    gpu=0.75 if gpus else 0.0,
                    workers=[
                        replace(
                            worker(at * size + local, local, at_s, step_of, pid), **(more or {})
                        )
                        for local in range(size)
                    ],
                ),
            )
            for at in range(nodes)
        ],
    )
    return replace(job, **fields)


def worker(
    rank: int, local_rank: int, at_s: float, step_of: Callable[[int, float], int], pid: int
) -> WorkerReport:
    """Return a worker that uses half a core and 100 MB."""
    return WorkerReport(
        rank=rank,
        local_rank=local_rank,
        pid=pid + rank,
        state="running",
        step=step_of(rank, at_s),
        step_age_s=0.0,
        heartbeat_age_s=0.1,
        cpu_s=at_s / 2,
        rss_bytes=100_000_000,
    )
