"""The limits of what nodes tell each other, as types: they hold for everything that is decoded.

Each limit is far above what a real job needs and far below what would hurt.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

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
ASKED_WHY_CHARS_MAX = 500
"""Why somebody asks for something: one line on every console."""
GRACE_S_MAX = 86_400.0

NODES_MAX = 1_000_000
LOCAL_WORLD_SIZE_MAX = 100_000
WORLD_SIZE_MAX = NODES_MAX * LOCAL_WORLD_SIZE_MAX
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
"""The same where a node reports what it heard: a coordinator counts on from there, if it believes it
(`core.rounds`)."""
TERMS_PER_PLACE = 2**32
"""Of one place in a list of endpoints: so many times a coordinator may be started there. Those of
a later place are higher, whatever the coordinators at earlier ones have done meanwhile."""
PLACES_MAX = 8
INCARNATION_MAX = 2**64 - 1
PID_MAX = 2**31 - 1
EXITCODE_MAX = 2**31 - 1

RunId = Annotated[str, Meta(min_length=1, max_length=RUN_ID_CHARS_MAX)]
NodeId = Annotated[str, Meta(min_length=1, max_length=NODE_ID_CHARS_MAX)]
Name = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
Why = Annotated[str, Meta(max_length=WHY_CHARS_MAX)]
Report = Annotated[bytes, Meta(max_length=REPORT_BYTES_MAX)]
Incarnation = Annotated[int, Meta(ge=0)]  # Up to INCARNATION_MAX, which is msgpack's own limit.
Count = Annotated[int, Meta(ge=0, le=COUNTER_MAX)]
Number = Annotated[int, Meta(ge=-1, le=COUNTER_MAX)]  # -1 is "none yet" of what counts from 0.
ReportedCount = Annotated[int, Meta(ge=0, le=REPORTED_COUNTER_MAX)]
ReportedNumber = Annotated[int, Meta(ge=-1, le=REPORTED_COUNTER_MAX)]
NodeRank = Annotated[int, Meta(ge=-1, le=NODES_MAX - 1)]
NodeCount = Annotated[int, Meta(ge=0, le=NODES_MAX)]
WorkerCount = Annotated[int, Meta(ge=0, le=WORLD_SIZE_MAX)]
WorkerRank = Annotated[int, Meta(ge=-1, le=WORLD_SIZE_MAX - 1)]
Port = Annotated[int, Meta(ge=0, le=PORT_MAX)]
StoreKey = Annotated[bytes, Meta(max_length=STORE_KEY_BYTES)]
ClockTime = Annotated[float, Meta(ge=0.0, le=1e15)]
Seconds = Annotated[float, Meta(ge=0.0, le=AWAY_S_MAX)]

MALFORMED = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
"""What is raised for bytes that are no message. Besides its own errors msgspec lets through what
Python says of text that is not UTF-8 and of things that are nested too deep."""
