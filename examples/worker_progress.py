"""A worker that reports its progress and its loss, and is restarted when it hangs.

Run it:

    holdfast run --nproc-per-node 2 --max-restarts 1 examples/worker_progress.py --hang-at-step 3

Rank 1 hangs in its fourth step, once. After two seconds its section times out: the agent appends the
worker's stacks to its log, kills it and restarts all workers. Without Holdfast the calls do nothing.

With `--steps 2000`, watch it in another terminal with `holdfast top` or `holdfast dashboard`: they show the
remaining time, and the loss over time.
"""

from __future__ import annotations

import argparse
import time

from holdfast import worker


def main() -> None:
    """Do some steps, each in a section with a timeout."""
    args = parse_args()
    me = worker.info()
    if me.last_end:
        before = f"the previous one had {me.previous_world_size} workers and ended: {me.last_end}"
        print(f"rank {me.rank}: generation {me.generation}; {before}")
    for step in range(args.steps):
        with worker.section("a step", timeout=args.timeout):
            if me.rank == 1 and me.generation == 0 and step == args.hang_at_step:
                time.sleep(3600)  # Hangs.
            time.sleep(0.05)
            loss = 4 / (1 + step) ** 0.3
        worker.progress(step, total=args.steps, loss=loss)
    print(f"rank {me.rank} of {me.world_size}: {args.steps} steps done")


def parse_args() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--hang-at-step", type=int, default=-1, metavar="STEP")
    parser.add_argument("--timeout", type=float, default=2.0, metavar="SECONDS")
    return parser.parse_args()


if __name__ == "__main__":
    main()
