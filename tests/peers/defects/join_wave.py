"""When many nodes join at once the time explodes: twice the nodes may never get a round at all.

The state is one value that everybody swaps for a changed one; each success makes all others fail
and try again at once, heartbeats among them, so waiting nodes are taken for dead. Default settings;
the handlers share this machine's cores, which real nodes would not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from .stage import WORKERS, Evidence, present

FEW, MANY, PROCESSES = 128, 256, 8
LIMIT_S = 60
FAIR = 3.0  # Twice the nodes in up to three times the time would be no defect.
# The set-up is not what is looked at: names that DNS does not know need not delay it by seconds.
QUICK_NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}


def show() -> Evidence:
    few_s, many_s = wave(FEW), wave(MANY)
    if few_s is None:
        return Evidence(shown=True, text=f"{FEW} handlers had no round after {LIMIT_S} s")
    many = f"{many_s:.1f} s" if many_s is not None else f"not done after {LIMIT_S} s"
    return Evidence(
        many_s is None or many_s > FAIR * few_s,
        f"{FEW} handlers joined in {few_s:.1f} s, {MANY} handlers: {many}",
    )


def wave(handlers: int) -> float | None:
    program = str(WORKERS / "wave.py")
    words = ["torchrun", str(handlers), str(PROCESSES), str(LIMIT_S)]
    done = subprocess.run(
        [sys.executable, program, *words],
        env=os.environ | QUICK_NAMES,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=LIMIT_S * 4,
    )
    took_s: float | None = json.loads(done.stdout)["took_s"]
    return took_s


if __name__ == "__main__":
    present(show)
