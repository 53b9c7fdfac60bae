"""A node that joins a running c10d job ends it, because it never receives the address of the workers' store.

Rank 0 publishes that address only in the round in which it created the store. A node that joins later waits for it
until `read_timeout` and exits; the others wait for that node, and exit too.
Shortened here: `read_timeout` 60 -> 4 s, `last_call_timeout` 30 -> 1 s.
"""

from __future__ import annotations

import time

from .stage import Evidence, Lab, Nodes, NotReached, log_tail, present

CONF = {"read_timeout": 4, "last_call_timeout": 1}


def show() -> Evidence:
    with Lab() as lab, Nodes(lab, "torchrun", "1:2", conf=CONF) as job:
        first = job.add()
        job.formed(1)
        joiner = job.add()
        began = time.monotonic()
        try:
            job.wait_for([first, joiner], within_s=30)
        except NotReached:
            codes = [first.wait(10), joiner.wait(10)]
        else:
            return Evidence(shown=False, text="both nodes run in a world of two")
        took_s = time.monotonic() - began
        text = f"{took_s:.0f} s after the second agent's start both had ended, codes {codes}: "
        return Evidence(codes == [1, 1], text + log_tail(joiner))


if __name__ == "__main__":
    present(show)
