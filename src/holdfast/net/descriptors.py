"""How many descriptors this process may have, for servers with a connection for each client.

The usual soft limit is 1024, for the sake of programs that use `select`; the hard limit is far
above it. Whoever serves many may raise the one to the other. Workers are not changed by that: they
get their limits from the keeper, which has those that the agent was started with.
"""

from __future__ import annotations

import resource

DESCRIPTORS_MAX = 1 << 20  # What is asked for at most; each connection needs one.


def descriptor_limit() -> int:
    """Return how many descriptors this process may have now."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else min(soft, DESCRIPTORS_MAX)


def raise_descriptor_limit() -> bool:
    """Allow as many as the machine does; return whether these are more than before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return False  # Something forbids it, such as a filter of system calls.
    return True
