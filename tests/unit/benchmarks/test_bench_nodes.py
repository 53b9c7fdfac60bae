from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# The benchmarks are run from the project's root and are not installed.
sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.launching import BenchmarkError, Lab
from benchmarks.nodes import (
    ESTABLISHED,
    LISTENING,
    Nodes,
    NotReached,
    free_port,
    open_files,
    sockets,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

WITHIN_S = 20.0
# Starts its workers at once, in the world that NODES says, and again when one of them dies.
LAUNCHER = f"""#!{sys.executable} -S
import os, socket, sys
words = sys.argv[1:]
workers, port = int(words[words.index("--nproc-per-node") + 1]), int(os.environ["HF_PORT"])
if port:
    server = socket.create_server(("127.0.0.1", port))
count = 0
while True:
    env = dict(os.environ, RANK="0", TORCHELASTIC_RESTART_COUNT=str(count))
    env["WORLD_SIZE"] = str(int(os.environ["HF_NODES"]) * workers)
    pids = [
        os.posix_spawn(sys.executable, [sys.executable, "-S", words[-1]], env)
        for _ in range(workers)
    ]
    pid, status = os.wait()
    if status == 0:
        sys.exit(0)
    for other in set(pids) - {{pid}}:
        os.kill(other, 9)
        os.waitpid(other, 0)
    count += 1
"""


class Bench(Lab):
    """A lab with a launcher of our own, which leaves this process as it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "HF_PORT": "0"}
        (folder / "launcher").write_text(LAUNCHER)
        (folder / "launcher").chmod(0o755)

    def program(self, launcher: str) -> str:
        return str(self.folder / "launcher")


@pytest.fixture
def lab(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def job(lab: Bench) -> Iterator[Nodes]:
    with Nodes(lab, "torchrun", "2:2", workers=2, env={"HF_NODES": "2"}) as nodes:
        yield nodes


def test_job_has_formed_when_every_worker_started(job: Nodes) -> None:
    agents = job.start(2)
    starts = job.formed(2, within_s=WITHIN_S)
    assert sorted(start.node for start in starts) == [0, 0, 1, 1]
    assert {start.world for start in starts} == {4}
    assert all(start.reached_ns > agents[0].started_ns for start in starts)


def test_only_starts_after_the_change_with_the_new_world_size_count(job: Nodes) -> None:
    agents = job.start(2)
    job.formed(2, within_s=WITHIN_S)
    killed_ns = time.monotonic_ns()
    os.kill(job.latest(agents[1]).pid, signal.SIGKILL)
    again = job.wait_for([agents[1]], world=4, since_ns=killed_ns, within_s=WITHIN_S)
    assert [(start.node, start.restarts) for start in again] == [(1, 1), (1, 1)]
    with pytest.raises(NotReached, match=r"0 of 2 workers started within 0\.1 s"):
        job.wait_for([agents[1]], world=2, within_s=0.1)


def test_wait_fails_when_an_agent_exits(job: Nodes) -> None:
    agents = job.start(2)
    job.formed(2, within_s=WITHIN_S)
    killed_ns = agents[0].kill()
    with pytest.raises(NotReached, match="agent 0 ended with -9"):
        job.wait_for(agents, since_ns=killed_ns, within_s=WITHIN_S)


def test_agents_exit_when_their_workers_are_released(job: Nodes) -> None:
    agents = job.start(2)
    job.formed(2, within_s=WITHIN_S)
    job.let_go()
    assert [agent.wait(WITHIN_S) for agent in agents] == [0, 0]


def test_error_contains_the_output_of_agents(job: Nodes) -> None:
    job.add(env={"HF_PORT": "no number"})
    with pytest.raises(BenchmarkError, match="invalid literal for int"):
        job.formed(1, within_s=WITHIN_S)


def test_finds_the_agent_that_listens_on_the_endpoint(job: Nodes) -> None:
    job.add()
    hosting = job.add(env={"HF_PORT": str(job.port)})
    job.formed(2, within_s=WITHIN_S)
    assert job.host() is hosting


def test_finds_a_connection_by_the_port_of_its_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not sockets(ESTABLISHED, port, of_peer=True) & open_files(os.getpid())
        with socket.create_connection(("127.0.0.1", port)):
            assert sockets(ESTABLISHED, port, of_peer=True) & open_files(os.getpid())
        assert sockets(LISTENING, port) & open_files(os.getpid())


def test_free_port_can_be_bound() -> None:
    socket.create_server(("127.0.0.1", free_port())).close()
