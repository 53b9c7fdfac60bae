"""Programs that use `torch.distributed` with gloo on several agents, with lost and joining nodes."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from network_teams import NetworkCluster
from real_teams import Cluster

if TYPE_CHECKING:
    from pathlib import Path

    from chaos.machine_network import MachineNetwork

pytestmark = pytest.mark.torch

# Every worker adds its rank + 1 to a sum over all, reports the sum and waits for orders.
GLOO = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
send(f"summed {AGENT} {NUMBER} {dist.get_rank()} {dist.get_world_size()} {total.item()}")
obey()
dist.barrier()
dist.destroy_process_group()
"""


def sums(cluster: Cluster, *agents: str) -> dict[str, int]:
    """Wait until all workers of a generation have reported their sums; return their processes by agent."""
    summed: dict[str, dict[str, int]] = {}
    while True:
        words = cluster.messages.next()
        if words[0] != "summed":
            continue
        _, agent, generation, _rank, size, total, pid = words
        assert int(total) == sum(range(int(size) + 1))
        members = summed.setdefault(generation, {})
        members[agent] = int(pid)
        if set(members) == set(agents) and int(size) == len(agents):
            return members


def order(signum: signal.Signals, pids: dict[str, int]) -> None:
    for pid in pids.values():
        os.kill(pid, signum)


def test_gloo_runs_on_two_agents_and_after_a_killed_worker(tmp_path: Path) -> None:
    with Cluster(tmp_path, GLOO, "--max-restarts=1", nnodes="2") as cluster:
        cluster.start_all("a", "b")
        first = sums(cluster, "a", "b")
        os.kill(first["b"], signal.SIGKILL)
        second = sums(cluster, "a", "b")
        order(signal.SIGUSR1, second)
        assert cluster.codes() == {"a": 0, "b": 0}


def test_gloo_runs_after_a_join_and_after_a_loss(tmp_path: Path) -> None:
    with Cluster(tmp_path, GLOO, nnodes="1:2") as cluster:
        cluster.start_host("a")
        sums(cluster, "a")
        cluster.start("b")
        sums(cluster, "a", "b")
        cluster.agents["b"].kill()
        last = sums(cluster, "a")
        order(signal.SIGUSR1, last)
        assert cluster.codes() == {"a": 0, "b": -signal.SIGKILL}


@pytest.mark.parametrize("access", ["hosts", "private"])
def test_gloo_runs_on_several_machines_with_a_restricted_store(
    tmp_path: Path, network: MachineNetwork, access: str
) -> None:
    with NetworkCluster(tmp_path, network, "2", "--max-restarts=1", script=GLOO) as cluster:
        for name in "ab":
            cluster.start_on(name, conf=f"store={access}", env={"GLOO_SOCKET_IFNAME": "eth0"})
        first = sums(cluster, "a", "b")
        os.kill(first["b"], signal.SIGKILL)
        second = sums(cluster, "a", "b")
        order(signal.SIGUSR1, second)
        assert cluster.codes() == {"a": 0, "b": 0}
