"""Real jobs with several nodes whose workers fail: restarts, the shared budget, and the outcome."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

from real_teams import OBEY, Cluster

if TYPE_CHECKING:
    from pathlib import Path

    from etcd_teams import MakeTeam


def test_restart_budget_belongs_to_the_job(tmp_path: Path, team: MakeTeam) -> None:
    """Two restarts are allowed, and workers fail on three nodes: the third failure ends the job."""
    with team(tmp_path, OBEY, "--max-restarts=2", nnodes="3") as cluster:
        cluster.start_all("a", "b", "c")
        for restart, name in enumerate("abc"):
            starts = cluster.generation(3)
            assert {start.restarts for start in starts.values()} == {restart}
            starts[name].fail()
        ends = cluster.end()
        assert {name: code for name, (code, _) in ends.items()} == {"a": 1, "b": 1, "c": 1}
        assert cluster.is_quiet()
        for _, output in ends.values():
            assert "after 2 of 2 restarts" in output
            assert "c was told to fail" in output


def test_every_node_reports_the_failure_that_ended_the_job(tmp_path: Path, team: MakeTeam) -> None:
    with team(tmp_path, OBEY, nnodes="3") as cluster:
        for name in "abc":
            cluster.start(name, f"--log-dir={tmp_path / name}")
        starts = cluster.generation(3)
        starts["b"].fail()
        ends = cluster.end()
    culprit = starts["b"]
    host = os.uname().nodename
    for name, (code, output) in ends.items():
        assert code == 1
        assert "RuntimeError: b was told to fail" in output
        assert "Traceback (most recent call last)" in output
        assert "obey()" in output
        assert host in output
        (path,) = (tmp_path / name).rglob("failure.json")
        report = json.loads(path.read_text())
        assert report["generation"] == 0
        first = report["first"]
        assert (first["rank"], first["pid"], first["host"]) == (culprit.rank, culprit.pid, host)
        assert "b was told to fail" in json.dumps(first)


@pytest.mark.parametrize(
    ("how", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137)]
)
def test_all_nodes_exit_with_the_first_failures_code(tmp_path: Path, how: str, code: int) -> None:
    script = f"obey()\nif AGENT == 'b': {how}\nobey()"
    with Cluster(tmp_path, script, nnodes="2") as cluster:
        starts = cluster.form("a", "b")
        starts["b"].finish()
        ends = cluster.end()
        assert {name: end[0] for name, end in ends.items()} == {"a": code, "b": code}
        for _, output in ends.values():
            assert f"rank {starts['b'].rank}" in output


def test_worker_that_fails_because_of_another_is_not_blamed(tmp_path: Path) -> None:
    """This happens in training: a worker dies, and the others fail because it no longer responds."""
    script = """
    import socket
    host, port = E["MASTER_ADDR"], int(E["MASTER_PORT"])
    if RANK == "0":
        with socket.create_server((host, port)) as server:
            send("open")
            peer = server.accept()[0]
            if not peer.recv(1):
                raise ConnectionError("rank 1 hung up")
    else:
        obey()
        connection = socket.create_connection((host, port))
        send("connected")
        obey()
    """
    with Cluster(tmp_path, script, "--worker-store", nnodes="2") as cluster:
        cluster.start_all("a", "b")
        received = [cluster.messages.next() for _ in range(3)]
        (other,) = (int(words[-1]) for words in received if len(words) > 2 and words[1] == "1")
        os.kill(other, signal.SIGUSR1)
        assert cluster.messages.next()[0] == "connected"
        os.kill(other, signal.SIGKILL)
        ends = cluster.end()
        assert {name: end[0] for name, end in ends.items()} == {"a": 137, "b": 137}
        for _, output in ends.values():
            assert "SIGKILL" in output


@pytest.mark.parametrize("allowed", [0, 2])
def test_program_that_one_node_cannot_start_ends_the_job_for_all(
    tmp_path: Path, allowed: int
) -> None:
    """The script is checked before workers start, so this test uses a missing interpreter."""
    with Cluster(tmp_path, OBEY, f"--max-restarts={allowed}", nnodes="2") as cluster:
        cluster.start("a")
        broken = tmp_path / "broken"
        broken.write_text("#!/nowhere/at/all\n")
        broken.chmod(0o755)
        cluster.start("b", "--no-python", program=str(broken))
        ends = cluster.end()
        assert {name: end[0] for name, end in ends.items()} == {"a": 127, "b": 127}
        for _, output in ends.values():
            assert f"could not be started: {broken}" in output


def test_finished_node_waits_for_the_others_up_to_the_limit(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        cluster.start_host("a")
        cluster.start("b", "--exit-barrier-timeout=0.3")
        starts = cluster.generation(2)
        starts["b"].finish()
        code, output = cluster.agents["b"].end()
        assert code == 0
        assert "stopped waiting for the other nodes to finish (limit 0.3 s)" in output
        starts["a"].finish()
        assert cluster.codes() == {"a": 0, "b": 0}
        assert cluster.is_quiet()


def test_coordinating_node_stays_until_all_are_done(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, "--exit-barrier-timeout=0.3", nnodes="2") as cluster:
        starts = cluster.form_at_host("a", "b")
        starts["a"].finish()
        cluster.agents["a"].wait_for_output(
            "waiting for the workers of the other nodes (which need this node)"
        )
        starts["b"].finish()
        assert cluster.codes() == {"a": 0, "b": 0}
        assert cluster.is_quiet()


def test_worker_that_ignores_signals_does_not_delay_other_reports(tmp_path: Path) -> None:
    script = """
    if AGENT == "a":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        send("deaf")
    obey()
    """
    with Cluster(tmp_path, script, "--shutdown-timeout=1", nnodes="2") as cluster:
        cluster.start_all("a", "b")
        received = [cluster.messages.next() for _ in range(3)]
        (failing,) = (int(words[-1]) for words in received if words[0] == "b")
        os.kill(failing, signal.SIGUSR2)
        ends = cluster.end()
        assert {name: end[0] for name, end in ends.items()} == {"a": 1, "b": 1}
        for _, output in ends.values():
            assert "b was told to fail" in output
