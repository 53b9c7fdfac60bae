"""The CPU time of `holdfast top` while it shows a job of many ranks that all make steps.

    viewing.py NODES RANKS_PER_NODE EVERY_S UPDATES

It draws into a pseudo-terminal of 80 columns and 24 lines. It repeatedly receives a message like that of a
coordinator, decodes it, adds it to the model, and shows it.
"""

from __future__ import annotations

import asyncio
import json
import os
import pty
import random
import sys
import termios
import threading
import time
from typing import TYPE_CHECKING

from holdfast.views.top.app import Top
from holdfast.wire import messages
from holdfast.wire.messages import (
    JobSummary,
    NodeReport,
    NodeSummary,
    Reply,
    WorkerReport,
    decode,
    encode,
    printable_summary,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.control.job_client import JobClient
    from holdfast.control.live_job import LiveJob

UNMEASURED = 3  # The first updates, until the screen and the rates exist.
STEPS_PER_S = 10.0


def message(at_s: float, nodes: int, size: int, speeds: list[float]) -> bytes:
    """Return the state of a job after that time."""
    reports = [
        NodeReport(
            run_id="bench",
            node=f"node-{at}",
            incarnation=1,
            state="running",
            generation=0,
            useful_s=at_s,
            elapsed_s=at_s,
            workers=[
                WorkerReport(
                    rank=rank,
                    local_rank=rank % size,
                    pid=1_000 + rank,
                    state="running",
                    step=int(at_s * speeds[rank]),
                    step_age_s=speeds[rank] % 0.1,
                    heartbeat_age_s=speeds[rank] % 0.1,
                    cpu_s=at_s * speeds[rank] / 10,
                    rss_bytes=int(1e9 + 1e7 * at_s * speeds[rank]),
                )
                for rank in range(at * size, (at + 1) * size)
            ],
        )
        for at in range(nodes)
    ]
    summaries = [
        NodeSummary(
            node=one.node, host=one.node, phase="running", rank=at, first_rank=at * size, size=size,
            generation=0, report=one,
        )
        for at, one in enumerate(reports)
    ]  # fmt: skip
    job = JobSummary(
        run_id="bench", phase="active", round=0, generation=0, present=nodes, members=nodes,
        min_nodes=nodes, max_nodes=nodes, nodes=summaries,
    )  # fmt: skip
    return encode(Reply(id=1, body=messages.pack(messages.JobSummaries(jobs=[job]))))


class Messages:
    """Takes the place of a feed, and measures."""

    client: JobClient | None = None

    def __init__(
        self, bodies: list[bytes], every_s: float, job: LiveJob, changed: Callable[[], None]
    ) -> None:
        self._bodies, self._every_s = bodies, every_s
        self._job, self._changed = job, changed
        self.ended: Callable[[], object] = lambda: None
        self.core = 0.0

    async def run(self) -> None:
        began = cpu_began = 0.0
        for at, body in enumerate(self._bodies):
            if at == UNMEASURED:
                began, cpu_began = time.monotonic(), time.process_time()
            reply = decode(body)
            assert isinstance(reply, Reply)
            [job] = messages.unpack(messages.JobSummaries, reply.body).jobs
            self._job.connected()
            self._job.add_summary(time.monotonic(), printable_summary(job))
            self._changed()
            await asyncio.sleep(self._every_s)
        self.core = (time.process_time() - cpu_began) / (time.monotonic() - began)
        self.ended()


def swallow(descriptor: int) -> None:
    while os.read(descriptor, 1 << 16):
        pass


def main() -> None:
    nodes, size, every_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    count = UNMEASURED + int(sys.argv[4])
    drawn = random.Random(1)
    speeds = [STEPS_PER_S + drawn.random() for _ in range(nodes * size)]
    bodies = [message(100 + at * every_s, nodes, size, speeds) for at in range(count)]
    console_fd = os.dup(1)
    screen, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    threading.Thread(target=swallow, args=(screen,), daemon=True).start()
    for one in (0, 1, 2):
        os.dup2(terminal, one)
    feeds: list[Messages] = []

    def drive(job: LiveJob, changed: Callable[[], None]) -> Messages:
        feeds.append(Messages(bodies, every_s, job, changed))
        return feeds[0]

    app = Top(drive)
    feeds[0].ended = app.exit
    app.run()
    os.write(console_fd, json.dumps({"core": feeds[0].core}).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
