"""The real, unmodified torchrun with `--rdzv-backend holdfast`: nodes that join, leave and die.

With torchrun's own `c10d` the same jobs end or hang: see `defects/join_kills_job.py` and the other scripts there.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from launchers import BIN

from real_teams import OBEY, QUICK, TEAM_HEAD, Agent, Cluster, Start, finish_all

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

pytestmark = pytest.mark.torch

# torchrun has no generations.
HEAD = TEAM_HEAD.replace('int(E["HOLDFAST_GENERATION"])', "0")

# The workers use the store that the first node's torchrun serves.
GLOO = """
import torch
import torch.distributed as dist
assert E["TORCHELASTIC_USE_AGENT_STORE"] == "True"
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
assert total.item() == sum(range(dist.get_world_size() + 1))
send(f"{AGENT} {E['RANK']} {E['WORLD_SIZE']} {NODE} {NODES} 1 {GENERATION} summed")
obey()
dist.barrier()
dist.destroy_process_group()
"""


class TorchrunCluster(Cluster):
    """Nodes of one job, each a torchrun."""

    def __init__(self, folder: Path, script: str = OBEY, *flags: str, nnodes: str) -> None:
        super().__init__(folder, script, *flags, nnodes=nnodes)
        self._script.write_text(self._script.read_text().replace(TEAM_HEAD, HEAD))

    def start(
        self,
        name: str,
        *flags: str,
        conf: str = "",
        env: Mapping[str, str] | None = None,
        before: tuple[str, ...] = (),
        program: str = "",
    ) -> Agent:
        command = [
            str(BIN / "torchrun"),
            "--nnodes", self._nnodes,
            "--rdzv-backend", "holdfast",
            "--rdzv-endpoint", self.endpoint,
            "--rdzv-id", self.run_id,
            "--rdzv-conf", ",".join(filter(None, (QUICK, conf))),
            "--local-addr", "127.0.0.1",
            *self._flags, *flags,
            str(self._script),
        ]  # fmt: skip
        return self._run(
            name, command, {"MESSAGES": str(self.messages.path), "AGENT": name, **(env or {})}
        )

    def start_with_host(self, host: str, *others: str) -> None:
        """Start nodes together; the first one coordinates."""
        self.start(host, conf="is_host=1")
        self.start_all(*others, conf="is_host=0")

    def world(self, *agents: str, master_endpoint: str = "") -> dict[str, Start]:
        """Wait until exactly the newest workers of these agents are in one world."""
        workers = self.full_world(len(agents), master_endpoint)
        while workers.keys() != set(agents):
            workers = self.full_world(len(agents), master_endpoint)
        return workers

    def full_world(self, size: int, master_endpoint: str = "") -> dict[str, Start]:
        """Wait until a world of this size has all its workers; return them by agent."""
        worlds: dict[str, dict[str, Start]] = {}
        while True:
            start = self.next_start()
            if start.world != size or master_endpoint not in start.master_endpoint:
                continue
            members = worlds.setdefault(start.master_endpoint, {})
            members[start.agent] = start
            if len(members) == size:
                assert sorted(one.rank for one in members.values()) == list(range(size))
                return members


def test_node_joins_a_running_job(tmp_path: Path) -> None:
    with TorchrunCluster(tmp_path, nnodes="2:3") as cluster:
        cluster.start_all("a", "b")
        before = cluster.world("a", "b")
        cluster.start("c")
        after = cluster.world("a", "b", "c")
        assert {name: after[name].rank for name in "ab"} == {n: before[n].rank for n in "ab"}
        assert after["a"].master_endpoint != before["a"].master_endpoint
        assert {one.restarts for one in after.values()} == {0}
        finish_all(after.values())
        assert cluster.codes() == {"a": 0, "b": 0, "c": 0}
        for agent in cluster.agents.values():
            assert "Traceback" not in agent.output()


def test_workers_do_not_receive_the_token(tmp_path: Path) -> None:
    """torchrun itself passes its whole environment to them."""
    with TorchrunCluster(tmp_path, nnodes="2") as cluster:
        for name in "ab":
            cluster.start(name, env={"HOLDFAST_TOKEN": "a token that both were given"})
        starts = cluster.generation(2)
        for start in starts.values():
            with open(f"/proc/{start.pid}/environ", "rb") as variables:
                assert b"HOLDFAST_TOKEN" not in variables.read()
            start.finish()
        assert cluster.codes() == {"a": 0, "b": 0}


def test_job_continues_without_nodes_that_left_or_died(tmp_path: Path) -> None:
    with TorchrunCluster(tmp_path, nnodes="1:3") as cluster:
        cluster.start_with_host("a", "b", "c")
        cluster.world("a", "b", "c")
        cluster.agents["b"].signal(signal.SIGTERM)
        cluster.world("a", "c")
        assert cluster.agents["a"].output().splitlines()[-1].endswith(" left)")
        cluster.agents["c"].kill()
        alone = cluster.world("a")
        assert cluster.agents["a"].output().splitlines()[-1].endswith("its connection closed)")
        finish_all(alone.values())
        assert cluster.codes() == {"a": 0, "b": 1, "c": -signal.SIGKILL}


def test_standby_replaces_a_dead_node(tmp_path: Path) -> None:
    with TorchrunCluster(tmp_path, nnodes="2") as cluster:
        cluster.start_with_host("a", "b")
        first = cluster.world("a", "b")
        for standby in [cluster.start(name) for name in "cd"]:
            standby.wait_for_output("standing by to replace a node")
        cluster.agents["b"].kill()
        second = cluster.full_world(2)
        (taker,) = second.keys() - {"a"}
        assert second[taker].rank == first["b"].rank
        finish_all(second.values())
        assert cluster.codes() == {"a": 0, "b": -signal.SIGKILL, "c": 0, "d": 0}


def test_job_survives_its_first_node(tmp_path: Path) -> None:
    """The first node coordinates and serves the workers' store; another torchrun of the host takes over."""
    with TorchrunCluster(tmp_path, nnodes="1:2") as cluster:
        cluster.start_host("a")
        cluster.start("b")
        cluster.world("a", "b")
        cluster.agents["a"].kill()
        finish_all(cluster.world("b").values())
        assert cluster.codes() == {"a": -signal.SIGKILL, "b": 0}


def test_failed_node_ends_the_job(tmp_path: Path) -> None:
    with TorchrunCluster(tmp_path, nnodes="2") as cluster:
        cluster.start_all("a", "b")
        workers = cluster.world("a", "b")
        os.kill(workers["b"].pid, signal.SIGKILL)
        ends = cluster.end()
        assert {name: code for name, (code, _) in ends.items()} == {"a": 1, "b": 1}
        cause = f"rank {workers['b'].rank} (pid {workers['b'].pid} on {os.uname().nodename})"
        assert (
            f"RendezvousClosedError: the job 'job' is over: {cause} failed: signal 9"
            in (ends["a"][1])
        )


def test_gloo_uses_the_agents_store_also_after_a_failure(tmp_path: Path) -> None:
    with TorchrunCluster(tmp_path, GLOO, "--max-restarts=1", nnodes="2") as cluster:
        cluster.start_all("a", "b")
        first = cluster.world("a", "b", master_endpoint="summed")
        os.kill(first["b"].pid, signal.SIGKILL)
        second = cluster.world("a", "b", master_endpoint="summed")
        finish_all(second.values())
        assert cluster.codes() == {"a": 0, "b": 0}
