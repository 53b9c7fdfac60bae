"""Workers without PyTorch that share their work through the job's store.

Run it:

    holdfast run --nproc-per-node 3 examples/store_plain.py

In each generation an agent serves a small key-value store for the workers, at `MASTER_ADDR` and
`MASTER_PORT`. PyTorch's workers connect through the same store. If a worker needs that port for its
own server, use `--worker-store`.

The workers count primes in blocks. Each takes the next number from a counter in the store, so a slow
worker takes fewer blocks. Every generation starts with an empty store. Data that must survive a
restart belongs in a file, as in `elastic_plain.py`.
"""

from __future__ import annotations

import os

from holdfast.store import from_environment

BLOCKS, NUMBERS_PER_BLOCK = 40, 500


def main() -> None:
    """Count until no block is left; the first worker adds up the results."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with from_environment() as store:
        taken = 0
        # One number for each block: `add` never returns the same number twice.
        while (block := store.add("next block", 1) - 1) < BLOCKS:
            store.set(f"primes/{block}", str(count_primes(block)))
            taken += 1
        print(f"rank {rank} of {world_size} took {taken} blocks")
        store.set(f"done/{rank}", "yes")
        if rank == 0:  # It exits last, because with --worker-store it serves the store.
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
