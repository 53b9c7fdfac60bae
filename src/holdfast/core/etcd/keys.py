"""Where a job lies in etcd, and how what lies there is written.

::

    PREFIX/RUN_ID/shared/leader              who leads, on that node's lease
    PREFIX/RUN_ID/shared/call                the number of the last roll call
    PREFIX/RUN_ID/job                        the job as the leader knows it
    PREFIX/RUN_ID/nodes/NODE/INCARNATION     what a node says of itself, on its lease
    PREFIX/RUN_ID/views/NODE/INCARNATION     what the leader tells that node
    PREFIX/RUN_ID/store/...                  the store that the agents share

All but what is on a node's own lease is on the lease of the job, which leaders keep alive: so
nothing lasts for ever, and the end of a node takes all that is its own. Names are quoted, so none
of them can reach out of its place. Whatever cannot be read is None, never an error: another
version, or another program, may have written it.
"""

from __future__ import annotations

import zlib
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import msgspec

from holdfast.core.etcd.calls import Get, end_of_prefix
from holdfast.core.protocol import Status, View
from holdfast.core.rounds import Job  # noqa: TC001 (msgspec reads the annotation)

MARK = b"hf1"
RECORD_BYTES_MAX = 64 * 1024 * 1024
"""What a record may be when unpacked; far above what etcd lets anybody store packed."""
PACKED_FROM_BYTES = 4096
CALL_DIGITS_MAX = 18  # A number of 64 bits, whatever its digits.

T = TypeVar("T")


class NodeRecord(msgspec.Struct, frozen=True):
    """What a node says of itself, and which roll call it has heard."""

    status: Status
    call: int = 0


class JobRecord(msgspec.Struct, frozen=True):
    """A job as it is stored, and the lease it is on."""

    job: Job
    lease: int


class JobKeys:
    """The keys of one job."""

    def __init__(self, prefix: str, run_id: str) -> None:
        self.root = f"{prefix.rstrip('/')}/{quote(run_id, safe='')}/".encode()
        self.shared = self.root + b"shared/"
        self.leader = self.shared + b"leader"
        self.call = self.shared + b"call"
        self.job = self.root + b"job"
        self.nodes = self.root + b"nodes/"
        self.views = self.root + b"views/"
        self.store = self.root + b"store/"

    def node(self, node: str, incarnation: int) -> bytes:
        """Return where an incarnation speaks."""
        return self.nodes + _name(node, incarnation)

    def view(self, node: str, incarnation: int) -> bytes:
        """Return where an incarnation is told."""
        return self.views + _name(node, incarnation)

    def views_of(self, node: str) -> bytes:
        """Return the prefix of all that the incarnations of a node are told."""
        return self.views + quote(node, safe="").encode() + b"/"

    def whose(self, key: bytes) -> tuple[str, int] | None:
        """Return the node and incarnation that a key of `nodes` or `views` is of."""
        parts = key[len(self.nodes) :].split(b"/")
        try:
            node, incarnation = parts
            return unquote(node.decode()), int(incarnation, 16)
        except ValueError:
            return None


def _name(node: str, incarnation: int) -> bytes:
    return f"{quote(node, safe='')}/{incarnation:x}".encode()


def get_prefix(prefix: bytes, *, keys_only: bool = False) -> Get:
    """Return the request that reads all keys of a prefix."""
    return Get(prefix, end_of_prefix(prefix), keys_only=keys_only)


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (NodeRecord, JobRecord, View)
}


def pack(record: NodeRecord | JobRecord | View) -> bytes:
    """Return a record as it is stored; large ones, which are mostly repetition, smaller."""
    body = _encoder.encode(record)
    if len(body) < PACKED_FROM_BYTES:
        return MARK + b"=" + body
    return MARK + b"z" + zlib.compress(body, 1)


def unpack(kind: type[T], value: bytes) -> T | None:
    """Return a record of this kind, or None if it is none that can be read."""
    start = len(MARK) + 1
    try:
        if value[:start] == MARK + b"z":
            inflating = zlib.decompressobj()
            body = inflating.decompress(memoryview(value)[start:], RECORD_BYTES_MAX)
            if not inflating.eof:
                return None
        elif value[:start] == MARK + b"=":
            body = value[start:]
        else:
            return None
        record: T = _decoders[kind].decode(body)
    except (msgspec.MsgspecError, zlib.error, ValueError, RecursionError):
        return None  # The last two are for text that is none, and for what is nested too deeply.
    return record


def roll_call_number(value: bytes) -> int:
    """Return the number of a roll call as it is stored, or 0 if it is none that can be read."""
    return int(value) if value.isdigit() and len(value) <= CALL_DIGITS_MAX else 0
