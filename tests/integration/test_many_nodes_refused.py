"""Nodes that do not fit a running job are refused with one line, and the job continues."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from real_teams import OBEY, SOON_SILENT, Cluster, fail_all, finish_all

if TYPE_CHECKING:
    from pathlib import Path

    from etcd_teams import MakeTeam

ELSEWHERE = "is_host=false"


@pytest.mark.parametrize(
    ("flags", "name", "theirs", "mine"),
    [
        (("--nnodes=3",), "--nnodes", "2:2", "3:3"),
        (("--nnodes=1:2",), "--nnodes", "2:2", "1:2"),
        (("--max-restarts=4",), "--max-restarts", "1", "4"),
    ],
)
def test_node_with_other_settings_is_refused(
    tmp_path: Path, flags: tuple[str, ...], name: str, theirs: str, mine: str
) -> None:
    with Cluster(tmp_path, OBEY, "--max-restarts=1", nnodes="2") as cluster:
        starts = cluster.form("a", "b")
        cluster.start("odd", *flags)
        code, output = cluster.agents["odd"].end()
        assert code == 78
        assert output.count("\n") == 1, output
        for part in ("holdfast run: error: ", cluster.endpoint, f"{name} {mine}", "'job'", theirs):
            assert part in output
        assert cluster.is_quiet()
        assert cluster.finish(starts) == {"a": 0, "b": 0, "odd": 78}
        assert cluster.is_quiet()


@pytest.mark.parametrize("how", ["finish", "fail"])
def test_late_node_learns_that_the_job_has_ended(tmp_path: Path, how: str) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        coordinator = cluster.start_coordinator("coordinator")
        starts = cluster.form("a", "b", conf=ELSEWHERE)
        if how == "fail":
            fail_all(starts.values())
        else:
            finish_all(starts.values())
        ended = 0 if how == "finish" else 1
        assert [cluster.agents[name].end()[0] for name in "ab"] == [ended, ended]
        cluster.start("late", conf=ELSEWHERE)
        code, output = cluster.agents["late"].end()
        assert code == 78
        assert output.count("\n") == 1, output
        assert f"the job 'job' at {cluster.endpoint} is over" in output
        assert "--rdzv-id" in output
        coordinator.signal(signal.SIGTERM)
        cluster.end()
        assert cluster.is_quiet()


def test_two_jobs_at_one_endpoint_are_independent(tmp_path: Path) -> None:
    """The first job's agent coordinates both; when it exits, an agent of the second takes over."""
    for name in "12":
        (tmp_path / name).mkdir()
    with (
        Cluster(tmp_path / "1", OBEY, "--max-restarts=1", nnodes="2", run_id="first") as one,
        Cluster(tmp_path / "2", OBEY, nnodes="2", run_id="second", port=one.port) as two,
    ):
        one.start_host("a")
        one.start("b")
        two.start_all("c", "d")
        first, second = one.generation(2), two.generation(2)
        assert first["a"].master_endpoint != second["c"].master_endpoint
        first["a"].fail()
        first = one.generation(2)
        assert {start.restarts for start in first.values()} == {1}
        assert two.is_quiet()
        finish_all(first.values())
        assert [agent.end()[0] for agent in one.agents.values()] == [0, 0]
        assert two.is_quiet()
        assert two.finish(second) == {"c": 0, "d": 0}
        assert two.is_quiet()


def test_job_can_run_again_under_its_name_after_its_coordinator_exits(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        for names in ("ab", "cd"):
            cluster.start_all(*names)
            starts = cluster.generation(2)
            assert {start.generation for start in starts.values()} == {0}
            finish_all(starts.values())
            assert [cluster.agents[name].end()[0] for name in names] == [0, 0]
        cluster.end()


def test_live_agent_keeps_its_id_and_another_with_it_is_refused(
    tmp_path: Path, team: MakeTeam
) -> None:
    with team(tmp_path, OBEY, nnodes="2") as cluster:
        cluster.start_host("a", conf=SOON_SILENT)
        cluster.start("old", conf=f"node_id=twin,{SOON_SILENT}")
        starts = cluster.generation(2)
        cluster.start("new", conf=f"node_id=twin,{SOON_SILENT}")
        cluster.agents["new"].wait_for_output("already has the node id twin")
        code, output = cluster.agents["new"].end()
        assert code == 78
        assert os.uname().nodename in output
        assert "node_id=twin" in output  # The setting to check.
        assert cluster.is_quiet()
        assert cluster.finish(starts) == {"a": 0, "old": 0, "new": 78}


def test_restarted_agent_replaces_its_dead_predecessor(tmp_path: Path, team: MakeTeam) -> None:
    """This holds even if it starts before its predecessor's loss is detected."""
    with team(tmp_path, OBEY, nnodes="2") as cluster:
        cluster.start_host("a", conf=SOON_SILENT)
        old = cluster.start("old", conf=f"node_id=twin,{SOON_SILENT}")
        before = cluster.generation(2)
        old.freeze()
        cluster.start("new", conf=f"node_id=twin,{SOON_SILENT}")
        cluster.agents["new"].wait_for_output("already has the node id twin")
        old.kill()
        after = cluster.generation(2)
        assert after["new"].rank == before["old"].rank
        assert cluster.finish(after) == {"a": 0, "old": -signal.SIGKILL, "new": 0}


def test_agent_with_replace_is_replaced_while_it_is_alive(tmp_path: Path, team: MakeTeam) -> None:
    with team(tmp_path, OBEY, nnodes="2") as cluster:
        cluster.start_host("a")
        cluster.start("old", conf="node_id=twin,replace=1")
        before = cluster.generation(2)
        cluster.start("new", conf="node_id=twin")
        after = cluster.generation(2)
        assert after["new"].rank == before["old"].rank
        code, output = cluster.agents["old"].end()
        assert code == 78
        assert "another agent replaced twin" in output
        assert cluster.finish(after) == {"a": 0, "old": 78, "new": 0}
