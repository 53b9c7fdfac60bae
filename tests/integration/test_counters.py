"""The table of docs/guides/counters.md: what each event does to the counters that workers see."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, NamedTuple

from holdfast.processes.procfs import initial_environment
from real_jobs import holdfast
from real_teams import OBEY, Cluster

if TYPE_CHECKING:
    from pathlib import Path


class Counters(NamedTuple):
    restarts: int
    generation: int
    fence: int
    world_size: int


def counters_of(cluster: Cluster, workers: int) -> tuple[Counters, dict[str, int]]:
    """Wait for a generation; return its counters, which all its workers share, and the pids by agent."""
    starts = cluster.generation(workers)
    seen = set()
    for start in starts.values():
        env = initial_environment(start.pid)
        fence = int(env["HOLDFAST_FENCE"])
        seen.add(Counters(start.restarts, start.generation, fence, start.world))
    (counters,) = seen
    return counters, {name: start.pid for name, start in starts.items()}


def test_only_a_worker_failure_uses_up_a_restart(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, "--max-restarts=3", nnodes="1:3") as cluster:
        cluster.start_host("a")
        cluster.start_all("b", "c")
        seen = [counters_of(cluster, 3)[0]]

        def note(workers: int) -> dict[str, int]:
            counters, pids = counters_of(cluster, workers)
            seen.append(counters)
            return pids

        cluster.agents["c"].kill()
        pids = note(2)
        os.kill(pids["b"], signal.SIGUSR2)  # It fails.
        note(2)
        cluster.start("d")
        note(3)
        cluster.agents["d"].signal(signal.SIGTERM)
        note(2)
        asked = holdfast("restart", "--rdzv-endpoint", cluster.endpoint, "--rdzv-id", "job")
        assert asked.returncode == 0, asked.stderr
        pids = note(2)
        for pid in pids.values():
            os.kill(pid, signal.SIGUSR1)
        cluster.end()
    restarts, generations, fences, sizes = zip(*seen, strict=True)
    assert restarts == (0, 0, 1, 1, 1, 1)
    assert sizes == (3, 2, 2, 3, 2, 2)
    assert [number - generations[0] for number in generations] == [*range(6)]
    assert list(fences) == sorted(set(fences))
