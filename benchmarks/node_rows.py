"""The rows of many nodes. All agents are on this machine, so they share its cores."""

from __future__ import annotations

from benchmarks import (
    handler_rows,
    joining,
    node_loss,
    node_restarts,
    scaling,
    token_cost,
    watch_rows,
)
from benchmarks.figures import HOLDFAST, TORCHRUN, Metric, Target
from benchmarks.measuring import Row

BOTH = (TORCHRUN, HOLDFAST)
LOSS_S, JOIN_S, HANDLERS_S = node_loss.LOSS_S_MAX, joining.JOIN_S_MAX, handler_rows.JOIN_S_MAX

JOINING_ROWS = (
    Row(
        "start-2-nodes",
        joining.measure_start,
        (
            Metric(
                "start", "2 agents of 2:3: start to all in user code", "s", (Target("limit", 2),)
            ),
        ),
        BOTH,
        rounds=5,
        quick_rounds=0,
        warm_up=False,
        rounds_at_most={TORCHRUN: 2},
    ),
    Row(
        "start-2-nodes-quick",
        joining.measure_start_quick,
        (Metric("start", "2 agents of 2:3, last_call_timeout=1: start to all in user code", "s"),),
        BOTH,
        rounds=3,
        quick_rounds=1,
        warm_up=False,
    ),
    Row(
        "join",
        joining.measure_join,
        (
            Metric(
                "join", "a third agent joins: to 3 nodes in user code", "s",
                (Target("limit", 2),), waited=JOIN_S,
            ),
        ),
        BOTH,
        rounds=5,
        quick_rounds=0,
        warm_up=False,
        rounds_at_most={TORCHRUN: 1},
    ),
    Row(
        "join-quick",
        joining.measure_join_quick,
        (
            Metric(
                "join", "a third agent joins, last_call_timeout=1 (torchrun: workaround)", "s",
                waited=JOIN_S,
            ),
        ),
        BOTH,
        rounds=3,
        quick_rounds=1,
        warm_up=False,
    ),
)  # fmt: skip

NODE_LOSS_ROWS = (
    Row(
        "node-killed",
        node_loss.measure_killed,
        (
            Metric(
                "killed", "node killed: to the other 2 in user code", "s",
                (Target("limit", 1),), waited=LOSS_S,
            ),
        ),
        BOTH,
        rounds=5,
        quick_rounds=1,
        warm_up=False,
        rounds_at_most={TORCHRUN: 1},
    ),
    Row(
        "node-stopped",
        node_loss.measure_stopped,
        (
            Metric(
                "stopped", "agent stopped: to the other 2 nodes in user code", "s",
                (Target("limit", 8),), waited=LOSS_S,
            ),
        ),
        BOTH,
        rounds=3,
        quick_rounds=1,
        warm_up=False,
        rounds_at_most={TORCHRUN: 1},
    ),
    Row(
        "standby",
        node_loss.measure_standby,
        (
            Metric(
                "standby", "node killed: to the standby in user code (torchrun: workaround)", "s",
                (Target("limit", 1),), waited=LOSS_S,
            ),
        ),
        BOTH,
        rounds=5,
        quick_rounds=1,
        warm_up=False,
        rounds_at_most={TORCHRUN: 2},
    ),
)  # fmt: skip


def _restart_row(count: int) -> Row:
    title = f"worker killed, {count} agents: to all in user code"
    return Row(
        f"restart-{count}-nodes",
        {
            2: node_restarts.measure_restart_2,
            8: node_restarts.measure_restart_8,
            16: node_restarts.measure_restart_16,
        }[count],
        (Metric("restart", title, "s", (Target("torchrun", 8),)),),
        BOTH,
        rounds=2 if count == 2 else 1,
        quick_rounds=1,
        warm_up=False,
    )


HANDLER_ROWS = (
    Row(
        "handlers-128",
        handler_rows.measure_join_handlers_128,
        (
            Metric(
                "join",
                "128 handlers join at once",
                "s",
                (Target("torchrun", 8),),
                waited=HANDLERS_S,
            ),
        ),
        BOTH,
        rounds=3,
        quick_rounds=1,
        warm_up=False,
    ),
    Row(
        "handlers-256",
        handler_rows.measure_join_handlers_256,
        (
            Metric(
                "join", "256 handlers join at once", "s", (Target("limit", 1),), waited=HANDLERS_S
            ),
        ),
        BOTH,
        rounds=5,
        quick_rounds=0,
        warm_up=False,
        rounds_at_most={TORCHRUN: 1},
    ),
)

SCALING_ROWS = (
    Row(
        "many-agents",
        scaling.measure_agents,
        (
            Metric("formed", "1,000 agents at one coordinator: a round forms", "s", (Target("limit", 2),)),
            Metric("restarted", "... a restart reaches all", "s", (Target("limit", 0.3),)),
            Metric("formed_many", "10,000 agents: a round forms", "s"),
            Metric("restarted_many", "... a restart of 10,000 reaches all", "s"),
            Metric("cpu_many", "... CPU time of the coordinator for the round", "s"),
            Metric(
                "formed_growth", "... cost per agent of a round, 10,000 / 1,000", "times",
                (Target("limit", 1.5),),
            ),
            Metric(
                "restarted_growth", "... cost per agent of a restart, 10,000 / 1,000", "times",
                (Target("limit", 1.5),),
            ),
        ),
        (HOLDFAST,),
        rounds=3,
        quick_rounds=1,
        warm_up=False,
    ),
    Row(
        "token",
        token_cost.measure_token_cost,
        (
            Metric(
                "start", "with a token / without: start of 2 agents", "times", (Target("limit", 1.05),)
            ),
            Metric("restart", "... restart of their workers", "times", (Target("limit", 1.05),)),
            Metric("round", "... a round of 1,000 agents", "times", (Target("limit", 1.05),)),
            Metric("restarted", "... a restart reaches 1,000 agents", "times"),
        ),
        (HOLDFAST,),
        rounds=1,
        quick_rounds=1,
        warm_up=False,
    ),
    Row(
        "connection-flood",
        scaling.measure_connection_flood,
        (
            Metric(
                "silent", "4,500 silent connections: an agent joins", "s",
                (Target("limit", 2),), waited=scaling.CONNECT_S_MAX,
            ),
            Metric(
                "byte", "4,500 connections that send one byte: an agent joins", "s",
                (Target("limit", 2),), waited=scaling.CONNECT_S_MAX,
            ),
            Metric(
                "hello", "4,500 connections that begin a handshake: an agent joins", "s",
                (Target("limit", 2),), waited=scaling.CONNECT_S_MAX,
            ),
        ),
        (HOLDFAST,),
        rounds=3,
        quick_rounds=1,
        warm_up=False,
    ),
    Row(
        "simulator",
        scaling.measure_simulator,
        (
            Metric(
                "steps", "simulator, 32 nodes, all invariants checked", "steps/s",
                (Target("floor", 100_000),), higher_is_better=True,
            ),
            Metric(
                "rough", "... with every kind of fault", "steps/s", higher_is_better=True,
            ),
        ),
        (HOLDFAST,),
        rounds=3,
        quick_rounds=1,
        warm_up=False,
    ),
)  # fmt: skip

WATCHING_ROWS = (
    Row(
        "status",
        watch_rows.measure_status,
        (
            Metric("status", "holdfast status of 1,000 agents", "ms", (Target("limit", 50),)),
            Metric("alone", "... CPU of the coordinator, no subscriber", "%"),
            Metric("watched", "... CPU of the coordinator, 100 subscribers", "%", (Target("limit", 5),)),
            Metric("added", "... difference", "%"),
        ),
        (HOLDFAST,),
        rounds=3,
        quick_rounds=1,
        warm_up=False,
    ),
    Row(
        "top",
        watch_rows.measure_top,
        (Metric("core", "CPU of holdfast top, 1,000 ranks", "%", (Target("limit", 3),)),),
        (HOLDFAST,),
        rounds=3,
        quick_rounds=1,
        warm_up=False,
    ),
    Row(
        "follow-logs",
        watch_rows.measure_follow,
        (
            Metric(
                "speed", "holdfast logs --follow of 300 MB", "MB/s",
                (Target("floor", 100),), higher_is_better=True,
            ),
        ),
        (HOLDFAST,),
        rounds=3,
        quick_rounds=1,
        warm_up=False,
    ),
)  # fmt: skip

NODE_ROWS = (
    *JOINING_ROWS,
    *NODE_LOSS_ROWS,
    *map(_restart_row, (2, 8, 16)),
    *HANDLER_ROWS,
    *SCALING_ROWS,
    *WATCHING_ROWS,
)
