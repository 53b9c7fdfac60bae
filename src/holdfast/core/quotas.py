"""Limits on a coordinator's resources: in total, per peer and per address.

`wire.wire_limits` limits single messages, `coordinator.job_stores` the jobs' stores, and
`coordinator.admission` unfinished handshakes. A peer that reaches a limit is refused with the reason;
other peers are not affected.
"""

from __future__ import annotations

MIB = 1024 * 1024

CONNECTIONS_MAX = 65_536
"""The limit is lower if the process may not open that many descriptors."""
JOBS_MAX = 1_000
JOB_NODES_MAX = 65_536
"""Nodes of one job, including nodes that left it and may still have workers. A node takes about 20 KB."""
SAVED_JOBS_MAX = 10_000
"""Jobs that have had no nodes for a long time; only their counters are kept."""
UNREAD_BYTES_MAX = 4 * MIB
"""Outgoing bytes that one peer may leave unread. Each slow reader can occupy this much memory."""
UNREAD_REPLIES_BYTES_MAX = 32 * MIB
"""Bytes of query replies that all peers together may leave unread."""

NEARLY_FULL = 0.75
ADDRESS_SHARE_MAX = 0.25
"""Once the connections or jobs are nearly used up, one address gets at most this share of the limit.
Until then an address has no limit of its own: a thousand agents may share a host or a gateway."""


class AddressShares:
    """How much of a limited resource each address uses."""

    def __init__(self, total_max: int) -> None:
        self.total_max = total_max
        self._taken: dict[str, int] = {}
        self._total = 0

    def is_over(self, address: str) -> bool:
        """Whether the resource is nearly used up and an address already has its share."""
        share = max(1, int(ADDRESS_SHARE_MAX * self.total_max))
        return self._total >= NEARLY_FULL * self.total_max and self.taken_by(address) >= share

    def taken_by(self, address: str) -> int:
        return self._taken.get(address, 0)

    def take(self, address: str) -> None:
        self._taken[address] = self.taken_by(address) + 1
        self._total += 1

    def release(self, address: str) -> None:
        self._taken[address] -= 1
        if not self._taken[address]:
            del self._taken[address]
        self._total -= 1
