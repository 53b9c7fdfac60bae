"""The metrics of recorded runs, read back by the parser of Prometheus's own client."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.core.supervision import StopReason
from holdfast.observe import lifecycle
from holdfast.observe.metrics.job_metrics import FAMILIES, JobMetrics
from holdfast.observe.metrics.prometheus import render
from holdfast.processes.workers.pages import OpenSection, Progress
from recorded_runs import (
    began,
    ended,
    exited,
    failure,
    first_start,
    restart,
    sent_heartbeat,
    success,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[3]


class Page:
    """The metrics that Prometheus reads at one time."""

    def __init__(
        self, run: Iterable[lifecycle.LifecycleEvent], now: float = 0.0, **more: Any
    ) -> None:
        self.now = now
        self.metrics = JobMetrics(clock=lambda: self.now, **more)
        for event in run:
            self.metrics(event)
        self.read()

    def read(self) -> None:
        text = render(self.metrics.collect()).decode()
        self.families = [*text_string_to_metric_families(text)]
        self.samples = [one for family in self.families for one in family.samples]
        assert all(one.labels.get("run_id") == "job-1" for one in self.samples)

    def value(self, name: str, **labels: str) -> float:
        [found] = [
            one.value
            for one in self.samples
            if one.name == f"holdfast_{name}" and labels.items() <= one.labels.items()
        ]
        return float(found)

    def states(self) -> tuple[str, str]:
        """Return the states of the job and of the node."""
        job, node = (
            [one.labels["state"] for one in self.samples if one.name == name and one.value == 1]
            for name in ("holdfast_job_state", "holdfast_node_state")
        )
        return job[0], node[0]


def test_metrics_of_a_successful_run() -> None:
    assert Page([]).samples == []
    page = Page(first_start(), now=23.0)
    assert page.states() == ("running", "running")
    for name, labels, value in (
        ("job_nodes", {}, 4),
        ("node_rank", {}, 2),
        ("generation", {}, 0),
        ("workers", {"state": "running"}, 2),
        ("worker_up", {"rank": "5", "local_rank": "1"}, 1),
        ("restarts_remaining", {}, 3),
        ("restarts_total", {"reason": "worker_failed"}, 0),
        ("rendezvous_seconds_sum", {}, 2.0),
        ("elapsed_seconds_total", {}, 13.0),
        ("useful_seconds_total", {}, 10.0),
        ("goodput_ratio", {}, pytest.approx(10 / 13)),
        ("job_info", {"role": "trainer", "backend": "c10d", "entry_point": "train.py"}, 1),
    ):
        assert page.value(name, **labels) == value, name
    page = Page([*first_start(), *success(20.0, 3)[:-1]])  # The node waits for the others.
    assert page.states() == ("running", "leaving")
    page = Page([*first_start(), *success(20.0, 3)], now=99.0)
    assert page.states() == ("succeeded", "done")
    assert page.value("workers", state="succeeded") == 2
    assert page.value("elapsed_seconds_total") == 11.0
    assert page.value("useful_seconds_total") == 8.0


def test_metrics_of_a_restart() -> None:
    run = [*first_start(), *failure(20.0)]
    page = Page(run[:5], now=30.0)
    assert page.states()[0] == "recovering"
    assert page.value("worker_up", rank="5") == 0
    assert page.value("worker_exits_total", outcome="failed") == 1
    assert page.value("useful_seconds_total") == 7.0
    run.insert(-1, exited(21.0, 0, failed=True))  # It was stopped, so this is not its own failure.
    page = Page(run, now=30.0)
    assert page.states()[1] == "joining"
    assert page.value("workers", state="failed") == 1
    assert page.value("workers", state="terminated") == 1
    assert page.value("worker_exits_total", outcome="failed") == 1
    page = Page([*run, *restart(22.5), sent_heartbeat(36.0), sent_heartbeat(37.0, 1)], now=40.5)
    assert page.states()[0] == "running"
    assert page.value("generation") == 1
    assert page.value("restarts_total", reason="worker_failed") == 1
    assert page.value("recovery_seconds_sum", stage="regroup") == 4.0
    assert page.value("recovery_seconds_sum", stage="warmup") == 1.5
    assert page.value("outage_seconds_sum") == 15.5
    assert page.value("useful_seconds_total") == 12.0


def test_counter_never_falls_between_two_reads() -> None:
    """A read in between may already have counted the time that has just ended."""
    page = Page(first_start(), now=30.0)
    for event in (exited(29.0, 0, failed=True), ended(29.5, "failed", 0)):
        page.metrics(event)
    page.read()
    assert page.value("useful_seconds_total") == 17
    assert page.value("elapsed_seconds_total") == 20


def test_progress_is_read_outside_the_lock() -> None:
    def progress() -> list[Any]:
        metrics[0](sent_heartbeat(2.0))  # The callback may do anything, even send an event.
        section = OpenSection("checkpoint", 0, None)
        at_ns = 20_000_000_000
        return [
            (4, Progress(7, 120, at_ns, 220, math.nan, 2.0, at_ns, (section,))),
            (5, Progress()),
        ]

    metrics: list[Any] = [lambda _event: None]
    page = Page(first_start(), now=20.25, progress=progress)
    metrics[0] = page.metrics
    page.read()
    assert page.value("worker_step", rank="4") == 120
    assert page.value("worker_step_target", rank="4") == 220
    assert page.value("worker_eta_seconds", rank="4") == 49.75
    assert math.isnan(page.value("worker_loss", rank="4"))
    assert page.value("worker_heartbeat_age_seconds", rank="4") == 0.25
    assert page.value("worker_section", section="checkpoint") == 1
    assert not [one for one in page.samples if "step" in one.name and one.labels["rank"] == "5"]


def test_every_family_is_declared_and_in_the_guide() -> None:
    page = Page(
        [*first_start(), exited(20.0, 0, failed=False)],
        now=21.0,
        progress=lambda: [
            (4, Progress(7, 1, 21 * 10**9, 9, 0.5, 2.0, 1, (OpenSection("a", 0, None),))),
        ],
    )
    seen, labels = {}, {}
    for family in page.families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        seen[name] = (family.type, family.documentation)
        found = {one for sample in family.samples for one in sample.labels}
        labels[name] = found - {"run_id", "le"}
    assert seen == FAMILIES
    guide = (ROOT / "docs" / "guides" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(holdfast_\w+)` \| (\w+) \|([^|]*)\|([^|]*)\|$", guide, re.MULTILINE)
    assert {name: kind for name, kind, _, _ in rows} == {
        name: kind for name, (kind, _) in FAMILIES.items()
    }
    assert {name: {*re.findall(r"`(\w+)`", text)} for name, _, text, _ in rows} == labels


def restarts_of(*run: lifecycle.LifecycleEvent) -> tuple[dict[str, float], set[str]]:
    """Return the seconds of each counted stage, and the reasons of restarts."""
    page = Page([began(), *run])
    counted = {
        one.labels["stage"]
        for one in page.samples
        if one.name.endswith("ry_seconds_count") and one.value
    }
    reasons = {
        one.labels["reason"] for one in page.samples if "restarts_total" in one.name and one.value
    }
    return {stage: page.value("recovery_seconds_sum", stage=stage) for stage in counted}, reasons


@pytest.mark.parametrize(
    "run",
    [
        [*first_start(), sent_heartbeat(14.0), *success(20.0, 3)],
        [*first_start(), *failure(20.0), ended(23.0, "failed", 0), *first_start()],
        [*first_start(), lifecycle.GenerationStopping(20.0, 0, StopReason.SIGNAL), *restart(22.5)],
    ],
)
def test_first_start_and_end_are_not_restarts(run: list[lifecycle.LifecycleEvent]) -> None:
    assert restarts_of(*run) == ({}, set())


@pytest.mark.parametrize(
    ("stop", "nodes", "restarts", "reason"),
    [
        (StopReason.GENERATION_CHANGED, 2, 1, "worker_failed"),
        (StopReason.GENERATION_CHANGED, 1, 1, "worker_failed"),
        (StopReason.GENERATION_CHANGED, 3, 0, "nodes_waiting"),
        (StopReason.GENERATION_CHANGED, 1, 0, "nodes_lost"),
        (StopReason.GENERATION_CHANGED, 2, 0, "coordinator"),
        (StopReason.REGROUP, 2, 0, "nodes_waiting"),
        (StopReason.COORDINATOR_LOST, 2, 0, "other"),
    ],
)
def test_restart_is_counted_by_reason(
    stop: StopReason, nodes: int, restarts: int, reason: str
) -> None:
    stages, reasons = restarts_of(
        lifecycle.GenerationStarted(10.0, 10.0, 1.0, 4, 0, 0, 2, ()),
        lifecycle.GenerationStopping(20.0, 4, stop),
        lifecycle.GenerationStarted(30.0, 30.0, 1.0, 5, restarts, 0, nodes, ()),
    )
    assert reasons == {reason}
    # If another node failed, that node counts the time until detection.
    assert stages.keys() == (set() if stop is StopReason.GENERATION_CHANGED else {"detect"})
