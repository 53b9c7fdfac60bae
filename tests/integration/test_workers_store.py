"""The workers' store of real jobs, used by real workers."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from holdfast.store.store_errors import DistNetworkError
from holdfast.store.tcp.store_client import TCPStore
from real_teams import TOGETHER, Cluster

if TYPE_CHECKING:
    from pathlib import Path

    from real_etcd import Etcd

STORE = """
from holdfast.store.from_env import from_environment
store = from_environment()
"""
MEET = (
    STORE
    + """
store.set(f"here{RANK}", AGENT)
store.wait([f"here{rank}" for rank in range(int(E["WORLD_SIZE"]))])
send(f"count {store.add('count', 1)}")
obey()
"""
)

LAST = (
    STORE
    + """
if RANK != "0":
    obey()
    send(f"stored {store.add('count', 1)}")
"""
)


def counts(cluster: Cluster, workers: int) -> list[int]:
    """Return the count that each worker of a generation read from the store."""
    return sorted(int(cluster.messages.next()[1]) for _ in range(workers))


def test_workers_of_several_nodes_share_the_store_of_the_first(tmp_path: Path) -> None:
    with Cluster(tmp_path, MEET, "--max-restarts", "1", nnodes="2") as cluster:
        starts = cluster.form("a", "b")
        assert counts(cluster, 2) == [1, 2]
        # A new generation begins with an empty store, on another port.
        starts["b"].fail()
        again = cluster.generation(2)
        assert counts(cluster, 2) == [1, 2]
        assert again["a"].master_endpoint != starts["a"].master_endpoint
        assert cluster.finish(again) == {"a": 0, "b": 0}


@pytest.mark.parametrize("backend", ["static", "file", "etcd"])
def test_every_backend_has_a_workers_store(tmp_path: Path, backend: str, etcd: Etcd) -> None:
    (tmp_path / "shared").mkdir()
    endpoint = {"file": str(tmp_path / "shared"), "etcd": etcd.endpoint}.get(backend, "")
    with Cluster(tmp_path, MEET, nnodes="2", backend=backend, endpoint=endpoint) as cluster:
        for number, name in enumerate("ab"):
            cluster.start(name, *(("--node-rank", str(number)) if backend == "static" else ()))
        starts = cluster.generation(2)
        assert counts(cluster, 2) == [1, 2]
        assert cluster.finish(starts) == {"a": 0, "b": 0}


def test_store_is_served_until_the_last_worker_is_done(tmp_path: Path) -> None:
    flags = ("--exit-barrier-timeout", "0.1")
    with Cluster(tmp_path, LAST, *flags, nnodes="2") as cluster:
        cluster.start_coordinator("coordinator")
        cluster.start_all("a", "b")
        first, other = cluster.ranks(2)
        cluster.agents[first.agent].wait_for_output("waiting for the workers of the other nodes")
        other.finish()
        assert cluster.messages.next()[:2] == ["stored", "1"]
        for name in "ab":
            assert cluster.agents[name].end()[0] == 0
        host, _, port = first.master_endpoint.rpartition(":")
        with pytest.raises(DistNetworkError):
            TCPStore(host, int(port), timeout=timedelta(seconds=0.5))


def test_store_moves_when_its_node_is_lost(tmp_path: Path) -> None:
    with Cluster(tmp_path, MEET, nnodes="1:2", conf=TOGETHER) as cluster:
        cluster.start_coordinator("coordinator")
        cluster.start_all("a", "b")
        first, other = cluster.ranks(2)
        assert counts(cluster, 2) == [1, 2]
        cluster.agents[first.agent].kill()
        again = cluster.next_start()
        assert (again.agent, again.world) == (other.agent, 1)
        assert counts(cluster, 1) == [1]
        again.finish()
        assert cluster.agents[other.agent].end()[0] == 0
