"""A node above the maximum waits without any limit, whatever `join_timeout` says.

Shortened here: `join_timeout` 600 -> 2 s.
"""

from __future__ import annotations

from .stage import Evidence, free_port, handler, present, together

WATCHED_S = 10.0


def show() -> Evidence:
    port = free_port()
    member, spare = (handler(port, "1:1", join_timeout=2) for _ in range(2))
    together([member.next_rendezvous])
    (outcome,) = together([spare.next_rendezvous], within_s=WATCHED_S)
    waits = outcome.took_s is None
    ended = "still waited" if waits else f"ended: {outcome.error!r}"
    return Evidence(waits, f"with join_timeout=2 the spare {ended} after {WATCHED_S:g} s")


if __name__ == "__main__":
    present(show)
