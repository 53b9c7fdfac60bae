"""A disconnected node that was removed never learns of it: two worlds run at the same time.

A spare takes its place and the job continues without it. When it reconnects, it finds no heartbeat of its own to
renew, treats that as success, and lets its workers run. Shortened here: keep-alive 5 s x 3 -> 1 s x 4. The spare can
join only with the workaround for `join_kills_job`.
"""

from __future__ import annotations

import signal
import time

from .stage import WORKAROUND, Evidence, Lab, Nodes, alive, present, watch

CONF = {"keep_alive_interval": 1, "keep_alive_max_attempt": 4}
WATCHED_S = 8.0


def show() -> Evidence:
    with Lab() as lab, Nodes(lab, "torchrun", "2:2", conf=CONF, env=WORKAROUND) as job:
        job.start(2)
        job.formed(2)
        host = job.host()
        absent = next(agent for agent in job.agents if agent is not host)
        old = job.latest(absent)
        spare = job.add()
        watch(job, 4.0)
        since_ns = time.monotonic_ns()
        absent.send(signal.SIGSTOP)
        job.wait_for([host, spare], since_ns=since_ns, within_s=30)
        absent.send(signal.SIGCONT)
        watch(job, WATCHED_S)
        ranks = {one.rank for one in map(job.latest, (host, spare))}
        both = absent.code is None and alive(old.pid) and ranks == {0, 1}
        return Evidence(
            both and old == job.latest(absent),
            f"{WATCHED_S:g} s after its return the given-up node still runs its old worker as "
            f"rank {old.rank} of {old.world}, beside the new ranks {sorted(ranks)} of 2",
        )


if __name__ == "__main__":
    present(show)
