"""Rows about many rendezvous handlers that join at once; `workers/wave.py` does the work."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.figures import NEVER
from benchmarks.launching import WORKERS, BenchmarkError

if TYPE_CHECKING:
    from benchmarks.launching import Lab, Samples

PROCESSES = 8
WAVE_S_MAX = 120.0
# For the imports and the connections, which are not measured.
SET_UP_S_MAX = 90.0
# torch asks for the name of each client's address; where DNS is slow this need not take minutes.
QUICK_NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}


def measure_wave(handlers: int, lab: Lab, launcher: str) -> Samples:
    """Let so many handlers join one round."""
    words = [launcher, str(handlers), str(PROCESSES), str(int(WAVE_S_MAX))]
    done = subprocess.run(
        [lab.python, str(WORKERS / "wave.py"), *words],
        env=lab.env | QUICK_NAMES,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAVE_S_MAX * 2 + SET_UP_S_MAX,
    )
    if done.returncode or not done.stdout:
        raise BenchmarkError(f"{launcher}: wave.py failed:\n{done.stderr[-3000:]}")
    took_s = json.loads(done.stdout)["took_s"]
    return {"wave": [NEVER if took_s is None else took_s]}


measure_wave_128 = partial(measure_wave, 128)
measure_wave_256 = partial(measure_wave, 256)
