"""How a recovery is divided, and what is none."""

from __future__ import annotations

import pytest

from holdfast.core.supervision import StopReason
from holdfast.observe import lifecycle
from holdfast.observe.metrics.job_metrics import STAGES, RecoveryTimes
from recorded_runs import ended, failure, first_start, met, restart, spoke, started, success


def after(*told: lifecycle.LifecycleEvent) -> RecoveryTimes:
    times = RecoveryTimes()
    for moment in told:
        times.take(moment)
    return times


def seconds(times: RecoveryTimes) -> dict[str, float]:
    return {name: found.sum for name, found in times.stages.items() if found.count}


def test_each_stage_has_its_share() -> None:
    times = after(*first_start(), *failure(20.0), *restart(22.5))
    times.take(spoke(36.0))
    times.take(spoke(99.0))
    assert seconds(times) == {
        "detect": 0.5,
        "stop": 2.0,
        "regroup": 5.0,
        "start": 8.0,
        "first_line": 0.5,
    }
    assert tuple(seconds(times)) == STAGES
    assert (times.outages.count, times.outages.sum) == (1, 15.5)
    assert times.restarts == {
        "worker_failed": 1,
        "unhealthy": 0,
        "nodes_waiting": 0,
        "coordinator": 0,
        "nodes_lost": 0,
        "other": 0,
    }


def test_the_first_start_is_no_recovery_and_neither_is_the_end() -> None:
    times = after(*first_start())
    times.take(spoke(14.0))
    for moment in success(20.0, 3):
        times.take(moment)
    assert (seconds(times), times.outages.count, sum(times.restarts.values())) == ({}, 0, 0)


def test_giving_up_is_no_recovery() -> None:
    times = after(*first_start(), *failure(20.0), ended(23.0, "failed", 0), *first_start())
    assert (seconds(times), sum(times.restarts.values())) == ({}, 0)


def test_a_regroup_has_nothing_to_detect_and_a_reason_of_its_own() -> None:
    stopping = lifecycle.GenerationStopping(20.0, 0, StopReason.REGROUP)
    times = after(*first_start(), stopping, lifecycle.GenerationStopped(21.0, 0), *restart(21.0))
    assert seconds(times) == {"detect": 0.0, "stop": 1.0, "regroup": 5.0, "start": 8.0}
    assert times.restarts["nodes_waiting"] == 1


@pytest.mark.parametrize(
    ("nodes", "restarts", "reason"),
    [
        (2, 1, "worker_failed"),
        (1, 1, "worker_failed"),
        (3, 0, "nodes_waiting"),
        (1, 0, "nodes_lost"),
        (2, 0, "coordinator"),
    ],
)
def test_what_a_coordinator_told_shows_in_what_came_of_it(
    nodes: int, restarts: int, reason: str
) -> None:
    times = after(
        lifecycle.GenerationStarted(10.0, 10.0, 1.0, 4, 0, 0, 2, ()),
        lifecycle.GenerationStopping(20.0, 4, StopReason.TOLD),
        lifecycle.GenerationStarted(30.0, 30.0, 1.0, 5, restarts, 0, nodes, ()),
    )
    assert {name for name, count in times.restarts.items() if count} == {reason}


def test_words_that_are_not_known_are_another_reason() -> None:
    stopping = lifecycle.GenerationStopping(20.0, 0, StopReason.COORDINATOR_LOST)
    assert after(*first_start(), stopping, *restart(21.0)).restarts["other"] == 1


def test_a_place_that_is_known_before_the_stop_ends_takes_no_time() -> None:
    stopping = lifecycle.GenerationStopping(20.0, 0, StopReason.TOLD)
    stopped = lifecycle.GenerationStopped(24.0, 0)
    times = after(*first_start(), stopping, met(22.0, 1.0), stopped, started(25.0, 1.0, 1))
    assert seconds(times) == {"detect": 0.0, "stop": 4.0, "regroup": 0.0, "start": 1.0}
