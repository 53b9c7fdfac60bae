"""A generation starts only after all workers of the previous one have exited on every node."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from real_teams import TOGETHER

if TYPE_CHECKING:
    from pathlib import Path

    from etcd_teams import MakeTeam
    from real_teams import Cluster

# The first worker of `b` handles its stop signal by saving, until the test orders it to finish.
SAVES = """
def save(*_):
    send("saving")
    signal.sigwait({signal.SIGUSR1})
    os._exit(0)
if AGENT == "b" and NUMBER == 0:
    signal.signal(signal.SIGTERM, save)
started()
obey()
"""


def start_all(cluster: Cluster, names: str) -> dict[str, int]:
    """Start agents with names; return the process ids of their workers."""
    for name in names:
        cluster.start(name, conf=f"node_id=node-{name},{TOGETHER}")
    return {name: start.pid for name, start in cluster.generation(len(names)).items()}


def check_that_all_wait(cluster: Cluster, *names: str) -> None:
    """Check that no worker starts, and that all agents print which node they wait for."""
    assert cluster.messages.next()[0] == "saving"
    for name in names:
        output = cluster.agents[name].wait_for_output("cannot start yet")
        assert "generation 1 cannot start yet: the workers of node-b have not stopped" in output
    assert cluster.is_quiet()


def test_restart_waits_for_a_worker_on_another_node_to_stop(tmp_path: Path, team: MakeTeam) -> None:
    with team(tmp_path, SAVES, "--max-restarts=1", nnodes="2") as cluster:
        workers = start_all(cluster, "ab")
        os.kill(workers["a"], signal.SIGUSR2)
        check_that_all_wait(cluster, "a", "b")
        os.kill(workers["b"], signal.SIGUSR1)
        for start in cluster.generation(2).values():
            assert start.generation == 1
            start.finish()
        assert cluster.codes() == {"a": 0, "b": 0}


def test_regroup_waits_for_the_workers_of_a_leaving_node(tmp_path: Path, team: MakeTeam) -> None:
    with team(tmp_path, SAVES, nnodes="2:3") as cluster:
        workers = start_all(cluster, "abc")
        cluster.agents["b"].signal(signal.SIGTERM)
        check_that_all_wait(cluster, "a", "c")
        os.kill(workers["b"], signal.SIGUSR1)
        for start in cluster.generation(2).values():
            assert start.generation == 1
            start.finish()
        assert cluster.codes() == {"a": 0, "b": 128 + signal.SIGTERM, "c": 0}
