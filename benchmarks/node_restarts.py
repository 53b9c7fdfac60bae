"""Rows about a worker that dies in a job of many nodes: all nodes start the next generation.

One job gives several samples; the victims are on different nodes.
"""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.joining import NS_PER_S
from benchmarks.nodes import Nodes

if TYPE_CHECKING:
    from benchmarks.launching import Lab, Samples

KILLS = 5
# The kill happens at any point of a polling interval of one second.
PAUSE_S = (0.5, 1.5)


def measure_restart(count: int, lab: Lab, launcher: str) -> Samples:
    """Kill workers of several agents, one after the other."""
    samples = []
    nnodes = f"{count}:{count}"
    with Nodes(lab, launcher, nnodes, flags=("--max-restarts", str(KILLS))) as job:
        agents = job.start(count)
        job.formed(count)
        for kill in range(KILLS):
            time.sleep(random.uniform(*PAUSE_S))
            victim = job.latest(agents[kill % count])
            killed_ns = time.monotonic_ns()
            os.kill(victim.pid, signal.SIGKILL)
            starts = job.formed(count, since_ns=killed_ns)
            samples.append((max(one.reached_ns for one in starts) - killed_ns) / NS_PER_S)
    return {"restart": samples}


measure_restart_2 = partial(measure_restart, 2)
measure_restart_8 = partial(measure_restart, 8)
measure_restart_16 = partial(measure_restart, 16)
