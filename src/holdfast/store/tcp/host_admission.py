"""Whom a store of workers serves: who may come in, who waits before the door, and for how long.

PyTorch's protocol asks nobody anything. So a store knows its clients by where they come from: a
process of this host by its user, as the kernel knows it, and another host by its address, which an
agent of the job vouches for (`wire.store_proof`). Workers may be faster than their agent, so a
connection from elsewhere is held for a while, unread.

Besides, no host may use it up: each that was vouched for has a share of its own, and all others
together have one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.store.key_space import BYTES_MAX, Share
from holdfast.store.tcp.embedded import HOSTS, OPEN

if TYPE_CHECKING:
    from holdfast.store.tcp.embedded import Access

HOST_PART = 2
"""One other host may use this part of the store: the half of its bytes, and of its connections."""
STRANGERS_PART = 4
"""Hosts that nobody vouched for may use this part, together."""
HELD_S = 30.0
"""How long a connection is held until its host is vouched for."""
HELD_PART = 2  # That part of all connections may be held ones.
TOLD_MAX = 1000  # Of so many hosts it is remembered that they were refused with a line.


class Admission:
    """What is known of the hosts that clients come from. A host is its address, in bytes."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._vouched: dict[bytes, Share] = {}
        self._strangers = Share("hosts outside of this job", BYTES_MAX, STRANGERS_PART)
        self._told: set[bytes] = set()

    def is_served(self, host: bytes) -> bool:
        """Whether clients of another host are served as they come."""
        return self.access.mode == OPEN or (self.access.mode == HOSTS and host in self._vouched)

    def is_awaited(self) -> bool:
        """Whether a host that is not served yet may be later."""
        return self.access.mode == HOSTS and bool(self.access.key)

    def share_of(self, host: bytes) -> Share | None:
        """Return what clients of another host may use, if they are served."""
        return self._vouched.get(host, self._strangers if self.access.mode == OPEN else None)

    def vouch(self, host: bytes, name: str) -> Share:
        """Serve a host from now on; return its share."""
        share = self._vouched.get(host)
        if share is None:
            share = self._vouched[host] = Share(name, BYTES_MAX, HOST_PART)
        return share

    def is_told(self, host: bytes) -> bool:
        """Return whether it was said already that a host is refused; from now on it was."""
        if host in self._told or len(self._told) >= TOLD_MAX:
            return True
        self._told.add(host)
        return False
