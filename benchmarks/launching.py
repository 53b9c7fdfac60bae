"""Starts launchers and bare processes, reads their stamps, and leaves nothing behind.

Nothing here polls: exits arrive by pidfd, stamps by a FIFO. So the measuring process uses no CPU
while it waits, which matters on a machine with two cores.

The measuring process adopts the orphans of a killed launcher (it is a "child subreaper"), so that
`Lab.close` can end every process of an interrupted run.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.figures import BARE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Self

WORKERS = Path(__file__).parent / "workers"
# A command that takes longer hangs; 32 workers that import torch take a third of this.
COMMAND_S_MAX = 120.0
SWEEP_S_MAX = 10.0
PR_SET_CHILD_SUBREAPER = 36
# Variables that change how a launcher or an interpreter runs. The most important one is
# PYTHONDONTWRITEBYTECODE: with it, Python compiles modules that pip did not compile again at every start.
DROPPED = (
    "LOCAL_RANK", "LOGLEVEL", "MASTER_ADDR", "MASTER_PORT", "PYTHONDEVMODE",
    "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER", "PYTHONHASHSEED", "PYTHONMALLOC",
    "PYTHONOPTIMIZE", "PYTHONPROFILEIMPORTTIME", "PYTHONTRACEMALLOC", "PYTHONUNBUFFERED",
    "PYTHONVERBOSE", "PYTHONWARNINGS", "RANK", "WORLD_SIZE",
)  # fmt: skip
DROPPED_PREFIXES = ("BENCH_", "HOLDFAST_", "PET_", "TORCHELASTIC_", "TORCH_")


Samples = dict[str, list[float]]  # The samples of one turn, by metric.


class BenchmarkError(Exception):
    """A launcher did not reach the state that the row measures."""


class Stamp(NamedTuple):
    """A worker reached its first line."""

    generation: int
    rank: int
    pid: int
    reached_ns: int


@dataclass(frozen=True)
class MeasuredLaunch:
    """A job to start: the same for every launcher, except for flags that a bare process does not have."""

    script: str
    workers: int
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    held: bool = False  # The workers wait until `LaunchedJob.release_workers`.
    console: int = subprocess.DEVNULL


class Stamps:
    """The FIFO to which workers write when they reach their first line."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        # Open for writing too: it then never reports an end between two writers.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._rest = b""
        self.seen: list[Stamp] = []

    def take(self) -> None:
        """Read the stamps that have arrived."""
        try:
            data = self._rest + os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return
        *lines, self._rest = data.split(b"\n")
        self.seen += [Stamp(*map(int, line.split())) for line in lines]

    def wait_for(self, generation: int, count: int, agent: int) -> list[Stamp]:
        """Return the stamps of a generation once there are `count`; `agent` is a pidfd."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(agent, select.POLLIN)
        deadline = time.monotonic() + COMMAND_S_MAX
        while True:
            self.take()
            found = [stamp for stamp in self.seen if stamp.generation == generation]
            if len(found) >= count:
                return found
            left_s = deadline - time.monotonic()
            ready = [fd for fd, _ in poll.poll(max(0.0, left_s) * 1000)]
            if left_s <= 0 or ready == [agent]:
                raise BenchmarkError(
                    f"{len(found)} of {count} workers of generation {generation} started"
                )

    def close(self) -> None:
        """Close the FIFO."""
        os.close(self._fd)


class LaunchedJob:
    """One launcher with its workers, or the bare processes that stand in for them."""

    def __init__(self, lab: Lab, launcher: str, launch: MeasuredLaunch) -> None:
        self.launcher = launcher
        self.folder = Path(tempfile.mkdtemp(dir=lab.folder))
        self.stamps = Stamps(self.folder / "stamps")
        self._workers = launch.workers
        self._gate = -1
        env = lab.env | launch.env | {"BENCH_STAMPS": str(self.folder / "stamps")}
        if launch.held:
            os.mkfifo(self.folder / "gate")
            self._gate = os.open(self.folder / "gate", os.O_RDWR | os.O_CLOEXEC)
            env["BENCH_GATE"] = str(self.folder / "gate")
        commands = lab.commands(launcher, launch, self.folder)
        environments = [env | {"LOCAL_RANK": str(rank)} for rank in range(len(commands))]
        if launcher != BARE:
            environments = [env]
        self._errors = (self.folder / "errors").open("wb")
        stderr = subprocess.STDOUT if launch.console == subprocess.PIPE else self._errors
        self.console, writer = os.pipe() if launch.console == subprocess.PIPE else (-1, -1)
        stdout = writer if writer >= 0 else launch.console
        self.started_ns = time.monotonic_ns()
        self.processes = [
            subprocess.Popen(
                command,
                env=one,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            for command, one in zip(commands, environments, strict=True)
        ]
        if writer >= 0:
            os.close(writer)
        self.pidfds = [os.pidfd_open(process.pid) for process in self.processes]

    def wait_for_stamps(self, count: int, generation: int = 0) -> list[Stamp]:
        """Return the stamps of a generation, in no order."""
        try:
            return self.stamps.wait_for(generation, count, self.pidfds[0])
        except BenchmarkError as problem:
            raise BenchmarkError(f"{self.launcher}: {problem}{self._output()}") from None

    def release_workers(self) -> None:
        """Let the waiting workers continue."""
        # A byte for each; kept open, because a worker may not have opened the gate yet.
        os.write(self._gate, bytes(self._workers))

    def wait(self) -> int:
        """Wait until all processes succeeded; return the time in ns."""
        deadline = time.monotonic() + COMMAND_S_MAX
        for pidfd in self.pidfds:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise BenchmarkError(
                    f"{self.launcher}: not finished after {COMMAND_S_MAX:g} s{self._output()}"
                )
        ended_ns = time.monotonic_ns()
        codes = [process.wait() for process in self.processes]
        if any(codes):
            raise BenchmarkError(
                f"{self.launcher}: exit code {max(codes, key=abs)}{self._output()}"
            )
        self.stamps.take()
        return ended_ns

    def close(self) -> None:
        """Close files and descriptors; the lab ends the processes."""
        self.stamps.close()
        self._errors.close()
        for fd in (self._gate, self.console, *self.pidfds):
            if fd >= 0:
                os.close(fd)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _output(self) -> str:
        text = (self.folder / "errors").read_text(encoding="utf-8", errors="replace").strip()
        return f"; its output:\n{text[-3000:]}" if text else ""


class Lab:
    """Where jobs run: one environment and one temporary folder for all of them."""

    def __init__(self, python: str = sys.executable) -> None:
        self.python = python
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        self.env = clean_environment() | {"TMPDIR": str(self.folder), "HOME": str(self.folder)}
        self.left_behind: dict[str, int] = {}
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def program(self, launcher: str) -> str:
        """Return the launcher's command, from the environment this interpreter belongs to."""
        command = Path(self.python).parent / launcher
        if not os.access(command, os.X_OK):
            raise BenchmarkError(
                f"{command} does not exist; install {launcher} next to {self.python}"
            )
        return str(command)

    def commands(self, launcher: str, launch: MeasuredLaunch, folder: Path) -> list[list[str]]:
        """Return the command lines of a launch; `{folder}` in a flag is the job's."""
        script = str(WORKERS / launch.script)
        if launcher == BARE:
            return [[self.python, "-u", script] for _ in range(launch.workers)]
        head = [self.program(launcher), *(["run"] if launcher == "holdfast" else [])]
        flags = [flag.replace("{folder}", str(folder)) for flag in launch.flags]
        return [[*head, "--nproc-per-node", str(launch.workers), *flags, script]]

    def start(self, launcher: str, launch: MeasuredLaunch) -> LaunchedJob:
        """Start a job; use it in a `with`."""
        return LaunchedJob(self, launcher, launch)

    def figures_of(
        self,
        program: str,
        words: tuple[object, ...],
        limit_s: float,
        env: dict[str, str] | None = None,
    ) -> Any:
        """Run a program that measures by itself; return the JSON it prints."""
        done = subprocess.run(
            [self.python, str(WORKERS / program), *map(str, words)],
            env=self.env | (env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        if done.returncode or not done.stdout:
            line = " ".join(map(str, (program, *words)))
            raise BenchmarkError(f"{line} failed:\n{done.stderr[-3000:]}")
        return json.loads(done.stdout)

    def note_leftovers(self, launcher: str) -> None:
        """Count and kill the processes that a launcher left behind."""
        left = len(self.sweep())
        if left:
            self.left_behind[launcher] = self.left_behind.get(launcher, 0) + left

    def sweep(self) -> set[int]:
        """Kill and reap all descendants of this process; return those that were still running."""
        killed: set[int] = set()
        deadline = time.monotonic() + SWEEP_S_MAX
        while time.monotonic() < deadline:
            _reap()
            below = descendants_of(os.getpid())
            if not below:
                break
            for pid in below:
                killed.add(pid)
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.002)
        return killed

    def close(self) -> None:
        """Kill every process and remove every file of this run."""
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        self.sweep()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def clean_environment() -> dict[str, str]:
    """Return the environment of all launchers: the user's, without variables that affect only one of them."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in DROPPED and not name.startswith(DROPPED_PREFIXES)
    }
    # Both launchers would set it to 1, and torchrun would print a banner.
    env["OMP_NUM_THREADS"] = "1"
    return env


def children_of(pid: int) -> list[int]:
    """Return the direct children of a process, of all its threads."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, listing.read_text(encoding="ascii").split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # The thread has exited.
    return found


def descendants_of(pid: int) -> list[int]:
    """Return all descendants of a process."""
    found: list[int] = []
    level: Sequence[int] = children_of(pid)
    while level:
        found += level
        level = [child for parent in level for child in children_of(parent)]
    return found


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
