"""Real agents whose own thread hangs while the heartbeat thread continues."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from real_jobs import Job
from real_teams import OBEY, QUICK, SOON_SILENT

if TYPE_CHECKING:
    from pathlib import Path

    from etcd_teams import MakeTeam

CONF = f"{QUICK},{SOON_SILENT}"

# Logs on a file system that hangs while the gate exists, until the test opens it.
FROZEN_LOGS = """
import os
from holdfast.processes.logs.specs import DefaultLogsSpecs

class FrozenLogs(DefaultLogsSpecs):
    def reify(self, envs):
        if os.path.exists(os.environ["GATE"]):
            os.close(os.open(os.environ["GATE"], os.O_RDONLY))
        return super().reify(envs)
"""


def install_frozen_logs(folder: Path) -> None:
    """Install `--logs-specs frozen` like a user's package."""
    (folder / "frozen.py").write_text(FROZEN_LOGS)
    about = folder / "frozen-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: frozen\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[torchrun.logs_specs]\nfrozen = frozen:FrozenLogs\n")


def test_job_continues_without_a_node_whose_file_system_hangs(
    tmp_path: Path, team: MakeTeam
) -> None:
    gate = tmp_path / "gate"
    install_frozen_logs(tmp_path)
    with team(tmp_path, OBEY, "--max-restarts=1", nnodes="2:3", conf=CONF) as cluster:
        cluster.start_host("a", conf="node_id=node-a")
        cluster.start("b", conf="node_id=node-b")
        env = {"PYTHONPATH": str(tmp_path), "GATE": str(gate)}
        cluster.start("c", "--logs-specs=frozen", conf="node_id=node-c", env=env)
        starts = cluster.generation(3)
        os.mkfifo(gate)
        starts["a"].fail()
        waiting = {cluster.next_start().agent for _ in range(2)}
        assert waiting == set(cluster.generation(2)) == {"a", "b"}
        for agent in cluster.agents.values():
            agent.wait_for_output("node-c was lost" if agent.name != "c" else "counts as lost")
        # It rejoins as soon as its file system responds.
        gate.rename(tmp_path / "open").write_text("")
        assert cluster.finish(cluster.generation(3)) == {"a": 0, "b": 0, "c": 0}


def test_failure_is_reported_even_if_its_log_cannot_be_read(tmp_path: Path) -> None:
    """Reading a pipe without a writer hangs in the same way as reading from a dead file server."""
    script = """
    log = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]) + "/stderr.log"
    os.unlink(log)
    os.mkfifo(log)
    sys.exit(7)
    """
    with Job(tmp_path, script, "--redirects=3", f"--log-dir={tmp_path}/logs") as job:
        code, _, errors = job.end()
    assert code == 7
    assert "rank      : 0" in errors


def test_unread_story_does_not_block_the_job(tmp_path: Path) -> None:
    story = tmp_path / "story"
    os.mkfifo(story)
    reader = os.open(story, os.O_RDWR)
    try:
        size = fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
        os.write(reader, bytes(size))
        with Job(tmp_path, "", f"--story={story}") as job:
            code, _, _ = job.end()
    finally:
        os.close(reader)
    assert code == 0
