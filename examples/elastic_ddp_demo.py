"""Trains on two nodes; a worker is killed, then an agent, then a node joins. The loss goes on.

Run it (needs PyTorch; takes about half a minute):

    python examples/elastic_ddp_demo.py --picture losses.svg

Each node is a `holdfast run` of its own on this machine, with workers of `elastic_ddp.py`. The demo
reads their log of losses, does the killing, and in the end compares the log with that of one
process that trained alone, undisturbed. It ends with an error if a step is missing or there twice,
or if a loss differs.
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

STEPS, STEPS_BETWEEN = 190, 25  # In all, and from one disturbance to the next.
STEP_SECONDS = 0.03
PATIENCE_S = 60.0  # Longer than this for what is waited for, and something is wrong.
LOOK_AGAIN_S = 0.02
SAME = 1e-9  # Sums over other numbers of workers round differently in the last digits.
# Imported once on each node, not by each worker. The second is what an optimizer imports when it is
# made, and takes as long as the first.
PRELOAD = "torch,torch._dynamo"
SCRIPT = str(Path(__file__).with_name("elastic_ddp.py"))

STARTED = re.compile(r"rank (\d+) of \d+ \(pid (\d+)\): generation (\d+), goes on after step (\d+)")


class Demo:
    """Starts the nodes, disturbs them, and tells what happens."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder = folder
        self.workers = workers  # On each node.
        self.port = free_port()
        self.log = folder / "job" / "losses.jsonl"
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.disturbed: list[tuple[int, str]] = []  # The generation that was, and what was done.
        self.told = 0  # Characters of node A's output that were passed on.
        self.began = time.monotonic()

    def run(self, picture: Path | None) -> int:
        """Run the job to its end; return 0 if it went as promised."""
        both = 2 * self.workers
        try:
            self.tell(f"starts the nodes A and B, with {self.workers} worker(s) each")
            self.start("A")
            self.await_coordinator()  # So that it is A, and the other can be killed.
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
                agent.kill()  # If it still runs. Its keeper ends all that is below it.
                agent.wait()
        self.tell(f"exit codes: {', '.join(f'{name} {code}' for name, code in codes.items())}")
        notes = read(self.log)
        if picture is not None:
            picture.write_text(draw(notes, self.labels(notes)))
            self.tell(f"drew {picture}")
        well = codes == {"A": 0, "B": -signal.SIGKILL, "C": 0} and self.check(notes)
        self.tell(
            "all is well" if well else "this is NOT what should have happened; please report it"
        )
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
        self.tell(f"kill -9 {pid}: rank {rank}, a worker on {name}")
        os.kill(int(pid), signal.SIGKILL)

    def kill_agent(self, name: str) -> None:
        """Kill the agent of one node without warning; its workers end with it."""
        agent = self.agents[name]
        below = len(descendants(agent.pid))
        self.note("agent killed")
        self.tell(f"kill -9 {agent.pid}: the agent of {name}, with {below} processes below it")
        agent.kill()

    def join(self, name: str) -> None:
        """Start a node that nobody knew of before."""
        self.note("node joined")
        self.tell(f"starts a new node, {name}")
        self.start(name)

    def note(self, label: str) -> None:
        """Note what is about to be done, and to which generation."""
        self.disturbed.append((read(self.log)[-1].generation, label))

    # What the demo sees.

    def await_coordinator(self) -> None:
        """Wait until somebody listens at the endpoint, which the kernel's table of sockets says."""
        listens = f":{self.port:04X} 00000000:0000 0A"
        self.wait(lambda: listens in Path("/proc/net/tcp").read_text(), "no coordinator")

    def await_steps(self, world_size: int) -> None:
        """Wait until workers that were started after the last disturbance have done some steps."""
        before = self.disturbed[-1][0] if self.disturbed else -1

        def steps() -> list[Note]:
            notes = read(self.log) if self.log.exists() else []
            return [
                note for note in notes if note.generation > before and note.world_size == world_size
            ]

        self.wait(lambda: len(steps()) > 0, f"no step of {world_size} workers")
        first = steps()[0]
        text = f"{world_size} worker(s) go on with step {first.step}, loss {first.loss:.4f}"
        self.tell(f"generation {first.generation}: {text}")
        self.wait(lambda: len(steps()) >= STEPS_BETWEEN, f"no more steps of {world_size} workers")

    def wait(self, done: Callable[[], bool], otherwise: str) -> None:
        """Wait for something that can be looked at only again and again."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            self.listen()
            if time.monotonic() > deadline or self.agents["A"].poll() is not None:
                raise SystemExit(f"{otherwise}; node A said:\n{self.output_of('A').read_text()}")
            time.sleep(LOOK_AGAIN_S)

    def listen(self) -> None:
        """Pass on what Holdfast says on node A; on the others it says much the same."""
        text = self.output_of("A").read_text()
        whole = text.rfind("\n") + 1
        for line in text[self.told : whole].splitlines():
            if line.startswith("[holdfast] "):
                self.tell(line.removeprefix("[holdfast] "), "holdfast")
        self.told = whole

    def check(self, notes: list[Note]) -> bool:
        """Tell whether every step is there once, with the loss that one process alone has."""
        whole = [note.step for note in notes] == list(range(1, STEPS + 1))
        self.tell(f"the log has {'every step once' if whole else 'STEPS MISSING OR REPEATED'}")
        self.train_alone()
        alone = read(self.folder / "alone" / "losses.jsonl")
        pairs = zip(notes, alone, strict=False)
        difference = max(abs(ours.loss - theirs.loss) for ours, theirs in pairs)
        same = len(notes) == len(alone) and difference < SAME
        self.tell(f"one process alone has losses that differ by at most {difference:.1e}")
        return whole and same

    def train_alone(self) -> None:
        """Do the same training in one process, without a launcher."""
        environment = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",  # As the workers have it.
        }
        arguments = ("--folder", str(self.folder / "alone"), "--steps", str(STEPS))
        subprocess.run(
            [sys.executable, SCRIPT, *arguments, "--step-seconds", "0"],
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
            check=True,
        )

    def labels(self, notes: list[Note]) -> dict[int, str]:
        """Return what was done before a generation, for those that did a step."""
        return {
            min(note.generation for note in notes if note.generation > before): label
            for before, label in self.disturbed
        }

    def output_of(self, name: str) -> Path:
        """Return the file with all that a node said."""
        return self.folder / f"{name}.txt"

    def tell(self, text: str, who: str = "demo") -> None:
        """Print one moment of the story."""
        print(f"{time.monotonic() - self.began:6.2f} s  {who:8}  {text}", flush=True)


def main() -> int:
    """Run the demo in a folder of its own, which is removed, or in one that is kept."""
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Leave nothing behind, either.
    sys.exit(main())
