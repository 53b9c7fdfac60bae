"""The metrics and events of a job's nodes while nodes join, fail and leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from observed_jobs import events_of, fetch, summary_of, until
from real_teams import Cluster

if TYPE_CHECKING:
    from pathlib import Path

    from real_teams import Agent

# Each worker prints why its generation was started, before it reports its start to the test.
KNOWING = """
from holdfast import worker
own = worker.info()
print(f"{own.generation}: {own.previous_world_size} {own.last_end!r}", flush=True)
started()
obey()
"""
AT_PORT = "metrics: http://127.0.0.1:"


def restarts(agent: Agent) -> dict[str, float]:
    """Return the restarts of an agent by reason, without reasons that did not occur."""
    port = int(agent.output().partition(AT_PORT)[2].partition("/")[0])
    [family] = [
        one
        for one in text_string_to_metric_families(fetch(port, "/metrics")[1])
        if one.name == "holdfast_restarts"
    ]
    return {one.labels["reason"]: one.value for one in family.samples if one.value}


def await_restarts(agent: Agent, **wanted: int) -> None:
    until(lambda: restarts(agent) == wanted or None)


def test_each_reason_for_a_new_generation_is_reported(tmp_path: Path) -> None:
    flags = ("--max-restarts=1", "--metrics-port=0", "--log-dir=logs")
    with Cluster(tmp_path, KNOWING, *flags, nnodes="1:2") as team:
        first = team.start_host("a")
        team.generation(1)
        team.start("b")
        workers = team.generation(2)
        await_restarts(first, nodes_waiting=1)
        workers["b"].fail()
        team.generation(2)
        await_restarts(first, nodes_waiting=1, worker_failed=1)
        await_restarts(team.agents["b"], worker_failed=1)
        team.agents["b"].kill()
        team.generation(1)["a"].finish()
        code, output = first.end()
    assert code == 0
    assert "0: None ''\n" in output
    assert "\n1: 1 '" in output
    assert " joined'\n" in output
    [failed] = [line for line in output.splitlines() if line.startswith("2: ")]
    assert failed.startswith("2: 2 'rank 1 (pid ")
    assert " failed: exit code 1" in failed  # And usually the exception, if it arrived in time.
    assert "\n3: 2 '" in output
    assert " was lost: " in output
    [logs] = (path for path in (tmp_path / "logs").iterdir() if "SUCCEEDED" in texts(path))
    events = [summary_of(one) for one in events_of(logs)]
    assert [event.restarts for event in events if event.name == "START"] == [0, 0, 1, 1]
    assert [event.name for event in events[-2:]] == ["SUCCEEDED", "SUCCEEDED"]


def texts(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("events-*.jsonl"))
