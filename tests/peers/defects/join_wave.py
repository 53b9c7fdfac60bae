"""If many nodes join at once, the time grows rapidly: four times as many nodes may never form a round.

The state is one value that every node replaces with compare_set. Each success makes all others fail and retry
immediately, including their heartbeats, so waiting nodes appear dead. Default settings; the handlers share this
machine's cores, unlike real nodes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from .stage import WORKERS, Evidence, present

FEW, MANY, PROCESSES = 128, 512, 8
LIMIT_S = 60
FAIR = 9.0  # Up to nine times the time for four times the nodes is not a defect.
# The setup is not measured; names that DNS does not know must not delay it by seconds.
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
    program = str(WORKERS / "join_handlers.py")
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
