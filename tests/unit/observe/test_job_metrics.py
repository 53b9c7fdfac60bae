"""The figures of told runs, read back by the parser of Prometheus's own client."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.core.supervision import StopReason
from holdfast.observe import lifecycle
from holdfast.observe.metrics.families import render
from holdfast.observe.metrics.job_metrics import FAMILIES, JobMetrics
from recorded_runs import began, ended, exited, failure, first_start, met, restart, spoke, success

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[3]


class Figures:
    """What the page says at a time."""

    def __init__(
        self, told: Iterable[lifecycle.LifecycleEvent], now: float = 0.0, **more: Any
    ) -> None:
        self.metrics = JobMetrics(clock=lambda: now, **more)
        for moment in told:
            self.metrics(moment)
        text = render(self.metrics.collect()).decode()
        self.families = [*text_string_to_metric_families(text)]
        self.samples = [one for family in self.families for one in family.samples]
        assert all(one.labels.get("run_id") == "job-1" for one in self.samples)

    def value(self, name: str, **labels: str) -> float:
        [found] = [
            one.value
            for one in self.samples
            if one.name == name and labels.items() <= one.labels.items()
        ]
        return float(found)

    def state(self, name: str) -> str:
        [state] = [
            one.labels["state"] for one in self.samples if one.name == name and one.value == 1
        ]
        return state


def test_there_is_nothing_before_a_run_begins() -> None:
    assert Figures([]).samples == []


def test_a_run_that_goes_well() -> None:
    figures = Figures(first_start(), now=23.0)
    assert figures.state("holdfast_job_state") == "running"
    assert figures.state("holdfast_node_state") == "running"
    assert figures.value("holdfast_job_nodes") == 4
    assert figures.value("holdfast_node_rank") == 2
    assert figures.value("holdfast_generation") == 0
    assert figures.value("holdfast_workers", state="running") == 2
    assert figures.value("holdfast_worker_up", rank="5", local_rank="1") == 1
    assert figures.value("holdfast_restarts_remaining") == 3
    assert figures.value("holdfast_restarts_total", reason="worker_failed") == 0
    assert figures.value("holdfast_rendezvous_seconds_sum") == 2.0
    assert figures.value("holdfast_elapsed_seconds_total") == 13.0
    assert figures.value("holdfast_running_seconds_total") == 10.0
    assert figures.value("holdfast_goodput_ratio") == pytest.approx(10 / 13)
    [info] = [one for one in figures.samples if one.name == "holdfast_job_info"]
    assert info.labels == {
        "run_id": "job-1",
        "role": "trainer",
        "backend": "c10d",
        "entry_point": "train.py",
    }


def test_a_failure_and_what_comes_of_it() -> None:
    broken = [*first_start(), *failure(20.0)]
    figures = Figures(broken[:5], now=30.0)
    assert figures.state("holdfast_job_state") == "recovering"
    assert figures.value("holdfast_workers", state="failed") == 1
    assert figures.value("holdfast_worker_up", rank="5") == 0
    assert figures.value("holdfast_worker_exits_total", outcome="failed") == 1
    assert figures.value("holdfast_running_seconds_total") == 7.0
    figures = Figures(broken, now=30.0)
    assert figures.state("holdfast_node_state") == "joining"
    assert figures.value("holdfast_workers", state="terminated") == 1


def test_what_ends_because_it_is_stopped_did_not_fail() -> None:
    told = [*first_start(), *failure(20.0)]
    told.insert(-1, exited(21.0, 0, failed=True))
    figures = Figures(told, now=30.0)
    assert figures.value("holdfast_workers", state="failed") == 1
    assert figures.value("holdfast_workers", state="terminated") == 1
    assert figures.value("holdfast_worker_exits_total", outcome="failed") == 1


def test_a_recovery() -> None:
    figures = Figures([*first_start(), *failure(20.0), *restart(22.5)], now=40.5)
    assert figures.state("holdfast_job_state") == "running"
    assert figures.value("holdfast_generation") == 1
    assert figures.value("holdfast_restarts_total", reason="worker_failed") == 1
    assert figures.value("holdfast_recovery_seconds_sum", stage="regroup") == 5.0
    assert figures.value("holdfast_recovery_seconds_bucket", stage="stop", le="1") == 0
    assert figures.value("holdfast_recovery_seconds_bucket", stage="stop", le="3") == 1
    assert figures.value("holdfast_outage_seconds_sum") == 15.5
    assert figures.value("holdfast_running_seconds_total") == 12.0
    assert figures.value("holdfast_recovery_seconds_count", stage="first_line") == 0
    figures.metrics(spoke(36.0))
    text = render(figures.metrics.collect()).decode()
    assert 'holdfast_recovery_seconds_sum{run_id="job-1",stage="first_line"} 0.5\n' in text


def test_success_and_the_clocks_stand_still() -> None:
    figures = Figures([*first_start(), *success(20.0, 3)], now=99.0)
    assert figures.state("holdfast_job_state") == "succeeded"
    assert figures.state("holdfast_node_state") == "ended"
    assert figures.value("holdfast_workers", state="succeeded") == 2
    assert figures.value("holdfast_elapsed_seconds_total") == 11.0
    # While it waits for the workers of other nodes, the job is running.
    assert figures.value("holdfast_running_seconds_total") == 8.0


def test_a_node_that_is_done_waits_for_the_others() -> None:
    figures = Figures([*first_start(), *success(20.0, 3)[:-1]])
    assert figures.state("holdfast_node_state") == "leaving"
    assert figures.state("holdfast_job_state") == "running"


@pytest.mark.parametrize("last", [ended(30.0, "failed", 0), ended(30.0, "", 2, error="SIGTERM")])
def test_an_end_that_is_no_success(last: lifecycle.LifecycleEvent) -> None:
    figures = Figures([*first_start(), last])
    assert figures.state("holdfast_job_state") == "failed"


def test_a_signal_stops_the_clock() -> None:
    stopping = lifecycle.GenerationStopping(20.0, 0, StopReason.SIGNAL)
    figures = Figures([*first_start(), stopping], now=30.0)
    assert figures.state("holdfast_node_state") == "stopping"
    assert figures.value("holdfast_running_seconds_total") == 7.0
    assert figures.value("holdfast_elapsed_seconds_total") == 20.0


def test_a_clock_that_was_looked_at_never_goes_back() -> None:
    """What has just ended may have been counted already, by a look that came in between."""
    now = [30.0]
    metrics = JobMetrics(clock=lambda: now[0])
    for moment in first_start():
        metrics(moment)
    before = render(metrics.collect()).decode()
    for moment in (exited(29.0, 0, failed=True), ended(29.5, "failed", 0)):
        metrics(moment)
    after = render(metrics.collect()).decode()
    for name, value in (("running", 17), ("elapsed", 20)):
        line = f'holdfast_{name}_seconds_total{{run_id="job-1"}} {value}\n'
        assert line in before
        assert line in after


def test_a_rendezvous_that_fails_is_counted() -> None:
    figures = Figures([began(), met(12.0, 2.0, error="timed out")])
    assert figures.value("holdfast_rendezvous_failures_total") == 1
    assert figures.value("holdfast_rendezvous_seconds_count") == 0


def test_timers_that_expire_are_counted() -> None:
    told = [
        lifecycle.WatchdogEvent(20.0, 1020.0, what)
        for what in ("watchdog started", "timer expired")
    ]
    assert Figures([*first_start(), *told]).value("holdfast_timers_expired_total") == 1


def test_what_workers_say_of_themselves() -> None:
    figures = Figures(
        first_start(),
        progress=lambda: [(4, 120, 0.25, "checkpoint"), (5, None, None, None)],
    )
    assert figures.value("holdfast_worker_step", rank="4") == 120
    assert figures.value("holdfast_worker_heartbeat_age_seconds", rank="4") == 0.25
    assert figures.value("holdfast_worker_section", section="checkpoint") == 1
    assert not [one for one in figures.samples if "step" in one.name and one.labels["rank"] == "5"]


def test_progress_that_cannot_be_had_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def gone() -> list[Any]:
        raise OSError("no such page")

    figures = Figures(first_start(), progress=gone)
    figures.metrics.collect()
    assert caplog.messages == ["the workers' progress: OSError: no such page"]
    assert figures.state("holdfast_job_state") == "running"


def test_every_family_is_declared_and_can_be_seen() -> None:
    figures = Figures(
        [*first_start(), exited(20.0, 0, failed=False)], progress=lambda: [(4, 1, 0.5, "a")]
    )
    seen = {
        f"{one.name}_total" if one.type == "counter" else one.name: (one.type, one.documentation)
        for one in figures.families
    }
    assert seen == FAMILIES


def test_the_table_for_people_is_complete_and_true() -> None:
    page = (ROOT / "docs" / "guides" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(holdfast_\w+)` \| (\w+) \|([^|]*)\|([^|]*)\|$", page, re.MULTILINE)
    figures = Figures(first_start(), progress=lambda: [(4, 1, 0.5, "a")])
    labels: dict[str, set[str]] = {}
    for family in figures.families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels[name] = {one for sample in family.samples for one in sample.labels} - {
            "run_id",
            "le",
        }
    assert {name: kind for name, kind, _, _ in rows} == {
        name: kind for name, (kind, _) in FAMILIES.items()
    }
    assert {name: {*re.findall(r"`(\w+)`", told)} for name, _, told, _ in rows} == labels


class Entered:
    """A lock that counts how often it is taken."""

    def __init__(self) -> None:
        self.times = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        self.times += 1

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_moments_may_come_while_figures_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = JobMetrics(lambda: [(4, entered.times, None, None)])
    entered = Entered()
    monkeypatch.setattr(metrics, "_lock", entered)
    metrics(began())
    metrics(spoke(1.0))
    figures = metrics.collect()
    assert entered.times == 3

    def meanwhile() -> list[Any]:
        metrics(spoke(2.0))
        return []

    # What workers say is asked for outside the lock, since it is somebody else's code.
    monkeypatch.setattr(metrics, "_progress", meanwhile)
    metrics.collect()
    assert entered.times == 5
    assert len(figures) == len(FAMILIES)
