"""`holdfast run --dashboard`: a child process of the agent that exits with it and never affects the job."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from http.client import HTTPConnection
from typing import TYPE_CHECKING

from dashboards import Browser
from real_jobs import PATIENCE_S, Job, Watched, children
from real_teams import FOREVER, Cluster

if TYPE_CHECKING:
    from pathlib import Path

WAITS = """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    send("begun")
    signal.sigwait([signal.SIGUSR1])
"""


def test_dashboard_ends_with_its_agent(tmp_path: Path) -> None:
    with Job(tmp_path, WAITS, "--dashboard", "0") as job:
        worker = job.messages.take(1)["begun"]
        port = port_of(job)
        keeper, dashboard = sorted(children(job.agent.pid))
        connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        connection.request("GET", "/login")
        with connection.getresponse() as answer:
            assert answer.status == 200
        connection.close()
        below = Watched(keeper, dashboard, worker)
        job.signal(signal.SIGKILL)
        below.wait_until_exited()


def test_page_receives_the_end_of_the_job_before_the_dashboard_exits(tmp_path: Path) -> None:
    with Job(tmp_path, WAITS + "    sys.exit(3)\n", "--dashboard", "0") as job:
        worker = job.messages.take(1)["begun"]
        page = Browser(line_with(job, "dashboard: "))
        page.log_in()
        feed = page.stream("/feed")
        while b'"running":1' not in feed.readline():
            pass
        os.kill(worker, signal.SIGUSR1)
        jobs = [update["job"] for line in feed if "job" in (update := json.loads(line))]
        end = jobs[-1]["end"]
        assert (end["outcome"], end["why"]) == ("failed", "rank 0 failed: exit code 3")
        assert job.end()[0] == 3
        feed.close()


def test_job_survives_a_killed_dashboard(tmp_path: Path) -> None:
    with Job(tmp_path, WAITS, "--dashboard", "0") as job:
        worker = job.messages.take(1)["begun"]
        port_of(job)
        _, dashboard = sorted(children(job.agent.pid))
        os.kill(dashboard, signal.SIGKILL)
        os.kill(worker, signal.SIGUSR1)
        assert job.end()[0] == 0


def test_job_survives_a_dashboard_that_cannot_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Job(tmp_path, WAITS, "--dashboard", str(port)) as job:
            worker = job.messages.take(1)["begun"]
            output = line_with(job, "error")
            assert str(port) in output
            os.kill(worker, signal.SIGUSR1)
            assert job.end()[0] == 0


def test_first_node_serves_the_dashboard(tmp_path: Path) -> None:
    with Cluster(tmp_path, FOREVER, "--dashboard", "0", nnodes="2:3") as cluster:
        cluster.start_coordinator("coordinator")
        cluster.start_all("a", "b", "c")
        first, *others = cluster.ranks(3)
        cluster.agents[first.agent].wait_for_output("dashboard: ")
        cluster.agents[first.agent].kill()
        first, other = cluster.ranks(2)
        assert first.agent in {start.agent for start in others}
        cluster.agents[first.agent].wait_for_output("dashboard: ")
        assert "dashboard: " not in cluster.agents[other.agent].output()


def port_of(job: Job) -> int:
    """Wait until the dashboard listens; return its port."""
    found = re.search(r"http://127.0.0.1:(\d+)/", line_with(job, "dashboard: "))
    assert found
    return int(found[1])


def line_with(job: Job, text: str) -> str:
    assert job.agent.stderr is not None
    for line in job.agent.stderr:
        if text in line:
            return str(line)
    raise AssertionError(f"{text!r} was never printed")
