"""The limits of what nodes send each other. `core.bounded` has them as types.

Each limit is far above what a real job needs and far below what would hurt.
"""

from __future__ import annotations

NODE_ID_CHARS_MAX = 200
RUN_ID_CHARS_MAX = 1_000
NAME_CHARS_MAX = 255
"""A host, an address, a role, a label."""
ADDRESS_CHARS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:%-"
"""What host names and addresses consist of, with the zone that an IPv6 address may have."""
SUMMARY_CHARS_MAX = 4_000
"""A failure in one line."""
WHY_CHARS_MAX = 2_000
"""A reason for a person, and a line of a job's history."""
REPORT_BYTES_MAX = 256 * 1024
"""A whole failure report, in a status or a view."""
REQUEST_ID_CHARS_MAX = 64
REQUEST_WHY_CHARS_MAX = 500
"""The reason of a request: one line on every console."""
GRACE_S_MAX = 86_400.0

NODES_MAX = 1_000_000
LOCAL_WORLD_SIZE_MAX = 100_000
WORLD_SIZE_MAX = NODES_MAX * LOCAL_WORLD_SIZE_MAX
VIEW_MEMBERS_MAX = 128
"""A view lists the members of a round of up to this many nodes. All views of a round together grow with
the square of its size: at this limit they take half a megabyte, for 10,000 nodes they would take gigabytes.
To list them only in the first view of a round would keep the square, and a node that receives only a later
view would miss them."""
RIVALS_MAX = 64
"""How many ranks are named besides the one that failed first, if that is not certain."""
PORT_MAX = 65_535
PORTS_MAX = 16
"""How many ports a node may hold for the workers' store."""
STORE_KEY_BYTES = 32
CONTROL_KEY_BYTES = 16
SETTLE_S_MAX = 86_400.0
AWAY_S_MAX = 10 * 366 * 86_400.0

COUNTER_MAX = 2**62
"""What is counted or drawn at random: terms, revisions, generations, ... Far enough from the end
of what msgpack can write (2**64) that counting on from a hostile value never gets there."""
REPORTED_COUNTER_MAX = 2**53
"""The same for what a node reports: a coordinator counts on from there, if it accepts it
(`core.rounds`)."""
TERMS_PER_PLACE = 2**32
"""Of one place in a list of endpoints: so many times a coordinator may be started there. Those of
a later place are higher, whatever the coordinators at earlier ones have done meanwhile."""
PLACES_MAX = 8
INCARNATION_MAX = 2**64 - 1
PID_MAX = 2**31 - 1
EXITCODE_MAX = 2**31 - 1
