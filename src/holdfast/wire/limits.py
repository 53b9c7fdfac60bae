"""How large anything on the wire may be.

Each limit is far above what a real job needs and far below what would hurt: a hostile or broken
peer can waste no more of us than is written here. A side that may exceed a limit with something
of its own making (a report, a reason) shortens it before it sends; see `clip`.
"""

from __future__ import annotations

from holdfast.core.protocol import NODE_ID_CHARS_MAX, RUN_ID_CHARS_MAX

KIB = 1024

FRAME_BYTES_MAX = 1024 * KIB
"""The body of one frame. Raising it lets each connection hold that much more memory."""

HANDSHAKE_FRAME_BYTES_MAX = 4 * KIB
"""The same for a peer that has not yet proven who it is."""

ANSWER_FRAME_BYTES_MAX = 16 * KIB * KIB
"""The same for whoever asked for the state of the jobs: about 200 bytes per node come back."""

REPORT_BYTES_MAX = 256 * KIB
"""The whole story of a failure, in a status or a view."""

WHY_CHARS_MAX = 2_000
"""A reason in words for a person, and a line of a job's history."""

SUMMARY_CHARS_MAX = 4_000
"""A failure in one line."""

NAME_CHARS_MAX = 255
"""A host, an address, a role, a label."""

NODES_MAX = 1_000_000
LOCAL_WORLD_SIZE_MAX = 100_000
WORLD_SIZE_MAX = NODES_MAX * LOCAL_WORLD_SIZE_MAX
PORT_MAX = 65_535
PORTS_MAX = 16
"""How many ports a node may hold for the workers' store."""
SETTLE_S_MAX = 86_400.0
AWAY_S_MAX = 10 * 366 * 86_400.0

COUNTER_MAX = 2**62
# What a node may say that it heard: a coordinator counts on from there, and needs the room.
SAID_MAX = 2**53
"""What is counted or drawn at random: terms, revisions, generations, ... Far enough from the end
of what msgpack can write (2**64) that counting on from a hostile value never gets there."""

INCARNATION_MAX = 2**64 - 1
PID_MAX = 2**31 - 1
EXITCODE_MAX = 2**31 - 1

STORE_VALUE_BYTES_MAX = 480 * KIB
"""A value in the store: two of them (`compare_set`) and their key fit into one frame."""

STORE_KEY_CHARS_MAX = 4_000
STORE_KEYS_MAX = 10_000
STORE_SCOPE_CHARS_MAX = RUN_ID_CHARS_MAX + NODE_ID_CHARS_MAX
STORE_TIMEOUT_S_MAX = 30 * 86_400.0

SUMMARIES_MAX = 100_000
"""Nodes of one job in an answer. Room for as many as a peer announces is made before the first is
read, so this is also what one short hostile message can make us allocate (8 bytes each)."""
JOBS_MAX = 10_000
HISTORY_LINES_MAX = 10_000

NONCE_BYTES = 32
NONCE_BYTES_MIN = 16
NONCE_BYTES_MAX = 64
PROOF_BYTES_MAX = 64
VERSION_MAX = 2**31 - 1


def clip(text: str, chars_max: int) -> str:
    """Return text that may be sent: not over the limit, and of characters that UTF-8 has."""
    if len(text) > chars_max:
        text = text[: chars_max - 3] + "..."
    return text.encode(errors="replace").decode()
