"""Real jobs with other kinds of rendezvous: fixed ranks, IPv6, host names, a custom handler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from holdfast.rendezvous.handler import host_label
from real_jobs import PATIENCE_S, WorkerMessages
from real_teams import OBEY, STARTED, TEAM_HEAD, Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KILLED = -signal.SIGKILL


def test_static_nodes_have_their_given_ranks(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="3", backend="static") as cluster:
        for rank, name in ((2, "c"), (0, "a"), (1, "b")):
            cluster.start(name, f"--node-rank={rank}")
        starts = cluster.generation(3)
        assert {name: start.rank for name, start in starts.items()} == {"a": 0, "b": 1, "c": 2}
        assert cluster.finish(starts) == {"a": 0, "b": 0, "c": 0}


def test_static_node_can_be_lost_and_restarted(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, "--max-restarts=0", nnodes="2", backend="static") as cluster:
        cluster.start_host("a", "--node-rank=0")
        cluster.start("b", "--node-rank=1")
        cluster.generation(2)
        cluster.agents["b"].kill()
        cluster.start("again", "--node-rank=1")
        starts = cluster.generation(2)
        assert (starts["a"].rank, starts["again"].rank) == (0, 1)
        assert cluster.finish(starts) == {"a": 0, "b": KILLED, "again": 0}


def test_static_nodes_need_only_the_address_of_the_first_node(tmp_path: Path) -> None:
    """`torchrun` is often used in this way: with --master-addr and --master-port, without an endpoint."""
    with Cluster(tmp_path, OBEY, nnodes="2", backend="static") as cluster:
        port = f"--master-port={cluster.port}"
        for rank, name in enumerate("ab"):
            flags = ("--rdzv-endpoint=", "--master-addr=127.0.0.1", port, f"--node-rank={rank}")
            cluster.start(name, *flags)
        starts = cluster.generation(2)
        assert (starts["a"].rank, starts["b"].rank) == (0, 1)
        assert cluster.finish(starts) == {"a": 0, "b": 0}


@pytest.mark.parametrize("rank", ["2", "-1"])
def test_node_rank_out_of_range_is_refused(tmp_path: Path, rank: str) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2", backend="static") as cluster:
        cluster.start("a", f"--node-rank={rank}")
        code, output = cluster.end()["a"]
        assert code == 2
        assert output.count("\n") == 1
        assert "--node-rank" in output


def test_nodes_form_a_round_over_ipv6(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2:3", host="::1") as cluster:
        starts = cluster.form_at_host("a", "b")
        assert starts["a"].master_endpoint.rpartition(":")[0] == "::1"
        cluster.agents["b"].kill()
        cluster.start("c")
        assert cluster.finish(cluster.generation(2)) == {"a": 0, "b": KILLED, "c": 0}
        host = host_label()
        # The new agent has the id of the killed one.
        assert cluster.agents["a"].output().count(f"ranks 0 on {host}, 1 on {host}-2\n") == 2


def test_nodes_form_a_round_at_a_host_name(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2", host="localhost") as cluster:
        cluster.start_all("a", "b")
        assert cluster.finish(cluster.generation(2)) == {"a": 0, "b": 0}


# A custom handler: two nodes count each other in a shared store.
OWN_HANDLER = """
import sys, time
from holdfast.elastic._impl.agents import LocalElasticAgent
from holdfast.agent.spec import WorkerSpec
from holdfast.processes.logs.specs import DefaultLogsSpecs
from holdfast.rendezvous.handler import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from holdfast.store.file_store import FileStore
from holdfast.store.prefix_store import PrefixStore

class Counting(RendezvousHandler):
    def __init__(self, folder, port):
        self.store, self.port, self.round = FileStore(folder), port, 0
    def get_backend(self): return "counting"
    def get_run_id(self): return "counted"
    def is_closed(self): return False
    def set_closed(self): pass
    def shutdown(self): return True
    def next_rendezvous(self):
        self.round += 1
        key = f"round {self.round}"
        rank = self.store.add(key, 1) - 1
        while self.store.add(key, 0) < 2:
            time.sleep(0.01)
        where = RendezvousStoreInfo("127.0.0.1", self.port)
        return RendezvousInfo(PrefixStore(key, self.store), rank, 2, where)
    def num_nodes_waiting(self):
        return self.store.add(f"round {self.round + 1}", 0)

folder, script, port, workers = sys.argv[1:]
spec = WorkerSpec(
    "trainer", int(workers), Counting(folder, int(port)), entrypoint=sys.executable, args=(script,),
    max_restarts=1, monitor_interval=0.05)
result = LocalElasticAgent(spec, DefaultLogsSpecs()).run()
sys.exit(1 if result.is_failed() else 0)
"""


@pytest.fixture
def messages(tmp_path: Path) -> Iterator[WorkerMessages]:
    received = WorkerMessages(tmp_path)
    yield received
    received.close()


def test_custom_handler_connects_agents(tmp_path: Path, messages: WorkerMessages) -> None:
    """These agents receive no notifications; they poll every `monitor_interval`."""
    program, script = tmp_path / "program.py", tmp_path / "train.py"
    program.write_text(OWN_HANDLER)
    script.write_text(TEAM_HEAD + STARTED + OBEY)
    agents = []
    try:
        for name, workers in (("a", 1), ("b", 2)):
            words = [str(tmp_path / "store"), str(script), "29555", str(workers)]
            env = {
                **os.environ,
                "MESSAGES": str(messages.path),
                "AGENT": name,
                "TMPDIR": str(tmp_path),
            }
            agents.append(subprocess.Popen([sys.executable, str(program), *words], env=env))
        before = [messages.next() for _ in range(3)]
        assert sorted(words[1] for words in before) == ["0", "1", "2"]
        assert {words[2] for words in before} == {"3"}
        failing = next(int(words[-1]) for words in before if words[0] == "b")
        os.kill(failing, signal.SIGUSR2)
        after = [messages.next() for _ in range(3)]
        assert sorted(words[1] for words in after) == ["0", "1", "2"]
        assert {words[0]: words[6] for words in after} == {"a": "0", "b": "1"}
        for words in after:
            os.kill(int(words[-1]), signal.SIGUSR1)
        assert [agent.wait(PATIENCE_S) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


AGENTS = """
import multiprocessing, os, threading
from holdfast.elastic.rendezvous.etcd_server import EtcdServer
from holdfast.launcher import LaunchConfig, elastic_launch

def work():
    return int(os.environ["RANK"])

def agent(endpoint):
    config = LaunchConfig(
        min_nodes=1, max_nodes=3, nproc_per_node=2, run_id="job", rdzv_backend="etcd",
        rdzv_endpoint=endpoint, rdzv_configs={"last_call_timeout": 60}, max_restarts=0)
    ranks = elastic_launch(config, work)().values()
    os.write(1, "".join(f"{rank}\\n" for rank in ranks).encode())  # One write, since threads share it.

if __name__ == "__main__":
    server = EtcdServer()
    server.start()
    try:
        where = (server.get_endpoint(),)
        process = multiprocessing.get_context("spawn").Process(target=agent, args=where)
        others = [process, threading.Thread(target=agent, args=where)]
        for one in others:
            one.start()
        agent(*where)
        for one in others:
            one.join()
        assert process.exitcode == 0
    finally:
        server.stop()
"""


def test_program_can_run_several_agents_and_their_etcd(tmp_path: Path) -> None:
    """Two agents run in separate processes, a third in a thread; the last call is long enough for all."""
    program = tmp_path / "program.py"
    program.write_text(AGENTS)
    words = [sys.executable, str(program)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.split()) == ["0", "1", "2", "3", "4", "5"]
