"""An agent that a program made by hand records for the handlers which that program configured."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from holdfast.agent.local_agent import LocalElasticAgent
from holdfast.agent.spec import WorkerSpec
from holdfast.elastic import events, metrics
from holdfast.errors import UsageError
from holdfast.launcher import LaunchConfig, elastic_launch
from holdfast.processes.logs.specs import DefaultLogsSpecs
from holdfast.rendezvous.single_node import SingleNodeHandler

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PREFIX = "torchelastic.worker.status."
STATES = [
    "RENDEZVOUS", "ASSIGN_WORKER_RANKS", "START", "START", "SUCCEEDED", "SUCCEEDED", "SUCCEEDED",
]  # fmt: skip


class Kept(events.EventHandler):
    def __init__(self) -> None:
        self.names: list[str] = []
        self.flushes = 0

    def record(self, event: events.Event) -> None:
        self.names.append(event.name.removeprefix(PREFIX))

    def flush(self) -> None:
        self.flushes += 1


class KeptMetrics(metrics.MetricHandler):
    def __init__(self) -> None:
        self.names: list[str] = []

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.names.append(metric_data.name)


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    events.configure(handler)
    yield handler
    events.configure(events.NullEventHandler())


@pytest.fixture
def kept_metrics() -> Iterator[KeptMetrics]:
    handler = KeptMetrics()
    metrics.configure(handler)
    yield handler
    metrics.configure(metrics.NullMetricHandler())


@pytest.fixture
def rendezvous() -> Iterator[SingleNodeHandler]:
    handler = SingleNodeHandler("job-1")
    yield handler
    handler.shutdown()


def agent_of(
    rendezvous: SingleNodeHandler, folder: Path, event_log_handler: str = "null"
) -> LocalElasticAgent:
    spec = WorkerSpec(
        "trainer", 2, rendezvous, entrypoint="true", event_log_handler=event_log_handler
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(str(folder)))


def test_events_of_each_run_are_there_when_it_has_ended(
    kept: Kept, rendezvous: SingleNodeHandler, tmp_path: Path
) -> None:
    agent = agent_of(rendezvous, tmp_path)
    agent.run()
    assert (kept.names, kept.flushes) == (STATES, 1)
    agent.run()
    assert (kept.names, kept.flushes) == (STATES * 2, 2)


def test_the_end_of_the_watchdog_is_recorded(
    kept: Kept,
    rendezvous: SingleNodeHandler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    agent_of(rendezvous, tmp_path).run()
    assert "watchdog started" in kept.names
    assert kept.names[-1] == "watchdog stopped"


def test_metrics_of_a_run_are_emitted(
    kept_metrics: KeptMetrics, rendezvous: SingleNodeHandler, tmp_path: Path
) -> None:
    agent_of(rendezvous, tmp_path).run()
    assert kept_metrics.names.count("SimpleElasticAgent.run.success") == 1
    assert "workers.trainer.run_success_no_retries" in kept_metrics.names


def test_json_lines_go_to_the_agents_log_directory(
    rendezvous: SingleNodeHandler, tmp_path: Path
) -> None:
    agent_of(rendezvous, tmp_path, "jsonl").run()
    (written,) = tmp_path.glob("*/events-*.jsonl")
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    assert [line["name"].removeprefix(PREFIX) for line in lines] == STATES


def test_a_destination_that_is_unknown_ends_it_before_anything_starts(
    rendezvous: SingleNodeHandler, tmp_path: Path
) -> None:
    agent = agent_of(rendezvous, tmp_path, "nowhere")
    for _ in range(2):
        with pytest.raises(UsageError, match="'nowhere' is unknown"):
            agent.run()
    assert [*tmp_path.iterdir()] == []


def test_at_a_launch_everything_is_recorded_once(
    kept: Kept, kept_metrics: KeptMetrics, tmp_path: Path
) -> None:
    config = LaunchConfig(1, 1, 2, logs_specs=DefaultLogsSpecs(str(tmp_path)), rdzv_backend="c10d")
    elastic_launch(config, sys.executable)("-c", "pass")
    assert (kept.names, kept.flushes) == (STATES, 1)
    assert kept_metrics.names.count("SimpleElasticAgent.run.success") == 1
