"""The keys of a job in etcd, and the format of their values.

::

    PREFIX/RUN_ID/shared/leader              the leader's name, lease and presence, on that lease
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
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import quote, unquote

import msgspec
from msgspec import Meta

from holdfast.core.bounded import MALFORMED, Name, Port
from holdfast.core.etcd.calls import Get, ReportUnreadable, end_of_prefix
from holdfast.core.protocol import (
    ControlPort,
    Status,
    View,
    check_address,
    sanitized_status,
    sanitized_view,
)
from holdfast.core.rounds import Job, sanitized_job
from holdfast.printable import quoted

if TYPE_CHECKING:
    from collections.abc import Callable

MARK = b"hf1"
RECORD_BYTES_MAX = 64 * 1024 * 1024
"""Of an uncompressed record; far above what etcd accepts compressed."""
COMPRESS_FROM_BYTES = 4096
UNREADABLE_MAX = 64  # Keys that are told of.
ROLL_CALL_DIGITS_MAX = 18  # A number of 64 bits, whatever its digits.
PRESENCE_ID_CHARS = 32

RollCallNumber = Annotated[int, Meta(ge=0, lt=10**ROLL_CALL_DIGITS_MAX)]
Lease = Annotated[int, Meta(ge=0, le=2**63 - 1)]
T = TypeVar("T")


class Presence(msgspec.Struct, frozen=True):
    """The port at which an agent's process says that it is there; see `core.etcd.witness`."""

    address: Name
    port: Port
    id: Annotated[str, Meta(pattern=f"^[0-9a-f]{{{PRESENCE_ID_CHARS}}}$")]
    """What is said there, and by no other process ever."""


class NodeRecord(msgspec.Struct, frozen=True):
    """A node's status, the last roll call that it has seen, how it can be known to have ended, and where
    people reach its agent, at the address of the node.
    """

    status: Status
    call: RollCallNumber = 0
    lease: Lease = 0
    presence: Presence | None = None
    control: ControlPort | None = None


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


def _sanitized_node(record: NodeRecord) -> NodeRecord:
    if record.presence is not None:
        check_address(record.presence.address)
    return msgspec.structs.replace(record, status=sanitized_status(record.status))


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (NodeRecord, JobRecord, View)
}
_checks: dict[Any, Callable[[Any], Any]] = {
    NodeRecord: _sanitized_node,
    JobRecord: lambda record: JobRecord(sanitized_job(record.job), record.lease),
    View: sanitized_view,
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


# The leader's key is text, for people: `NAME LEASE`, and in a second line its presence.


def leader_signature(name: str, lease: int) -> bytes:
    """Return what only this node's key begins with, and only with this lease."""
    return f"{name} {lease:x}".encode()


def leader_value(name: str, lease: int, presence: Presence | None) -> bytes:
    """Return what a leader stores."""
    signature = leader_signature(name, lease)
    if presence is None:
        return signature
    return signature + f"\n{presence.address} {presence.port} {presence.id}".encode()


def read_leader(value: bytes) -> tuple[str, int, Presence | None]:
    """Return the name of a leader, its lease (or 0) and its presence, as far as they can be read."""
    signature, _, second = value.decode(errors="replace").partition("\n")
    name, _, lease = signature.rpartition(" ")
    try:
        address, port, said = second.split(" ")
        check_address(address)
        presence = msgspec.convert({"address": address, "port": int(port), "id": said}, Presence)
        return name, msgspec.convert(int(lease, 16), Lease), presence
    except MALFORMED:
        return name, 0, None


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
