"""Real jobs with several endpoints: only an operator, never an agent, moves the coordinator to another machine."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from chaos.machine_network import address
from network_teams import CUTTING, PORT, NetworkCluster, finish, wait_for_group
from real_jobs import HOLDFAST

if TYPE_CHECKING:
    from pathlib import Path

    from chaos.machine_network import MachineNetwork
    from real_teams import Agent

TOKEN = {"HOLDFAST_TOKEN": "a token that all of them were given"}
ENDPOINTS = [f"{address(node)}:{PORT}" for node in range(3)]
PATIENT = "coordinator_timeout=120"
ELSEWHERE = "is_host=0"


class ListCluster(NetworkCluster):
    """Agents on machines of a network, each with the list of endpoints."""

    def __init__(self, folder: Path, network: MachineNetwork, nnodes: str) -> None:
        super().__init__(folder, network, nnodes)
        self._endpoint = ",".join(ENDPOINTS)

    def coordinate(self, name: str, node: int, *flags: str) -> Agent:
        """Start a separate coordinator on a node."""
        given = ["--endpoint", self.endpoint, "--rdzv-conf", CUTTING, "--rdzv-id", self.run_id]
        command = [*self._network.inside(node), *HOLDFAST, "coordinator", *given, *flags]
        return self._run(name, command, TOKEN)

    def start_nodes(self, names: str, conf: str = "") -> None:
        for name in names:
            self.start_on(name, conf=f"{PATIENT},{conf}".rstrip(","), env=TOKEN)


def test_operator_takes_over_from_a_failed_machine(tmp_path: Path, network: MachineNetwork) -> None:
    with ListCluster(tmp_path, network, "2:3") as cluster:
        cluster.start_nodes("abc")
        wait_for_group(cluster, *"abc")
        network.cut(0)  # Silently: only an operator can know that it is permanent.
        cluster.agents["a"].kill()
        for name in "bc":
            assert "--take-over" in cluster.agents[name].wait_for_output(
                "(coordinator_timeout=120)"
            )
        assert cluster.is_quiet()
        second = cluster.coordinate("second", 1, "--take-over")
        wait_for_group(cluster, *"bc")
        for name in "bc":
            assert (
                f"connected to the coordinator at {ENDPOINTS[1]} instead"
                in cluster.agents[name].output()
            )
        network.heal(0)  # With another agent, which must not coordinate.
        cluster.start("again", conf=PATIENT, env=TOKEN, before=network.inside(0))
        cluster.agents["again"].wait_for_output(f"a coordinator took over at {ENDPOINTS[1]}")
        finish(wait_for_group(cluster, *"bc", "again"))
        assert second.end()[0] == 0  # It exits with the job.
        assert cluster.codes() == {
            "a": -signal.SIGKILL, "b": 0, "c": 0, "again": 0, "second": 0,
        }  # fmt: skip


def test_cut_off_coordinator_stops_when_it_detects_its_replacement(
    tmp_path: Path, network: MachineNetwork
) -> None:
    """The operator was wrong: it still runs. Its own node joins at the replacement; no node returns to it."""
    with ListCluster(tmp_path, network, "2:3") as cluster:
        cluster.start_nodes("abc")
        wait_for_group(cluster, *"abc")
        network.cut(0)
        cluster.agents["b"].wait_for_output("lost the connection to the coordinator")
        cluster.coordinate("second", 1, "--take-over")
        wait_for_group(cluster, *"bc")
        network.heal(0)
        cluster.agents["a"].wait_for_output(f"a coordinator took over at {ENDPOINTS[1]}")
        finish(wait_for_group(cluster, *"abc"))
        assert cluster.codes() == {"a": 0, "b": 0, "c": 0, "second": 0}


def test_takeover_restarts_no_worker_if_all_nodes_reconnect(
    tmp_path: Path, network: MachineNetwork
) -> None:
    """The coordinator runs without an agent; it is taken over twice, from the first to the third machine."""
    with ListCluster(tmp_path, network, "2") as cluster:
        first = cluster.coordinate("first", 0)
        cluster.start_nodes("bc", conf=ELSEWHERE)
        workers = wait_for_group(cluster, *"bc")
        first.kill()
        second = cluster.coordinate("second", 1, "--take-over")
        second.wait_for_output(": all nodes reconnected")
        second.kill()
        cluster.coordinate("third", 2, "--take-over").wait_for_output(": all nodes reconnected")
        assert cluster.is_quiet()
        finish(workers)
        ends = {name: agent.end()[0] for name, agent in cluster.agents.items()}
        assert ends == {
            "first": -signal.SIGKILL, "second": -signal.SIGKILL, "third": 0, "b": 0, "c": 0,
        }  # fmt: skip
