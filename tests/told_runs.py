"""The moments of whole runs, as an agent would tell them: a second for each step, or so."""

from __future__ import annotations

from holdfast.agent import moments
from holdfast.core.supervision import Reason


def worker(local_rank: int, pid: int = 0) -> moments.WorkerFact:
    return moments.WorkerFact(local_rank, 4 + local_rank, local_rank, 2, pid or 100 + local_rank)


WORKERS = (worker(0), worker(1))


def began(max_restarts: int = 3) -> moments.Began:
    return moments.Began(10.0, 1000.0, "job-1", "trainer", "c10d", "train.py", 2, max_restarts)


def met(at: float, took_s: float, error: str = "") -> moments.Met:
    return moments.Met(at, 1000.0 + at, took_s, None if error else 2, None if error else 4, error)


def ranked(at: float, took_s: float, error: str = "") -> moments.Ranked:
    return moments.Ranked(at, 1000.0 + at, took_s, 2, 4, error)


def started(at: float, took_s: float, generation: int) -> moments.Started:
    return moments.Started(at, 1000.0 + at, took_s, generation, generation, 2, 4, WORKERS)


def exited(at: float, local_rank: int, *, failed: bool, generation: int = 0) -> moments.Exited:
    return moments.Exited(at, 1000.0 + at, generation, WORKERS[local_rank], failed)


def ended(
    at: float, state: str, remaining: int, *, max_restarts: int = 3, error: str = ""
) -> moments.Ended:
    ends = tuple(moments.WorkerEnd(one, state) for one in WORKERS) if state else ()
    used = max_restarts - remaining
    return moments.Ended(
        at, 1000.0 + at, at - 10.0, state, used, remaining, max_restarts, 2, 4, ends, error
    )


def first_start() -> list[moments.Moment]:
    """Begin at 10, meet until 12, have ranks at 12.5, and run from 13 on."""
    return [began(), met(12.0, 2.0), ranked(12.5, 0.5), started(13.0, 0.25, 0)]


def failure(at: float) -> list[moments.Moment]:
    """A worker fails, which is seen after half a second, and all are gone two seconds later."""
    return [
        exited(at, 1, failed=True),
        moments.Looked(at, "failed", 3),
        moments.Stopping(at + 0.5, 0, Reason.WORKER_FAILED.value),
        moments.Stopped(at + 2.5, 0),
    ]


def restart(at: float) -> list[moments.Moment]:
    """Meet again for four seconds, have ranks a second later, and start within eight more."""
    return [met(at + 4.0, 4.0), ranked(at + 5.0, 1.0), started(at + 13.0, 8.0, 1)]


def success(at: float, remaining: int) -> list[moments.Moment]:
    return [
        exited(at, 0, failed=False),
        exited(at, 1, failed=False),
        moments.Looked(at, "succeeded", remaining),
        moments.Stopping(at, 1, Reason.SUCCEEDED.value),
        moments.Stopped(at, 1),
        ended(at + 1.0, "succeeded", remaining),
    ]


def spoke(at: float) -> moments.Spoke:
    """A worker made its first call."""
    return moments.Spoke(at, 1, moments.WorkerFact(0, 0, 0, 1, 4711))
