"""A node that leaves because of SIGTERM does not report it: the others continue in the old world.

Shortened here: keep-alive 5 s x 3 -> 1 s x 4.
"""

from __future__ import annotations

import signal

from .dead_node_unnoticed import CONF
from .stage import Evidence, Lab, Nodes, alive, present, watch

WATCHED_S = 10.0


def show() -> Evidence:
    with Lab() as lab, Nodes(lab, "torchrun", "1:2", conf=CONF) as job:
        job.start(2)
        job.formed(2)
        survivor = job.host()
        leaver = next(agent for agent in job.agents if agent is not survivor)
        before = job.latest(survivor)
        leaver.send(signal.SIGTERM)
        code = leaver.wait(10)
        watch(job, WATCHED_S)
        after = job.latest(survivor)
        went_on = after == before and alive(before.pid) and survivor.code is None
        return Evidence(
            went_on and code is not None,
            f"{WATCHED_S:g} s after the agent left with code {code} the other's worker still "
            f"runs with WORLD_SIZE={after.world}",
        )


if __name__ == "__main__":
    present(show)
