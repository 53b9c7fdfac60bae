"""Ranks follow the addresses as text, so a joining node can change the ranks of all others.

`10` sorts before `2`. Neither the order of arrival nor the ranks of the previous round matter.
"""

from __future__ import annotations

from .stage import Evidence, free_port, handler, present, together

FIRST, JOINS = "127.0.0.2", "127.0.0.10"


def show() -> Evidence:
    port, conf = free_port(), {"last_call_timeout": 1}
    first = handler(port, "1:2", addr=FIRST, **conf)
    (before,) = together([first.next_rendezvous])
    joins = handler(port, "1:2", addr=JOINS, **conf)
    after, _ = together([first.next_rendezvous, joins.next_rendezvous])
    ranks = [one.value and one.value.rank for one in (before, after)]
    return Evidence(
        ranks == [0, 1], f"{FIRST} had rank {ranks[0]} and, since {JOINS} joined, rank {ranks[1]}"
    )


if __name__ == "__main__":
    present(show)
