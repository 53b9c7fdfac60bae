"""Real jobs with several endpoints: a person has the coordinator taken over, and never an agent."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from chaos.network import address

from network_teams import CUTTING, PORT, NetworkCluster, finish, meeting
from real_jobs import HOLDFAST

if TYPE_CHECKING:
    from pathlib import Path

    from chaos.network import Network

    from real_teams import Agent

TOKEN = {"HOLDFAST_TOKEN": "a token that all of them were given"}
LIST = ",".join(f"{address(node)}:{PORT}" for node in range(3))
PATIENT = "coordinator_timeout=120"


class ListCluster(NetworkCluster):
    """Agents on machines of a network, all of which have a list of the machines."""

    def __init__(self, folder: Path, network: Network, nnodes: str, script: str = "") -> None:
        super().__init__(folder, network, nnodes, "--max-restarts=1", script=script)
        self._endpoint = LIST

    def take_over(self, name: str, node: int) -> Agent:
        flags = [
            "--take-over",
            "--endpoint",
            LIST,
            "--rdzv-conf",
            CUTTING,
            "--rdzv-id",
            self.run_id,
        ]
        command = [*self._network.inside(node), *HOLDFAST, "coordinator", *flags]
        return self._run(name, command, TOKEN)

    def start_nodes(self, names: str, conf: str = PATIENT) -> None:
        self.await_coordinator(self.start_on(names[0], conf=conf, env=TOKEN))
        for name in names[1:]:
            self.start_on(name, conf=conf, env=TOKEN)


def test_a_person_takes_over_from_a_machine_that_is_gone(tmp_path: Path, network: Network) -> None:
    with ListCluster(tmp_path, network, "2:3") as cluster:
        cluster.start_nodes("abc")
        meeting(cluster, *"abc")
        network.cut(0)  # Silently: nobody but a person can know that it is for good.
        cluster.agents["a"].kill()
        for name in "bc":
            assert "--take-over" in cluster.agents[name].says("(coordinator_timeout=120)")
        assert cluster.is_quiet()
        second = cluster.take_over("second", 1)
        workers = meeting(cluster, *"bc")
        for name in "bc":
            cluster.agents[name].says(f"the coordinator at {address(1)}:{PORT} is back")
        finish(workers)
        assert second.end()[0] == 0  # It ends with the job.
        assert cluster.codes() == {"a": -signal.SIGKILL, "b": 0, "c": 0, "second": 0}


def test_a_coordinator_that_was_only_cut_off_ends_when_it_finds_that_it_was_replaced(
    tmp_path: Path, network: Network
) -> None:
    """The person was wrong. Its node joins at the other, and nobody goes back to it."""
    with ListCluster(tmp_path, network, "2:3") as cluster:
        cluster.start_nodes("abc")
        meeting(cluster, *"abc")
        network.cut(0)
        cluster.agents["b"].says("lost the coordinator")
        second = cluster.take_over("second", 1)
        meeting(cluster, *"bc")
        network.heal(0)
        cluster.agents["a"].says(f"a coordinator took over at {address(1)}:{PORT}")
        after = meeting(cluster, *"abc")
        cluster.start_on("c2", conf=PATIENT, env=TOKEN) if False else None
        finish(after)
        assert cluster.codes() == {"a": 0, "b": 0, "c": 0, "second": 0}
