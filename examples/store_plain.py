"""Workers without PyTorch that share their work through the job's store.

Run it:

    holdfast run --nproc-per-node 3 examples/store_plain.py

An agent serves the workers of each generation a small key-value store, at `MASTER_ADDR` and
`MASTER_PORT`; it is the one in which PyTorch's workers find each other. So that port is taken. A
worker that wants it for a server of its own is run with `--worker-store`.

The workers count primes, in blocks that nobody deals out: each takes the next number off a counter
in the store, so a slow one takes fewer. Every generation begins with an empty store. What has to
outlive a restart belongs in a file, as in `elastic_plain.py`.
"""

from __future__ import annotations

import os

from holdfast.store import from_environment

BLOCKS, NUMBERS_PER_BLOCK = 40, 500


def main() -> None:
    """Count until no block is left; the first worker adds up what all have found."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with from_environment() as store:
        taken = 0
        # One number for each block: `add` gives no two workers the same.
        while (block := store.add("next block", 1) - 1) < BLOCKS:
            store.set(f"primes/{block}", str(count_primes(block)))
            taken += 1
        print(f"rank {rank} of {world_size} took {taken} blocks")
        store.set(f"done/{rank}", "yes")
        if rank == 0:  # It leaves last, since with --worker-store it is the one that has the store.
            store.wait([f"done/{other}" for other in range(world_size)])
            found = store.multi_get([f"primes/{block}" for block in range(BLOCKS)])
            total = sum(int(number) for number in found)
            print(f"primes below {BLOCKS * NUMBERS_PER_BLOCK}: {total}")


def count_primes(block: int) -> int:
    """Count the primes of one block."""
    first = block * NUMBERS_PER_BLOCK
    numbers = range(max(2, first), first + NUMBERS_PER_BLOCK)
    return sum(
        all(number % divisor for divisor in range(2, int(number**0.5) + 1)) for number in numbers
    )


if __name__ == "__main__":
    main()
