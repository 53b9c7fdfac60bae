"""Which connection to close when too many are unauthenticated; pure.

A connection has one of a few places until its handshake or request is complete. When all are taken, the oldest
makes room for the next, but not before a minimum time; until then others wait in the kernel's queue. So
a thousand honest clients that connect at once are all served.

One address could take all places and everybody's time this way. So if an address has more than its share of the
places, its oldest connection makes room: at once if it has sent nothing, otherwise after a much shorter
time. A flood only displaces itself. Hundreds of agents behind one address still get in: they send their
first message immediately and finish. Without the short time each of them would be closed for the next
before it finishes, and none would get in.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from holdfast.net.peer_user import MAPPED

if TYPE_CHECKING:
    from typing import Any

SHARE = 4  # An address may have one of this many places.


class HalfOpen:
    """The half-open connections of one server, as opaque objects.

    Each has at least `min_s`; a connection of a crowd that has sent something has `crowd_min_s`.
    """

    def __init__(self, places: int, min_s: float = 0.0, crowd_min_s: float = 0.0) -> None:
        self.since: dict[Any, float] = {}
        """When each was added, the oldest first."""
        self._places = places
        self._min_s = min_s
        self._crowd_min_s = crowd_min_s
        self._groups: dict[str, _Group] = {}  # By address.
        self._group_of: dict[Any, _Group] = {}
        self._crowds: dict[str, _Group] = {}  # Those with more than a share.

    @property
    def is_full(self) -> bool:
        return len(self.since) >= self._places

    def turns_away(self, address: str) -> bool:
        """Whether a new silent connection must close itself: its address has a crowd."""
        return self.is_full and network_of(address) in self._crowds

    def add(self, connection: Any, address: str, now: float, *, silent: bool = True) -> None:
        network = network_of(address)
        group = self._groups.get(network)
        if group is None:
            group = self._groups[network] = _Group(network)
        (group.silent if silent else group.others)[connection] = None
        self._group_of[connection] = group
        self.since[connection] = now
        if len(group) * SHARE > self._places:
            self._crowds[network] = group

    def remove(self, connection: Any) -> bool:
        """Forget a connection that finished or closed; return whether it was half open."""
        if self.since.pop(connection, None) is None:
            return False
        group = self._group_of.pop(connection)
        group.silent.pop(connection, None)
        group.others.pop(connection, None)
        if len(group) * SHARE <= self._places:
            self._crowds.pop(group.network, None)
        if not len(group):
            del self._groups[group.network]
        return True

    def next_to_go(self) -> tuple[Any, float]:
        """Return which connection makes room for one more, and from when on."""
        oldest, since = next(iter(self.since.items()))
        if not self._crowds:
            return oldest, since + self._min_s
        crowd = max(self._crowds.values(), key=len)
        if crowd.silent:
            return next(iter(crowd.silent)), 0.0
        first = next(iter(crowd.others))
        return first, self.since[first] + self._crowd_min_s


class _Group:
    """The connections from one address, the oldest first."""

    __slots__ = ("network", "others", "silent")

    def __init__(self, network: str) -> None:
        self.network = network
        self.silent: dict[Any, None] = {}
        self.others: dict[Any, None] = {}

    def __len__(self) -> int:
        return len(self.silent) + len(self.others)


def network_of(address: str) -> str:
    """Return what counts as one address: an IPv4 address, or the /64 of an IPv6 address."""
    if ":" not in address:
        return address
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    if packed.startswith(MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return socket.inet_ntop(socket.AF_INET6, packed[:8].ljust(16, b"\0")) + "/64"
