"""Decides which hosts a workers' store serves, and how long it holds connections of unknown hosts.

PyTorch's protocol has no authentication. So the store identifies a client by its origin: a process on this
host by its user, which the kernel reports; a process on another host by the address of the host, which an agent of the
job attests, and by its user, which the store queries from that agent (`wire.store_proof`). Workers may connect
before their agent attests, so the store holds a connection for `HELD_S` without reading from it, and once
more for the agent's answer.

No host can use up the store: each attested host has a share, and all others together have one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.store.key_space import BYTES_MAX, ClientShare
from holdfast.store.tcp.embedded import HOSTS, OPEN

if TYPE_CHECKING:
    from holdfast.store.tcp.embedded import HostAccess

HOST_PART = 2
"""The part of the store that one other host may use: half of its bytes, and of its connections."""
STRANGERS_PART = 4
"""The part that all unattested hosts may use together."""
HELD_S = 30.0
"""How long a connection is held until an agent attests its host, and then until the agent says whose it is."""
HELD_PART = 2  # The part of all connections that may be held.
REPORTED_MAX = 1000  # How many refusals are remembered, so that each is reported once for a host.


class HostAdmission:
    """Decides which hosts are served. A host is identified by its address, in bytes."""

    def __init__(self, access: HostAccess) -> None:
        self.access = access
        self._shares: dict[bytes, ClientShare] = {}  # Of the hosts of agents.
        self._strangers = ClientShare("hosts outside of this job", BYTES_MAX, STRANGERS_PART)
        self._reported: set[tuple[bytes, str]] = set()

    @property
    def serves_every_host(self) -> bool:
        return self.access.mode == OPEN

    @property
    def serves_attested_hosts(self) -> bool:
        """Whether agents may attest their hosts."""
        return self.access.mode == HOSTS and bool(self.access.key)

    def share_of(self, host: bytes) -> ClientShare | None:
        """Return the share of another host's clients, if the store serves them."""
        return self._shares.get(host, self._strangers if self.serves_every_host else None)

    def add(self, host: bytes, name: str) -> ClientShare:
        """Return the share of a host that has an agent of the job."""
        share = self._shares.get(host)
        if share is None:
            share = self._shares[host] = ClientShare(name, BYTES_MAX, HOST_PART)
        return share

    def is_reported(self, host: bytes, why: str) -> bool:
        """Return whether this refusal of a host was reported before; record that it is reported now."""
        if (host, why) in self._reported or len(self._reported) >= REPORTED_MAX:
            return True
        self._reported.add((host, why))
        return False
