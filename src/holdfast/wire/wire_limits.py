"""Limits on everything sent over the wire, besides those of `core.protocol`.

They limit the memory and time that a hostile or broken peer can use in this process. If a side's own text (a
report, a reason) may exceed a limit, the side shortens it before sending.
"""

from __future__ import annotations

from holdfast.core.limits import NODE_ID_CHARS_MAX, RUN_ID_CHARS_MAX

KIB = 1024

FRAME_BYTES_MAX = 1024 * KIB
"""The body of one frame. Raising it lets each connection use that much more memory."""

PART_BYTES = 8 * KIB
"""A larger message is sent in parts of this size. A heartbeat may wait behind one part: raising the limit
makes a slow link look dead sooner."""

HANDSHAKE_FRAME_BYTES_MAX = 8 * KIB
"""The body of a frame from an unauthenticated peer: a hello with the longest run id fits."""

STATUS_FRAME_BYTES_MAX = 16 * KIB * KIB
"""The body of a frame to a client that requested the state of jobs, at about 200 bytes per node. Only such a
client's reader accepts a frame above `FRAME_BYTES_MAX`."""

STORE_VALUE_BYTES_MAX = 480 * KIB
"""A value in the store: two of them (`compare_set`) and their key fit into one frame."""

STORE_KEY_CHARS_MAX = 4_000
STORE_KEYS_MAX = 10_000
STORE_SCOPE_CHARS_MAX = RUN_ID_CHARS_MAX + NODE_ID_CHARS_MAX
STORE_TIMEOUT_S_MAX = 30 * 86_400.0

QUERY_BYTES_MAX = 64 * KIB
"""The body of one query."""
REPLY_BYTES_MAX = 960 * KIB
"""The body of one of several replies; it fits into a frame."""
WORKERS_REPORTED_MAX = 4_096
"""Workers of one node in a report."""
EVENTS_MAX = 1_024
"""Events in one message."""

SUMMARIES_MAX = 100_000
"""Nodes of one job in a reply. The decoder allocates 8 bytes for each node that the peer announces, so this also
limits the allocation that a short hostile message can cause."""
JOBS_MAX = 10_000
HISTORY_LINES_MAX = 10_000

NONCE_BYTES = 32
NONCE_BYTES_MIN = 16
NONCE_BYTES_MAX = 64
PROOF_BYTES_MAX = 64
VERSION_MAX = 2**31 - 1
