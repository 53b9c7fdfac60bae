"""Readiness follows the lifecycle events of a run."""

from __future__ import annotations

from holdfast.core.supervision import StopReason
from holdfast.observe.health.server import Readiness
from holdfast.observe.lifecycle import (
    GenerationStarted,
    GenerationStopped,
    GenerationStopping,
    RunEnded,
    WorkerEnded,
    WorkerInfo,
)


def worker(rank: int) -> WorkerInfo:
    return WorkerInfo(rank, 4 + rank, rank, 2, 1000 + rank)


def started(generation: int) -> GenerationStarted:
    return GenerationStarted(0.0, 0.0, 0.1, generation, 0, 0, 1, (worker(0), worker(1)))


def ended(generation: int, rank: int, *, failed: bool) -> WorkerEnded:
    return WorkerEnded(0.0, 0.0, generation, worker(rank), failed)


def test_ready_exactly_while_all_workers_run() -> None:
    readiness = Readiness()
    for event, is_ready in (
        (None, False),
        (started(0), True),
        (ended(0, 1, failed=True), False),
        (GenerationStopping(0.0, 0, StopReason.WORKER_FAILED), False),
        (GenerationStopped(0.0, 0), False),
        (started(1), True),
        (ended(1, 0, failed=False), True),
        (ended(1, 1, failed=False), False),
        (RunEnded(0.0, 0.0, 1.0, "succeeded", 1, 2, 3, 0, 1), False),
    ):
        if event is not None:
            readiness(event)
        assert (readiness.why_not() == "") is is_ready, event


def test_events_of_an_earlier_generation_change_nothing() -> None:
    readiness = Readiness()
    readiness(started(3))
    readiness(ended(2, 0, failed=True))
    readiness(GenerationStopping(0.0, 2, StopReason.REGROUP))
    readiness(GenerationStopped(0.0, 2))
    assert readiness.why_not() == ""
