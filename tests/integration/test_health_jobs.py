"""Probes of real agents: alive while the loop responds, ready while the workers run."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from holdfast import console
from holdfast.agent.spec import WorkerSpec
from holdfast.elastic._impl.agents import LocalElasticAgent
from holdfast.launcher.config import LaunchConfig
from holdfast.launcher.launch_job import elastic_launch
from holdfast.observe.lifecycle import GenerationStarted, LifecycleEvent
from holdfast.processes.logs.specs import DefaultLogsSpecs
from holdfast.rendezvous.worker_store import SingleNodeHandler
from observed_jobs import ObservedJob, fetch, until
from real_jobs import PATIENCE_S
from real_teams import OBEY, Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


PROBED = {"TORCHELASTIC_HEALTH_CHECK_PORT": "0"}
AT_PORT = "health checks at port "
OK = (200, "ok\n")
NOT_STARTED = (503, "the workers have not started yet\n")

# Rank 1 waits for an order before it stops.
LINGERING = """
def linger(signum, frame):
    send("lingering")
    obey()
    sys.exit()
signal.signal(signal.SIGTERM, linger)
send(f"up{RANK}")
if GENERATION == "0":
    forever()
obey()
"""


def await_ready(port: int) -> None:
    until(lambda: fetch(port, "/readyz") == OK or None)


def test_node_is_ready_while_its_workers_run(tmp_path: Path) -> None:
    flags = ("--nproc-per-node=2", "--max-restarts=1")
    with ObservedJob(tmp_path, LINGERING, *flags, env=PROBED) as job:
        port = int(job.prints(AT_PORT))
        workers = job.messages.take(2)
        await_ready(port)
        for path in ("/healthz", "/livez", "/"):
            assert fetch(port, path) == OK
        os.kill(workers["up0"], signal.SIGKILL)
        lingering = job.messages.take(1)["lingering"]
        assert fetch(port, "/readyz") == (503, "the workers are being stopped: a worker failed\n")
        assert fetch(port, "/livez") == OK
        os.kill(lingering, signal.SIGUSR1)
        workers = job.messages.take(2)
        await_ready(port)
        for pid in workers.values():
            os.kill(pid, signal.SIGUSR1)
        assert job.ends()[0] == 0
        assert job.left_behind() == []
    with socket.create_server(("", port)):
        pass


def test_waiting_agent_is_alive_and_not_ready(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2") as team:
        agent = team.start("a", env=PROBED)
        port = int(agent.wait_for_output(AT_PORT).partition(AT_PORT)[2].partition("\n")[0])
        team.await_coordinator(agent)
        assert fetch(port, "/readyz") == NOT_STARTED
        assert fetch(port, "/livez") == OK
        team.start("b")
        workers = team.generation(2)
        await_ready(port)
        assert team.finish(workers) == {"a": 0, "b": 0}


def test_stopped_agent_does_not_respond_to_probes(tmp_path: Path) -> None:
    with ObservedJob(tmp_path, "send('up'); obey()", env=PROBED) as job:
        port = int(job.prints(AT_PORT))
        worker = job.messages.take(1)["up"]
        job.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, job.agent.pid, os.WSTOPPED | os.WNOWAIT)  # All its threads are stopped.
        with pytest.raises(TimeoutError):
            fetch(port, "/livez", limit_s=0.3)
        job.signal(signal.SIGCONT)
        assert fetch(port, "/livez") == OK
        os.kill(worker, signal.SIGUSR1)
        assert job.ends()[0] == 0


# Agents in this process, so that a test can block them.


class Held:
    """A point at which an agent blocks until the test releases it."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.released = threading.Event()

    def hold(self) -> None:
        self.entered.set()
        assert self.released.wait(PATIENCE_S)


@contextmanager
def running(
    handler: SingleNodeHandler,
    held: Held,
    log: pytest.LogCaptureFixture,
    *,
    at_start: bool = False,
) -> Iterator[int]:
    """Run an agent in a thread; yield the port of its probes once it is blocked."""
    spec = WorkerSpec("trainer", 1, handler, entrypoint="/bin/true", max_restarts=0)
    agent = LocalElasticAgent(spec, DefaultLogsSpecs())

    def hold_at_start(moment: LifecycleEvent) -> None:
        if isinstance(moment, GenerationStarted):
            held.hold()

    if at_start:
        agent.observers.add(hold_at_start)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(agent.run)
        try:
            assert held.entered.wait(PATIENCE_S)
            [line] = [line for line in log.messages if line.startswith(AT_PORT)]
            yield int(line.removeprefix(AT_PORT))
        finally:
            held.released.set()
        assert not run.result(PATIENCE_S).is_failed()
    handler.shutdown()


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """Enable probes of agents in this process, with a short timeout; return their messages."""
    caplog.set_level(console.NOTICE, "holdfast")
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", "0")
    monkeypatch.setenv("HOLDFAST_HEALTH_TIMEOUT", "0.2")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return caplog


def test_agent_with_a_stuck_loop_is_not_alive(log: pytest.LogCaptureFixture) -> None:
    held = Held()
    with running(SingleNodeHandler("job"), held, log, at_start=True) as port:

        def refusal() -> str | None:  # For a moment, the loop's last response still counts.
            status, why = fetch(port, "/livez")
            return why if status == 503 else None

        assert until(refusal)


class OwnServer:
    """A health server that the caller supplies."""

    def __init__(self, *, fails_to_stop: bool = False) -> None:
        self.calls: list[str] = []
        self._fails_to_stop = fails_to_stop

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")
        if self._fails_to_stop:
            raise OSError("the plug is stuck")


@pytest.mark.parametrize("fails_to_stop", [False, True])
def test_callers_server_is_started_and_stopped(
    log: pytest.LogCaptureFixture, fails_to_stop: bool
) -> None:
    own = OwnServer(fails_to_stop=fails_to_stop)
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, max_restarts=0)
    elastic_launch(config, "/bin/true", own)()
    assert own.calls == ["start", "stop"]
    assert not [line for line in log.messages if line.startswith(AT_PORT)]
    named = [re.search("OwnServer: .*the plug is stuck", line) for line in log.messages]
    assert [*map(bool, named)] == [True] * fails_to_stop
