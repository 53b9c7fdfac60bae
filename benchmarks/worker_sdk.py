"""Rows about the cost of `holdfast.worker` calls; Holdfast only.

`workers/sdk_calls.py` makes the calls, in a process with a page like a worker's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.figures import HOLDFAST, Metric, Target
from benchmarks.measuring import Row

if TYPE_CHECKING:
    from benchmarks.launching import Lab, Samples

CALLS, REPEATS = 100_000, 5
CALLS_S_MAX = 120.0
CALL_NS_MAX = 1_000


def measure_calls(lab: Lab, _: str) -> Samples:
    """Return the cost of one call in the cheapest of several series."""
    found = lab.figures_of("sdk_calls.py", (CALLS, REPEATS), CALLS_S_MAX)
    return {name: [value] for name, value in found.items()}


WORKER_ROWS = (
    Row(
        "worker-calls",
        measure_calls,
        (
            Metric(
                "heartbeat", "worker.heartbeat()", "ns", (Target("limit", CALL_NS_MAX),)
            ),
            Metric("progress", "worker.progress(step)", "ns", (Target("limit", CALL_NS_MAX),)),
            Metric("section", "worker.section: create, enter and leave", "ns"),
            Metric("section_again", "worker.section: enter and leave", "ns"),
            Metric("import_ms", "import holdfast.worker", "ms"),
        ),
        (HOLDFAST,),
        rounds=5,
        quick_rounds=1,
        warm_up=False,
    ),
)  # fmt: skip
