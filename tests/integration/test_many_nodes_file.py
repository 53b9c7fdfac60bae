"""Real jobs with several nodes that share a folder: without a coordinator, but with the same behaviour."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from real_jobs import Watched
from real_teams import OBEY, QUICK, SOON_SILENT, Cluster, finish_all

if TYPE_CHECKING:
    from pathlib import Path

KILLED = -signal.SIGKILL
QUICK_TO_NOTICE = f"{QUICK},{SOON_SILENT}"


def in_a_folder(
    folder: Path,
    nnodes: str,
    *flags: str,
    conf: str = QUICK_TO_NOTICE,
    endpoint: str = "",
    run_id: str = "job",
) -> Cluster:
    folder.mkdir(exist_ok=True)
    return Cluster(
        folder,
        OBEY,
        *flags,
        nnodes=nnodes,
        run_id=run_id,
        backend="file",
        endpoint=endpoint or str(folder / "rendezvous"),
        conf=conf,
    )


def number_of(state: Path) -> int:
    return int(state.suffix[1:])


def test_nodes_in_a_shared_folder_learn_of_joins_and_losses(tmp_path: Path) -> None:
    with in_a_folder(tmp_path, "2:3", "--max-restarts=0") as cluster:
        first = cluster.form("a", "b")
        cluster.start("c")
        joined = cluster.generation(3)
        assert (joined["a"].rank, joined["b"].rank) == (first["a"].rank, first["b"].rank)
        cluster.agents["c"].kill()
        smaller = cluster.generation(2)
        assert {start.generation for start in smaller.values()} == {2}
        finish_all(smaller.values())
        ends = cluster.end()
        assert {name: code for name, (code, _) in ends.items()} == {"a": 0, "b": 0, "c": KILLED}
        for name in "ab":
            assert "generation 0: node " in ends[name][1]
            assert " joined)" in ends[name][1]
            assert "was lost: no heartbeat for 2 s" in ends[name][1]


def test_finished_node_survives_a_killed_one(tmp_path: Path) -> None:
    with in_a_folder(tmp_path, "1:2") as cluster:
        cluster.start_all("a", "b")
        done = cluster.generation(2)["a"]
        ending = Watched(done.pid)
        done.finish()
        ending.wait_until_exited()
        cluster.agents["b"].kill()
        cluster.generation(1)["a"].finish()
        assert cluster.codes() == {"a": 0, "b": KILLED}


def test_frozen_agent_is_fenced_when_it_resumes_and_rejoins(tmp_path: Path) -> None:
    with in_a_folder(tmp_path, "1:2", "--max-restarts=0") as cluster:
        before = cluster.form("a", "b")
        frozen = cluster.agents["b"]
        frozen.signal(signal.SIGSTOP)
        assert set(cluster.generation(1)) == {"a"}
        old = Watched(before["b"].pid)
        frozen.signal(signal.SIGCONT)
        after = cluster.generation(2)
        old.assert_exited()
        assert "fenced" in frozen.output()
        assert cluster.finish(after) == {"a": 0, "b": 0}


def test_invalid_state_is_reported_in_one_line(tmp_path: Path) -> None:
    with in_a_folder(tmp_path, "1") as cluster:
        cluster.start("a")
        cluster.generation(1)["a"].finish()
        assert cluster.agents["a"].end()[0] == 0
        state = max((tmp_path / "rendezvous").rglob("state.*"), key=number_of)
        state.write_bytes(b"something else")
        code, output = cluster.start("b").end()
        assert code == 78
        assert output.count("\n") == 1, output
        assert f"{state} is damaged" in output


def test_nodes_restore_a_lost_state_without_restarting_workers(tmp_path: Path) -> None:
    with in_a_folder(tmp_path, "2", "--max-restarts=0") as cluster:
        starts = cluster.form("a", "b")
        for state in (tmp_path / "rendezvous").rglob("state.*"):
            state.unlink()
        starts["a"].finish()
        cluster.agents["a"].wait_for_output("this node's workers have finished")
        starts["b"].finish()
        assert cluster.codes() == {"a": 0, "b": 0}
        assert cluster.is_quiet()


def test_agent_exits_when_the_folder_stays_unreachable(tmp_path: Path) -> None:
    """The agent stops the workers when the limit has passed, and prints the reason."""
    with in_a_folder(tmp_path, "1", conf="coordinator_timeout=2") as cluster:
        cluster.start("a")
        cluster.generation(1)
        folder = tmp_path / "rendezvous"
        folder.rename(tmp_path / "elsewhere")
        folder.write_text("no longer a folder")
        code, output = cluster.end()["a"]
        assert code != 0
        assert f"{folder} has been unreachable since" in output
        assert "Not a directory" in output


def test_agent_replaces_a_dead_agent_with_its_id_but_not_a_live_one(tmp_path: Path) -> None:
    """If no other node can detect the loss, the new agent detects it."""
    with in_a_folder(tmp_path, "1:2", conf=f"{QUICK_TO_NOTICE},node_id=twin") as cluster:
        cluster.start("old")
        cluster.generation(1)
        cluster.start("new")
        code, output = cluster.agents["new"].end()
        assert code == 78
        assert "already has the node id twin" in output
        assert cluster.is_quiet()
        cluster.agents["old"].kill()
        cluster.start("newer")
        cluster.generation(1)["newer"].finish()
        assert cluster.codes() == {"old": KILLED, "new": 78, "newer": 0}
