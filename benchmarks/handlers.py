"""Rows about many rendezvous handlers that join at once; `workers/wave.py` does the work."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks.figures import NEVER

if TYPE_CHECKING:
    from benchmarks.launching import Lab, Samples

PROCESSES = 8
WAVE_S_MAX = 120.0
# For the imports and the connections, which are not measured.
SET_UP_S_MAX = 90.0
# torch looks up the name of each client; this limits the time if DNS is slow.
QUICK_NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}


def measure_wave(handlers: int, lab: Lab, launcher: str) -> Samples:
    """Let many handlers join one round."""
    words = (launcher, handlers, PROCESSES, int(WAVE_S_MAX))
    limit_s = WAVE_S_MAX * 2 + SET_UP_S_MAX
    took_s = lab.figures_of("wave.py", words, limit_s, QUICK_NAMES)["took_s"]
    return {"wave": [NEVER if took_s is None else took_s]}


measure_wave_128 = partial(measure_wave, 128)
measure_wave_256 = partial(measure_wave, 256)
