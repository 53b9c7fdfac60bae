"""Real agents that are lost: killed with or without their workers, or frozen and resumed."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from real_jobs import Watched
from real_teams import (
    OBEY,
    QUICK,
    SILENCE_S,
    SOON_SILENT,
    TOGETHER,
    Cluster,
    descendants,
    fail_all,
    finish_all,
)

if TYPE_CHECKING:
    from pathlib import Path

    from etcd_teams import MakeTeam

KILLED = -signal.SIGKILL
FREEZING = f"{QUICK},{SOON_SILENT}"
FROZEN_S = SILENCE_S + 1


def test_survivors_of_a_killed_node_keep_their_order(tmp_path: Path, team: MakeTeam) -> None:
    with team(tmp_path, OBEY, nnodes="2:4") as cluster:
        before = cluster.form_at_host("a", "b", "c", "d")
        victim = next(name for name, start in before.items() if start.rank == 2 and name != "a")
        cluster.agents[victim].kill()
        after = cluster.generation(3)
        order = sorted(after, key=lambda name: before[name].rank)
        assert sorted(after, key=lambda name: after[name].rank) == order
        assert {start.restarts for start in after.values()} == {0}
        finish_all(after.values())
        codes = cluster.codes()
        assert codes.pop(victim) == KILLED
        assert set(codes.values()) == {0}


def test_lost_node_is_detected_with_default_settings(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="1:2", conf="") as cluster:
        cluster.form_at_host("a", "b")
        cluster.agents["b"].kill()
        cluster.generation(1)["a"].finish()
        assert cluster.codes() == {"a": 0, "b": KILLED}


def test_worker_failure_caused_by_a_killed_node_is_not_charged(tmp_path: Path) -> None:
    """The worker detects its peer's exit and fails before the coordinator detects the lost node."""
    script = """
    import socket
    if int(E["WORLD_SIZE"]) == 2:
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
    flags = ("--worker-store", "--max-restarts", "0")
    with Cluster(tmp_path, script, *flags, nnodes="1:2", conf=TOGETHER) as cluster:
        cluster.start_coordinator("coordinator")
        cluster.start_all("a", "b")
        received = [cluster.messages.next() for _ in range(3)]
        starts = {words[1]: words for words in received if len(words) > 2}
        os.kill(int(starts["1"][-1]), signal.SIGUSR1)
        assert [cluster.messages.next()[0] for _ in range(2)] == ["connected"] * 2
        killed, survivor = starts["1"][0], starts["0"][0]
        cluster.agents[killed].signal(signal.SIGKILL)
        again = cluster.next_start()
        assert (again.agent, again.world, again.restarts) == (survivor, 1, 0)
        again.finish()
        code, output = cluster.agents[survivor].end()
        assert code == 0
        assert "was lost: its connection closed" in output


def test_too_few_survivors_stop_and_wait_for_a_replacement(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        before = cluster.form_at_host("a", "b")
        worker = Watched(before["a"].pid)
        cluster.agents["b"].kill()
        cluster.agents["a"].wait_for_output("the round is broken")
        worker.wait_until_exited()
        cluster.start("new")
        after = cluster.generation(2)
        assert after["a"].rank == before["a"].rank
        assert after["new"].rank == before["b"].rank
        assert cluster.finish(after) == {"a": 0, "b": KILLED, "new": 0}


def test_killed_worker_restarts_all_workers_in_the_same_round(
    tmp_path: Path, team: MakeTeam
) -> None:
    with team(tmp_path, OBEY, "--max-restarts=2", nnodes="2:3") as cluster:
        before = cluster.form("a", "b", "c")
        os.kill(before["b"].pid, signal.SIGKILL)
        after = cluster.generation(3)
        for name, start in after.items():
            assert start.rank == before[name].rank
            assert start.pid != before[name].pid
            assert (start.generation, start.restarts) == (before[name].generation + 1, 1)
        assert cluster.finish(after) == {"a": 0, "b": 0, "c": 0}


def test_frozen_agent_is_fenced_when_it_resumes_and_rejoins(tmp_path: Path, team: MakeTeam) -> None:
    with team(tmp_path, OBEY, nnodes="2:3", conf=FREEZING) as cluster:
        before = cluster.form_at_host("a", "b", "c")
        frozen, old = cluster.agents["b"], Watched(before["b"].pid)
        frozen.signal(signal.SIGSTOP)
        smaller = cluster.generation(2)
        old.assert_exited()  # Its keeper has killed it.
        assert set(smaller) == {"a", "c"}
        frozen.signal(signal.SIGCONT)
        after = cluster.generation(3)
        assert "fenced" in frozen.output()
        for name in "ac":
            assert after[name].rank == smaller[name].rank
        assert {start.restarts for start in after.values()} == {0}
        assert cluster.finish(after) == {"a": 0, "b": 0, "c": 0}


def test_workers_that_fail_because_of_a_silent_machine_are_not_blamed(
    tmp_path: Path, team: MakeTeam
) -> None:
    """Its connections stay open, and the workers' sockets time out before its silence is detected."""
    with team(tmp_path, OBEY, "--max-restarts=0", nnodes="2:3", conf=FREEZING) as cluster:
        before = cluster.form_at_host("a", "b", "c")
        for pid in [cluster.agents["b"].pid, *descendants(cluster.agents["b"].pid)]:
            os.kill(pid, signal.SIGSTOP)
        fail_all([before["a"], before["c"]])
        after = cluster.generation(2)
        assert set(after) == {"a", "c"}
        assert {start.restarts for start in after.values()} == {0}
        cluster.agents["b"].kill()  # It never resumes.
        assert cluster.finish(after) == {"a": 0, "b": -signal.SIGKILL, "c": 0}


def test_replaced_frozen_agent_stands_by_when_it_resumes(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2", conf=FREEZING) as cluster:
        before = cluster.form_at_host("a", "b")
        cluster.start("spare")
        cluster.agents["spare"].wait_for_output("standing by")
        frozen, old = cluster.agents["b"], Watched(before["b"].pid)
        frozen.signal(signal.SIGSTOP)
        after = cluster.generation(2)
        old.assert_exited()
        assert after["spare"].rank == before["b"].rank
        frozen.signal(signal.SIGCONT)
        frozen.wait_for_output("standing by")
        assert cluster.is_quiet()
        assert cluster.finish(after) == {"a": 0, "b": 0, "spare": 0}


def test_coordinator_that_resumes_in_time_restarts_no_worker(tmp_path: Path) -> None:
    """All nodes have closed their connections to it by then, and reconnect."""
    with Cluster(tmp_path, OBEY, nnodes="3", conf=FREEZING) as cluster:
        host = cluster.start_host("a")
        cluster.start_all("b", "c")
        starts = cluster.generation(3)
        host.signal(signal.SIGSTOP)
        time.sleep(FROZEN_S)
        host.signal(signal.SIGCONT)
        assert cluster.finish(starts) == {"a": 0, "b": 0, "c": 0}
        assert cluster.is_quiet()


def test_node_frozen_for_less_than_the_limit_is_not_lost(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2", conf="keep_alive_max_attempt=3") as cluster:
        starts = cluster.form_at_host("a", "b")
        cluster.agents["b"].signal(signal.SIGSTOP)
        time.sleep(1)
        cluster.agents["b"].signal(signal.SIGCONT)
        assert cluster.finish(starts) == {"a": 0, "b": 0}
        assert cluster.is_quiet()


def test_loss_of_a_finished_node_does_not_matter(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2:3") as cluster:
        starts = cluster.form_at_host("a", "b", "c")
        starts["b"].finish()
        cluster.agents["b"].wait_for_output("this node's workers have finished")
        cluster.agents["b"].kill()
        starts["a"].finish()
        starts["c"].finish()
        assert cluster.codes() == {"a": 0, "b": KILLED, "c": 0}
        assert cluster.is_quiet()
