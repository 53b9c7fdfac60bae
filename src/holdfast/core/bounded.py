"""The limits of `core.limits` as types. Decoding a message checks them."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from holdfast.core.limits import (
    COUNTER_MAX,
    DURATION_S_MAX,
    NAME_CHARS_MAX,
    NODE_ID_CHARS_MAX,
    NODES_MAX,
    PATIENCE_MAX,
    PORT_MAX,
    REPORT_BYTES_MAX,
    REPORTED_COUNTER_MAX,
    RUN_ID_CHARS_MAX,
    STORE_KEY_BYTES,
    WHY_CHARS_MAX,
    WORLD_SIZE_MAX,
)

RunId = Annotated[str, Meta(min_length=1, max_length=RUN_ID_CHARS_MAX)]
NodeId = Annotated[str, Meta(min_length=1, max_length=NODE_ID_CHARS_MAX)]
Name = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
Why = Annotated[str, Meta(max_length=WHY_CHARS_MAX)]
Report = Annotated[bytes, Meta(max_length=REPORT_BYTES_MAX)]
Incarnation = Annotated[int, Meta(ge=0)]  # Up to INCARNATION_MAX, which is msgpack's own limit.
Count = Annotated[int, Meta(ge=0, le=COUNTER_MAX)]
Number = Annotated[int, Meta(ge=-1, le=COUNTER_MAX)]  # Counts from 0; -1 means "none yet".
Patience = Annotated[int, Meta(ge=0, le=PATIENCE_MAX)]
ReportedCount = Annotated[int, Meta(ge=0, le=REPORTED_COUNTER_MAX)]
ReportedNumber = Annotated[int, Meta(ge=-1, le=REPORTED_COUNTER_MAX)]
NodeRank = Annotated[int, Meta(ge=-1, le=NODES_MAX - 1)]
NodeCount = Annotated[int, Meta(ge=0, le=NODES_MAX)]
WorkerCount = Annotated[int, Meta(ge=0, le=WORLD_SIZE_MAX)]
WorkerRank = Annotated[int, Meta(ge=-1, le=WORLD_SIZE_MAX - 1)]
Port = Annotated[int, Meta(ge=0, le=PORT_MAX)]
StoreKey = Annotated[bytes, Meta(max_length=STORE_KEY_BYTES)]
ClockTime = Annotated[float, Meta(ge=0.0, le=1e15)]
Seconds = Annotated[float, Meta(ge=0.0, le=DURATION_S_MAX)]
Loss = (
    Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
    | Literal["nan", "inf", "-inf"]  # JSON has no numbers for these.
)

MALFORMED = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
"""The exceptions for bytes that are not a valid message. Besides its own errors, msgspec raises Python's
for text that is not UTF-8 and for structures that are nested too deeply."""
