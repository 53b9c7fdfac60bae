"""The keys of a job in etcd, and the format of their values.

::

    PREFIX/RUN_ID/shared/leader              the leader's version, name, lease and presence, on that lease
    PREFIX/RUN_ID/shared/call                the number of the last roll call
    PREFIX/RUN_ID/shared/missing             with `--ha`, the machines without which the job does not survive a loss
    PREFIX/RUN_ID/job                        the job as the leader stored it
    PREFIX/RUN_ID/nodes/NODE/INCARNATION     a node's status, on its lease
    PREFIX/RUN_ID/views/NODE/INCARNATION     the leader's view for that node
    PREFIX/RUN_ID/store/...                  the store that the agents share

A node's status and the leader's key are on the lease of a node, and are deleted with it. All other keys are
on the lease of the job, which leaders renew; so nothing remains forever. Names are quoted, so no name can
reach a key outside its folder. Values are validated like messages on the wire (`core.protocol`): another
version, another program or any client with the same etcd user may have written them.
"""

from __future__ import annotations

import re
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
from holdfast.defaults import PROTOCOL_VERSION, SAME_VERSION
from holdfast.printable import one_line, quoted

if TYPE_CHECKING:
    from collections.abc import Callable

MARK_PREFIX = b"hf"
MARK = MARK_PREFIX + b"%d" % PROTOCOL_VERSION
"""The first bytes of each record and of the leader's key."""
RECORD_BYTES_MAX = 64 * 1024 * 1024
"""The limit of a decompressed record; far above what etcd accepts compressed."""
COMPRESS_FROM_BYTES = 4096
UNREADABLE_MAX = 64  # The number of invalid keys that are reported.
ROLL_CALL_DIGITS_MAX = 18  # Any number with this many digits fits into 64 bits.
PRESENCE_ID_CHARS = 32

RollCallNumber = Annotated[int, Meta(ge=0, lt=10**ROLL_CALL_DIGITS_MAX)]
Lease = Annotated[int, Meta(ge=0, le=2**63 - 1)]
T = TypeVar("T")
MISSING_CHARS_MAX = 500


class Presence(msgspec.Struct, frozen=True):
    """The port that shows that an agent's process runs; see `core.etcd.witness`."""

    address: Name
    port: Port
    id: Annotated[str, Meta(pattern=f"^[0-9a-f]{{{PRESENCE_ID_CHARS}}}$")]
    """The identity that the process sends there; no other process ever has the same."""


class NodeRecord(msgspec.Struct, frozen=True):
    """A node's stored record.

    It has the node's status and the last roll call that it received; its lease and presence, by which its
    exit is detected; and its control port, at which operators reach its agent.
    """

    status: Status
    roll_call: RollCallNumber = 0
    lease: Lease = 0
    presence: Presence | None = None
    control: ControlPort | None = None


class JobRecord(msgspec.Struct, frozen=True):
    """A stored job, and its lease."""

    job: Job
    lease: Lease


class JobKeys:
    """The keys of one job."""

    def __init__(self, prefix: str, run_id: str) -> None:
        self.root = f"{prefix.rstrip('/')}/{quote(run_id, safe='')}/".encode()
        self.shared = self.root + b"shared/"
        self.leader = self.shared + b"leader"
        self.roll_call = self.shared + b"call"
        self.missing_members = self.shared + b"missing"
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


def missing_members(value: bytes) -> str:
    """Return the stored names of missing machines, printable."""
    return one_line(value.decode(errors="replace"), MISSING_CHARS_MAX)


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
    """Return a record as bytes to store. Large records are mostly repetitive, so they are compressed."""
    body = _encoder.encode(record)
    if len(body) < COMPRESS_FROM_BYTES:
        return MARK + b"=" + body
    return MARK + b"z" + zlib.compress(body, 1)


def read_record(kind: type[T], value: bytes) -> T:
    """Return a record of this kind; raise `ValueError` with the reason if the value is invalid."""
    start = len(MARK) + 1
    try:
        if value[:start] == MARK + b"z":
            inflating = zlib.decompressobj()
            body = inflating.decompress(memoryview(value)[start:], RECORD_BYTES_MAX)
            if not inflating.eof:
                raise ValueError("it is truncated or too large")
        elif value[:start] == MARK + b"=":
            body = value[start:]
        else:
            raise ValueError(
                version_refusal(value) or "it does not begin with the mark of a record"
            )
        record: T = _checks[kind](_decoders[kind].decode(body))
    except (*MALFORMED, zlib.error) as problem:
        raise ValueError(quoted(str(problem))) from None
    return record


def unpack(kind: type[T], value: bytes) -> T | None:
    """Return a record of this kind, or None if the value is invalid."""
    try:
        return read_record(kind, value)
    except ValueError:
        return None


def version_refusal(value: bytes) -> str:
    """Return why a value of another version of Holdfast is refused; empty for any other value."""
    found = re.match(MARK_PREFIX + rb"(\d{1,9})[ =z]", value)
    if found is None or int(found[1]) == PROTOCOL_VERSION:
        return ""
    return (
        f"another version of Holdfast wrote it (protocol version {int(found[1])}, here "
        f"{PROTOCOL_VERSION}): {SAME_VERSION}"
    )


# The leader's key is readable text: `MARK NAME LEASE`, and in a second line its presence.


def leader_signature(name: str, lease: int) -> bytes:
    """Return the first line of the leader's key, which is unique to this node and lease."""
    return MARK + f" {name} {lease:x}".encode()


def leader_value(name: str, lease: int, presence: Presence | None) -> bytes:
    """Return the value of the leader's key."""
    signature = leader_signature(name, lease)
    if presence is None:
        return signature
    return signature + f"\n{presence.address} {presence.port} {presence.id}".encode()


def read_leader(value: bytes) -> tuple[str, int, Presence | None]:
    """Return a leader's name, its lease (or 0) and its presence, as far as the value is valid."""
    signature, _, second = value.decode(errors="replace").partition("\n")
    name, _, lease = signature.removeprefix(f"{MARK.decode()} ").rpartition(" ")
    try:
        address, port, identity = second.split(" ")
        check_address(address)
        fields = {"address": address, "port": int(port), "id": identity}
        presence = msgspec.convert(fields, Presence)
        return name, msgspec.convert(int(lease, 16), Lease), presence
    except MALFORMED:
        return name, 0, None


def roll_call_number(value: bytes) -> int:
    """Return the number of a stored roll call, or 0 if the value is invalid."""
    return int(value) if value.isdigit() and len(value) <= ROLL_CALL_DIGITS_MAX else 0


class UnreadableKeys:
    """Keys of nodes with invalid values; each is reported once."""

    def __init__(self, keys: JobKeys) -> None:
        self._keys = keys
        self._known: set[bytes] = set()
        self._pending: list[ReportUnreadable] = []

    def add(self, key: bytes, why: str) -> None:
        if key not in self._known and len(self._known) < UNREADABLE_MAX:
            self._known.add(key)
            peer = self._keys.peer_of(key)
            self._pending.append(ReportUnreadable(key, peer[0] if peer is not None else "", why))

    def take(self) -> list[ReportUnreadable]:
        """Return the pending reports, and clear them."""
        pending, self._pending = self._pending, []
        return pending
