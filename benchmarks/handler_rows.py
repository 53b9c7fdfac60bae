"""Rows about many rendezvous handlers that join at once; `workers/join_handlers.py` does the work."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks.figures import NEVER

if TYPE_CHECKING:
    from benchmarks.launching import Lab, Samples

PROCESSES = 8
JOIN_S_MAX = 120.0
# For the imports and the connections, which are not measured.
SET_UP_S_MAX = 90.0
# torch looks up the name of each client; this limits the time if DNS is slow.
QUICK_NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}


def measure_join_handlers(handlers: int, lab: Lab, launcher: str) -> Samples:
    """Let many handlers join one round."""
    words = (launcher, handlers, PROCESSES, int(JOIN_S_MAX))
    limit_s = JOIN_S_MAX * 2 + SET_UP_S_MAX
    took_s = lab.figures_of("join_handlers.py", words, limit_s, QUICK_NAMES)["took_s"]
    return {"join": [NEVER if took_s is None else took_s]}


measure_join_handlers_128 = partial(measure_join_handlers, 128)
measure_join_handlers_256 = partial(measure_join_handlers, 256)
