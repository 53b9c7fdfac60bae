"""The limits of messages between nodes. `core.bounded` has them as types.

Each limit is far above what a real job needs, and low enough that a hostile peer cannot do harm.
"""

from __future__ import annotations

NODE_ID_CHARS_MAX = 200
RUN_ID_CHARS_MAX = 1_000
NAME_CHARS_MAX = 255
"""A host, an address, a role, a label."""
ADDRESS_CHARS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:%-"
"""The characters of host names and addresses, including the zone of an IPv6 address."""
SUMMARY_CHARS_MAX = 4_000
"""The one-line summary of a failure."""
WHY_CHARS_MAX = 2_000
"""A reason, as text for a user, and a line of a job's history."""
REPORT_BYTES_MAX = 256 * 1024
"""A complete failure report, in a status or a view."""
REQUEST_ID_CHARS_MAX = 64
REQUEST_WHY_CHARS_MAX = 500
"""The reason that an operator gives for a request. Every console prints it as one line."""
GRACE_S_MAX = 86_400.0

NODES_MAX = 1_000_000
LOCAL_WORLD_SIZE_MAX = 100_000
WORLD_SIZE_MAX = NODES_MAX * LOCAL_WORLD_SIZE_MAX
VIEW_MEMBERS_MAX = 128
"""A view lists the members of a round if there are at most this many. The total size of a round's views
grows with the square of its members: half a megabyte at this limit, gigabytes for 10,000 nodes.
Listing them only in the first view of a round would not help: a node that receives only a later view would
miss them."""
RIVALS_MAX = 64
"""If it is uncertain which rank failed first, at most this many other candidates are listed."""
PORT_MAX = 65_535
PORTS_MAX = 16
"""The number of ports that a node may hold for the workers' store."""
STORE_KEY_BYTES = 32
CONTROL_KEY_BYTES = 16
SETTLE_S_MAX = 86_400.0
DURATION_S_MAX = 10 * 366 * 86_400.0


def check_node_range(least: int, most: int) -> None:
    """Raise `ValueError` unless a job can have from `least` to `most` nodes."""
    if not 1 <= least <= most:
        raise ValueError(
            f"{least}:{most} is not a range of nodes; accepted: MIN:MAX, from 1, MIN <= MAX"
        )


PATIENCE_MAX = 3
"""The most further silence limits for which others wait for an agent that gets little CPU. A higher value
loses fewer starved nodes, and delays the detection of a host that failed while it was overloaded."""
COUNTER_MAX = 2**62
"""The limit of counters and random numbers: terms, revisions, generations and so on. msgpack can encode
numbers below 2**64. Even a hostile value stays below that when it is incremented."""
REPORTED_COUNTER_MAX = 2**53
"""The limit of counters that a node reports. A coordinator that accepts such a value continues to count
from it (`core.rounds`)."""
TERMS_PER_ENDPOINT = 2**32
"""The number of terms reserved for each endpoint in a list of endpoints: the number of times that a
coordinator can start there. All terms of a later endpoint are higher than those of an earlier endpoint."""
COORDINATORS_MAX = 8
INCARNATION_MAX = 2**64 - 1
PID_MAX = 2**31 - 1
EXITCODE_MAX = 2**31 - 1
