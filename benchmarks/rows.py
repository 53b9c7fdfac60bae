"""The rows of the benchmark: what each measures, how often, and what is to be reached.

Here are those of one node; `benchmarks.torch_rows` has those of workers that use torch,
`benchmarks.node_rows` those of many nodes, `benchmarks.etcd_rows` those on etcd, and
`benchmarks.worker_sdk` those of `holdfast.worker`.

`measure` is one turn of one launcher and returns its samples by metric; `benchmarks.measuring`
lets the launchers take turns.
"""

from __future__ import annotations

from benchmarks import idling, restarting, starting, teeing
from benchmarks.etcd_rows import ETCD_ROWS
from benchmarks.figures import BARE, HOLDFAST, TORCHRUN, Metric, Target
from benchmarks.measuring import Row
from benchmarks.node_rows import NODE_ROWS
from benchmarks.torch_rows import TORCH_ROWS
from benchmarks.worker_sdk import WORKER_ROWS

ALL = (TORCHRUN, HOLDFAST, BARE)
BOTH = (TORCHRUN, HOLDFAST)


ONE_NODE_ROWS = (
    Row(
        "first-line",
        starting.measure_first_line,
        (
            Metric(
                "first",
                "command to first user line, 2 workers",
                "ms",
                (Target("torchrun", 12), Target("bare", 4)),
            ),
            Metric("last", "... to the other worker's first line", "ms"),
        ),
        ALL,
        rounds=9,
        quick_rounds=3,
    ),
    Row(
        "whole",
        starting.measure_whole,
        (
            Metric(
                "whole",
                "whole command, 2 workers that do nothing",
                "ms",
                (Target("torchrun", 12), Target("bare", 3.5)),
            ),
            Metric("cpu", "... CPU time of all its processes", "ms"),
        ),
        ALL,
        rounds=9,
        quick_rounds=3,
    ),
    Row(
        "restart",
        restarting.measure_restart,
        (
            Metric(
                "restart",
                "worker killed -> all of the next generation in user code",
                "ms",
                (Target("torchrun", 3),),
            ),
        ),
        BOTH,
        rounds=4,
        quick_rounds=1,
    ),
    Row(
        "many",
        starting.measure_many,
        (
            Metric("last", "64 workers, last one's first line", "ms", (Target("torchrun", 2),)),
            Metric("first", "... first one's first line", "ms"),
        ),
        ALL,
        rounds=5,
        quick_rounds=1,
    ),
    Row(
        "tee",
        teeing.measure_tee,
        (
            Metric(
                "speed",
                "tee of 2 x 30 MB, to the command's end",
                "MB/s",
                (Target("torchrun", 3),),
                higher_is_better=True,
            ),
            Metric("console_speed", "... to the last console byte", "MB/s", higher_is_better=True),
            Metric("miscounted", "... too few or too many", "lines", (Target("limit", 0),)),
        ),
        ALL,
        rounds=7,
        quick_rounds=2,
    ),
    Row(
        "tee-lines",
        teeing.measure_lines,
        (
            Metric(
                "damaged",
                "tee of 2 x 30 MB, lost or mixed or out of order",
                "lines",
                (Target("limit", 0),),
            ),
        ),
        BOTH,
        rounds=2,
        quick_rounds=1,
        warm_up=False,
    ),
    Row(
        "idle",
        idling.measure_idle,
        (
            Metric("agent_rss", "agent memory, RSS", "MiB", (Target("limit", 32),)),
            Metric("helpers_rss", "... its helper processes, RSS", "MiB"),
            Metric("all_pss", "... agent and helpers together, PSS", "MiB"),
            Metric("wakeups", "wake-ups while idle for 5 s", "switches", (Target("limit", 0),)),
            Metric("cpu", "CPU while idle", "%"),
        ),
        BOTH,
        rounds=3,
        quick_rounds=1,
        warm_up=False,
    ),
)

ROWS = (*ONE_NODE_ROWS, *TORCH_ROWS, *NODE_ROWS, *ETCD_ROWS, *WORKER_ROWS)
# Names that stand for several rows.
GROUPS = {
    "one-node": tuple(row.name for row in ONE_NODE_ROWS),
    "torch": tuple(row.name for row in TORCH_ROWS),
    "nodes": tuple(row.name for row in NODE_ROWS),
    "etcd": tuple(row.name for row in ETCD_ROWS),
    "worker": tuple(row.name for row in WORKER_ROWS),
}
