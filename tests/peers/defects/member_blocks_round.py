"""One member that does not rejoin the rendezvous blocks the next round for all others.

A round ends only when every member has left it. The error of the waiting nodes has no message. Shortened here:
`join_timeout` 600 -> 4 s.
"""

from __future__ import annotations

from .stage import Evidence, free_port, handler, present, together


def show() -> Evidence:
    port = free_port()
    busy, eager = (handler(port, "1:2", join_timeout=4) for _ in range(2))
    together([busy.next_rendezvous, eager.next_rendezvous])
    # `busy` is alive and sends heartbeats, but does not leave the round.
    (outcome,) = together([eager.next_rendezvous], within_s=20)
    error = type(outcome.error).__name__
    return Evidence(
        error == "RendezvousTimeoutError",
        f"a node of 1:2 that wanted the next round got {error} with the message "
        f"{str(outcome.error)!r} after {outcome.took_s or 20:.0f} s",
    )


if __name__ == "__main__":
    present(show)
