"""The events that observers of a real agent receive, and the records of an agent without a launcher."""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from event_fakes import RecordingHandler
from holdfast.agent.spec import WorkerSpec
from holdfast.elastic import events, metrics
from holdfast.elastic._impl.agents import LocalElasticAgent
from holdfast.errors import UsageError
from holdfast.launcher import LaunchConfig, elastic_launch
from holdfast.observe.lifecycle import (
    GenerationStarted,
    GenerationStopped,
    GenerationStopping,
    LifecycleEvent,
    RanksAssigned,
    RendezvousEnded,
    RunEnded,
    RunStarted,
    WorkerEnded,
    WorkersFailed,
    WorkersObserved,
)
from holdfast.processes.logs.specs import DefaultLogsSpecs
from holdfast.processes.signals import SignalException
from holdfast.rendezvous.handler_registry import get_rendezvous_handler
from holdfast.rendezvous.rdzv_conf import RendezvousParameters
from holdfast.rendezvous.rendezvous_errors import RendezvousTimeoutError
from holdfast.rendezvous.worker_store import SingleNodeHandler

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FAILS_ONCE = "import os, sys; sys.exit(int(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0') * 3)"
PREFIX = "torchelastic.worker.status."
STATES = [
    "RENDEZVOUS", "ASSIGN_WORKER_RANKS", "START", "START", "SUCCEEDED", "SUCCEEDED", "SUCCEEDED",
]  # fmt: skip


@pytest.fixture
def rendezvous() -> Iterator[SingleNodeHandler]:
    handler = SingleNodeHandler("job-1")
    yield handler
    handler.shutdown()


def agent_of(rendezvous: Any, folder: Path, script: str = "pass", **how: Any) -> LocalElasticAgent:
    given = {"entrypoint": sys.executable, "args": ("-c", script), "local_world_size": 2, **how}
    spec = WorkerSpec("trainer", rdzv_handler=rendezvous, **given)
    return LocalElasticAgent(spec, DefaultLogsSpecs(str(folder)))


def observed(agent: LocalElasticAgent) -> list[Any]:
    received: list[LifecycleEvent] = []
    agent.observers.add(received.append)
    return received


def kinds(received: list[Any]) -> list[type]:
    return [type(one) for one in received]


def test_run_with_a_restart_is_reported(rendezvous: SingleNodeHandler, tmp_path: Path) -> None:
    agent = agent_of(rendezvous, tmp_path, FAILS_ONCE, max_restarts=1, local_world_size=1)
    received = observed(agent)
    agent.run()
    start = [RendezvousEnded, RanksAssigned, GenerationStarted, WorkersObserved]
    stop = [WorkerEnded, GenerationStopping, GenerationStopped]
    # The reason of a failure is collected after the next generation has started.
    again = [*start, WorkersFailed]
    assert kinds(received) == [RunStarted, *start, *stop, *again, *stop, RunEnded]
    run, rendezvoused, _, first = received[:4]
    assert (run.run_id, run.role, run.local_world_size) == ("job-1", "trainer", 1)
    assert (rendezvoused.group_rank, rendezvoused.group_world_size, rendezvoused.error) == (
        0,
        1,
        "",
    )
    assert received[5].failed
    assert received[5].worker == first.workers[0]
    again, end = received[10], received[-1]
    assert (again.generation, again.restart_count) == (1, 1)
    assert (end.state, end.error) == ("succeeded", "")
    assert [(one.state, one.exit_code) for one in end.outcomes] == [("succeeded", 0)]
    times = [one.at for one in received]
    assert times == sorted(times)


def test_run_ended_by_a_signal_or_the_rendezvous_has_an_error(
    rendezvous: SingleNodeHandler, tmp_path: Path
) -> None:
    agent = agent_of(rendezvous, tmp_path, "import signal; signal.pause()")
    received = observed(agent)
    agent.observers.add(
        lambda event: (
            signal.raise_signal(signal.SIGTERM) if isinstance(event, GenerationStarted) else None
        )
    )
    with pytest.raises(SignalException):
        agent.run()
    assert (received[-1].state, "SignalException" in received[-1].error) == ("", True)
    params = RendezvousParameters("c10d", "127.0.0.1:0", "job", 2, 2, join_timeout=0.2)
    handler = get_rendezvous_handler(params)
    agent = agent_of(handler, tmp_path)
    received = observed(agent)
    with pytest.raises(RendezvousTimeoutError):
        agent.run()
    handler.shutdown()
    assert kinds(received) == [RunStarted, RendezvousEnded, RunEnded]
    assert "RendezvousTimeoutError" in received[1].error


def states_of(handler: RecordingHandler) -> list[str]:
    return [event.name.removeprefix(PREFIX) for event in handler.received]


class KeptMetrics(metrics.MetricHandler):
    def __init__(self) -> None:
        self.names: list[str] = []

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.names.append(metric_data.name)


def test_each_run_is_recorded_for_the_configured_handlers_once(
    rendezvous: SingleNodeHandler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, kept_metrics = RecordingHandler(), KeptMetrics()
    events.configure(kept)
    metrics.configure(kept_metrics)
    agent = agent_of(rendezvous, tmp_path)
    for runs in (1, 2):
        agent.run()
        assert (states_of(kept), kept.calls) == (STATES * runs, ["flush"] * runs)
        assert kept_metrics.names.count("SimpleElasticAgent.run.success") == runs
    config = LaunchConfig(1, 1, 2, logs_specs=DefaultLogsSpecs(str(tmp_path)), rdzv_backend="c10d")
    elastic_launch(config, sys.executable)("-c", "pass")
    assert (states_of(kept), kept.calls) == (STATES * 3, ["flush"] * 3)
    assert kept_metrics.names.count("SimpleElasticAgent.run.success") == 3
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    agent_of(rendezvous, tmp_path).run()
    assert states_of(kept)[-1] == "watchdog stopped"


def test_spec_selects_the_destination(rendezvous: SingleNodeHandler, tmp_path: Path) -> None:
    agent = agent_of(rendezvous, tmp_path, event_log_handler="nowhere")
    for _ in range(2):
        with pytest.raises(UsageError, match="'nowhere'"):
            agent.run()
    assert [*tmp_path.iterdir()] == []
    agent_of(rendezvous, tmp_path, event_log_handler="jsonl").run()
    (written,) = tmp_path.glob("*/events-*.jsonl")
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    assert [line["name"].removeprefix(PREFIX) for line in lines] == STATES
