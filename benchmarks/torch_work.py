"""Rows about workers that use torch: start, restart, process groups, store.

In the rows about starting, Holdfast's workers use `--preload torch`, which torchrun does not have.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.figures import HOLDFAST
from benchmarks.handler_rows import QUICK_NAMES
from benchmarks.launching import MeasuredLaunch
from benchmarks.restarting import restarts

if TYPE_CHECKING:
    from benchmarks.launching import Lab, Samples

RESTARTED, STARTED = 2, 8
KILLS = 4
JOINS = 5
LOAD_S = 2.0
LOAD_S_MAX = 120.0
NS_PER_MS = 1e6
PRELOAD_TORCH = ("--preload", "torch")


def measure_restart(lab: Lab, launcher: str) -> Samples:
    """Kill a worker that has imported torch, several times within one job."""
    flags = ("--max-restarts", str(KILLS), *(PRELOAD_TORCH if launcher == HOLDFAST else ()))
    launch = MeasuredLaunch("stamp_torch.py", RESTARTED, flags=flags, held=True)
    return restarts(lab, launcher, launch, KILLS)


def measure_start(lab: Lab, launcher: str) -> Samples:
    """Start workers that import torch, all at once."""
    flags = PRELOAD_TORCH if launcher == HOLDFAST else ()
    with lab.start(launcher, MeasuredLaunch("stamp_torch.py", STARTED, flags=flags)) as job:
        job.wait()
        stamps = job.wait_for_stamps(STARTED)
        after_ms = [(stamp.reached_ns - job.started_ns) / NS_PER_MS for stamp in stamps]
    return {"last": [max(after_ms)], "first": [min(after_ms)]}


def measure_join(workers: int, lab: Lab, launcher: str) -> Samples:
    """Let workers join a gloo group, several times within one job."""
    env = {"BENCH_TIMES": str(JOINS), **QUICK_NAMES}
    samples = []
    with lab.start(
        launcher, MeasuredLaunch("join_process_group.py", workers, env=env, held=True)
    ) as job:
        for turn in range(JOINS):
            job.wait_for_stamps(workers, generation=2 * turn)
            began_ns = time.monotonic_ns()
            job.release_workers()
            stamps = job.wait_for_stamps(workers, generation=2 * turn + 1)
            samples.append((max(stamp.reached_ns for stamp in stamps) - began_ns) / NS_PER_MS)
        job.wait()
    return {"met": samples[1:]}  # The first time also loads gloo's libraries.


def measure_load(clients: int, lab: Lab, launcher: str) -> Samples:
    """Keep a store busy with many clients."""
    found = lab.figures_of("store_load.py", (launcher, clients, LOAD_S), LOAD_S_MAX)
    return {"speed": [found["per_s"]]}


measure_gloo_8, measure_gloo_32 = (partial(measure_join, count) for count in (8, 32))
measure_load_1, measure_load_16, measure_load_64 = (
    partial(measure_load, count) for count in (1, 16, 64)
)
