"""Three nodes compute pi. The demo kills a worker, then a whole node, then adds a node.

Run it:

    make demo                   # or: python examples/demo.py

Each node is its own `holdfast run` on this machine, with two workers of `elastic_plain.py`.
The demo reads their output, kills and adds processes, and measures the time until the last worker
of the next generation runs user code. Then it runs `holdfast report` on the log directories and
prints the address of that page. It exits with 1 if anything is not as expected.
"""

from __future__ import annotations

import argparse
import math
import os
import queue
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import NamedTuple

from elastic_plain import compute

WORKERS = 2  # On each node.
BLOCKS, BLOCK_SECONDS = 150, 0.25
# Blocks done before each change. After the last one, enough must remain for the new node to join.
KILL_WORKER_AT, KILL_NODE_AT, ADD_NODE_AT = 16, 32, 48
PROGRESS_EVERY, BLOCKS_PER_MARK = 15, 3
PATIENCE_S = 60.0  # The longest time without any output.
MARK = "HOLDFAST_DEMO"  # The environment variable that marks every process of the job.
WIDTH = 96
REPORT = Path(__file__).parents[1] / "build" / "demo-report.html"

STARTED = re.compile(r"rank (\d+) of (\d+) \(pid (\d+)\): generation (\d+)")
STEPPED = re.compile(r"rank \d+ of \d+ \(pid \d+\): block (\d+)")
RESULT = re.compile(r"pi = (\S+)")

INTRODUCTION = f"""\
Three nodes with {WORKERS} workers each compute pi in {BLOCKS} blocks. Finished blocks are files in a
shared folder, so any number of workers can continue. On a cluster each node is a machine;
here all of them run on this one. Each node is started with:
"""


class Line(NamedTuple):
    """A line that an agent or one of its workers printed. `text` is None at the end of the output."""

    agent: str
    text: str | None
    at: float


class Worker(NamedTuple):
    """A worker that runs user code."""

    agent: str
    pid: int


class Demo:
    """Starts the nodes, disturbs them, and prints what happens."""

    def __init__(self, folder: Path, report: Path) -> None:
        self.folder = folder
        self.report = report
        self.port = free_port()
        self.mark = secrets.token_hex(8)
        self.lines: queue.SimpleQueue[Line] = queue.SimpleQueue()
        self.agents: dict[str, subprocess.Popen[str]] = {}
        self.silent: set[str] = set()
        self.began = self.changed_at = time.monotonic()
        self.change = "the start"
        self.awaited = 3 * WORKERS  # Workers expected to run after the last change.
        self.generation = -1  # The newest generation in which all workers run.
        self.starts: dict[int, dict[int, Worker]] = {}
        self.took: dict[str, float] = {}
        self.blocks = 0
        self.newest = 0  # The block finished last.
        self.pi: float | None = None

    def run(self) -> int:
        """Run the job to its end; return 0 if everything went as expected."""
        print(paint("1", "Holdfast demo: a worker dies, a node dies, a node joins"), end="\n\n")
        print(INTRODUCTION)
        print(paint("36", self.shown_command()), end="\n\n", flush=True)
        self.began = self.changed_at = time.monotonic()
        self.show("demo", "start nodes A, B and C")
        try:
            self.start("A")
            self.wait_for_coordinator()  # A coordinates, so the demo can kill another node.
            self.start("B")
            self.start("C")
            while len(self.silent) < len(self.agents):
                self.handle(self.lines.get(timeout=PATIENCE_S))
            codes = {name: agent.wait(PATIENCE_S) for name, agent in self.agents.items()}
        except (queue.Empty, subprocess.TimeoutExpired):
            self.show("demo", f"no output for {PATIENCE_S:g} s: giving up", "31")
            codes = {}
        finally:
            left = self.processes()
            for pid in left:
                kill(pid)
            for agent in self.agents.values():
                agent.wait()
        return self.conclude(codes, left)

    # What the demo does.

    def start(self, name: str) -> None:
        """Start the agent of one node, and read its output."""
        agent = subprocess.Popen(
            self.command(name),
            env={**os.environ, MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.agents[name] = agent
        threading.Thread(target=self.read, args=(name, agent), daemon=True).start()

    def read(self, name: str, agent: subprocess.Popen[str]) -> None:
        """Queue the lines of one agent; runs in its own thread."""
        assert agent.stdout is not None
        with agent.stdout:
            for line in agent.stdout:
                self.lines.put(Line(name, line.rstrip("\n"), time.monotonic()))
        self.lines.put(Line(name, None, time.monotonic()))

    def command(self, name: str) -> list[str]:
        """Return the command line of one node."""
        return [
            *(sys.executable, "-m", "holdfast", "run"),
            *("--nnodes", "2:3", "--nproc-per-node", str(WORKERS), "--max-restarts", "3"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}"),
            *("--rdzv-id", "demo", "--rdzv-conf", f"node_id={name}"),
            *("--tee", "1", "--log-dir", str(self.folder / "logs")),
            *(str(Path(__file__).with_name("elastic_plain.py")), "--folder", str(self.folder)),
            *("--blocks", str(BLOCKS), "--block-seconds", str(BLOCK_SECONDS)),
        ]

    def shown_command(self) -> str:
        """Return the command of node A as a user would type it."""
        words = self.command("A")
        shown = ["holdfast", *words[3 : words.index("--tee")], "elastic_plain.py"]
        lines = textwrap.wrap(shlex.join(shown), WIDTH - 4, break_on_hyphens=False)
        return textwrap.indent(" \\\n    ".join(lines), "    ")

    def wait_for_coordinator(self) -> None:
        """Wait until the kernel's socket table shows a listener at the endpoint."""
        listens = f":{self.port:04X} 00000000:0000 0A"
        deadline = time.monotonic() + PATIENCE_S
        while listens not in Path("/proc/net/tcp").read_text():
            if time.monotonic() > deadline:
                raise queue.Empty
            time.sleep(0.01)

    def kill_worker(self) -> None:
        """Kill one worker without warning."""
        rank, worker = max(self.starts[self.generation].items())
        self.begin("the kill of a worker", 3 * WORKERS)
        os.kill(worker.pid, signal.SIGKILL)
        self.show("demo", f"kill -9 {worker.pid}: rank {rank} on node {worker.agent}", "31")

    def kill_node(self) -> None:
        """Kill an agent and all its descendants at once, as when a machine dies."""
        agent = self.agents["C"]
        family = [agent.pid, *descendants(agent.pid)]
        for pid in family:
            os.kill(pid, signal.SIGSTOP)  # None of them sees another one exit.
        self.begin("the death of a node", 2 * WORKERS)
        for pid in family:
            os.kill(pid, signal.SIGKILL)
        self.show("demo", f"kill node C: all {len(family)} processes, as in a power failure", "31")

    def add_node(self) -> None:
        """Start an agent that was not in the job before."""
        self.begin("the start of a new node", 3 * WORKERS)
        # Only the next generation looks for missing blocks. Deleting one keeps the job from finishing
        # before the node joins, however slow this machine is.
        (self.folder / f"block_{self.newest}").unlink(missing_ok=True)
        self.start("D")
        self.show("demo", "start a new node, D, with the same command")

    def begin(self, change: str, awaited: int) -> None:
        """Note the change that follows, and how many workers are expected to run after it."""
        self.change, self.awaited, self.changed_at = change, awaited, time.monotonic()

    # What the demo reads.

    def handle(self, line: Line) -> None:
        """Handle one line of an agent or its workers."""
        text = line.text
        if text is None:
            self.silent.add(line.agent)
        elif found := STARTED.search(text):
            rank, world, pid, generation = map(int, found.groups())
            peers = self.starts.setdefault(generation, {})
            peers[rank] = Worker(line.agent, pid)
            if len(peers) == world:
                self.all_started(generation, line.at)
        elif found := STEPPED.search(text):
            self.blocks += 1
            self.newest = int(found[1])
            self.show_progress()
            self.disturb()
        elif found := RESULT.search(text):
            self.pi = float(found[1])
        elif text.startswith("[holdfast] "):
            if line.agent == "A":  # The other agents print nearly the same.
                self.show("holdfast", text.removeprefix("[holdfast] "), "33", line.at)
        elif text:
            print(f"{'':20}| {line.agent}: {text}", flush=True)  # Unexpected output.

    def disturb(self) -> None:
        """Make the next change, once all workers run and enough blocks are done."""
        if self.change not in self.took:
            return
        steps = (
            ("the kill of a worker", KILL_WORKER_AT, self.kill_worker),
            ("the death of a node", KILL_NODE_AT, self.kill_node),
            ("the start of a new node", ADD_NODE_AT, self.add_node),
        )
        for change, due, act in steps:
            if change not in self.took:
                if self.blocks >= due:
                    act()
                return

    def all_started(self, generation: int, at: float) -> None:
        """Show that every worker of a generation runs user code, and how long that took."""
        self.generation = generation
        peers = self.starts[generation]
        nodes = ", ".join(sorted({worker.agent for worker in peers.values()}))
        took = at - self.changed_at
        text = f"{len(peers)} run on {nodes}"
        if len(peers) == self.awaited and self.change not in self.took:
            self.took[self.change] = took
            text += f", {took:.2f} s after {self.change}"
        self.show("workers", text, "32", at)

    def show_progress(self) -> None:
        """Show the progress from time to time."""
        if self.blocks % PROGRESS_EVERY == 0:
            done = "#" * (self.blocks // BLOCKS_PER_MARK)
            bar = done.ljust(BLOCKS // BLOCKS_PER_MARK, ".")
            self.show("progress", f"[{bar}] {self.blocks} of {BLOCKS}")

    def conclude(self, codes: dict[str, int], left: list[int]) -> int:
        """Show how the job ended; return 0 if everything went as expected."""
        shown = ", ".join(f"{name} {code}" for name, code in codes.items())
        self.show("job", f"ended; exit codes: {shown}")
        is_exact = self.pi == math.fsum(compute(block) for block in range(BLOCKS))
        same = "exactly" if is_exact else "NOT"
        self.show("result", f"pi = {self.pi}, {same} the result of a single process")
        self.show("left over", f"{len(left) or 'no'} processes")
        print()
        well = codes == {"A": 0, "B": 0, "C": -signal.SIGKILL, "D": 0}
        if well and is_exact and not left and len(self.took) == 4:
            print(paint("32", "The last worker ran user code"))
            for change, took in self.took.items():
                print(paint("32", f"  {took:5.2f} s after {change}"))
            return self.write_report()
        print(paint("31", "The demo did not end as expected; please report this."))
        return 1

    def write_report(self) -> int:
        """Run `holdfast report`, and print the address of the page."""
        self.report.parent.mkdir(parents=True, exist_ok=True)
        command = (sys.executable, "-m", "holdfast", "report", str(self.folder / "logs"))
        done = subprocess.run(
            [*command, "--output", str(self.report)], stdout=subprocess.PIPE, text=True, check=False
        )
        print(f"\nThe same as a page (holdfast report):\n  {paint('36', done.stdout.strip())}")
        return done.returncode

    def processes(self) -> list[int]:
        """Return every process of the job that still runs, whatever its parent."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # It exited meanwhile, or belongs to another user.
        return found

    def show(self, who: str, text: str, colour: str = "", at: float | None = None) -> None:
        """Print one line with its time."""
        moment = (at or time.monotonic()) - self.began
        first, *more = textwrap.wrap(text, WIDTH - 20)
        print(f"{moment:6.2f} s  {who:9} {paint(colour, first)}")
        for line in more:
            print(f"{'':20}{paint(colour, line)}")
        sys.stdout.flush()


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def descendants(pid: int) -> list[int]:
    """Return all processes below a process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [one for child in children for one in (int(child), *descendants(int(child)))]


def kill(pid: int) -> None:
    """Kill a process, unless it exited meanwhile."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def paint(colour: str, text: str) -> str:
    """Colour a text if standard output is a terminal."""
    if not colour or not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\033[{colour}m{text}\033[0m"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Three nodes compute pi, and lose a worker and a node"
    )
    parser.add_argument("--report", type=Path, default=REPORT, help="where the page goes")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Clean up after SIGTERM too.
    try:
        with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as name:
            code = Demo(Path(name), args.report).run()
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
