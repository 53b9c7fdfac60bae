"""Clients that watch a job learn how it ended from the job itself, on any backend."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from dashboards import await_agents
from holdfast.control.discovery import JobChoice, connect
from holdfast.control.job_feed import JobFeed
from holdfast.control.live_job import LiveJob
from in_loop import in_loop
from real_jobs import HOLDFAST, PATIENCE_S, Job
from real_teams import OBEY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from etcd_teams import MakeTeam

WAITS = """
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(3))
    send("waits")
    forever()
"""


@contextmanager
def watching(*flags: str) -> Iterator[subprocess.Popen[str]]:
    """Run `status --watch`, and wait until it has shown the job."""
    command = [*HOLDFAST, "status", "--watch", "--json", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        try:
            assert watch.stdout is not None
            assert json.loads(watch.stdout.readline())["outcome"] == ""
            yield watch
        finally:
            watch.kill()


def last_shown(watch: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait until the command ends by itself; return the last state that it showed."""
    out, _ = watch.communicate(timeout=PATIENCE_S)
    assert watch.returncode == 0
    shown: dict[str, Any] = json.loads(out.splitlines()[-1])
    return shown


@pytest.mark.parametrize(
    ("order", "outcome", "why"),
    [
        (signal.SIGUSR1, "succeeded", "all workers succeeded"),
        (signal.SIGUSR2, "failed", "rank 0 failed: exit code 3"),
        (signal.SIGTERM, "stopped", "agent {pid} received SIGTERM (termination request)"),
    ],
)
def test_watch_of_one_node_ends_with_its_outcome(
    order: signal.Signals, outcome: str, why: str, tmp_path: Path
) -> None:
    with Job(tmp_path, WAITS) as job:
        worker = job.messages.take(1)["waits"]
        about = await_agents(job.agent.pid)
        with watching(about) as watch:
            if order is signal.SIGTERM:
                job.signal(order)
            else:
                subprocess.run(["kill", f"-{order.value}", str(worker)], check=True)
            end = last_shown(watch)
        job.end()
    assert (end["outcome"], end["why"]) == (outcome, why.format(pid=job.agent.pid))


@in_loop
async def test_signals_to_all_agents_end_every_view(tmp_path: Path, team: MakeTeam) -> None:
    run_id = f"ended-{team.backend}"
    with team(tmp_path, OBEY, nnodes="2", run_id=run_id) as cluster:
        cluster.start_all("a", "b")
        await asyncio.to_thread(cluster.generation, 2)
        await asyncio.to_thread(await_agents, *(one.pid for one in cluster.agents.values()))
        job, changed = LiveJob(), asyncio.Event()
        feed = JobFeed(lambda: connect(JobChoice(run_id=run_id)), job, changed.set)
        with watching(run_id) as watch:
            async with asyncio.TaskGroup() as tasks, asyncio.timeout(PATIENCE_S):
                feeding = tasks.create_task(feed.run())
                while job.header.running < 2:
                    await changed.wait()
                    changed.clear()
                for agent in cluster.agents.values():
                    agent.signal(signal.SIGTERM)
                while job.end is None:
                    await changed.wait()
                    changed.clear()
                feeding.cancel()
            end = await asyncio.to_thread(last_shown, watch)
        assert {code for code, _ in cluster.end().values()} == {143}
    assert end["outcome"] == job.end.outcome == "stopped"
