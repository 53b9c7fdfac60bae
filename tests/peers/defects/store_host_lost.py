"""Losing the agent that hosts the rendezvous store ends the job on every node.

The store's client never reconnects, and the remaining agents fail at their next call.
"""

from __future__ import annotations

import time

from .stage import Evidence, Lab, Nodes, log_tail, present


def show() -> Evidence:
    flags = ["--max-restarts", "3"]
    with Lab() as lab, Nodes(lab, "torchrun", "1:3", flags=flags) as job:
        job.start(3)
        job.formed(3)
        host = job.host()
        others = [agent for agent in job.agents if agent is not host]
        host.kill()
        began = time.monotonic()
        codes = [agent.wait(15) for agent in others]
        return Evidence(
            codes == [1, 1],
            f"{time.monotonic() - began:.1f} s after the SIGKILL the other two agents of 1:3 had "
            f"ended too, codes {codes}: {log_tail(others[0])}",
        )


if __name__ == "__main__":
    present(show)
