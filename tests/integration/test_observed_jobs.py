"""The events and metrics of real jobs, the information of workers, and idle agents."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from observed_jobs import ObservedJob, events_of, fetch, summary_of, until
from real_jobs import children

if TYPE_CHECKING:
    from collections.abc import Mapping

    Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

KINDS = {
    "run_id": str,
    "global_rank": int,
    "group_rank": int,
    "worker_id": str,
    "role": str,
    "hostname": str,
    "state": str,
    "total_run_time": int,
    "rdzv_backend": str,
    "raw_error": str,
    "metadata": str,
    "agent_restarts": int,
    "duration_ms": float,
}


def run(
    folder: Path, script: str, *flags: str, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a job to its end, and check that it left no temporary file."""
    with ObservedJob(folder, script, *flags, env=env) as job:
        end = job.ends()
        assert job.left_behind() == []
    return end


# Events.


def test_job_writes_its_events_to_its_log_directory(tmp_path: Path) -> None:
    script = "if RANK == '1' and GENERATION == '0': sys.exit(3)\n"
    flags = ("--rdzv-backend=c10d", "--rdzv-id=nightly", "--log-dir=logs", "--max-restarts=1")
    code, _ = run(tmp_path, script, "--nproc-per-node=2", *flags)
    assert code == 0
    events = events_of(tmp_path / "logs")
    assert [summary_of(one) for one in events] == [
        ("RENDEZVOUS", "AGENT", None, 0),
        ("ASSIGN_WORKER_RANKS", "AGENT", None, 0),
        ("START", "WORKER", 0, 0),
        ("START", "WORKER", 1, 0),
        ("RENDEZVOUS", "AGENT", None, 1),
        ("ASSIGN_WORKER_RANKS", "AGENT", None, 1),
        ("START", "WORKER", 0, 1),
        ("START", "WORKER", 1, 1),
        ("SUCCEEDED", "WORKER", 0, 1),
        ("SUCCEEDED", "WORKER", 1, 1),
        ("SUCCEEDED", "AGENT", None, 1),
    ]
    for event in events:
        for key, value in event["metadata"].items():
            assert value is None or type(value) is KINDS[key], (key, value)
        assert event["metadata"]["run_id"] == "nightly"
        inner = json.loads(event["metadata"]["metadata"])
        assert inner["group_world_size"] == 1
        assert event["source"] == "AGENT" or inner["worker_pid"] == int(
            event["metadata"]["worker_id"]
        )
    times = [event["timestamp"] for event in events]
    assert times == sorted(times)
    assert times[0] > 0


def test_job_without_a_log_directory_leaves_no_files(tmp_path: Path) -> None:
    assert run(tmp_path, "pass\n") == (0, "")


def test_events_can_be_printed_to_the_console(tmp_path: Path) -> None:
    code, output = run(tmp_path, "pass\n", "--event-log-handler=console")
    assert code == 0
    names = [summary_of(json.loads(line)).name for line in output.splitlines()]
    assert names == ["RENDEZVOUS", "ASSIGN_WORKER_RANKS", "START", "SUCCEEDED", "SUCCEEDED"]


def test_unknown_event_destination_is_refused(tmp_path: Path) -> None:
    with ObservedJob(tmp_path, "send('up')", "--event-log-handler=pigeon") as job:
        code, output = job.ends()
        assert job.messages.is_quiet()
        assert job.left_behind() == []
    assert code == 2
    [line] = output.splitlines()
    assert line.startswith("holdfast run: error: ")
    assert "'pigeon' is unknown; accepted: console, " in line


# Metrics.

STEPPING = """
from holdfast import worker
worker.heartbeat()
worker.progress(7 + int(RANK))
with worker.section("validation", timeout=1000):
    send(f"up{RANK}")
    obey()
"""


def scraped(port: int) -> Samples:
    """Return the metrics as parsed by Prometheus's client, by name and labels without the run."""
    status, text = fetch(port, "/metrics")
    assert status == 200
    return {
        (
            one.name,
            frozenset((key, value) for key, value in one.labels.items() if key != "run_id"),
        ): (one.value)
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"holdfast_{name}", frozenset(labels.items())]


def test_metrics_count_a_restart(tmp_path: Path) -> None:
    flags = ("--metrics-port=0", "--nproc-per-node=2", "--max-restarts=2")
    with ObservedJob(tmp_path, STEPPING, *flags) as job:
        port = int(job.prints("metrics: http://127.0.0.1:").removesuffix("/metrics"))
        before = job.messages.take(2)
        os.kill(before["up0"], signal.SIGKILL)
        after = job.messages.take(2)

        def started() -> Samples | None:
            samples = scraped(port)
            return samples if value(samples, "generation") == 1 else None

        now = until(started)
        assert value(now, "job_state", state="running") == 1
        assert value(now, "node_state", state="running") == 1
        assert value(now, "node_state", state="joining") == 0
        assert value(now, "workers", state="running") == 2
        assert value(now, "restarts_total", reason="worker_failed") == 1
        assert value(now, "restarts_remaining") == 1
        assert 0 < value(now, "goodput_ratio") < 1
        assert value(now, "outage_seconds_count") == 1
        for rank in ("0", "1"):
            assert value(now, "worker_up", rank=rank, local_rank=rank) == 1
            assert value(now, "worker_step", rank=rank) == 7 + int(rank)
            assert value(now, "worker_section", rank=rank, section="validation") == 1
            assert value(now, "worker_heartbeat_age_seconds", rank=rank) >= 0
        for pid in after.values():
            os.kill(pid, signal.SIGUSR1)
        assert job.ends()[0] == 0
        assert job.left_behind() == []
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


@pytest.mark.parametrize("what", ["--metrics-port", "TORCHELASTIC_HEALTH_CHECK_PORT"])
def test_busy_port_ends_the_command_before_workers_start(tmp_path: Path, what: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = [f"--metrics-port={port}"] if what == "--metrics-port" else []
        env = {} if flags else {what: str(port)}
        with ObservedJob(tmp_path, "send('up')", *flags, env=env) as job:
            code, output = job.ends()
            assert job.messages.is_quiet()
            assert job.left_behind() == []
    assert code == 78
    [line] = output.splitlines()
    assert line.startswith(f"holdfast run: error: {what}: cannot listen on ")
    assert f"port {port}: Address already in use (" in line


# The information of a worker.


def test_worker_knows_the_outcome_of_the_previous_generation(tmp_path: Path) -> None:
    script = """
from holdfast import worker
own = worker.info()
values = (own.rank, own.generation, own.restart_count, own.previous_world_size, repr(own.last_end))
sys.stdout.write(" ".join(map(str, values)) + "\\n")  # One write per line, since two workers share it.
sys.exit(GENERATION == "0" and RANK == "1")
"""
    with ObservedJob(tmp_path, script, "--nproc-per-node=2", "--max-restarts=1") as job:
        code, out, _ = job.end()
    assert code == 0
    lines = sorted(out.splitlines())
    assert "1 0 0 None ''" in lines  # Rank 0 may have been stopped before it printed its line.
    later = [line for line in lines if line.split()[1] == "1"]
    assert later == ["0 1 1 2 'a worker failed'", "1 1 1 2 'a worker failed'"]


# Idle agents.

TICKING = """
from holdfast import worker
step = 0
while not os.path.exists("enough"):
    step += 1
    with worker.section("step", timeout=1000):
        worker.progress(step)
        send("tick")
        time.sleep(0.2)
"""
WINDOWS_MAX = 50
EVERYTHING = {"TORCHELASTIC_HEALTH_CHECK_PORT": "0", "TORCHELASTIC_ENABLE_FILE_TIMER": "1"}


@pytest.mark.parametrize("what", ["defaults", "everything"])
def test_agent_sleeps_while_its_workers_run(tmp_path: Path, what: str) -> None:
    """Between two ticks of a worker neither a thread of the agent nor its keeper runs.

    A tick takes longer than any polling interval that they could have.
    """
    everything = what == "everything"
    flags = ["--metrics-port=0"] if everything else []
    with ObservedJob(tmp_path, TICKING, *flags, env=EVERYTHING if everything else {}) as job:
        before = -1
        for _ in range(WINDOWS_MAX):
            job.messages.next()
            now = switches(job.agent.pid) + sum(map(switches, children(job.agent.pid)))
            if now == before:
                break
            before = now
        else:
            pytest.fail("the agent was never idle")
        (tmp_path / "enough").touch()
        assert job.ends()[0] == 0


def switches(pid: int) -> int:
    """Return the number of context switches of a process's threads."""
    return sum(
        int(line.split()[1])
        for status in Path(f"/proc/{pid}/task").glob("*/status")
        for line in status.read_text().splitlines()
        if "ctxt_switches" in line
    )
