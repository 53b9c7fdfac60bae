"""TorchElastic's metrics of recorded runs; tests/peers compares the names with torchrun's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.observe import lifecycle
from holdfast.observe.metrics.metric_recorder import MetricRecorder
from recorded_runs import began, ended, failure, first_start, ranked, rendezvoused, restart, success

if TYPE_CHECKING:
    from collections.abc import Iterable

AGENT, LOCAL = "SimpleElasticAgent", "LocalElasticAgent"
OUTCOMES = (
    "run_success_with_retries", "run_success_no_retries", "run_failed_with_retries",
    "run_failed_no_retries",
)  # fmt: skip


def recorded(run: Iterable[lifecycle.LifecycleEvent]) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    recorder = MetricRecorder(lambda name, value: found.append((name, value)))
    for event in run:
        recorder(event)
    return found


def call(name: str, ms: int, outcome: str = "success") -> list[tuple[str, int]]:
    return [(f"{name}.{outcome}", 1), (f"{name}.duration.ms", ms)]


def failed(name: str, ms: int) -> list[tuple[str, int]]:
    return call(name, ms, "failure")


def outcome(flakiness: int, which: str) -> list[tuple[str, int]]:
    counts = [(f"workers.trainer.{one}", int(one == which)) for one in OUTCOMES]
    return [("workers.trainer.flakiness", flakiness), ("workers.trainer.run_total", 1), *counts]


def observed(state: str, remaining: int) -> list[tuple[str, int]]:
    return [
        *call(f"{LOCAL}._monitor_workers", 0),
        ("workers.trainer.remaining_restarts", remaining),
        (f"workers.trainer.{state}", 1),
    ]


START = [
    *call(f"{AGENT}._assign_worker_ranks", 500),
    *call(f"{AGENT}._rendezvous", 2500),
    *call(f"{LOCAL}._start_workers", 250),
    *call(f"{AGENT}._initialize_workers", 3000),
]


def test_run_with_a_restart_is_reported() -> None:
    run = [*first_start(), *failure(20.0), *restart(22.5), *success(50.0, 2)]
    assert recorded(run) == [
        *START, *observed("failed", 3), *call(f"{LOCAL}._stop_workers", 2000),
        *call(f"{AGENT}._assign_worker_ranks", 1000), *call(f"{AGENT}._rendezvous", 5000),
        *call(f"{LOCAL}._start_workers", 8000), *call(f"{AGENT}._initialize_workers", 13_000),
        *call(f"{AGENT}._restart_workers", 15_000), *observed("succeeded", 2),
        *outcome(25, "run_success_with_retries"), *call(f"{AGENT}.run", 41_000),
    ]  # fmt: skip
    unobserved = [one for one in run if not isinstance(one, lifecycle.WorkersObserved)]
    assert recorded(unobserved) == recorded(run)  # The stop implies the same state.


def test_each_outcome_has_its_metrics() -> None:
    assert recorded([*first_start(), *success(20.0, 3)]) == [
        *START,
        *observed("succeeded", 3),
        *outcome(0, "run_success_no_retries"),
        *call(f"{AGENT}.run", 11_000),
    ]
    run = [*first_start(), *failure(20.0), ended(23.0, "failed", 3), *first_start()]
    assert recorded(run)[len(START) :] == [
        *observed("failed", 3),
        *call(f"{LOCAL}._stop_workers", 2000),
        *outcome(100, "run_failed_no_retries"),
        *call(f"{AGENT}.run", 13_000),
        *START,  # A run is independent of the previous one.
    ]
    assert outcome(100, "run_failed_with_retries") == recorded([began(), ended(9, "failed", 1)])[:6]


def test_failure_ends_all_enclosing_calls() -> None:
    run = [began(), rendezvoused(14.0, 4.0, "timed out"), ended(14.5, "", 3, error="timed out")]
    assert recorded(run) == [
        *failed(f"{AGENT}._rendezvous", 4000),
        *failed(f"{AGENT}._initialize_workers", 4500),
        *failed(f"{AGENT}.run", 4500),
    ]
    # The node had a rank, but its workers did not.
    run = [
        began(),
        rendezvoused(12.0, 2.0),
        rendezvoused(13.0, 3.0, "gone"),
        ended(13.0, "", 3, error="gone"),
    ]
    assert recorded(run) == [
        *failed(f"{AGENT}._assign_worker_ranks", 1000),
        *failed(f"{AGENT}._rendezvous", 3000),
        *failed(f"{AGENT}._initialize_workers", 3000),
        *failed(f"{AGENT}.run", 3000),
    ]
    run = [
        began(),
        rendezvoused(12.0, 2.0),
        ranked(12.0, 0.0),
        ended(13.0, "", 3, error="no such file"),
    ]
    assert recorded(run)[4:] == [
        *failed(f"{LOCAL}._start_workers", 1000),
        *failed(f"{AGENT}._initialize_workers", 3000),
        *failed(f"{AGENT}.run", 3000),
    ]


def test_round_that_broke_before_its_start_is_joined_again() -> None:
    run = [began(), rendezvoused(11.0, 1.0), *first_start()[1:]]
    assert [name for name, _ in recorded(run) if not name.endswith("ms")] == [
        f"{AGENT}._assign_worker_ranks.failure",
        f"{AGENT}._rendezvous.failure",
        f"{AGENT}._assign_worker_ranks.success",
        f"{AGENT}._rendezvous.success",
        f"{LOCAL}._start_workers.success",
        f"{AGENT}._initialize_workers.success",
    ]
