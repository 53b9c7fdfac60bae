r"""A worker without PyTorch for a job whose number of workers changes while it runs.

Run it on two terminals; a third may join at any time, and any of them may be stopped or killed:

    holdfast run --nnodes 2:3 --rdzv-backend c10d --rdzv-endpoint localhost:29400 --rdzv-id pi \
        --max-restarts 3 examples/elastic_plain.py --folder /tmp/pi

Together the workers compute pi, in numbered blocks. Which blocks are whose follows from `RANK` and
`WORLD_SIZE`, and what is done is in a folder that all nodes see. So after any change each worker
works out anew what is left for it. Nothing else is needed to be elastic: no block depends on who
computed it, and one that is computed twice is the same both times.
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
    """Compute the blocks that fall to this worker and are not there yet."""
    args = parse_args()
    # What every worker is told by its environment. All of it may differ at the next start.
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    me = f"rank {rank} of {world_size} (pid {os.getpid()})"
    args.folder.mkdir(parents=True, exist_ok=True)
    there = len(done(args.folder))
    print(f"{me}: generation {os.environ['HOLDFAST_GENERATION']}, {there} blocks are there")
    for block in range(rank, args.blocks, world_size):
        if not (args.folder / f"block_{block}").exists():
            value = compute(block)
            time.sleep(args.block_seconds)  # Real training has more to do.
            save(args.folder / f"block_{block}", value)
            print(f"{me}: block {block} of {args.blocks}")
            worker.progress(len(done(args.folder)))  # For reports; nothing depends on it.
    if rank == 0:
        print(f"{me}: pi = {collect(args.folder, args.blocks)!r}")


def compute(block: int) -> float:
    """Return the sum of one block of the series for pi."""
    first = block * TERMS_PER_BLOCK
    terms = range(first, first + TERMS_PER_BLOCK)
    return math.fsum((-1) ** k * 4 / (2 * k + 1) for k in terms)


def save(file: Path, value: float) -> None:
    """Write a result beside its place, then rename it: a kill must not leave half of one.

    The name beside it has this process's id: a worker on a node that the others have given up, but
    that does not know it yet, may be at the same block.
    """
    beside = file.with_name(f"{os.uname().nodename}_{os.getpid()}.new")
    beside.write_text(repr(value))
    beside.replace(file)


def done(folder: Path) -> list[Path]:
    """Return the results that are there."""
    return list(folder.glob("block_*"))


def collect(folder: Path, blocks: int) -> float:
    """Wait for the other workers' blocks and return the sum of all.

    It need not look after them: should one fail, this worker is stopped and started again too.
    """
    while len(done(folder)) < blocks:
        time.sleep(0.01)
    return math.fsum(float(file.read_text()) for file in done(folder))


def parse_args() -> argparse.Namespace:
    """Return the arguments of the script; Holdfast passes them on untouched."""
    parser = argparse.ArgumentParser(description="Compute pi in blocks, with any number of workers")
    parser.add_argument("--folder", type=Path, required=True, help="a folder that all nodes see")
    parser.add_argument("--blocks", type=int, default=600)
    parser.add_argument("--block-seconds", type=float, default=0.1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
