"""The rows of jobs on etcd. They compare Holdfast with itself, because torchrun needs etcd's old API v2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import etcd_work
from benchmarks.figures import HOLDFAST, Metric, Target
from benchmarks.measuring import Row

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.launching import Lab, Samples

RATIO_MAX = 2.0


def _compared(name: str, what: str, measure: Callable[[Lab, str], Samples], rounds: int) -> Row:
    return Row(
        name,
        measure,
        (
            Metric("embedded", f"{what}, coordinator", "s"),
            Metric("etcd", "... on etcd", "s"),
            Metric("trip", "... a round trip to etcd", "s"),
            Metric(
                "ratio", "... (on etcd - round trip) / coordinator", "times",
                (Target("limit", RATIO_MAX),),
            ),
        ),
        (HOLDFAST,),
        rounds=rounds,
        quick_rounds=1,
        warm_up=False,
    )  # fmt: skip


def _ha_start(count: int, measure: Callable[[Lab, str], Samples]) -> Row:
    title = f"{count} agents with --ha: last start to all in user code"
    return Row(
        f"ha-start-{count}-nodes",
        measure,
        (Metric("start", title, "s", (Target("limit", 3),)),),
        (HOLDFAST,),
        rounds=5,
        quick_rounds=1,
        warm_up=False,
    )


ETCD_ROWS = (
    _compared(
        "etcd-start-2-nodes", "2 agents: start to all in user code", etcd_work.measure_start_2, 3
    ),
    _compared(
        "etcd-start-16-nodes", "16 agents: start to all in user code", etcd_work.measure_start_16, 2
    ),
    _compared(
        "etcd-restart-16",
        "worker killed, 16 agents: to all in user code",
        etcd_work.measure_restart_16,
        2,
    ),
    _ha_start(3, etcd_work.measure_ha_start_3),
    _ha_start(8, etcd_work.measure_ha_start_8),
    Row(
        "ha-restart-16",
        etcd_work.measure_ha_restart_16,
        (
            Metric(
                "embedded", "worker killed, 16 agents: to all in user code, coordinator", "s"
            ),
            Metric("ha", "... with --ha", "s"),
            Metric("ratio", "... with --ha / coordinator", "times", (Target("limit", 1.5),)),
        ),
        (HOLDFAST,),
        rounds=2,
        quick_rounds=1,
        warm_up=False,
    ),
    Row(
        "etcd-lost",
        etcd_work.measure_lost,
        (
            Metric(
                "follower", "node killed on etcd: to the others in user code", "s",
                (Target("limit", 1.5),),
            ),
            Metric("leader", "... the leading node", "s", (Target("limit", 1.5),)),
        ),
        (HOLDFAST,),
        rounds=5,
        quick_rounds=1,
        warm_up=False,
    ),
    Row(
        "ha-lost",
        etcd_work.measure_lost_member,
        (
            Metric(
                "member", "leader and etcd's leader killed with --ha: to the others in user code", "s",
                (Target("limit", 2.5),),
            ),
        ),
        (HOLDFAST,),
        rounds=5,
        quick_rounds=1,
        warm_up=False,
    ),
    Row(
        "etcd-writes",
        etcd_work.measure_writes,
        (
            Metric("round", "writes to etcd per agent, a round of 16", "writes"),
            Metric(
                "idle", "... an idle second", "writes", (Target("limit", 0),)
            ),
            Metric("restart", "... a restart of 16", "writes"),
            Metric(
                "growth", "... a round, 16 agents / 4 agents", "times",
                (Target("limit", 1.5),),
            ),
        ),
        (HOLDFAST,),
        rounds=1,
        quick_rounds=1,
        warm_up=False,
    ),
)  # fmt: skip
