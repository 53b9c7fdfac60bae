"""What is emitted for the moments of a run; tests/peers compares the names with torchrun's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.core.supervision import StopReason
from holdfast.observe import lifecycle
from holdfast.observe.metrics.recorder import MetricRecorder
from recorded_runs import began, ended, failure, first_start, met, ranked, restart, success

if TYPE_CHECKING:
    from collections.abc import Iterable


def recorded(told: Iterable[lifecycle.LifecycleEvent]) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    recorder = MetricRecorder(lambda name, value: found.append((name, value)))
    for moment in told:
        recorder(moment)
    return found


def call(name: str, ms: int, outcome: str = "success") -> list[tuple[str, int]]:
    return [(f"{name}.{outcome}", 1), (f"{name}.duration.ms", ms)]


START = [
    *call("SimpleElasticAgent._assign_worker_ranks", 500),
    *call("SimpleElasticAgent._rendezvous", 2500),
    *call("LocalElasticAgent._start_workers", 250),
    *call("SimpleElasticAgent._initialize_workers", 3000),
]


def outcome(flakiness: int, which: str) -> list[tuple[str, int]]:
    return [
        ("workers.trainer.flakiness", flakiness),
        ("workers.trainer.run_total", 1),
        *(
            (f"workers.trainer.{one}", int(one == which))
            for one in (
                "run_success_with_retries",
                "run_success_no_retries",
                "run_failed_with_retries",
                "run_failed_no_retries",
            )
        ),
    ]


def looked(state: str, remaining: int) -> list[tuple[str, int]]:
    return [
        *call("LocalElasticAgent._monitor_workers", 0),
        ("workers.trainer.remaining_restarts", remaining),
        (f"workers.trainer.{state}", 1),
    ]


def test_a_run_that_succeeds_at_once() -> None:
    assert recorded([*first_start(), *success(20.0, 3)]) == [
        *START,
        *looked("succeeded", 3),
        *outcome(0, "run_success_no_retries"),
        *call("SimpleElasticAgent.run", 11_000),
    ]


def test_a_run_with_a_restart() -> None:
    assert recorded([*first_start(), *failure(20.0), *restart(22.5), *success(50.0, 2)]) == [
        *START,
        *looked("failed", 3),
        *call("LocalElasticAgent._stop_workers", 2000),
        *call("SimpleElasticAgent._assign_worker_ranks", 1000),
        *call("SimpleElasticAgent._rendezvous", 5000),
        *call("LocalElasticAgent._start_workers", 8000),
        *call("SimpleElasticAgent._initialize_workers", 13_000),
        *call("SimpleElasticAgent._restart_workers", 15_000),
        *looked("succeeded", 2),
        *outcome(25, "run_success_with_retries"),
        *call("SimpleElasticAgent.run", 41_000),
    ]


def test_what_a_stop_says_of_the_workers_needs_no_look() -> None:
    told = [*first_start(), *failure(20.0), *restart(22.5), *success(50.0, 2)]
    unseen = [one for one in told if not isinstance(one, lifecycle.WorkersObserved)]
    assert recorded(unseen) == recorded(told)


def test_a_run_that_fails_for_good() -> None:
    told = recorded([*first_start(), *failure(20.0), ended(23.0, "failed", 3)])
    assert told[len(START) :] == [
        *looked("failed", 3),
        *call("LocalElasticAgent._stop_workers", 2000),
        *outcome(100, "run_failed_no_retries"),
        *call("SimpleElasticAgent.run", 13_000),
    ]


def test_failing_after_restarts_is_told_apart() -> None:
    assert outcome(100, "run_failed_with_retries") == recorded([began(), ended(9, "failed", 1)])[:6]


def test_a_signal_ends_a_run_with_a_failure_and_no_figures() -> None:
    told = [
        *first_start(),
        lifecycle.GenerationStopping(20.0, 0, StopReason.SIGNAL),
        lifecycle.GenerationStopped(21.0, 0),
        ended(21.5, "", 3, error="SignalException"),
    ]
    assert recorded(told)[len(START) :] == call("SimpleElasticAgent.run", 11_500, "failure")


def test_a_rendezvous_that_fails_ends_all_that_waited_for_it() -> None:
    told = [began(), met(14.0, 4.0, "timed out"), ended(14.5, "", 3, error="timed out")]
    assert recorded(told) == [
        *call("SimpleElasticAgent._rendezvous", 4000, "failure"),
        *call("SimpleElasticAgent._initialize_workers", 4500, "failure"),
        *call("SimpleElasticAgent.run", 4500, "failure"),
    ]


def test_ranks_that_cannot_be_had_fail_the_rendezvous() -> None:
    told = [*first_start(), *failure(20.0)]
    told += [met(24.0, 1.0), ranked(25.0, 1.0, "gone"), ended(25.0, "", 2, error="gone")]
    assert recorded(told)[len(START) + len(looked("", 0)) + 2 :] == [
        *call("SimpleElasticAgent._assign_worker_ranks", 1000, "failure"),
        *call("SimpleElasticAgent._rendezvous", 2000, "failure"),
        *call("SimpleElasticAgent._initialize_workers", 2000, "failure"),
        *call("SimpleElasticAgent._restart_workers", 4500, "failure"),
        *call("SimpleElasticAgent.run", 15_000, "failure"),
    ]


def test_a_place_without_ranks_is_one_failure() -> None:
    told = [began(), met(12.0, 2.0), met(13.0, 3.0, "gone"), ended(13.0, "", 3, error="gone")]
    assert recorded(told) == [
        *call("SimpleElasticAgent._assign_worker_ranks", 1000, "failure"),
        *call("SimpleElasticAgent._rendezvous", 3000, "failure"),
        *call("SimpleElasticAgent._initialize_workers", 3000, "failure"),
        *call("SimpleElasticAgent.run", 3000, "failure"),
    ]


def test_workers_that_cannot_be_started() -> None:
    told = [began(), met(12.0, 2.0), ranked(12.0, 0.0), ended(13.0, "", 3, error="no such file")]
    assert recorded(told)[4:] == [
        *call("LocalElasticAgent._start_workers", 1000, "failure"),
        *call("SimpleElasticAgent._initialize_workers", 3000, "failure"),
        *call("SimpleElasticAgent.run", 3000, "failure"),
    ]


@pytest.mark.parametrize("broken", [[ranked(11.5, 0.5, "a node left")], []])
def test_a_round_that_broke_before_it_began_is_met_anew(
    broken: list[lifecycle.LifecycleEvent],
) -> None:
    told = [began(), met(11.0, 1.0), *broken, *first_start()[1:]]
    names = [name for name, _ in recorded(told) if not name.endswith("ms")]
    assert names == [
        "SimpleElasticAgent._assign_worker_ranks.failure",
        "SimpleElasticAgent._rendezvous.failure",
        "SimpleElasticAgent._assign_worker_ranks.success",
        "SimpleElasticAgent._rendezvous.success",
        "LocalElasticAgent._start_workers.success",
        "SimpleElasticAgent._initialize_workers.success",
    ]


def test_another_run_knows_nothing_of_the_one_before() -> None:
    twice = [*first_start(), *failure(20.0), ended(23.0, "failed", 3), *first_start()]
    assert recorded(twice)[-len(START) :] == START
