"""Real jobs on a real etcd whose nodes exit: the others detect it by their connections, not by the lease.

Leases last for five minutes here, longer than any test waits, so only a closed connection can show a loss.
"""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from etcd_teams import EtcdTeam, presences
from real_jobs import Watched
from real_teams import OBEY, QUICK

if TYPE_CHECKING:
    from pathlib import Path

    from real_etcd import Etcd

KILLED = -signal.SIGKILL
LONG_LEASE = f"{QUICK},keep_alive_interval=60,keep_alive_max_attempt=5"
ENDED = "was lost: its agent exited"


class Team(EtcdTeam):
    """Agents that print which presences they see; the first one leads."""

    def begin(self, *names: str) -> None:
        """Start all agents, and wait until the leader sees each of them and each sees the leader."""
        first, *others = names
        for name in names:
            self.start(name, conf=f"node_id={name}", env={"LOGLEVEL": "debug"})
            if name == first:
                self.await_leader(first)
        self.agents[first].wait_for_output(": seen", times=len(others))
        for name in others:
            self.agents[name].wait_for_output(": seen")


def test_killed_node_and_killed_leader_are_detected_immediately(tmp_path: Path, etcd: Etcd) -> None:
    """For the first node, only the agent is killed; its port closes once the keeper has killed the workers."""
    flags = ("--max-restarts=0",)
    with Team(tmp_path, OBEY, *flags, etcd=etcd, nnodes="1:3", conf=LONG_LEASE) as cluster:
        cluster.begin("a", "b", "c")
        starts = cluster.generation(3)
        cluster.agents["c"].signal(signal.SIGKILL)
        fewer = cluster.generation(2)
        Watched(starts["c"].pid).assert_exited()
        assert ENDED in cluster.agents["b"].output()
        cluster.agents["a"].kill()
        alone = cluster.generation(1)
        assert cluster.leader() == "b"
        assert cluster.agents["b"].output().count(ENDED) == 2
        assert set(fewer) == {"a", "b"}
        assert cluster.finish(alone) == {"a": KILLED, "b": 0, "c": KILLED}


@pytest.mark.parametrize("stopped", ["a", "b"])
def test_stopped_agent_with_broken_connections_is_not_lost(
    tmp_path: Path, etcd: Etcd, stopped: str
) -> None:
    """A router breaks them twice: while the agent is stopped, and after it has resumed."""
    with Team(tmp_path, OBEY, etcd=etcd, nnodes="2", conf=LONG_LEASE) as cluster:
        cluster.begin("a", "b")
        starts = cluster.generation(2)
        (other,) = {"a", "b"} - {stopped}
        port = presences(cluster)[stopped]
        frozen, sees = cluster.agents[stopped], cluster.agents[other]
        frozen.freeze()
        reset(port)
        sees.wait_for_output(": closed")
        frozen.signal(signal.SIGCONT)
        sees.wait_for_output(": seen", times=2)
        reset(port)
        sees.wait_for_output(": seen", times=3)
        assert "refused" not in sees.output()
        assert cluster.is_quiet()
        assert cluster.finish(starts) == {"a": 0, "b": 0}


def test_agent_without_presence_is_not_watched(tmp_path: Path, etcd: Etcd) -> None:
    with EtcdTeam(tmp_path, OBEY, etcd=etcd, nnodes="1", conf=f"{QUICK},presence=off") as cluster:
        cluster.start("a")
        starts = cluster.generation(1)
        assert presences(cluster) == {}
        assert cluster.finish(starts) == {"a": 0}


def reset(port: int) -> None:
    """Reset the connections at a port, as a router may do."""
    command = ["ss", "-K", "state", "established", "sport", "=", str(port)]
    try:
        broken = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as problem:
        pytest.skip(f"ss -K: {problem}")
    assert f":{port} " in broken, broken
