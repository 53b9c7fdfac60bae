"""Train on two nodes, kill a worker, kill an agent, add a node; the loss curve continues.

Run it (needs PyTorch; takes about half a minute):

    python examples/elastic_ddp_demo.py --picture losses.svg

Each node is its own `holdfast run` on this machine, with workers of `elastic_ddp.py`. The demo reads
their log of losses and kills processes. At the end it compares the log with that of a single
undisturbed process. It exits with an error if a step is missing or repeated, or if a loss differs.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from demo import descendants, free_port
from plot_losses import Note, draw, read

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS, STEPS_BETWEEN = 190, 25  # In total, and between two disturbances.
STEP_SECONDS = 0.03
PATIENCE_S = 60.0  # The longest wait for anything.
POLL_S = 0.02
SAME = 1e-9  # Sums over another number of workers round differently in the last digits.
# Each node imports these once, instead of each worker. The first optimizer imports torch._dynamo,
# which takes as long as torch itself.
PRELOAD = "torch,torch._dynamo"
SCRIPT = str(Path(__file__).with_name("elastic_ddp.py"))

STARTED = re.compile(
    r"rank (\d+) of \d+ \(pid (\d+)\): generation (\d+), continues after step (\d+)"
)


class Demo:
    """Starts the nodes, disturbs them, and prints what happens."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder = folder
        self.workers = workers  # On each node.
        self.port = free_port()
        self.log = folder / "job" / "losses.jsonl"
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.disturbed: list[tuple[int, str]] = []  # The generation and the disturbance.
        self.printed = 0  # Characters of node A's output that were printed.
        self.began = time.monotonic()

    def run(self, picture: Path | None) -> int:
        """Run the job to its end; return 0 if everything went as expected."""
        both = 2 * self.workers
        try:
            self.show(f"start nodes A and B, with {self.workers} worker(s) each")
            self.start("A")
            self.await_coordinator()  # A coordinates, so the demo can kill the other.
            self.start("B")
            self.await_steps(both)
            self.kill_worker("B")
            self.await_steps(both)
            self.kill_agent("B")
            self.await_steps(self.workers)
            self.join("C")
            self.await_steps(both)
            codes = {name: agent.wait(PATIENCE_S) for name, agent in self.agents.items()}
            self.listen()
        finally:
            for agent in self.agents.values():
                agent.kill()  # If it still runs. Its keeper kills its workers.
                agent.wait()
        self.show(f"exit codes: {', '.join(f'{name} {code}' for name, code in codes.items())}")
        notes = read(self.log)
        if picture is not None:
            picture.write_text(draw(notes, self.labels(notes)))
            self.show(f"drew {picture}")
        well = codes == {"A": 0, "B": -signal.SIGKILL, "C": 0} and self.check(notes)
        self.show("all is well" if well else "this did not end as expected; please report it")
        return 0 if well else 1

    # What the demo does.

    def start(self, name: str) -> None:
        """Start the agent of one node."""
        command = [
            *(sys.executable, "-m", "holdfast", "run"),
            *("--nnodes", "1:2", "--nproc-per-node", str(self.workers), "--max-restarts", "3"),
            *("--preload", PRELOAD),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}"),
            *("--rdzv-id", "ddp", "--rdzv-conf", f"node_id={name}"),
            *(SCRIPT, "--folder", str(self.log.parent), "--steps", str(STEPS)),
            *("--step-seconds", str(STEP_SECONDS)),
        ]
        with self.output_of(name).open("wb") as output:
            self.agents[name] = subprocess.Popen(command, stdout=output, stderr=output)

    def kill_worker(self, name: str) -> None:
        """Kill a worker of one node without warning."""
        rank, pid, _, _ = STARTED.findall(self.output_of(name).read_text())[-1]
        self.note("worker killed")
        self.show(f"kill -9 {pid}: rank {rank}, a worker on {name}")
        os.kill(int(pid), signal.SIGKILL)

    def kill_agent(self, name: str) -> None:
        """Kill the agent of one node without warning, and its workers with it."""
        agent = self.agents[name]
        below = len(descendants(agent.pid))
        self.note("agent killed")
        self.show(f"kill -9 {agent.pid}: the agent of {name}, with {below} processes below it")
        agent.kill()

    def join(self, name: str) -> None:
        """Start a node that was not in the job before."""
        self.note("node joined")
        self.show(f"start a new node, {name}")
        self.start(name)

    def note(self, label: str) -> None:
        """Note the disturbance that follows, and the generation."""
        self.disturbed.append((read(self.log)[-1].generation, label))

    # What the demo reads.

    def await_coordinator(self) -> None:
        """Wait until the kernel's socket table shows a listener at the endpoint."""
        listens = f":{self.port:04X} 00000000:0000 0A"
        self.wait(lambda: listens in Path("/proc/net/tcp").read_text(), "no coordinator")

    def await_steps(self, world_size: int) -> None:
        """Wait until workers that started after the last disturbance have made some steps."""
        before = self.disturbed[-1][0] if self.disturbed else -1

        def steps() -> list[Note]:
            notes = read(self.log) if self.log.exists() else []
            return [
                note for note in notes if note.generation > before and note.world_size == world_size
            ]

        self.wait(lambda: len(steps()) > 0, f"no step of {world_size} workers")
        first = steps()[0]
        text = f"{world_size} worker(s) continue with step {first.step}, loss {first.loss:.4f}"
        self.show(f"generation {first.generation}: {text}")
        self.wait(lambda: len(steps()) >= STEPS_BETWEEN, f"no more steps of {world_size} workers")

    def wait(self, done: Callable[[], bool], otherwise: str) -> None:
        """Poll until a condition holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            self.listen()
            if time.monotonic() > deadline or self.agents["A"].poll() is not None:
                raise SystemExit(
                    f"{otherwise}; output of node A:\n{self.output_of('A').read_text()}"
                )
            time.sleep(POLL_S)

    def listen(self) -> None:
        """Print Holdfast's messages on node A; the other nodes print nearly the same."""
        text = self.output_of("A").read_text()
        whole = text.rfind("\n") + 1
        for line in text[self.printed : whole].splitlines():
            if line.startswith("[holdfast] "):
                self.show(line.removeprefix("[holdfast] "), "holdfast")
        self.printed = whole

    def check(self, notes: list[Note]) -> bool:
        """Check that every step occurs once, with the loss of a single process."""
        whole = [note.step for note in notes] == list(range(1, STEPS + 1))
        self.show(f"the log has {'every step once' if whole else 'STEPS MISSING OR REPEATED'}")
        self.train_alone()
        alone = read(self.folder / "alone" / "losses.jsonl")
        pairs = zip(notes, alone, strict=False)
        difference = max(abs(ours.loss - theirs.loss) for ours, theirs in pairs)
        same = len(notes) == len(alone) and difference < SAME
        self.show(f"the losses of a single process differ by at most {difference:.1e}")
        return whole and same

    def train_alone(self) -> None:
        """Run the same training in one process, without a launcher."""
        environment = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",  # As in the workers.
        }
        arguments = ("--folder", str(self.folder / "alone"), "--steps", str(STEPS))
        subprocess.run(
            [sys.executable, SCRIPT, *arguments, "--step-seconds", "0"],
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
            check=True,
        )

    def labels(self, notes: list[Note]) -> dict[int, str]:
        """Return the disturbance before each generation that made a step."""
        return {
            min(note.generation for note in notes if note.generation > before): label
            for before, label in self.disturbed
        }

    def output_of(self, name: str) -> Path:
        """Return the file with a node's output."""
        return self.folder / f"{name}.txt"

    def show(self, text: str, who: str = "demo") -> None:
        """Print one line with its time."""
        print(f"{time.monotonic() - self.began:6.2f} s  {who:8}  {text}", flush=True)


def main() -> int:
    """Run the demo in a temporary folder, or in one that is kept."""
    parser = argparse.ArgumentParser(description="Disturb a training job.")
    parser.add_argument("--picture", type=Path, help="draw the loss curve here")
    parser.add_argument("--workers", type=int, default=2, help="on each node")
    parser.add_argument("--folder", type=Path, help="keep all files here; it must be new")
    args = parser.parse_args()
    if args.folder is not None:
        args.folder.mkdir(parents=True)
        return Demo(args.folder, args.workers).run(args.picture)
    with tempfile.TemporaryDirectory(prefix="holdfast-ddp-") as name:
        return Demo(Path(name), args.workers).run(args.picture)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Clean up after SIGTERM too.
    sys.exit(main())
