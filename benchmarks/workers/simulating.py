"""Runs the simulator on a few seeds and prints its steps and CPU time.

simulating.py NODES MINUTES SEEDS PROFILE
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # The simulator is not installed.

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
