"""Real jobs whose coordinator restarts while the nodes that know the job are gone or have finished."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

from etcd_teams import SOON_LOST, EtcdTeam
from holdfast.processes.procfs import initial_environment
from real_etcd import running_etcd
from real_teams import OBEY, QUICK, Cluster

if TYPE_CHECKING:
    from pathlib import Path

    from real_teams import Start

KILLED = -signal.SIGKILL


def fence_of(worker: Start) -> int:
    return int(initial_environment(worker.pid)["HOLDFAST_FENCE"])


def test_new_coordinator_continues_generation_and_restarts_without_the_old_nodes(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state.json"
    conf = f"{QUICK},state_file={state},recover_timeout=0.5"
    with Cluster(tmp_path, OBEY, "--max-restarts=1", nnodes="1:2", conf=conf) as cluster:
        cluster.start_host("a")
        cluster.start("b")
        cluster.generation(2)["b"].fail()
        before = cluster.generation(2)["b"]
        fence = fence_of(before)
        cluster.agents["b"].freeze()
        cluster.agents["a"].kill()
        cluster.start_host("c")
        alone = cluster.generation(1)["c"]
        assert (alone.generation, alone.restarts) == (before.generation + 1, 1)
        assert fence_of(alone) > fence
        cluster.agents["b"].signal(signal.SIGCONT)
        after = cluster.generation(2)
        assert after["b"].generation > alone.generation
        after["b"].fail()  # No restart is left, since the budget allowed only one failure.
        assert [cluster.agents[name].end()[0] for name in "bc"] == [1, 1]
    assert state.stat().st_mode & 0o777 == 0o600
    assert [job["outcome"] for job in json.loads(state.read_text())["jobs"]] == ["failed"]


def test_fences_grow_even_without_a_stored_state(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="1:2") as cluster:
        cluster.start_host("a")
        first = cluster.generation(1)["a"]
        fence = fence_of(first)
        cluster.agents["a"].kill()
        cluster.start_host("b")
        second = cluster.generation(1)["b"]
        assert first.generation == second.generation == 0
        assert fence_of(second) > fence
        second.finish()
        assert cluster.codes() == {"a": KILLED, "b": 0}


def test_late_agent_does_not_rerun_a_finished_job(tmp_path: Path) -> None:
    conf = f"{QUICK},state_file={tmp_path / 'state.json'}"
    with Cluster(tmp_path, OBEY, nnodes="1:2", conf=conf) as cluster:
        cluster.start_host("a")
        cluster.generation(1)["a"].finish()
        assert cluster.agents["a"].end()[0] == 0
        cluster.start("late")
        code, output = cluster.agents["late"].end()
        assert code != 0
        assert "is over" in output
        assert cluster.is_quiet()


def test_job_on_etcd_continues_after_the_loss_of_all_nodes(tmp_path: Path) -> None:
    conf = f"{QUICK},{SOON_LOST}"
    with (
        running_etcd(tmp_path) as etcd,
        EtcdTeam(tmp_path, OBEY, "--max-restarts=2", etcd=etcd, nnodes="2", conf=conf) as cluster,
    ):
        cluster.start_all("a", "b")
        cluster.generation(2)["b"].fail()
        before = cluster.generation(2)["b"]
        fence = fence_of(before)
        for name in "ab":
            cluster.agents[name].freeze()
        others = cluster.form("c", "d")
        assert {one.generation for one in others.values()} == {before.generation + 1}
        assert {one.restarts for one in others.values()} == {1}
        assert fence_of(others["c"]) == fence_of(others["d"]) > fence
        for name in "ab":
            cluster.agents[name].kill()
        for one in others.values():
            one.finish()
        assert [cluster.agents[name].end()[0] for name in "cd"] == [0, 0]
