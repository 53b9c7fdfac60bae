"""After a worker's failure a spare may take the place of a healthy member.

The member that restarts its workers leaves the round for a moment. Then all spares try to join too, and the first one
takes the place. The member that lost its place waits with stopped workers.
"""

from __future__ import annotations

import time
from typing import Any

from .stage import Call, Evidence, free_port, handler, present, together

SPARES = 4
TRIES = 4
WITHIN_S = 8.0


def show() -> Evidence:
    port = free_port()
    conf: dict[str, Any] = {"last_call_timeout": 1}
    failing, other = (handler(port, "2:2", **conf) for _ in range(2))
    together([failing.next_rendezvous, other.next_rendezvous])
    spares = [handler(port, "2:2", **conf) for _ in range(SPARES)]
    places = [Call(one.next_rendezvous) for one in spares]
    time.sleep(3)  # By then all of them are on the list of spares.
    for tried in range(1, TRIES + 1):
        # A worker of one member failed: it requests the next round, and so does the other member.
        again = Call(failing.next_rendezvous)
        while other.num_nodes_waiting() == 0:
            time.sleep(0.05)
        follows = Call(other.next_rendezvous)
        kept = again.result(WITHIN_S).took_s is not None
        followed = follows.result(0.1).took_s is not None
        if not kept or not followed:
            taken = sum(place.result(0.1).took_s is not None for place in places)
            return Evidence(
                taken > 0,
                f"at restart {tried} of a job of 2:2, {taken} of {SPARES} spares took the places "
                f"of healthy members",
            )
    return Evidence(shown=False, text=f"the members kept their places over {TRIES} restarts")


if __name__ == "__main__":
    present(show)
