"""A job that loses a worker, then has one fail, and finishes all the same; told as it happens.

Run it:

    make demo                   # or: python examples/demo.py

It starts `holdfast run` with the workers of `train_plain.py`, reads what they print, and kills one
of them. It ends with an error if anything is not as it should be.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

WORKERS, STEPS, STEP_SECONDS = 3, 30, 0.15
KILLED_RANK, KILL_AT_STEP = 1, 10
FAILING_RANK, FAIL_AT_STEP = 2, 20
PROGRESS_EVERY = 5
MARK = "HOLDFAST_DEMO"  # An environment variable that finds every process of the job.
WIDTH = 96

STARTED = re.compile(r"rank (\d+) \(pid (\d+)\): start (\d+), begins at step (\d+)")
STEPPED = re.compile(r"rank (\d+) \(pid \d+\): step (\d+)")
DONE = re.compile(r"rank (\d+) \(pid \d+\): done, its share of pi is (\S+)")

INTRODUCTION = f"""\
{WORKERS} workers compute pi together. Each works in {STEPS} steps, saves a checkpoint after
each, and starts a helper process that nobody will stop. One worker will be killed,
another will fail. Holdfast is told that it may restart them 3 times:
"""


class Demo:
    """Follows one job and tells what happens in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(8)
        self.began = time.monotonic()
        self.pids: dict[int, int] = {}
        self.steps: dict[int, int] = {}
        self.shares: dict[int, float] = {}
        self.told_steps = 0
        self.killed = False
        self.broken_since: float | None = None
        self.recoveries: list[float] = []

    def run(self) -> int:
        """Run the job to its end; return 0 if it went as promised."""
        command = self.command()
        print(paint("1", "Holdfast demo: killed, failed, finished"), end="\n\n")
        print(INTRODUCTION)
        print(textwrap.indent(paint("36", shorten(command)), "    "), end="\n\n", flush=True)
        self.began = time.monotonic()
        with subprocess.Popen(
            command,
            env={**os.environ, MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as job:
            assert job.stdout is not None
            try:
                for line in job.stdout:
                    self.hear(line.rstrip("\n"))
            except BaseException:
                job.terminate()
                raise
        return self.conclude(job.returncode)

    def command(self) -> list[str]:
        """Return the command line of the job."""
        here = Path(__file__).parent
        return [
            *(sys.executable, "-m", "holdfast", "run"),
            *("--nproc-per-node", str(WORKERS), "--max-restarts", "3"),
            *("--tee", "1", "--log-dir", str(self.folder / "logs")),
            *(str(here / "train_plain.py"), "--folder", str(self.folder), "--helpers"),
            *("--steps", str(STEPS), "--step-seconds", str(STEP_SECONDS)),
            *("--fail-at-step", str(FAIL_AT_STEP), "--fail-rank", str(FAILING_RANK)),
        ]

    def hear(self, line: str) -> None:
        """Take in one line that the job printed."""
        if found := STARTED.search(line):
            rank, pid, start, step = map(int, found.groups())
            self.pids[rank], self.steps[rank] = pid, step
            if len(self.pids) == WORKERS:
                self.all_started(start)
        elif found := STEPPED.search(line):
            self.steps[int(found[1])] = int(found[2])
            self.tell_progress()
            if self.steps[KILLED_RANK] >= KILL_AT_STEP and not self.killed:
                self.kill()
        elif found := DONE.search(line):
            self.shares[int(found[1])] = float(found[2])
        elif line.startswith("[holdfast] "):
            self.tell("holdfast", line.removeprefix("[holdfast] "), "33")
            self.pids.clear()
        elif line:
            if self.broken_since is None:
                self.broken_since = time.monotonic()
                self.tell("demo", f"rank {FAILING_RANK} hits a bug. What it prints:", "31")
            print(paint("2", f"{'':20}| {line}"), flush=True)

    def all_started(self, start: int) -> None:
        """Tell that every worker runs, and how long that took after the trouble."""
        pids = ", ".join(str(self.pids[rank]) for rank in range(WORKERS))
        steps = ", ".join(str(self.steps[rank]) for rank in range(WORKERS))
        if self.broken_since is None:
            self.tell("workers", f"all {WORKERS} run (pids {pids}), from step {steps}")
            return
        took = time.monotonic() - self.broken_since
        self.broken_since = None
        self.recoveries.append(took)
        self.tell("workers", f"all {WORKERS} run again (pids {pids}), {took:.2f} s later", "32")
        self.tell("", f"from their checkpoints at step {steps}; this is restart {start}")

    def tell_progress(self) -> None:
        """Tell how far the slowest worker is, now and then."""
        slowest = min(self.steps.values())
        if slowest >= self.told_steps + PROGRESS_EVERY:
            self.told_steps = slowest
            done = "#" * slowest + "." * (STEPS - slowest)
            self.tell("progress", f"[{done}] step {slowest} of {STEPS}")

    def kill(self) -> None:
        """Kill a worker without warning."""
        self.killed = True
        pid, processes = self.pids[KILLED_RANK], len(self.processes())
        self.broken_since = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        text = f"kill -9 {pid}: rank {KILLED_RANK} is gone, as if memory had run out"
        self.tell("demo", text, "31")
        self.tell("", f"(the job is {processes} processes now, Holdfast's two included)")

    def conclude(self, code: int) -> int:
        """Tell how the job ended; return 0 if it went as promised."""
        self.tell("job", f"ended with exit code {code}")
        left = self.processes()
        pi = math.fsum(self.shares.values())
        alike = self.shares == {rank: undisturbed_share(rank) for rank in range(WORKERS)}
        same = "exactly" if alike else "NOT"
        self.tell("result", f"pi = {pi:.6f}, {same} what an undisturbed run computes")
        self.tell("left over", f"{len(left) or 'no'} processes, the helpers included")
        print()
        if code == 0 and alike and not left and len(self.recoveries) == 2:
            first, second = self.recoveries
            print(paint("32", f"Recovered from a kill in {first:.2f} s, "), end="")
            print(paint("32", f"from an error in {second:.2f} s. Nothing was lost or left."))
            return 0
        print(paint("31", "This is not what should have happened; please report it."))
        return 1

    def processes(self) -> list[int]:
        """Return every process of the job that still runs, whoever its parent is now."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # It ended meanwhile, or it is someone else's.
        return found

    def tell(self, who: str, text: str, colour: str = "") -> None:
        """Print one moment of the story."""
        moment = f"{time.monotonic() - self.began:6.2f} s" if who else ""
        lines = textwrap.wrap(text, WIDTH - 20)
        print(f"{moment:8}  {who:9} {paint(colour, lines[0])}")
        for line in lines[1:]:
            print(f"{'':20}{paint(colour, line)}")
        sys.stdout.flush()


def undisturbed_share(rank: int) -> float:
    """Compute what a worker that is never stopped would."""
    from train_plain import TERMS_PER_STEP

    total = 0.0
    for k in range(rank, STEPS * TERMS_PER_STEP * WORKERS, WORKERS):
        total += (-1) ** k * 4 / (2 * k + 1)
    return total


def shorten(command: list[str]) -> str:
    """Return the command as one would type it, up to the arguments of the script."""
    script = next(at for at, word in enumerate(command) if word.endswith("train_plain.py"))
    words = [word for word in command[3:script] if not word.startswith("/")]
    words.remove("--log-dir")
    return f"holdfast {shlex.join(words)} train_plain.py ..."


def paint(colour: str, text: str) -> str:
    """Colour a text if a person looks at it on a terminal."""
    if not colour or not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\033[{colour}m{text}\033[0m"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as name:
        code = Demo(Path(name)).run()
    sys.exit(code)
