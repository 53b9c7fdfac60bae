"""Agents in processes of their own that share nothing but a folder."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

AGENT = """
import sys
from holdfast.elastic.agent.server import WorkerSpec
from holdfast.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from holdfast.elastic.multiprocessing import DefaultLogsSpecs
from holdfast.elastic.rendezvous import RendezvousParameters
from holdfast.elastic.rendezvous.registry import get_rendezvous_handler

folder, worker = sys.argv[1:]
handler = get_rendezvous_handler(
    RendezvousParameters("file", folder, "job", 3, 3, "127.0.0.1", keep_alive_interval="2")
)
spec = WorkerSpec(
    role="trainer", local_world_size=2, rdzv_handler=handler, entrypoint="/bin/sh",
    args=("-c", worker), max_restarts=1, monitor_interval=0.01,
)
try:
    result = LocalElasticAgent(spec, DefaultLogsSpecs(), exit_barrier_timeout=30).run()
    print(result.state.name)
finally:
    handler.shutdown()
"""


def run_agents(folder: Path, worker: str, count: int = 3) -> list[str]:
    agents = [
        subprocess.Popen(
            [sys.executable, "-c", AGENT, str(folder / "meeting"), worker],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    ended = [agent.communicate(timeout=60) for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * count, ended
    return [out.strip() for out, _ in ended]


def test_workers_of_three_agents_have_ranks_of_one_world(tmp_path: Path) -> None:
    say = f'echo "$WORLD_SIZE $GROUP_RANK $MASTER_PORT" > {tmp_path}/rank$RANK'
    assert run_agents(tmp_path, say) == ["SUCCEEDED"] * 3
    told = [(tmp_path / f"rank{rank}").read_text().split() for rank in range(6)]
    assert [(size, node) for size, node, _ in told] == [
        ("6", "0"), ("6", "0"), ("6", "1"), ("6", "1"), ("6", "2"), ("6", "2"),
    ]  # fmt: skip
    assert len({port for _, _, port in told}) == 1


def test_a_worker_that_fails_once_restarts_those_of_all_agents(tmp_path: Path) -> None:
    worker = (
        f"started() {{ until [ $(cat {tmp_path}/starts* | wc -l) -ge $1 ]; do sleep 0.02; done; }};"
        f"echo $MASTER_PORT >> {tmp_path}/starts$RANK; "
        # Not before all have started, or those that have not would be stopped before they do.
        f"[ $RANK = 3 ] && started 6 && mkdir {tmp_path}/failed 2>/dev/null && exit 1; "
        "started 12"
    )
    assert run_agents(tmp_path, worker) == ["SUCCEEDED"] * 3
    starts = [(tmp_path / f"starts{rank}").read_text().split() for rank in range(6)]
    assert [len(one) for one in starts] == [2] * 6
    assert len({tuple(one) for one in starts}) == 1
    assert starts[0][0] != starts[0][1]
