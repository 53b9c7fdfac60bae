"""After a restart the workers of one round have different restart counts.

Each agent counts and charges only the failures of its own workers.
"""

from __future__ import annotations

import os
import signal
import time

from .stage import Evidence, Lab, Nodes, present


def show() -> Evidence:
    with Lab() as lab, Nodes(lab, "torchrun", "2:2", flags=["--max-restarts", "3"]) as job:
        agents = job.start(2)
        job.formed(2)
        since_ns = time.monotonic_ns()
        os.kill(job.latest(agents[1]).pid, signal.SIGKILL)
        job.wait_for(agents, since_ns=since_ns)
        counts = {f"node {one.node}": job.latest(one).restarts for one in agents}
        return Evidence(
            counts == {"node 0": 0, "node 1": 1}, f"TORCHELASTIC_RESTART_COUNT is {counts}"
        )


if __name__ == "__main__":
    present(show)
