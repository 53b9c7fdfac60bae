"""Real jobs on a real etcd in which etcd, one of its members, or an agent fails."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from etcd_teams import SOON_LOST, EtcdTeam
from real_etcd import SMALL_QUOTA, b64, running_cluster, running_etcd
from real_jobs import Watched
from real_teams import OBEY, QUICK

if TYPE_CHECKING:
    from pathlib import Path

    from real_etcd import Etcd

KILLED = -signal.SIGKILL
SOON = f"{QUICK},{SOON_LOST}"
BACKLOG, EACH_BYTES = 64, 1 << 16


def check_restart(cluster: EtcdTeam, restarts: int = 1) -> dict[str, int]:
    """Let a worker fail, check that all workers restart, and let the job succeed."""
    again = cluster.generation(2)
    assert {start.restarts for start in again.values()} == {restarts}
    return cluster.finish(again)


def test_restart_of_etcd_restarts_no_worker(tmp_path: Path) -> None:
    """etcd is down for about as long as a lease, and has no history of changes afterwards."""
    with (
        running_etcd(tmp_path) as etcd,
        EtcdTeam(
            tmp_path, OBEY, "--max-restarts=1", etcd=etcd, nnodes="2", conf=f"{SOON},on_lost=run"
        ) as cluster,
    ):
        starts = cluster.form_at_host("a", "b")
        etcd.compact()
        etcd.kill()
        for agent in cluster.agents.values():
            assert "keep running" in agent.wait_for_output("lost the connection to etcd")
        etcd.start()
        agents = cluster.agents.values()
        cluster.await_unharmed(lambda: all("reconnected to" in agent.output() for agent in agents))
        assert cluster.is_quiet()
        starts["b"].fail()
        assert check_restart(cluster) == {"a": 0, "b": 0}


def test_workers_stop_while_etcd_is_down_and_restart_without_charge(tmp_path: Path) -> None:
    """Without etcd, a node does not know whether its workers have been replaced."""
    with (
        running_etcd(tmp_path) as etcd,
        EtcdTeam(tmp_path, OBEY, "--max-restarts=0", etcd=etcd, nnodes="2", conf=SOON) as cluster,
    ):
        cluster.start_all("a", "b")
        before = Watched(*(start.pid for start in cluster.generation(2).values()))
        etcd.kill()
        before.wait_until_exited()
        etcd.start()
        after = cluster.generation(2)
        assert {start.restarts for start in after.values()} == {0}
        for agent in cluster.agents.values():
            assert "before other nodes could replace them" in agent.output()
        assert cluster.finish(after) == {"a": 0, "b": 0}


def test_hanging_or_killed_etcd_member_restarts_no_worker(tmp_path: Path) -> None:
    """All agents start with the first endpoint. Each fault hits the endpoint in use."""
    flags = ("--max-restarts=2",)
    with running_cluster(tmp_path) as members:
        first, second, third = members.members
        where = members.endpoints
        with EtcdTeam(tmp_path, OBEY, *flags, etcd=third, endpoint=where, nnodes="2") as cluster:
            starts = cluster.form_at_host("a", "b")
            first.pause()
            members.leader()
            assert cluster.is_quiet()
            starts["b"].fail()
            starts = cluster.generation(2)
            assert {start.restarts for start in starts.values()} == {1}
            first.resume()
            second.kill()
            members.leader()
            assert cluster.is_quiet()
            starts["b"].fail()
            assert check_restart(cluster, restarts=2) == {"a": 0, "b": 0}


def test_killed_leader_restarts_workers_only_if_it_was_a_member(tmp_path: Path, etcd: Etcd) -> None:
    flags = ("--max-restarts=1",)
    with EtcdTeam(tmp_path, OBEY, *flags, etcd=etcd, nnodes="1:2", conf=SOON) as cluster:
        cluster.start_host("a")
        cluster.start("b", conf="node_id=b")
        starts = cluster.generation(2)
        cluster.start("spare", conf="node_id=spare")
        cluster.agents["spare"].wait_for_output("standing by")
        make_leader(cluster, "spare", "a", "b")
        cluster.agents["spare"].kill()
        leader = cluster.await_leader(other_than="spare")
        assert cluster.is_quiet()
        starts[leader].fail()
        again = cluster.generation(2)
        assert {start.restarts for start in again.values()} == {1}
        cluster.agents[leader].kill()
        (survivor,) = {"a", "b"} - {leader}
        alone = cluster.generation(1)
        assert (alone[survivor].world, alone[survivor].restarts) == (1, 1)
        assert cluster.finish(alone) == {leader: KILLED, survivor: 0, "spare": KILLED}


def make_leader(cluster: EtcdTeam, node: str, *others: str) -> None:
    """Make a node the leader: freeze the others, which keep their leases."""
    for other in others:
        cluster.agents[other].freeze()  # A running agent could win the election again.
    cluster.etcd.raw("/v3/kv/deleterange", {"key": b64(f"{cluster.root}shared/leader".encode())})
    cluster.await_unharmed(lambda: cluster.leader() == node)
    for other in others:
        cluster.agents[other].signal(signal.SIGCONT)


def test_frozen_leader_is_fenced_when_it_resumes_and_rejoins(tmp_path: Path, etcd: Etcd) -> None:
    with EtcdTeam(tmp_path, OBEY, etcd=etcd, nnodes="2:3", conf=SOON) as cluster:
        frozen = cluster.start_host("a")
        cluster.start_all("b", "c")
        before = cluster.generation(3)
        old = Watched(before["a"].pid)
        frozen.signal(signal.SIGSTOP)
        smaller = cluster.generation(2)
        old.assert_exited()
        assert set(smaller) == {"b", "c"}
        frozen.signal(signal.SIGCONT)
        after = cluster.generation(3)
        assert "fenced" in frozen.output()
        assert cluster.leader() != "a"
        assert {start.restarts for start in after.values()} == {0}
        assert cluster.finish(after) == {"a": 0, "b": 0, "c": 0}


def test_full_etcd_is_reported_and_stops_no_workers(tmp_path: Path) -> None:
    flags = ("--max-restarts=1",)
    with (
        running_etcd(tmp_path, SMALL_QUOTA) as etcd,
        EtcdTeam(
            tmp_path, OBEY, *flags, etcd=etcd, nnodes="2", conf=f"{QUICK},on_lost=run"
        ) as cluster,
    ):
        starts = cluster.form_at_host("a", "b")
        etcd.fill_up()
        starts["b"].fail()
        output = cluster.agents["b"].wait_for_output("lost the connection to etcd")
        assert "database space exceeded" in output
        assert cluster.is_quiet()
        etcd.make_room()
        cluster.agents["b"].wait_for_output("reconnected to")
        assert check_restart(cluster) == {"a": 0, "b": 0}


# A worker that reports when it is stopped.
LAST = """
import time
def stopped(*_):
    send(f"stopped {time.monotonic()}")
    os._exit(0)
signal.signal(signal.SIGTERM, stopped)
obey()
"""


def test_etcd_that_stays_down_or_full_ends_the_job_after_the_limit(tmp_path: Path) -> None:
    """Workers run until then, unless they failed."""
    for name in ("away", "full"):
        (tmp_path / name).mkdir()
    conf = f"{QUICK},coordinator_timeout=4,on_lost=run"
    with (
        running_etcd(tmp_path / "away") as away,
        running_etcd(tmp_path / "full", SMALL_QUOTA) as full,
        EtcdTeam(tmp_path / "away", LAST, etcd=away, nnodes="2", conf=conf) as one,
        EtcdTeam(tmp_path / "full", OBEY, etcd=full, nnodes="1", conf=conf) as two,
    ):
        one.start_all("a", "b")
        two.start("c")
        one.generation(2)
        failing = two.generation(1)
        gone_at = time.monotonic()
        away.kill()
        full.fill_up()
        failing["c"].fail()
        for agent in one.agents.values():
            agent.wait_for_output("(coordinator_timeout=4)")
        for _ in range(2):
            what, when, _pid = one.messages.next()
            assert what == "stopped"
            assert float(when) > gone_at + 2, "4 s, minus the time since etcd last responded"
        for team, why in ((one, "connection refused"), (two, "database space exceeded")):
            for code, output in team.end().values():
                last = output.splitlines()[-1]
                assert code == 78, output
                assert f"error: etcd at {team.endpoint} has been unreachable since" in last
                assert last.endswith(f"s): {why}")
            assert team.is_quiet()


def test_compacted_watch_restarts_no_worker(tmp_path: Path, etcd: Etcd) -> None:
    """A frozen agent reads no changes; etcd keeps them for it, until a compaction removes them."""
    conf = f"{QUICK},keep_alive_interval=6"
    with EtcdTeam(tmp_path, OBEY, "--max-restarts=1", etcd=etcd, nnodes="2", conf=conf) as cluster:
        cluster.start_host("a")
        frozen = cluster.start("b", conf="node_id=b", env={"LOGLEVEL": "debug"})
        starts = cluster.generation(2)
        frozen.freeze()

        def watch_stays_behind() -> bool:
            """Write more; return whether the watch was behind all the time, not only for a moment."""
            was_behind = etcd.slow_watchers() > 0
            for _ in range(BACKLOG):
                etcd.put(f"{cluster.root}views/b/0".encode(), bytes(EACH_BYTES))
            return was_behind and etcd.slow_watchers() > 0

        cluster.await_unharmed(watch_stays_behind)
        etcd.compact()
        frozen.signal(signal.SIGCONT)
        frozen.wait_for_output("the session at etcd ended: a watch fell behind")
        assert cluster.is_quiet()
        starts["a"].fail()
        assert check_restart(cluster) == {"a": 0, "b": 0}


# Each of the two workers detects the failure of the other machine immediately, and fails because of it.
MEETING = """
import socket
if NUMBER == 0:
    host, port = E["MASTER_ADDR"], int(E["MASTER_PORT"])
    if RANK == "0":
        with socket.create_server((host, port)) as server:
            send("open")
            peer = server.accept()[0]
    else:
        obey()
        peer = socket.create_connection((host, port))
    send("connected")
    peer.recv(1)
    os._exit(1)
obey()
"""


@pytest.mark.parametrize("killed", ["the leader", "another"])
def test_worker_failure_caused_by_a_killed_node_is_not_charged(
    tmp_path: Path, etcd: Etcd, killed: str
) -> None:
    """It fails seconds before the lease of that node expires, and the budget allows no restart."""
    flags = ("--worker-store", "--max-restarts=0")
    with EtcdTeam(tmp_path, MEETING, *flags, etcd=etcd, nnodes="2", conf=SOON) as cluster:
        cluster.start_host("a")
        cluster.start("b")
        received = [cluster.messages.next() for _ in range(3)]
        starts = {words[0]: words for words in received if len(words) > 2}
        (other,) = (int(words[-1]) for words in starts.values() if words[1] == "1")
        os.kill(other, signal.SIGUSR1)
        assert [cluster.messages.next()[0] for _ in range(2)] == ["connected"] * 2
        cluster.start("spare")
        cluster.agents["spare"].wait_for_output("standing by")
        victim, survivor = ("a", "b") if killed == "the leader" else ("b", "a")
        cluster.agents[victim].kill()
        after = cluster.generation(2)
        assert {start.restarts for start in after.values()} == {0}
        ranks = {name: str(start.rank) for name, start in after.items()}
        assert ranks == {survivor: starts[survivor][1], "spare": starts[victim][1]}
        assert cluster.finish(after) == {victim: KILLED, survivor: 0, "spare": 0}
