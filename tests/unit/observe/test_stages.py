"""Where the time of each generation went, out of one node's lifecycle events."""

from __future__ import annotations

from holdfast.core.supervision import StopReason
from holdfast.observe import lifecycle
from holdfast.observe.stages import stages_of

WORKERS = tuple(lifecycle.WorkerInfo(rank, rank, rank, 2, 100 + rank) for rank in (0, 1))


def started(at: float, generation: int, why: str = "") -> lifecycle.GenerationStarted:
    return lifecycle.GenerationStarted(at, at, 0.1, generation, 0, 0, 1, WORKERS, 2, 1, why)


def met(at: float) -> lifecycle.RendezvousEnded:
    return lifecycle.RendezvousEnded(at, at, 0.0, 0, 1)


def test_a_restart_from_the_failure_to_the_first_step() -> None:
    failure = lifecycle.WorkerFailure(
        1,
        1,
        101,
        1,
        0.0,
        consequence=False,
        ending="exit code 1",
        detail="",
        message="",
        traceback="",
        stderr_tail="",
    )
    events = [
        met(12.0),
        started(13.0, 0),
        lifecycle.FirstHeartbeat(13.5, 0, WORKERS[0]),
        lifecycle.ProgressSampled(20.0, 0, ((0, 1, 15.0),)),
        lifecycle.ProgressSampled(21.0, 0, ((0, 5, 20.5), (1, 1, 16.0))),
        lifecycle.WorkerEnded(30.0, 30.0, 0, WORKERS[1], failed=True),
        lifecycle.GenerationStopping(30.5, 0, StopReason.WORKER_FAILED),
        lifecycle.WorkerEnded(31.0, 31.0, 0, WORKERS[0], failed=True),
        lifecycle.GenerationStopped(32.5, 0),
        met(36.5),
        started(37.0, 1, "rank 1 failed"),
        lifecycle.WorkersFailed(37.1, 0, (failure,)),
        lifecycle.FirstHeartbeat(38.0, 1, WORKERS[0]),
    ]
    first, second = stages_of(40.0, 10.0, events)
    assert (first.regroup_s, first.start_s, first.first_step_s) == (2.0, 1.0, 3.0)
    assert (first.ran_s, first.detect_s, first.stop_s, first.age_s) == (17.5, 0.5, 2.0, 27.0)
    assert (first.is_over, first.detail) == (True, "rank 1 failed: exit code 1")
    assert (second.regroup_s, second.start_s, second.ran_s) == (4.0, 0.5, 3.0)
    assert second.first_step_s < 0, "one of two has given no sign of life"
    assert (second.is_over, second.why, second.world_size) == (False, "rank 1 failed", 2)
    events.append(lifecycle.FirstHeartbeat(39.0, 1, WORKERS[1]))
    assert stages_of(40.0, 10.0, events)[1].first_step_s == 2.0


def test_a_hang_began_with_the_last_step() -> None:
    events = [
        started(13.0, 0),
        lifecycle.GenerationStopping(90.0, 0, StopReason.UNHEALTHY, "no step for 60 s"),
        lifecycle.ProgressSampled(90.1, 0, ((0, 7, 29.0), (1, 7, 30.0))),
    ]
    (one,) = stages_of(91.0, 10.0, events)
    assert (one.detect_s, one.detail) == (60.0, "no step for 60 s")
    assert one.stop_s < 0


def test_what_was_asked_for_is_named() -> None:
    asked = "restart asked for by me: new data"
    events = [
        started(13.0, 0),
        lifecycle.GenerationStopping(20.0, 0, StopReason.ASKED),
        lifecycle.Requested(20.0, 20.0, "id", asked),
    ]
    assert [one.detail for one in stages_of(21.0, 10.0, events)] == [asked]


def test_a_generation_whose_start_nobody_saw_began_with_the_run() -> None:
    events = [
        lifecycle.GenerationStopping(20.0, 3, StopReason.WORKER_FAILED),
        lifecycle.GenerationStopped(21.0, 3),
    ]
    (one,) = stages_of(22.0, 10.0, events)
    assert (one.generation, one.ran_s, one.stop_s) == (3, 10.0, 1.0)
    assert max(one.regroup_s, one.start_s, one.first_step_s, one.detect_s) < 0
