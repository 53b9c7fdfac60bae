"""The rows of workers that use torch, on one node."""

from __future__ import annotations

from benchmarks import torch_work
from benchmarks.figures import BARE, HOLDFAST, TORCHRUN, Metric, Target
from benchmarks.measuring import Row

BOTH = (TORCHRUN, HOLDFAST)


def _gloo_row(count: int) -> Row:
    return Row(
        f"gloo-{count}",
        {8: torch_work.measure_gloo_8, 32: torch_work.measure_gloo_32}[count],
        (
            Metric(
                "met", f"init_process_group('gloo'), {count} ranks, agent's store", "ms",
                (Target("torchrun", 1 / 1.1),),
            ),
        ),
        BOTH,
        rounds=4 if count == 8 else 3,
        quick_rounds=1 if count == 8 else 0,
        warm_up=False,
    )  # fmt: skip


def _load_row(count: int) -> Row:
    measure = {
        1: torch_work.measure_load_1,
        16: torch_work.measure_load_16,
        64: torch_work.measure_load_64,
    }[count]
    targets = (Target("torchrun", 1 / 3),) if count == 16 else ()
    title = (
        f"store, {count} torch clients against the C++ server"
        if count > 1
        else ("store, 1 torch client against the C++ server")
    )
    return Row(
        f"store-{count}",
        measure,
        (Metric("speed", title, "operations/s", targets, higher_is_better=True),),
        BOTH,
        rounds=5,
        quick_rounds=1,
        warm_up=False,
    )  # fmt: skip


TORCH_ROWS = (
    Row(
        "torch-restart",
        torch_work.measure_restart,
        (
            Metric(
                "restart", "restart of workers that import torch, --preload torch", "ms",
                (Target("torchrun", 15),),
            ),
        ),
        BOTH,
        rounds=3,
        quick_rounds=1,
        warm_up=False,
    ),
    Row(
        "torch-start",
        torch_work.measure_start,
        (
            Metric(
                "last", "start of 8 workers that import torch, --preload torch", "ms",
                (Target("torchrun", 2),),
            ),
            Metric("first", "... of the first of them", "ms"),
        ),
        (TORCHRUN, HOLDFAST, BARE),
        rounds=4,
        quick_rounds=1,
    ),
    _gloo_row(8),
    _gloo_row(32),
    *map(_load_row, (1, 16, 64)),
)  # fmt: skip
