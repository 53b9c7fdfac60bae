"""When a node's workers fail for good, the other nodes are not told: they go on, and then wait.

The failed agent ends; the console of the other shows nothing. Its workers finish, and the agent
then waits 300 s for a node that has left. Shown up to the begin of that wait.
"""

from __future__ import annotations

import os
import signal

from .stage import Evidence, Lab, Nodes, alive, present, watch

WATCHED_S = 8.0


def show() -> Evidence:
    with Lab() as lab, Nodes(lab, "torchrun", "2:2", flags=["--max-restarts", "0"]) as job:
        job.start(2)
        job.formed(2)
        other = job.host()
        failing = next(agent for agent in job.agents if agent is not other)
        os.kill(job.latest(failing).pid, signal.SIGKILL)
        code = failing.wait(20)
        watch(job, WATCHED_S)
        untold = alive(job.latest(other).pid) and not other.said().strip()
        job.let_go()
        watch(job, WATCHED_S)
        waits = other.code is None and not alive(job.latest(other).pid)
        return Evidence(
            code == 1 and untold and waits,
            f"{WATCHED_S:g} s after the failed agent's exit ({code}) the other's worker ran and "
            f"its console was empty; {WATCHED_S:g} s after that worker's end its agent still waits",
        )


if __name__ == "__main__":
    present(show)
