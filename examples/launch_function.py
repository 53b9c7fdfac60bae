"""Launch a Python function as workers, from Python, and get their return values.

Run it:

    python examples/launch_function.py

The import path and the arguments are those of `torch.distributed.launcher.api`, so a program that
launches with TorchElastic needs only the import changed.
"""

from __future__ import annotations

import os

from holdfast.launcher.api import LaunchConfig, elastic_launch


def count_primes(limit: int) -> int:
    """Count the primes below `limit` in this worker's share."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mine = range(2 + rank, limit, world_size)
    return sum(
        all(number % divisor for divisor in range(2, int(number**0.5) + 1)) for number in mine
    )


def main() -> None:
    """Launch three workers and add up what they found."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=3,
        run_id="primes",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    by_rank = elastic_launch(config, count_primes)(10_000)
    for rank, found in sorted(by_rank.items()):
        print(f"rank {rank} found {found}")
    print(f"primes below 10000: {sum(by_rank.values())}")


# Workers import this file to find the function; without this line they would launch workers too.
if __name__ == "__main__":
    main()
