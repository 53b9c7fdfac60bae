"""With fewer nodes than the maximum a job always starts 30 s late.

Once the minimum has joined, the nodes wait for the whole last call, even if no other node joins.
"""

from __future__ import annotations

from .stage import Evidence, free_port, handler, present, together


def show() -> Evidence:
    port = free_port()
    calls = [handler(port, "2:3").next_rendezvous for _ in range(2)]
    outcomes = together(calls, within_s=60)
    took_s = max(one.took_s or 60.0 for one in outcomes)
    return Evidence(took_s >= 30, f"two nodes of 2:3 had their round after {took_s:.1f} s")


if __name__ == "__main__":
    present(show)
