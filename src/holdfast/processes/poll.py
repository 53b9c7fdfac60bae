"""Waiting for descriptors and deadlines, whichever comes first."""

from __future__ import annotations

import select
import time

# The longest single wait; a later deadline is checked again after it.
WAIT_S_MAX = 86_400


def min_of(first: float | None, second: float | None) -> float | None:
    """Return the earlier of two deadlines; None stands for no deadline."""
    if first is None or second is None:
        return first if second is None else second
    return min(first, second)


def wait_for(deadline: float | None, *fds: int) -> None:
    """Wait until a descriptor is readable, or until the deadline on the monotonic clock."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    if deadline is None:
        poll.poll()
        return
    left_s = min(deadline - time.monotonic(), WAIT_S_MAX)
    # Rounded up, because a wait that ends just before its deadline would have to be repeated.
    poll.poll(left_s * 1000 + 1 if left_s > 0 else 0)
