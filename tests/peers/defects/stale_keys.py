"""After a restart, the workers' store still has the keys of the previous generation.

The store exists as long as the agent, and keys have no prefix per attempt. So counters continue, and a fast rank
reads the address of a rank that has exited.
"""

from __future__ import annotations

import os
import signal
import time

from .stage import HERE, Evidence, Lab, Nodes, present


def show() -> Evidence:
    script = str(HERE / "counting_worker.py")
    flags = ["--max-restarts", "3"]
    with Lab() as lab, Nodes(lab, "torchrun", "2:2", flags=flags, script=script) as job:
        agents = job.start(2)
        job.formed(2)
        first = max(one.rank for one in job.starts)
        since_ns = time.monotonic_ns()
        os.kill(job.latest(agents[0]).pid, signal.SIGKILL)
        second = max(one.rank for one in job.wait_for(agents, since_ns=since_ns))
        return Evidence(
            (first, second) == (2, 4),
            f"a counter that two workers each incremented is {first} in the first generation "
            f"and at {second} in the second",
        )


if __name__ == "__main__":
    present(show)
