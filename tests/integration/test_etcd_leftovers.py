"""The keys that real jobs leave in etcd, and how a later job uses them."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from etcd_teams import LEASE_S, SOON_LOST, EtcdTeam, leaves
from holdfast.core.etcd.leader import JOB_KEEP_S
from holdfast.rendezvous.etcd_handler import create_etcd_handler
from holdfast.rendezvous.rdzv_conf import RendezvousParameters
from real_teams import OBEY, QUICK

if TYPE_CHECKING:
    from pathlib import Path

    from real_etcd import Etcd

KILLED = -signal.SIGKILL
SOON = f"{QUICK},{SOON_LOST}"


@pytest.mark.parametrize("how", ["finish", "fail"])
def test_finished_job_leaves_only_its_outcome_which_late_nodes_read(
    tmp_path: Path, etcd: Etcd, how: str
) -> None:
    with EtcdTeam(tmp_path, OBEY, etcd=etcd, nnodes="2", backend="etcd-v2") as cluster:
        starts = cluster.form_at_host("a", "b")
        cluster.start("spare")
        cluster.agents["spare"].wait_for_output("standing by")
        assert {one.ttl_s > 0 for one in cluster.left().values()} == {True}
        for start in starts.values():
            getattr(start, how)()
        ended = 0 if how == "finish" else 1
        assert cluster.codes() == {"a": ended, "b": ended, "spare": ended}
        assert "--rdzv-backend etcd-v2 is the same as etcd" in cluster.agents["a"].output()
        for late in ("late", "later"):
            left = cluster.left()
            assert {name: one.ttl_s for name, one in left.items()} == {"job": JOB_KEEP_S}
            code, output = cluster.start(late, "--rdzv-backend=etcd").end()
            assert code == 78
            assert output.count("\n") == 1, output
            assert f"the job 'job' at {cluster.endpoint} is over" in output
            assert "--rdzv-id" in output
        assert cluster.is_quiet()


def test_job_without_nodes_leaves_only_its_counters(tmp_path: Path, etcd: Etcd) -> None:
    before = set(etcd.leases())
    generation = -1
    with EtcdTeam(tmp_path, OBEY, "--max-restarts=1", etcd=etcd, nnodes="2:3") as cluster:
        for names in ("abc", "def"):
            cluster.start_all(*names)
            starts = cluster.generation(3)
            assert {start.restarts for start in starts.values()} == {0}
            assert min(start.generation for start in starts.values()) > generation
            starts[names[0]].fail()
            starts = cluster.generation(3)
            assert {start.restarts for start in starts.values()} == {1}
            generation = starts[names[0]].generation
            for name in names:
                cluster.agents[name].signal(signal.SIGTERM)
            assert {cluster.agents[name].end()[0] for name in names} == {128 + signal.SIGTERM}
            assert set(cluster.left()) == {"job"}
            assert len(set(etcd.leases()) - before) == 1


def test_store_of_a_round_is_removed_with_the_last_node(tmp_path: Path, etcd: Etcd) -> None:
    """Custom agents request rounds from a handler; the nodes of a round share a store in etcd."""
    prefix = f"/tests/{tmp_path.name}"
    conf = {"etcd_prefix": prefix, "last_call_timeout": "0.2"}
    handlers = [
        create_etcd_handler(RendezvousParameters("etcd", etcd.endpoint, "job", 2, 2, **conf))
        for _ in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        infos = [*pool.map(lambda one: one.next_rendezvous(), handlers)]
        infos[0].store.set("key", "value")
        assert infos[1].store.get("key") == b"value"
        there = leaves(etcd, f"{prefix}/job/")
        assert [one for one in there if one.name.startswith("store/")]
        assert {0 < one.ttl_s <= JOB_KEEP_S for one in there} == {True}
        assert all(pool.map(lambda one: one.shutdown(), handlers))
    assert [one.name for one in leaves(etcd, f"{prefix}/job/")] == ["job"]


def test_job_whose_nodes_were_killed_continues_its_counters(tmp_path: Path, etcd: Etcd) -> None:
    flags = ("--max-restarts=2",)
    with EtcdTeam(tmp_path, OBEY, *flags, etcd=etcd, nnodes="2", conf=SOON) as cluster:
        cluster.start_host("a")
        cluster.start("b")
        cluster.generation(2)["b"].fail()
        before = cluster.generation(2)["b"]
        for name in "ab":
            cluster.agents[name].kill()
        left = cluster.left()
        assert {one.ttl_s for one in left.values()} <= {LEASE_S, JOB_KEEP_S}
        assert "shared/leader" in left  # So the next node starts before the last leases expire.
        cluster.start("c", conf="node_id=c")
        cluster.start("d", conf="node_id=d")
        starts = cluster.generation(2)
        numbers = {(start.generation, start.restarts) for start in starts.values()}
        assert numbers == {(before.generation + 1, 1)}
        assert {start.rank for start in starts.values()} == {0, 1}
        starts["c"].fail()
        again = cluster.generation(2)
        numbers = {(start.generation, start.restarts) for start in again.values()}
        assert numbers == {(before.generation + 2, 2)}
        assert cluster.finish(again) == {"a": KILLED, "b": KILLED, "c": 0, "d": 0}
        assert cluster.is_quiet()
        cluster.await_left("job")
