"""A program that serves the dashboard of a fictitious job with any number of ranks.

    python large_dashboard.py RANKS [--read-only]

It prints the same as `holdfast dashboard`. Every rank except rank 333 makes a step each second.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Any, Self

from holdfast.cli.dashboard_command import TokenFile
from holdfast.control.job_client import ControlProblem
from holdfast.net.http_server import listen_tcp
from holdfast.views.dashboard.access import DashboardAccess, random_token
from holdfast.views.dashboard.watched_job import WatchedJob
from holdfast.views.dashboard.web_server import serve
from holdfast.wire.messages import JobSummary, NodeReport, NodeSummary, WorkerReport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PER_NODE = 8
SLOW = 333


class LargeJob:
    """Stands in for the connection to a job."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._begun = time.monotonic() - 100.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def status(self, **_: Any) -> JobSummary:
        elapsed_s = time.monotonic() - self._begun
        nodes = [self._node(first, elapsed_s) for first in range(0, self._ranks, PER_NODE)]
        count = len(nodes)
        return JobSummary(
            run_id="large", phase="active", round=0, generation=0, max_restarts=3, present=count,
            nodes=nodes, min_nodes=1, max_nodes=count, members=count, why="all nodes joined",
        )  # fmt: skip

    def _node(self, first: int, elapsed_s: float) -> NodeSummary:
        name = f"node{first // PER_NODE:04}"
        size = min(PER_NODE, self._ranks - first)
        workers = [
            WorkerReport(
                rank=first + at, local_rank=at, pid=1000 + at, state="running",
                step=int(elapsed_s / (4 if first + at == SLOW else 1)), step_age_s=0.1,
                heartbeat_age_s=0.1, cpu_s=elapsed_s, rss_bytes=(at + 1) << 30,
            )
            for at in range(size)
        ]  # fmt: skip
        report = NodeReport(
            run_id="large", node=name, state="running", generation=0, useful_s=elapsed_s,
            elapsed_s=elapsed_s, workers=workers,
        )  # fmt: skip
        return NodeSummary(
            node=name, host=name, phase="running", rank=first // PER_NODE, generation=0,
            first_rank=first, size=size, report=report,
        )  # fmt: skip

    async def events(self, **_: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    async def logs(self, node: str, *_: Any, **__: Any) -> AsyncIterator[Any]:
        raise ControlProblem(f"there is no node {node}")
        yield

    async def history(self, node: str) -> list[Any]:
        raise ControlProblem(f"there is no node {node}")


async def main() -> None:
    job: Any = LargeJob(int(sys.argv[1]))

    async def connect() -> Any:
        return job

    listener = listen_tcp("127.0.0.1", 0, name="--port")
    port = listener.getsockname()[1]
    token = random_token()
    with listener, TokenFile(port, token) as path:
        print(
            f"The dashboard is at http://127.0.0.1:{port}/\nThe login token is in {path}",
            flush=True,
        )
        watched = WatchedJob(connect, is_read_only="--read-only" in sys.argv)
        await serve(listener, DashboardAccess(token), watched)


if __name__ == "__main__":
    asyncio.run(main())
