"""Rows about starting: the first line of user code, the whole command, many workers.

A stamp is the worker's first action. The clock starts just before the command is spawned.
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

from benchmarks.launching import MeasuredLaunch

if TYPE_CHECKING:
    from benchmarks.launching import Lab, Samples

FEW, MANY = 2, 64
NS_PER_MS = 1e6


def measure_first_line(lab: Lab, launcher: str) -> Samples:
    """Two workers: when the first and the last of them run user code."""
    return _first_lines(lab, launcher, FEW)


def measure_start_64_workers(lab: Lab, launcher: str) -> Samples:
    """The same for 64 workers."""
    return _first_lines(lab, launcher, MANY)


def measure_no_op_command(lab: Lab, launcher: str) -> Samples:
    """Two workers that do nothing, until the command exits."""
    cpu_s = _cpu_s_of_children()
    with lab.start(launcher, MeasuredLaunch("nothing.py", FEW)) as job:
        whole_ns = job.wait() - job.started_ns
    # When a process is reaped, the kernel adds its CPU time to its parent's total, level by level.
    return {"command": [whole_ns / NS_PER_MS], "cpu": [(_cpu_s_of_children() - cpu_s) * 1000]}


def _cpu_s_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _first_lines(lab: Lab, launcher: str, workers: int) -> Samples:
    with lab.start(launcher, MeasuredLaunch("stamp.py", workers)) as job:
        job.wait()
        stamps = job.wait_for_stamps(workers)
        after_ms = [(stamp.reached_ns - job.started_ns) / NS_PER_MS for stamp in stamps]
    return {"first": [min(after_ms)], "last": [max(after_ms)]}
