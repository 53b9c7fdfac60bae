"""The row about restarting: the time from killing a worker until a whole new generation runs user code.

One job gives several samples. Waiting workers hold no lock and no signal handler, so the launcher
accounts for the whole time: it notices the exit, stops the others, and starts all of them again.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING

from benchmarks.launching import MeasuredLaunch

if TYPE_CHECKING:
    from benchmarks.launching import Lab, Samples

WORKERS = 2
KILLS = 5
# The kill happens at any point of a polling interval of 100 ms.
PAUSE_S = (0.15, 0.35)
NS_PER_MS = 1e6


def measure_restart(lab: Lab, launcher: str) -> Samples:
    """Kill a worker several times within one job."""
    flags = ("--max-restarts", str(KILLS))
    return restarts(
        lab, launcher, MeasuredLaunch("stamp.py", WORKERS, flags=flags, held=True), KILLS
    )


def restarts(lab: Lab, launcher: str, launch: MeasuredLaunch, kills: int) -> Samples:
    """Kill one worker after the other; measure each time until all run again."""
    samples = []
    with lab.start(launcher, launch) as job:
        stamps = job.wait_for_stamps(launch.workers)
        for kill in range(kills):
            time.sleep(random.uniform(*PAUSE_S))
            victim = next(stamp for stamp in stamps if stamp.rank == kill % launch.workers)
            killed_ns = time.monotonic_ns()
            os.kill(victim.pid, signal.SIGKILL)
            stamps = job.wait_for_stamps(launch.workers, generation=kill + 1)
            samples.append((max(stamp.reached_ns for stamp in stamps) - killed_ns) / NS_PER_MS)
        job.release_workers()
        job.wait()
    return {"restart": samples}
