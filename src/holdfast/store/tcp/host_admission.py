"""Decides which hosts a workers' store serves, and how long it holds connections of unknown hosts.

PyTorch's protocol has no authentication. So the store identifies a client by its origin: a process on this
host by its user, which the kernel reports; another host by its address, which an agent of the job attests
(`wire.store_proof`). Workers may connect before their agent attests, so the store holds a connection
from an unknown host for `HELD_S` without reading from it.

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
"""How long a connection is held until an agent attests its host."""
HELD_PART = 2  # The part of all connections that may be held.
REPORTED_MAX = 1000  # How many refused hosts are remembered, so that each is reported once.


class HostAdmission:
    """Decides which hosts are served. A host is identified by its address, in bytes."""

    def __init__(self, access: HostAccess) -> None:
        self.access = access
        self._attested: dict[bytes, ClientShare] = {}
        self._strangers = ClientShare("hosts outside of this job", BYTES_MAX, STRANGERS_PART)
        self._reported: set[bytes] = set()

    def is_served(self, host: bytes) -> bool:
        """Whether the store serves clients of another host at once."""
        return self.access.mode == OPEN or (self.access.mode == HOSTS and host in self._attested)

    def may_be_attested(self) -> bool:
        """Whether an agent may still attest a host."""
        return self.access.mode == HOSTS and bool(self.access.key)

    def share_of(self, host: bytes) -> ClientShare | None:
        """Return the share of another host's clients, if the store serves them."""
        return self._attested.get(host, self._strangers if self.access.mode == OPEN else None)

    def attest(self, host: bytes, name: str) -> ClientShare:
        """Serve a host from now on; return its share."""
        share = self._attested.get(host)
        if share is None:
            share = self._attested[host] = ClientShare(name, BYTES_MAX, HOST_PART)
        return share

    def is_reported(self, host: bytes) -> bool:
        """Return whether the refusal of a host was reported before; record that it is reported now."""
        if host in self._reported or len(self._reported) >= REPORTED_MAX:
            return True
        self._reported.add(host)
        return False
