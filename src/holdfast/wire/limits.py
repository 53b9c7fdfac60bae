"""How large anything on the wire may be, besides the limits of `core.protocol`.

A hostile or broken peer can waste no more of us than is written here. A side that may exceed a
limit with something of its own making (a report, a reason) shortens it before it sends.
"""

from __future__ import annotations

from holdfast.core.limits import NODE_ID_CHARS_MAX, RUN_ID_CHARS_MAX

KIB = 1024

FRAME_BYTES_MAX = 1024 * KIB
"""The body of one frame. Raising it lets each connection hold that much more memory."""

PART_BYTES = 8 * KIB
"""A message above this is sent in parts of this size. A heartbeat may have to wait for one of them:
raising it makes slow links look dead sooner."""

HANDSHAKE_FRAME_BYTES_MAX = 8 * KIB
"""The same for a peer that has not yet proven who it is: a hello with the longest run id."""

STATUS_FRAME_BYTES_MAX = 16 * KIB * KIB
"""The same for a client that requested the state of the jobs: about 200 bytes per node. Only such a
client's reader accepts a frame above `FRAME_BYTES_MAX`."""

STORE_VALUE_BYTES_MAX = 480 * KIB
"""A value in the store: two of them (`compare_set`) and their key fit into one frame."""

STORE_KEY_CHARS_MAX = 4_000
STORE_KEYS_MAX = 10_000
STORE_SCOPE_CHARS_MAX = RUN_ID_CHARS_MAX + NODE_ID_CHARS_MAX
STORE_TIMEOUT_S_MAX = 30 * 86_400.0

QUERY_BYTES_MAX = 64 * KIB
"""What a person's question, and what it is about, may take."""
REPLY_BYTES_MAX = 960 * KIB
"""One answer of several to such a question: it fits into a frame."""
WORKERS_REPORTED_MAX = 4_096
"""Workers of one node in a report."""
EVENTS_MAX = 1_024
"""Events in one message."""

SUMMARIES_MAX = 100_000
"""Nodes of one job in a reply. Room for as many as a peer announces is made before the first is
read, so this is also what one short hostile message can make us allocate (8 bytes each)."""
JOBS_MAX = 10_000
HISTORY_LINES_MAX = 10_000

NONCE_BYTES = 32
NONCE_BYTES_MIN = 16
NONCE_BYTES_MAX = 64
PROOF_BYTES_MAX = 64
VERSION_MAX = 2**31 - 1
