"""The lifecycle events of whole runs, with about a second for each step."""

from __future__ import annotations

from holdfast.core.supervision import StopReason
from holdfast.observe import lifecycle


def worker(local_rank: int, pid: int = 0) -> lifecycle.WorkerInfo:
    return lifecycle.WorkerInfo(local_rank, 4 + local_rank, local_rank, 2, pid or 100 + local_rank)


WORKERS = (worker(0), worker(1))


def began(max_restarts: int = 3) -> lifecycle.RunStarted:
    return lifecycle.RunStarted(
        10.0, 1000.0, "job-1", "trainer", "c10d", "train.py", 2, max_restarts
    )


def rendezvoused(at: float, took_s: float, error: str = "") -> lifecycle.RendezvousEnded:
    return lifecycle.RendezvousEnded(
        at, 1000.0 + at, took_s, None if error else 2, None if error else 4, error
    )


def ranked(at: float, took_s: float) -> lifecycle.RanksAssigned:
    return lifecycle.RanksAssigned(at, 1000.0 + at, took_s, 2, 4)


def started(at: float, took_s: float, generation: int) -> lifecycle.GenerationStarted:
    return lifecycle.GenerationStarted(
        at, 1000.0 + at, took_s, generation, generation, 2, 4, WORKERS
    )


def exited(
    at: float, local_rank: int, *, failed: bool, generation: int = 0
) -> lifecycle.WorkerEnded:
    return lifecycle.WorkerEnded(at, 1000.0 + at, generation, WORKERS[local_rank], failed)


def ended(
    at: float, state: str, remaining: int, *, max_restarts: int = 3, error: str = ""
) -> lifecycle.RunEnded:
    ends = tuple(lifecycle.WorkerOutcome(one, state) for one in WORKERS) if state else ()
    used = max_restarts - remaining
    return lifecycle.RunEnded(
        at, 1000.0 + at, at - 10.0, state, used, remaining, max_restarts, 2, 4, ends, error
    )


def first_start() -> list[lifecycle.LifecycleEvent]:
    """A run begins at 10, its rendezvous ends at 12, ranks are assigned at 12.5, and workers run from 13 on."""
    return [began(), rendezvoused(12.0, 2.0), ranked(12.5, 0.5), started(13.0, 0.25, 0)]


def failure(at: float) -> list[lifecycle.LifecycleEvent]:
    """A worker fails; the agent notices after half a second, and all workers have exited two seconds later."""
    return [
        exited(at, 1, failed=True),
        lifecycle.WorkersObserved(at, "failed", 3),
        lifecycle.GenerationStopping(at + 0.5, 0, StopReason.WORKER_FAILED),
        lifecycle.GenerationStopped(at + 2.5, 0),
    ]


def restart(at: float) -> list[lifecycle.LifecycleEvent]:
    """The next rendezvous takes four seconds, the ranks one second, and the start another eight."""
    return [rendezvoused(at + 4.0, 4.0), ranked(at + 5.0, 1.0), started(at + 13.0, 8.0, 1)]


def success(at: float, remaining: int) -> list[lifecycle.LifecycleEvent]:
    return [
        exited(at, 0, failed=False),
        exited(at, 1, failed=False),
        lifecycle.WorkersObserved(at, "succeeded", remaining),
        lifecycle.GenerationStopping(at, 1, StopReason.SUCCEEDED),
        lifecycle.GenerationStopped(at, 1),
        ended(at + 1.0, "succeeded", remaining),
    ]


def sent_heartbeat(at: float, local_rank: int = 0) -> lifecycle.FirstHeartbeat:
    """A worker sends its first heartbeat."""
    return lifecycle.FirstHeartbeat(at, 1, WORKERS[local_rank])
