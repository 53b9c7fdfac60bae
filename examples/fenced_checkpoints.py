r"""A worker that workers of earlier generations cannot harm: they cannot overwrite its checkpoints.

Run it, and kill agents and coordinators:

    holdfast run --nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint localhost:29400 --rdzv-id count \
        --max-restarts 3 examples/fenced_checkpoints.py --folder /tmp/count

A disconnected node does not know that another node replaced it. Its worker may still write after its
successors have started. So the folder stores the highest fence. Before a worker publishes a checkpoint,
it compares fences; if its own is lower, it exits.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Fenced(Exception):
    """A later generation writes here; it has replaced this worker."""


class CheckpointFolder:
    """The folder with the checkpoints of one job. A writer opens it with its fence."""

    def __init__(self, folder: Path, fence: int) -> None:
        self._folder = folder
        self._fence = fence
        folder.mkdir(parents=True, exist_ok=True)
        with self._locked():  # From now on, earlier generations are rejected.
            pass

    def load(self) -> dict[str, int]:
        """Return the newest checkpoint, or the initial one."""
        try:
            loaded: dict[str, int] = json.loads((self._folder / "checkpoint.json").read_text())
        except FileNotFoundError:
            return {"step": 0}
        return loaded

    def save(self, checkpoint: dict[str, int]) -> None:
        """Replace the last checkpoint, unless this writer was replaced."""
        beside = self._folder / f"{self._fence}.new"
        beside.write_text(json.dumps(checkpoint))
        with self._locked():  # The lock makes the check and the rename one step.
            beside.replace(self._folder / "checkpoint.json")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder; raise `Fenced` if it has a higher fence."""
        highest = self._folder / "fence"
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            stored = int(highest.read_text()) if highest.exists() else 0
            if stored > self._fence:
                raise Fenced(f"the folder has fence {stored}, this worker only {self._fence}")
            if stored < self._fence:
                beside = highest.with_name(f"fence.{self._fence}.new")
                beside.write_text(str(self._fence))
                beside.replace(highest)
            yield


def main() -> None:
    """Count, and save every step."""
    args = parse_args()
    if int(os.environ["RANK"]):  # Only rank 0 writes.
        time.sleep(args.steps * args.step_seconds)
        return
    folder = CheckpointFolder(args.folder, int(os.environ["HOLDFAST_FENCE"]))
    checkpoint = folder.load()
    print(f"fence {os.environ['HOLDFAST_FENCE']}: from step {checkpoint['step']}")
    while checkpoint["step"] < args.steps:
        time.sleep(args.step_seconds)  # Real training takes longer.
        checkpoint["step"] += 1
        folder.save(checkpoint)
    print(f"done: {checkpoint['step']} steps")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints are kept")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
