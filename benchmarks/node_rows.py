"""The rows of many nodes. All agents are on this machine, so they share its cores."""

from __future__ import annotations

from benchmarks import gathering, losing, operating, regrouping, scaling, sealing, waves
from benchmarks.figures import HOLDFAST, TORCHRUN, Metric, Target
from benchmarks.measuring import Row

BOTH = (TORCHRUN, HOLDFAST)
LOSS_S, JOIN_S, WAVE_S = losing.LOSS_S_MAX, gathering.JOIN_S_MAX, waves.WAVE_S_MAX

FORMING_ROWS = (
    Row(
        "form",
        gathering.measure_form,
        (
            Metric(
                "form", "2 agents of 2:3, command to all in user code", "s", (Target("limit", 2),)
            ),
        ),
        BOTH,
        rounds=5,
        quick_rounds=0,
        warm_up=False,
        rounds_at_most={TORCHRUN: 2},
    ),
    Row(
        "form-quick",
        gathering.measure_form_quick,
        (Metric("form", "2 agents of 2:3 with last_call_timeout=1", "s"),),
        BOTH,
        rounds=3,
        quick_rounds=1,
        warm_up=False,
    ),
    Row(
        "join",
        gathering.measure_join,
        (
            Metric(
                "join", "a third agent joins, to 3 nodes in user code", "s",
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
        gathering.measure_join_quick,
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

LOSING_ROWS = (
    Row(
        "node-killed",
        losing.measure_killed,
        (
            Metric(
                "killed", "agent and workers SIGKILLed -> the other 2 nodes in user code", "s",
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
        losing.measure_stopped,
        (
            Metric(
                "stopped", "agent SIGSTOPped -> the other 2 nodes in user code", "s",
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
        losing.measure_standby,
        (
            Metric(
                "standby", "member SIGKILLed -> standby in user code (torchrun: workaround)", "s",
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
    title = f"worker killed, {count} agents -> all in the next generation"
    return Row(
        f"restart-{count}-nodes",
        {
            2: regrouping.measure_restart_2,
            8: regrouping.measure_restart_8,
            16: regrouping.measure_restart_16,
        }[count],
        (Metric("restart", title, "s", (Target("torchrun", 8),)),),
        BOTH,
        rounds=2 if count == 2 else 1,
        quick_rounds=1,
        warm_up=False,
    )


WAVE_ROWS = (
    Row(
        "handlers-128",
        waves.measure_wave_128,
        (
            Metric(
                "wave", "128 handlers join at once", "s", (Target("torchrun", 8),), waited=WAVE_S
            ),
        ),
        BOTH,
        rounds=3,
        quick_rounds=1,
        warm_up=False,
    ),
    Row(
        "handlers-256",
        waves.measure_wave_256,
        (Metric("wave", "256 handlers join at once", "s", (Target("limit", 1),), waited=WAVE_S),),
        BOTH,
        rounds=5,
        quick_rounds=0,
        warm_up=False,
        rounds_at_most={TORCHRUN: 1},
    ),
)

SCALING_ROWS = (
    Row(
        "agents",
        scaling.measure_agents,
        (
            Metric("formed", "1,000 agents on one coordinator: round", "s", (Target("limit", 2),)),
            Metric("told", "... a restart told to all", "s", (Target("limit", 0.3),)),
            Metric("formed_many", "... 10,000 agents: round", "s"),
            Metric("told_many", "... 10,000 agents: a restart told to all", "s"),
            Metric("cpu_many", "... 10,000 agents: the coordinator's CPU time for a round", "s"),
            Metric(
                "formed_growth", "... round, cost of an agent at 10,000 / at 1,000", "times",
                (Target("limit", 1.5),),
            ),
            Metric(
                "told_growth", "... restart, cost of an agent at 10,000 / at 1,000", "times",
                (Target("limit", 1.5),),
            ),
        ),
        (HOLDFAST,),
        rounds=3,
        quick_rounds=1,
        warm_up=False,
    ),
    Row(
        "sealed",
        sealing.measure_sealed,
        (
            Metric(
                "start", "with a token / without: 2 agents start", "times", (Target("limit", 1.05),)
            ),
            Metric("restart", "... their workers restart", "times", (Target("limit", 1.05),)),
            Metric("round", "... 1,000 agents: round", "times", (Target("limit", 1.05),)),
            Metric("told", "... 1,000 agents: a restart told to all", "times"),
        ),
        (HOLDFAST,),
        rounds=1,
        quick_rounds=1,
        warm_up=False,
    ),
    Row(
        "flood",
        scaling.measure_flood,
        (
            Metric(
                "silent", "4,500 silent connections kept up: an agent is in", "s",
                (Target("limit", 2),), waited=scaling.KNOCK_S_MAX,
            ),
            Metric(
                "byte", "... that send one byte", "s",
                (Target("limit", 2),), waited=scaling.KNOCK_S_MAX,
            ),
            Metric(
                "hello", "... that begin a handshake", "s",
                (Target("limit", 2),), waited=scaling.KNOCK_S_MAX,
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
                "rough", "the same with every kind of fault", "steps/s", higher_is_better=True,
            ),
        ),
        (HOLDFAST,),
        rounds=3,
        quick_rounds=1,
        warm_up=False,
    ),
)  # fmt: skip

OPERATING_ROWS = (
    Row(
        "watching",
        operating.measure_watching,
        (
            Metric("status", "a status of 1,000 agents", "ms", (Target("limit", 50),)),
            Metric("alone", "... the coordinator's core, nobody watches", "%"),
            Metric("watched", "... 100 subscribers", "%", (Target("limit", 5),)),
            Metric("added", "... which is more by", "%"),
        ),
        (HOLDFAST,),
        rounds=3,
        quick_rounds=1,
        warm_up=False,
    ),
    Row(
        "viewing",
        operating.measure_viewing,
        (Metric("core", "`holdfast top` of 1,000 ranks: its core", "%", (Target("limit", 3),)),),
        (HOLDFAST,),
        rounds=3,
        quick_rounds=1,
        warm_up=False,
    ),
    Row(
        "following",
        operating.measure_following,
        (
            Metric(
                "speed", "a log of 300 MB followed", "MB/s",
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
    *FORMING_ROWS,
    *LOSING_ROWS,
    *map(_restart_row, (2, 8, 16)),
    *WAVE_ROWS,
    *SCALING_ROWS,
    *OPERATING_ROWS,
)
