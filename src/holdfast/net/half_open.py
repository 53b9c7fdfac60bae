"""Selects the connection to close when too many are unauthenticated; pure.

A connection occupies one of a few places until its handshake or request is complete. When all places are taken,
the oldest connection is closed to admit the next one, but not before a minimum time; until then new connections wait
in the kernel's queue. So a thousand honest clients that connect at once are all served.

With this rule alone, one address could take all places. So if an address has more than its share of the places,
its oldest connection is closed first: immediately if it has sent nothing, otherwise after a much shorter
time. A flood only displaces itself. Hundreds of agents behind one address can still connect: they send their
first message immediately and complete the handshake within the short time. Without a minimum time, each would be
closed to admit the next before its handshake could complete.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from holdfast.net.addresses import packed

if TYPE_CHECKING:
    from typing import Any

SHARE = 4  # The share of an address is the number of places divided by this.


class HalfOpen:
    """The half-open connections of one server, as opaque objects.

    Each stays open for at least `min_s`. If its address exceeds its share, it stays open for at least
    `oversized_min_s` if it has sent something, and may be closed immediately otherwise.
    """

    def __init__(self, places: int, min_s: float = 0.0, oversized_min_s: float = 0.0) -> None:
        self.since: dict[Any, float] = {}
        """When each connection was added, the oldest first."""
        self._places = places
        self._min_s = min_s
        self._oversized_min_s = oversized_min_s
        self._groups: dict[str, _Group] = {}  # By address.
        self._group_of: dict[Any, _Group] = {}
        self._oversized: dict[str, _Group] = {}  # The groups that exceed their share.

    @property
    def is_full(self) -> bool:
        return len(self.since) >= self._places

    def rejects(self, address: str, user: int | None = None) -> bool:
        """Whether to close a new silent connection: no place is free and its address exceeds its share."""
        return self.is_full and _origin(address, user) in self._oversized

    def add(
        self,
        connection: Any,
        address: str,
        now: float,
        *,
        silent: bool = True,
        user: int | None = None,
    ) -> None:
        """Add a connection; `user` is the user at its other end, if that is another user of this host."""
        network = _origin(address, user)
        group = self._groups.get(network)
        if group is None:
            group = self._groups[network] = _Group(network)
        (group.silent if silent else group.others)[connection] = None
        self._group_of[connection] = group
        self.since[connection] = now
        if len(group) * SHARE > self._places:
            self._oversized[network] = group

    def remove(self, connection: Any) -> bool:
        """Forget a connection that finished or closed; return whether it was half open."""
        if self.since.pop(connection, None) is None:
            return False
        group = self._group_of.pop(connection)
        group.silent.pop(connection, None)
        group.others.pop(connection, None)
        if len(group) * SHARE <= self._places:
            self._oversized.pop(group.network, None)
        if not len(group):
            del self._groups[group.network]
        return True

    def next_to_close(self) -> tuple[Any, float]:
        """Return the connection to close for a new one, and the time from which it may be closed."""
        oldest, since = next(iter(self.since.items()))
        if not self._oversized:
            return oldest, since + self._min_s
        group = max(self._oversized.values(), key=len)
        if group.silent:
            return next(iter(group.silent)), 0.0
        first = next(iter(group.others))
        return first, self.since[first] + self._oversized_min_s


class _Group:
    """The connections from one address, the oldest first."""

    __slots__ = ("network", "others", "silent")

    def __init__(self, network: str) -> None:
        self.network = network
        self.silent: dict[Any, None] = {}
        self.others: dict[Any, None] = {}

    def __len__(self) -> int:
        return len(self.silent) + len(self.others)


def _origin(address: str, user: int | None) -> str:
    """Return the key of a group: the network, or another user of this host, who can connect from many addresses."""
    return network_of(address) if user is None else f"user {user}"


def network_of(address: str) -> str:
    """Return the network that counts as one address: an IPv4 address, or the /64 of an IPv6 address."""
    if ":" not in address:
        return address
    found = packed(address)
    if len(found) == 4:
        return socket.inet_ntop(socket.AF_INET, found)
    return socket.inet_ntop(socket.AF_INET6, found[:8].ljust(16, b"\0")) + "/64"
