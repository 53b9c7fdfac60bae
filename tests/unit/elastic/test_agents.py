"""Events that a user's agent creates itself, as TorchElastic's agents do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from event_fakes import RecordingHandler
from holdfast import observe
from holdfast.agent.spec import WorkerSpec
from holdfast.elastic import events
from holdfast.elastic._impl.agents import LocalElasticAgent
from holdfast.processes.logs.specs import DefaultLogsSpecs
from holdfast.rendezvous.worker_store import SingleNodeHandler

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PREFIX = "torchelastic.worker.status."


class Measuring(LocalElasticAgent):
    """Records the duration of the workers' start, which can be made to fail."""

    is_failing = False

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        with self.record_duration("MY_START"):
            if self.is_failing:
                raise OSError("cannot start")
            return super()._start_workers(worker_group)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Measuring]:
    handler = SingleNodeHandler("job-1")
    spec = WorkerSpec("trainer", 1, handler, entrypoint="true", event_log_handler="jsonl")
    yield Measuring(spec, DefaultLogsSpecs(str(tmp_path)))
    handler.shutdown()


def test_recorded_duration_is_among_the_events_of_the_run(agent: Measuring, tmp_path: Path) -> None:
    agent.run()
    (written,) = tmp_path.glob("*/events-*.jsonl")
    found = [events.Event.deserialize(line) for line in written.read_text().splitlines()]
    states = [one.name.removeprefix(PREFIX) for one in found]
    assert states[:4] == ["RENDEZVOUS", "ASSIGN_WORKER_RANKS", "MY_START", "START"]
    step = found[2]
    assert (step.source, step.metadata["run_id"]) == (events.EventSource.AGENT, "job-1")
    assert step.metadata["group_rank"] == 0
    duration = step.metadata["duration_ms"]
    assert isinstance(duration, float)
    assert duration > 0


def test_duration_of_a_failing_step_is_recorded(agent: Measuring, tmp_path: Path) -> None:
    agent.is_failing = True
    handler = RecordingHandler()
    events.configure(handler)
    try:
        with pytest.raises(OSError, match="cannot start"):
            agent.run()
    finally:
        observe.configured.pop("null").close(5.0)
    assert [one.name.removeprefix(PREFIX) for one in handler.received[2:]] == ["MY_START", "FAILED"]


def test_success_and_failure_events_can_be_constructed(agent: Measuring) -> None:
    good = agent.get_event_succeeded()
    assert (good.name, good.source) == (f"{PREFIX}SUCCEEDED", events.EventSource.AGENT)
    assert good.metadata["raw_error"] is None
    inner = good.metadata["metadata"]
    assert isinstance(inner, str)
    assert json.loads(inner) == {"group_world_size": None, "entry_point": "true"}
    try:
        raise ValueError("the reason")
    except ValueError:
        bad = agent.get_event_failed()
    assert bad.metadata["state"] == "FAILED"
    assert "ValueError: the reason" in str(bad.metadata["raw_error"])


def test_duration_outside_of_a_run_uses_the_specs_handler(
    agent: Measuring, capsys: pytest.CaptureFixture[str]
) -> None:
    agent.get_worker_group().spec.event_log_handler = "console"
    with agent.record_duration("BEFORE"):
        pass
    assert f'"name": "{PREFIX}BEFORE"' in capsys.readouterr().err
