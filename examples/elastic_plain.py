r"""A worker without PyTorch for a job whose number of workers changes while it runs.

Run it in two terminals. You can start it in a third at any time, and stop or kill any of them:

    holdfast run --nnodes 2:3 --rdzv-backend c10d --rdzv-endpoint localhost:29400 --rdzv-id pi \
        --max-restarts 3 examples/elastic_plain.py --folder /tmp/pi

The workers compute pi in numbered blocks. `RANK` and `WORLD_SIZE` assign the blocks to workers, and
finished blocks are files in a folder that all nodes share. After any change, each worker computes its
missing blocks. The result does not depend on which worker computed a block.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

from holdfast import worker

TERMS_PER_BLOCK = 2_000


def main() -> None:
    """Compute the blocks of this worker that do not exist yet."""
    args = parse_args()
    # Every worker has these variables. Their values may differ at the next start.
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    me = f"rank {rank} of {world_size} (pid {os.getpid()})"
    args.folder.mkdir(parents=True, exist_ok=True)
    count = len(done(args.folder))
    print(f"{me}: generation {os.environ['HOLDFAST_GENERATION']}, {count} blocks exist")
    for block in range(rank, args.blocks, world_size):
        if not (args.folder / f"block_{block}").exists():
            value = compute(block)
            time.sleep(args.block_seconds)  # Real training takes longer.
            save(args.folder / f"block_{block}", value)
            print(f"{me}: block {block} of {args.blocks}")
            worker.progress(len(done(args.folder)))  # For reports only.
    if rank == 0:
        print(f"{me}: pi = {collect(args.folder, args.blocks)!r}")


def compute(block: int) -> float:
    """Return the sum of one block of the series for pi."""
    first = block * TERMS_PER_BLOCK
    terms = range(first, first + TERMS_PER_BLOCK)
    return math.fsum((-1) ** k * 4 / (2 * k + 1) for k in terms)


def save(file: Path, value: float) -> None:
    """Write a result under another name, then rename it, so that a kill leaves no partial file.

    The other name contains this process's id, because two workers may compute the same block: one
    of them may run on a node that was replaced and does not know it yet.
    """
    beside = file.with_name(f"{os.uname().nodename}_{os.getpid()}.new")
    beside.write_text(repr(value))
    beside.replace(file)


def done(folder: Path) -> list[Path]:
    """Return the results that exist."""
    return list(folder.glob("block_*"))


def collect(folder: Path, blocks: int) -> float:
    """Wait for the other workers' blocks and return the sum of all.

    If one of them fails, this worker is restarted too.
    """
    while len(done(folder)) < blocks:
        time.sleep(0.01)
    return math.fsum(float(file.read_text()) for file in done(folder))


def parse_args() -> argparse.Namespace:
    """Return the arguments of the script; Holdfast passes them on unchanged."""
    parser = argparse.ArgumentParser(description="Compute pi in blocks, with any number of workers")
    parser.add_argument("--folder", type=Path, required=True, help="a folder that all nodes share")
    parser.add_argument("--blocks", type=int, default=600)
    parser.add_argument("--block-seconds", type=float, default=0.1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
