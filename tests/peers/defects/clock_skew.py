"""Two nodes whose clocks differ by 20 s form two worlds from one round.

A node decides which nodes are alive by comparing their timestamps with its own clock. The node that is ahead treats
the other as dead, and computes rank and size without it.
"""

from __future__ import annotations

import datetime as dt
import multiprocessing
import time
from typing import Any

from .stage import Evidence, free_port, handler, present

SKEW_S = 20
LIMIT_S = 30


def join(port: int, ahead_s: int, results: Any) -> None:
    """Join on a machine whose clock is ahead; only the clock of torch's module is replaced."""
    import torch.distributed.elastic.rendezvous.dynamic_rendezvous as torch_module

    class Clock(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Any:
            return dt.datetime.now(tz) + dt.timedelta(seconds=ahead_s)

    torch_module.datetime = Clock
    info = handler(port, "2:2", is_host=ahead_s == 0).next_rendezvous()
    results.put((ahead_s, info.world_size))
    time.sleep(LIMIT_S)  # One of the two serves the store.


def show() -> Evidence:
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), free_port()
    machines = [
        context.Process(target=join, args=(port, ahead_s, results), daemon=True)
        for ahead_s in (0, SKEW_S)
    ]
    for machine in machines:
        machine.start()
    worlds = dict(results.get(timeout=LIMIT_S) for _ in machines)
    for machine in machines:
        machine.kill()
    return Evidence(
        len(set(worlds.values())) > 1,
        f"in a round of 2:2 the node with the right clock has a world of {worlds[0]} nodes, "
        f"the one {SKEW_S} s ahead a world of {worlds[SKEW_S]}",
    )


if __name__ == "__main__":
    present(show)
