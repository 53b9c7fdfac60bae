"""A node that requires three nodes starts in a world of two.

The limits are not part of the shared state: the node with the lowest limit completes the round.
"""

from __future__ import annotations

import time

from .stage import Call, Evidence, free_port, handler, present


def show() -> Evidence:
    port = free_port()
    wants_three = Call(handler(port, "3:3").next_rendezvous)
    time.sleep(1)  # It joins first, so that the other one finds the round full.
    Call(handler(port, "2:2").next_rendezvous)
    info = wants_three.result(within_s=15).value
    size = info.world_size if info else None
    return Evidence(size == 2, f"the node with 3:3 has a world of {size} nodes")


if __name__ == "__main__":
    present(show)
