"""Waiting for descriptors and deadlines, whichever comes first."""

from __future__ import annotations

import select
import time

# The longest single wait; a deadline further away is looked at again then.
WAIT_S_MAX = 86_400


def min_of(first: float | None, second: float | None) -> float | None:
    """Return the earlier of two deadlines that may not exist."""
    if first is None or second is None:
        return first if second is None else second
    return min(first, second)


def is_readable(fd: int) -> bool:
    """Return whether a descriptor can be read now."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def wait_for(deadline: float | None, *fds: int) -> None:
    """Wait until a descriptor can be read, or for the deadline on the monotonic clock."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    if deadline is None:
        poll.poll()
        return
    left_s = min(deadline - time.monotonic(), WAIT_S_MAX)
    # Rounded up: a wait that ends just before its deadline would have to be repeated.
    poll.poll(left_s * 1000 + 1 if left_s > 0 else 0)
