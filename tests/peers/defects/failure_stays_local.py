"""If a node's workers fail permanently, the other nodes do not learn of it: they continue, and then wait.

The failed agent exits; the other agent prints nothing. The other agent's workers finish, and it then waits 300 s for a
node that has left. The script shows this up to the beginning of that wait.
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
        unnoticed = alive(job.latest(other).pid) and not other.output().strip()
        job.release_workers()
        watch(job, WATCHED_S)
        waits = other.code is None and not alive(job.latest(other).pid)
        return Evidence(
            code == 1 and unnoticed and waits,
            f"{WATCHED_S:g} s after the failed agent's exit ({code}) the other's worker ran and "
            f"its console was empty; {WATCHED_S:g} s after that worker's end its agent still waits",
        )


if __name__ == "__main__":
    present(show)
