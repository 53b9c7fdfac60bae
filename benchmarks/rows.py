"""The rows of the benchmark: what each measures, how often, and its targets.

This module has the rows of one node; `benchmarks.torch_rows` has those of workers that use torch,
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
                "start: first line of user code, 2 workers",
                "ms",
                (Target("torchrun", 12), Target("bare", 5)),
            ),
            Metric("last", "... of the other worker", "ms"),
        ),
        ALL,
        rounds=9,
        quick_rounds=3,
    ),
    Row(
        "no-op-command",
        starting.measure_no_op_command,
        (
            Metric(
                "command",
                "whole command, 2 no-op workers",
                "ms",
                (Target("torchrun", 12), Target("bare", 4.5)),
            ),
            Metric("cpu", "... CPU time of all processes", "ms"),
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
                "restart: worker killed to all in user code",
                "ms",
                (Target("torchrun", 3),),
            ),
        ),
        BOTH,
        rounds=4,
        quick_rounds=1,
    ),
    Row(
        "start-64-workers",
        starting.measure_start_64_workers,
        (
            Metric(
                "last",
                "start: first line of the last of 64 workers",
                "ms",
                (Target("torchrun", 2),),
            ),
            Metric("first", "... of the first of them", "ms"),
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
                "--tee of 2 x 30 MB, until the command exits",
                "MB/s",
                (Target("torchrun", 3),),
                higher_is_better=True,
            ),
            Metric(
                "console_speed",
                "... until the last byte on the console",
                "MB/s",
                higher_is_better=True,
            ),
            Metric("miscounted", "... missing or repeated lines", "lines", (Target("limit", 0),)),
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
                "--tee of 2 x 30 MB, lost, mixed or reordered lines",
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
            Metric("agent_rss", "memory of the agent, RSS", "MiB", (Target("limit", 32),)),
            Metric("helpers_rss", "... of its keeper, RSS", "MiB"),
            Metric("all_pss", "... of both, PSS", "MiB"),
            Metric("wakeups", "wake-ups in 5 idle seconds", "switches", (Target("limit", 0),)),
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
