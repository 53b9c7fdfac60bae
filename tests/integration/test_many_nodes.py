"""Real agents on one machine: they form a job, join it, stand by and leave it."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from real_jobs import PATIENCE_S
from real_teams import OBEY, Cluster, finish_all, free_port

if TYPE_CHECKING:
    from pathlib import Path

    from etcd_teams import MakeTeam


def test_job_with_default_settings_forms_after_the_settle_time(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2:4", conf="") as cluster:
        starts = cluster.form("a", "b")
        assert cluster.finish(starts) == {"a": 0, "b": 0}


SHAPES = """
names = ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
         "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS")
with open(f"shape-{RANK}", "w") as shape:
    shape.write(" ".join(E[name] for name in names))
"""


def test_nodes_with_different_sizes_and_roles_agree_on_all_ranks(
    tmp_path: Path, team: MakeTeam
) -> None:
    with team(tmp_path, SHAPES, "--max-restarts=2", nnodes="3") as cluster:
        cluster.start("a", "--nproc-per-node=2", "--role=trainer")
        cluster.start("b", "--nproc-per-node=1", "--role=reader")
        cluster.start("c", "--nproc-per-node=3", "--role=trainer")
        starts = cluster.ranks(6)
        assert cluster.codes() == {"a": 0, "b": 0, "c": 0}
    per_node = {"a": 2, "b": 1, "c": 3}
    assert [start.world for start in starts] == [6] * 6
    # A node's workers have consecutive ranks, in order of the nodes; each role is counted separately.
    in_role = {"trainer": 0, "reader": 0}
    for start in starts:
        role, role_rank, role_size, local_rank, local_size, run_id, restarts = (
            (tmp_path / f"shape-{start.rank}").read_text().split()
        )
        local_ranks = [one.rank for one in starts if one.agent == start.agent]
        assert local_ranks == list(range(local_ranks[0], local_ranks[0] + per_node[start.agent]))
        assert role == ("reader" if start.agent == "b" else "trainer")
        assert (role_rank, role_size) == (str(in_role[role]), "1" if role == "reader" else "5")
        assert (local_rank, local_size) == (str(start.rank - local_ranks[0]), str(len(local_ranks)))
        assert (run_id, restarts) == (cluster.run_id, "2")
        in_role[role] += 1
    assert [start.node for start in starts] == sorted(start.node for start in starts)


def test_several_joiners_cost_one_restart(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="1:3", conf="settle=3") as cluster:
        cluster.start("a")
        cluster.generation(1)
        cluster.start_all("b", "c")
        starts = cluster.generation(3)
        assert {start.generation for start in starts.values()} == {1}
        assert {start.restarts for start in starts.values()} == {0}
        assert starts["a"].rank == 0
        assert cluster.finish(starts) == {"a": 0, "b": 0, "c": 0}
        assert cluster.is_quiet()


def test_nodes_above_the_maximum_stand_by_and_exit_with_success(
    tmp_path: Path, team: MakeTeam
) -> None:
    with team(tmp_path, OBEY, nnodes="2") as cluster:
        starts = cluster.form("a", "b")
        cluster.start_all("c", "d")
        for name in "cd":
            cluster.agents[name].wait_for_output("standing by")
        finish_all(starts.values())
        ends = cluster.end()
        assert {name: code for name, (code, _) in ends.items()} == dict.fromkeys("abcd", 0)
        assert cluster.is_quiet()
        for name in "cd":
            assert "error" not in ends[name][1]


def test_stopping_a_standby_restarts_no_worker(tmp_path: Path, team: MakeTeam) -> None:
    with team(tmp_path, OBEY, nnodes="2") as cluster:
        starts = cluster.form("a", "b")
        cluster.start("spare")
        cluster.agents["spare"].wait_for_output("standing by")
        cluster.agents["spare"].signal(signal.SIGTERM)
        assert cluster.agents["spare"].end()[0] == 128 + signal.SIGTERM
        assert cluster.is_quiet()
        assert cluster.finish(starts) == {"a": 0, "b": 0, "spare": 128 + signal.SIGTERM}
        assert cluster.is_quiet()


def test_standby_takes_over_the_ranks_of_a_killed_node(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="3") as cluster:
        before = cluster.form_at_host("host", "b", "c")
        cluster.start("spare")
        cluster.agents["spare"].wait_for_output("standing by")
        cluster.agents["b"].kill()
        after = cluster.generation(3)
        assert after["spare"].rank == before["b"].rank
        assert after["c"].rank == before["c"].rank
        assert after["host"].rank == before["host"].rank
        assert {start.restarts for start in after.values()} == {0}
        assert cluster.finish(after) == {"host": 0, "b": -signal.SIGKILL, "c": 0, "spare": 0}


def test_spares_wait_until_one_is_needed(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, "--spares=1", nnodes="2:3", conf="settle=1") as cluster:
        cluster.start_host("a")
        cluster.start_all("b", "c")
        before = cluster.generation(2)
        idle = ({"a", "b", "c"} - set(before)).pop()
        cluster.agents[idle].wait_for_output("standing by")
        lost = max(before)  # Not the coordinating node.
        cluster.agents[lost].kill()
        after = cluster.generation(2)
        assert after[idle].rank == before[lost].rank
        finish_all(after.values())
        codes = cluster.codes()
        assert codes.pop(lost) == -signal.SIGKILL
        assert set(codes.values()) == {0}


@pytest.mark.parametrize(
    ("signum", "code", "who"), [(signal.SIGTERM, 143, "the host"), (signal.SIGINT, 130, "another")]
)
def test_signalled_node_leaves_and_the_others_regroup(
    tmp_path: Path, team: MakeTeam, signum: signal.Signals, code: int, who: str
) -> None:
    """Leaving is not charged: the job continues even with a budget of 0."""
    with team(tmp_path, OBEY, "--max-restarts=0", nnodes="2:3") as cluster:
        cluster.form_at_host("a", "b", "c")
        leaver = "a" if who == "the host" else "b"
        cluster.agents[leaver].signal(signum)
        assert cluster.agents[leaver].end()[0] == code
        starts = cluster.generation(2)
        assert set(starts) == {"a", "b", "c"} - {leaver}
        finish_all(starts.values())
        expected = {"a": 0, "b": 0, "c": 0, leaver: code}
        assert cluster.codes() == expected


def test_node_that_left_can_rejoin(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        cluster.form_at_host("a", "b")
        cluster.agents["b"].signal(signal.SIGTERM)
        assert cluster.agents["b"].end()[0] == 128 + signal.SIGTERM
        cluster.start("again")
        starts = cluster.generation(2)
        assert cluster.finish(starts) == {"a": 0, "b": 128 + signal.SIGTERM, "again": 0}


def test_signal_ends_the_wait_for_nodes(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        cluster.start("a")
        cluster.agents["a"].wait_for_output(
            f"waiting for nodes at {cluster.endpoint}: 1 of 2 joined"
        )
        cluster.agents["a"].signal(signal.SIGTERM)
        assert cluster.codes() == {"a": 128 + signal.SIGTERM}


def test_too_few_nodes_time_out_with_one_line(tmp_path: Path, team: MakeTeam) -> None:
    with team(tmp_path, OBEY, nnodes="2", conf="join_timeout=1.5") as cluster:
        cluster.start("a")
        code, output = cluster.end()["a"]
        assert code == 78
        assert output == (
            f"holdfast run: error: 1 of 2 nodes joined at {cluster.endpoint} within 1.5 s "
            "(join_timeout)\n"
        )


LAUNCHING = """
import os, sys
from holdfast.launcher import LaunchConfig, elastic_launch
def work(factor):
    assert "HOLDFAST_TOKEN" not in os.environ
    return factor * int(os.environ["RANK"])
if __name__ == "__main__":
    endpoint, workers, method = sys.argv[1:]
    config = LaunchConfig(
        min_nodes=2, max_nodes=2, nproc_per_node=int(workers), run_id="job", start_method=method,
        rdzv_backend="c10d", rdzv_endpoint=endpoint)
    print(sorted(elastic_launch(config, work)(10).items()))
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_functions_run_on_several_nodes(tmp_path: Path, method: str) -> None:
    """Each node's program receives the values of its own workers, by global rank."""
    program = tmp_path / "program.py"
    program.write_text(LAUNCHING)
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = [
        subprocess.Popen(
            [sys.executable, str(program), endpoint, workers, method],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HOLDFAST_TOKEN": "a secret of two nodes"},
        )
        for workers in ("1", "2")
    ]
    try:
        output = [node.communicate(timeout=PATIENCE_S)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert [node.returncode for node in nodes] == [0, 0]
    received = [ast.literal_eval(one) for one in output]
    assert [len(values) for values in received] == [1, 2]
    assert sorted(received[0] + received[1]) == [(0, 0), (1, 10), (2, 20)]
