"""Readiness follows the moments of a run."""

from __future__ import annotations

from holdfast.agent.moments import Ended, Exited, Started, Stopped, Stopping, WorkerFact
from holdfast.agent.readiness import Readiness


def worker(rank: int) -> WorkerFact:
    return WorkerFact(rank, 4 + rank, rank, 2, 1000 + rank)


def started(generation: int) -> Started:
    return Started(0.0, 0.0, 0.1, generation, 0, 0, 1, (worker(0), worker(1)))


def exited(generation: int, rank: int, *, failed: bool) -> Exited:
    return Exited(0.0, 0.0, generation, worker(rank), failed)


def test_a_run_from_beginning_to_end() -> None:
    readiness = Readiness()
    assert readiness.why_not() == "the workers are not started yet"
    readiness(started(0))
    assert readiness.why_not() == ""
    readiness(exited(0, 1, failed=True))
    assert readiness.why_not() == "worker 5 has failed"
    readiness(Stopping(0.0, 0, "a worker failed"))
    assert readiness.why_not() == "the workers are being stopped: a worker failed"
    readiness(Stopped(0.0, 0))
    assert readiness.why_not() == "the workers are stopped, and not started again yet"
    readiness(started(1))
    assert readiness.why_not() == ""
    readiness(exited(1, 0, failed=False))
    assert readiness.why_not() == ""
    readiness(exited(1, 1, failed=False))
    assert readiness.why_not() == "the workers have finished"
    readiness(Ended(0.0, 0.0, 1.0, "succeeded", 1, 2, 3, 0, 1))
    assert readiness.why_not() == "the run has ended"


def test_what_is_told_of_an_earlier_generation_changes_nothing() -> None:
    readiness = Readiness()
    readiness(started(3))
    readiness(exited(2, 0, failed=True))
    readiness(Stopping(0.0, 2, "late"))
    readiness(Stopped(0.0, 2))
    assert readiness.why_not() == ""
