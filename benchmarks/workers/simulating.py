"""Runs the simulator on a few seeds and prints how many steps it took in how many seconds.

simulating.py NODES MINUTES SEEDS PROFILE
"""

from __future__ import annotations

import json
import sys
import time

from simulator import simulate


def main() -> None:
    nodes, minutes, seeds = map(int, sys.argv[1:4])
    profile = sys.argv[4]
    steps, began = 0, time.process_time()
    for seed in range(seeds):
        result = simulate(seed, nodes=nodes, minutes=minutes, profile=profile)
        if result.violation:
            sys.exit(f"seed {seed}: {result.invariant}: {result.violation}")
        steps += result.steps
    print(json.dumps({"steps": steps, "cpu_s": time.process_time() - began}))


if __name__ == "__main__":
    main()
