"""The row about idling: what an agent costs while two workers do nothing.

A helper is any process below the agent that is not a worker. Holdfast has one, `hf-keeper`, which
holds the workers' process tree. The row shows its memory separately, and together with the agent's as
PSS, which divides a shared page among the processes that share it. Wake-ups and CPU time include all
threads of the agent and of its helpers.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.launching import MeasuredLaunch, descendants_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.launching import Lab, Samples

WORKERS = 2
SETTLE_S = 1.5
WINDOW_S = 5.0
KIB_PER_MIB = 1024


def measure_idle(lab: Lab, launcher: str) -> Samples:
    """Read an agent's counters, wait, and read them again."""
    with lab.start(launcher, MeasuredLaunch("stamp.py", WORKERS, held=True)) as job:
        workers = {stamp.pid for stamp in job.wait_for_stamps(WORKERS)}
        time.sleep(SETTLE_S)
        agent = job.processes[0].pid
        helpers = [pid for pid in descendants_of(agent) if pid not in workers]
        kept = [agent, *helpers]
        begun = time.monotonic()
        switches, cpu_ns = switches_of(kept), cpu_ns_of(kept)
        time.sleep(WINDOW_S)
        switches, cpu_ns = switches_of(kept) - switches, cpu_ns_of(kept) - cpu_ns
        window_s = time.monotonic() - begun
        samples = {
            "agent_rss": [memory_mib(agent, "Rss")],
            "helpers_rss": [sum(memory_mib(pid, "Rss") for pid in helpers)],
            "all_pss": [sum(memory_mib(pid, "Pss") for pid in kept)],
            "wakeups": [float(switches)],
            "cpu": [cpu_ns / 1e9 / window_s * 100],
        }
        job.release_workers()
        job.wait()
    return samples


def memory_mib(pid: int, what: str) -> float:
    """Return a process's `Rss` or `Pss` in MiB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) / KIB_PER_MIB
    raise ValueError(f"the kernel has no {what}")


def switches_of(pids: Iterable[int]) -> int:
    """Return how often any thread of these processes was given a CPU, or lost it."""
    return sum(
        int(line.split()[1])
        for pid in pids
        for status in Path(f"/proc/{pid}/task").glob("*/status")
        for line in status.read_text(encoding="utf-8").splitlines()
        if "_ctxt_switches:" in line
    )


def cpu_ns_of(pids: Iterable[int]) -> int:
    """Return the CPU time of all threads of these processes."""
    return sum(
        int(schedstat.read_text(encoding="ascii").split()[0])
        for pid in pids
        for schedstat in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )
