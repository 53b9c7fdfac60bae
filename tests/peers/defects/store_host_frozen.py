"""While the store's host does not respond, the other agents do not even notice that their own workers die.

Once connected, calls of the store's client have no timeout, and the agent's only thread makes them. Here the host is
stopped (SIGSTOP); a cut network without a reset has the same effect.
"""

from __future__ import annotations

import os
import signal

from .stage import Evidence, Lab, Nodes, alive, present, watch

FROZEN_S = 2.0  # Every agent calls the store at least once per second.
WATCHED_S = 10.0


def show() -> Evidence:
    with Lab() as lab, Nodes(lab, "torchrun", "1:2", flags=["--max-restarts", "3"]) as job:
        job.start(2)
        job.formed(2)
        host = job.host()
        other = next(agent for agent in job.agents if agent is not host)
        host.send(signal.SIGSTOP)
        watch(job, FROZEN_S)
        before = job.latest(other)
        os.kill(before.pid, signal.SIGKILL)
        watch(job, WATCHED_S)
        blind = job.latest(other) == before and other.code is None and not alive(before.pid)
        return Evidence(
            blind and not other.output().strip(),
            f"{WATCHED_S:g} s after its worker was killed the agent has neither restarted it nor "
            f"printed a line",
        )


if __name__ == "__main__":
    present(show)
