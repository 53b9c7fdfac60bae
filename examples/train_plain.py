"""A worker without PyTorch that survives a kill: it saves its progress and continues from there.

Run it:

    holdfast run --nproc-per-node 3 --max-restarts 3 examples/train_plain.py --folder /tmp/pi

The workers compute pi together. Each adds up its share of a series in steps, and writes a checkpoint
after each step. If you kill a worker (`kill -9 <pid>`), Holdfast stops the others and restarts all of
them, and each continues from its checkpoint. The sum at the end is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from pathlib import Path

TERMS_PER_STEP = 2_000


def main() -> None:
    """Do the remaining steps."""
    args = parse_args()
    # The environment of every worker, as under torchrun.
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    me = f"rank {rank} (pid {os.getpid()})"
    args.folder.mkdir(parents=True, exist_ok=True)
    checkpoint = args.folder / f"checkpoint_{rank}.json"
    step, total = load(checkpoint)
    print(f"{me}: start {generation}, begins at step {step} of {args.steps}")
    if args.helpers:
        # Data loaders do this. It has its own session and would outlive its parent.
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    while step < args.steps:
        if rank == args.fail_rank and step == args.fail_at_step:
            fail_once(args.folder / "failed_once")
        first = step * TERMS_PER_STEP
        for term in range(first, first + TERMS_PER_STEP):
            k = term * world_size + rank
            total += (-1) ** k * 4 / (2 * k + 1)
        step += 1
        time.sleep(args.step_seconds)  # Real training takes longer.
        save(checkpoint, step, total)
        print(f"{me}: step {step} of {args.steps}")
    print(f"{me}: done, its share of pi is {total!r}")


def load(checkpoint: Path) -> tuple[int, float]:
    """Return the progress of the last start."""
    try:
        saved = json.loads(checkpoint.read_text())
    except FileNotFoundError:
        return 0, 0.0
    return saved["step"], saved["total"]


def save(checkpoint: Path, step: int, total: float) -> None:
    """Write a checkpoint under another name, then rename it, so that a kill leaves no partial file."""
    beside = checkpoint.with_suffix(".new")
    beside.write_text(json.dumps({"step": step, "total": total}))
    beside.replace(checkpoint)


def fail_once(marker: Path) -> None:
    """Raise, but only the first time, so that the next start passes this step."""
    if not marker.exists():
        marker.touch()
        raise ValueError("a bad batch: this example fails here once, as requested")


def parse_args() -> argparse.Namespace:
    """Return the arguments of the script; Holdfast passes them on unchanged."""
    parser = argparse.ArgumentParser(description="Compute pi in steps, with checkpoints.")
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints are kept")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--fail-at-step", type=int, default=-1, help="raise an error there, once")
    parser.add_argument("--fail-rank", type=int, default=1, help="the rank that raises it")
    parser.add_argument("--helpers", action="store_true", help="each worker starts a helper too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
