"""The keys of a job in etcd, and the format of their values.

::

    PREFIX/RUN_ID/shared/leader              the leader's name, on its node's lease
    PREFIX/RUN_ID/shared/call                the number of the last roll call
    PREFIX/RUN_ID/job                        the job as the leader stored it
    PREFIX/RUN_ID/nodes/NODE/INCARNATION     a node's status, on its lease
    PREFIX/RUN_ID/views/NODE/INCARNATION     the view that the leader made for that node
    PREFIX/RUN_ID/store/...                  the store that the agents share

All but what is on a node's own lease is on the lease of the job, which leaders keep alive: so
nothing stays for ever, and whatever belongs to one node goes with it. Names are quoted, so that
none can reach outside its place. Values are checked like messages of the wire (`core.protocol`): another
version, another program or anybody who has the same user at etcd may have written them.
"""

from __future__ import annotations

import zlib
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, unquote

import msgspec
from msgspec import Meta

from holdfast.core.etcd.calls import Get, ReportUnreadable, end_of_prefix
from holdfast.core.protocol import MALFORMED, Status, View, sound_status, sound_view
from holdfast.core.rounds import Job, sound_job
from holdfast.printable import quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MARK = b"hf2"
RECORD_BYTES_MAX = 64 * 1024 * 1024
"""Of an uncompressed record; far above what etcd accepts compressed."""
COMPRESS_FROM_BYTES = 4096
UNREADABLE_MAX = 64  # Keys that are told of.
ROLL_CALL_DIGITS_MAX = 18  # A number of 64 bits, whatever its digits.

RollCallNumber = Annotated[int, Meta(ge=0, lt=10**ROLL_CALL_DIGITS_MAX)]
Lease = Annotated[int, Meta(ge=0, le=2**63 - 1)]
T = TypeVar("T")


class NodeRecord(msgspec.Struct, frozen=True):
    """A node's status, and the last roll call that it has seen."""

    status: Status
    call: RollCallNumber = 0


class JobRecord(msgspec.Struct, frozen=True):
    """A job as it is stored, and the lease it is on."""

    job: Job
    lease: Lease


class JobKeys:
    """The keys of one job."""

    def __init__(self, prefix: str, run_id: str) -> None:
        self.root = f"{prefix.rstrip('/')}/{quote(run_id, safe='')}/".encode()
        self.shared = self.root + b"shared/"
        self.leader = self.shared + b"leader"
        self.roll_call = self.shared + b"call"
        self.job = self.root + b"job"
        self.nodes = self.root + b"nodes/"
        self.views = self.root + b"views/"
        self.store = self.root + b"store/"

    def node(self, node: str, incarnation: int) -> bytes:
        """Return the key of an incarnation's status."""
        return self.nodes + _name(node, incarnation)

    def view(self, node: str, incarnation: int) -> bytes:
        """Return the key of the view for an incarnation."""
        return self.views + _name(node, incarnation)

    def views_of(self, node: str) -> bytes:
        """Return the prefix of the views for all incarnations of a node."""
        return self.views + quote(node, safe="").encode() + b"/"

    def peer_of(self, key: bytes) -> tuple[str, int] | None:
        """Return the node and incarnation of a key below `nodes` or `views`."""
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
_checks: dict[Any, Callable[[Any], Any]] = {
    NodeRecord: lambda record: NodeRecord(sound_status(record.status), record.call),
    JobRecord: lambda record: JobRecord(sound_job(record.job), record.lease),
    View: sound_view,
}


def pack(record: NodeRecord | JobRecord | View) -> bytes:
    """Return a record as it is stored; a large one, which is mostly repetition, compressed."""
    body = _encoder.encode(record)
    if len(body) < COMPRESS_FROM_BYTES:
        return MARK + b"=" + body
    return MARK + b"z" + zlib.compress(body, 1)


def read_record(kind: type[T], value: bytes) -> T:
    """Return a record of this kind; raise `ValueError`, with why, if the value is not one."""
    start = len(MARK) + 1
    try:
        if value[:start] == MARK + b"z":
            inflating = zlib.decompressobj()
            body = inflating.decompress(memoryview(value)[start:], RECORD_BYTES_MAX)
            if not inflating.eof:
                raise ValueError("it is not whole, or too large")
        elif value[:start] == MARK + b"=":
            body = value[start:]
        else:
            raise ValueError("it begins otherwise")
        record: T = _checks[kind](_decoders[kind].decode(body))
    except (*MALFORMED, zlib.error) as problem:
        raise ValueError(quoted(str(problem))) from None
    return record


def unpack(kind: type[T], value: bytes) -> T | None:
    """Return a record of this kind, or None if the value is not one."""
    try:
        return read_record(kind, value)
    except ValueError:
        return None


def roll_call_number(value: bytes) -> int:
    """Return the number of a stored roll call, or 0 if the value is not one."""
    return int(value) if value.isdigit() and len(value) <= ROLL_CALL_DIGITS_MAX else 0


class UnreadableKeys:
    """What is stored for nodes and cannot be used: each key is told of once."""

    def __init__(self, keys: JobKeys) -> None:
        self._keys = keys
        self._told: set[bytes] = set()
        self._untold: list[ReportUnreadable] = []

    def add(self, key: bytes, why: str) -> None:
        if key not in self._told and len(self._told) < UNREADABLE_MAX:
            self._told.add(key)
            peer = self._keys.peer_of(key)
            self._untold.append(ReportUnreadable(key, peer[0] if peer is not None else "", why))

    def take(self) -> list[ReportUnreadable]:
        """Return what is to be told now."""
        untold, self._untold = self._untold, []
        return untold
