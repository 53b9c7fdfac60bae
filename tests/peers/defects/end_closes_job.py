"""An agent that exits, for whatever reason, permanently closes the job's id for all others.

torchrun calls `shutdown` at every exit except after a signal. A member that must restart its workers afterwards cannot,
although it has restarts left, and a new node is refused.
"""

from __future__ import annotations

from .stage import Evidence, free_port, handler, present, together


def show() -> Evidence:
    port = free_port()
    stays, ends = (handler(port, "1:2") for _ in range(2))
    together([stays.next_rendezvous, ends.next_rendezvous])
    ends.shutdown()
    again, new = together([stays.next_rendezvous, handler(port, "1:2").next_rendezvous], 15)
    errors = [type(again.error).__name__, type(new.error).__name__]
    return Evidence(
        errors == ["RendezvousClosedError"] * 2,
        f"after one node of 1:2 ended, the other's next round and a new node both got {errors}",
    )


if __name__ == "__main__":
    present(show)
