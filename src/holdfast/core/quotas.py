"""How much of a coordinator its peers may take: together, each, and from one address.

Sizes of single messages are those of `wire.wire_limits`, of the jobs' stores those of `coordinator.job_stores`,
and of handshakes that are not done those of `coordinator.admission`. A peer that reaches one of these is turned away with the reason; the others go on.
"""

from __future__ import annotations

MIB = 1024 * 1024

CONNECTIONS_MAX = 65_536
"""Or as many as the process may have descriptors for."""
JOBS_MAX = 1_000
JOB_NODES_MAX = 65_536
"""Nodes of one job, with those that are out of it and whose workers may not be gone yet. A node
costs some 20 KB."""
MEMORIES_MAX = 10_000
"""Jobs that nobody was in for long, of which only the numbers are kept."""
UNREAD_BYTES_MAX = 4 * MIB
"""What one connection may leave unread. Raising it lets each slow reader hold that much memory."""
UNREAD_REPLIES_BYTES_MAX = 32 * MIB
"""What all connections together may leave unread of the answers that they asked for."""

NEARLY_FULL = 0.75
ADDRESS_SHARE_MAX = 0.25
"""Once connections or jobs are nearly full, no address gets more than this of all there can be. Until
then one host may have as many as it likes: a thousand agents may well be on one, or behind one."""


class Shares:
    """Who has how much of something of which there is only so much."""

    def __init__(self, total_max: int) -> None:
        self.total_max = total_max
        self._taken: dict[str, int] = {}
        self._total = 0

    def is_over(self, address: str) -> bool:
        """Whether an address has its share, and little is left for the others."""
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
