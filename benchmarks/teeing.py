"""Rows about output: how fast `--tee 3` forwards it, and whether every line arrives whole.

Speed is the number of MB that the workers wrote, divided by a time that begins with the first
worker's first line. The first figure ends when the command exits, so it includes how long a
launcher takes to notice the end. The second figure ends with the last byte on the console. The
console (stdout and stderr together) is a pipe that is read as fast as it fills.

The bare processes write to that pipe themselves, without prefixes and log files. They show how
fast this machine is.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from typing import TYPE_CHECKING

from benchmarks.figures import BARE
from benchmarks.launching import COMMAND_S_MAX, BenchmarkError, MeasuredLaunch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.launching import Lab, LaunchedJob, Samples

WORKERS = 2
STREAMS = (1, 2)
LINE_BYTES = 100
LINES_PER_STREAM = 150_000  # 30 MB a worker, half of it on each stream
LINES = WORKERS * len(STREAMS) * LINES_PER_STREAM
READ_BYTES = 1 << 20
NS_PER_S = 1e9

LAUNCH = MeasuredLaunch(
    "chatter.py",
    WORKERS,
    flags=("--tee", "3", "--log-dir", "{folder}/logs"),
    env={"BENCH_LINES": str(LINES_PER_STREAM), "BENCH_LINE_BYTES": str(LINE_BYTES)},
    console=subprocess.PIPE,
)


def measure_tee(lab: Lab, launcher: str) -> Samples:
    """Count and time the output."""
    lines = arrived_bytes = last_ns = 0
    with lab.start(launcher, LAUNCH) as job:
        for data in _console(job):
            last_ns = time.monotonic_ns()
            lines += data.count(b"\n")
            arrived_bytes += len(data)
        ended_ns = job.wait()
        begun_ns = min(stamp.reached_ns for stamp in job.wait_for_stamps(WORKERS))
        _check_logs(job)
    missing_bytes = LINES * (LINE_BYTES + len(_prefix(launcher, 0))) - arrived_bytes
    megabytes = LINES * LINE_BYTES / 1e6
    return {
        "speed": [megabytes / ((ended_ns - begun_ns) / NS_PER_S)],
        "console_speed": [megabytes / ((last_ns - begun_ns) / NS_PER_S)],
        # A torn or lost line shows in one of the two counts; `measure_lines` compares lines.
        "miscounted": [max(abs(LINES - lines), abs(missing_bytes) / LINE_BYTES)],
    }


def measure_lines(lab: Lab, launcher: str) -> Samples:
    """Compare every line, untimed; count lost, mixed and reordered ones."""
    whole = 0
    awaited = {(rank, fd): 0 for rank in range(WORKERS) for fd in STREAMS}
    rest = b""
    with lab.start(launcher, LAUNCH) as job:
        for data in _console(job):
            *lines, rest = (rest + data).split(b"\n")
            whole += sum(_is_next(launcher, line, awaited) for line in lines)
        job.wait()
        _check_logs(job)
    return {"damaged": [float(LINES - whole)]}


def _is_next(launcher: str, line: bytes, awaited: dict[tuple[int, int], int]) -> bool:
    """Whether a line is complete and follows all earlier lines of its stream."""
    for rank in range(WORKERS):
        prefix = _prefix(launcher, rank)
        words = line[len(prefix) :].split(b" ")
        if line.startswith(prefix + b"%d " % rank) and len(words) == 4 and words[2].isdigit():
            break
    else:
        return False
    fd, number = int(words[1]), int(words[2])
    head = b"%s%d %d %09d " % (prefix, rank, fd, number)
    if line != head.ljust(len(prefix) + LINE_BYTES - 1, b"x"):
        return False
    if (rank, fd) not in awaited or number < awaited[rank, fd]:
        return False
    awaited[rank, fd] = number + 1
    return True


def _prefix(launcher: str, rank: int) -> bytes:
    return b"" if launcher == BARE else b"[default%d]:" % rank


def _console(job: LaunchedJob) -> Iterator[bytes]:
    """Yield the console's output until all writers have closed it."""
    poll = select.poll()
    poll.register(job.console, select.POLLIN)
    while poll.poll(COMMAND_S_MAX * 1000):
        data = os.read(job.console, READ_BYTES)
        if not data:
            return
        yield data
    raise BenchmarkError(f"{job.launcher}: no output for {COMMAND_S_MAX:g} s")


def _check_logs(job: LaunchedJob) -> None:
    if job.launcher == BARE:
        return
    found = [path for path in (job.folder / "logs").rglob("std*.log") if path.is_file()]
    size = sum(path.stat().st_size for path in found)
    if size != LINES * LINE_BYTES:
        raise BenchmarkError(f"{job.launcher}: its {len(found)} log files hold {size} bytes")
