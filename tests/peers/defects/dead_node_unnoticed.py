"""The other nodes never notice that a node died: their workers continue in the old world.

The dead node is removed from the list of participants, but this has no effect. Only a failing collective of the
workers ends the situation. Shortened here: keep-alive 5 s x 3 -> 1 s x 4.
"""

from __future__ import annotations

from .stage import Evidence, Lab, Nodes, alive, present, state_of, watch

CONF = {"keep_alive_interval": 1, "keep_alive_max_attempt": 4}
WATCHED_S = 12.0


def show() -> Evidence:
    with Lab() as lab, Nodes(lab, "torchrun", "1:2", conf=CONF) as job:
        job.start(2)
        job.formed(2)
        survivor = job.host()
        victim = next(agent for agent in job.agents if agent is not survivor)
        before = job.latest(survivor)
        victim.kill()
        watch(job, WATCHED_S)
        after = job.latest(survivor)
        counted = len(state_of(job.port, "bench").participants)
        went_on = after == before and alive(before.pid) and survivor.code is None
        return Evidence(
            went_on and counted == 1,
            f"{WATCHED_S:g} s after the SIGKILL the survivor's worker still runs with "
            f"WORLD_SIZE={after.world}, while the rendezvous counts {counted} participant",
        )


if __name__ == "__main__":
    present(show)
