"""Requests to etcd, its answers, and the effects that carry them, as plain values.

The machines on etcd (`core.etcd.etcd_session`, `core.etcd.leader`) return these requests as effects and
handle the answers as events. A real client performs the requests over the network, and the simulator in
its own store, so the same decisions run in both.

If the answer is a `Problem`, the request was not performed. After `UNREACHABLE` or `CLOSED` it may have
been performed. A revision is etcd's counter, which increases with every change of any key.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from holdfast.core.machine import Effect, Event


def end_of_prefix(prefix: bytes) -> bytes:
    """Return the `end` of the range of all keys that begin with `prefix`."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"


class KeyValue(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it is stored."""

    key: bytes
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    version: int = 0
    lease: int = 0


# Requests.


class Put(msgspec.Struct, frozen=True):
    """Store a value. If a lease is given, the key is deleted when the lease ends."""

    key: bytes
    value: bytes
    lease: int = 0


class Get(msgspec.Struct, frozen=True):
    """Read a key, or all keys from `key` up to and excluding `end`."""

    key: bytes
    end: bytes = b""
    keys_only: bool = False


class Delete(msgspec.Struct, frozen=True):
    """Delete a key, or all keys of a range; the result has the number of deleted keys."""

    key: bytes
    end: bytes = b""


Op = Put | Get | Delete


class Field(Enum):
    """The field of a key that a condition compares; 0 for a missing key, except `VALUE`."""

    CREATE = "create"
    MOD = "mod"
    VERSION = "version"
    VALUE = "value"


class Compare(msgspec.Struct, frozen=True):
    """A condition: the field of the key has this value."""

    key: bytes
    field: Field
    equals: int | bytes


class Txn(msgspec.Struct, frozen=True):
    """Atomically perform `success` if all conditions hold, and `failure` otherwise."""

    compare: tuple[Compare, ...] = ()
    success: tuple[Op, ...] = ()
    failure: tuple[Op, ...] = ()

    def __str__(self) -> str:
        """Return the operations and keys without values, for stories."""
        ops = ", ".join(f"{type(op).__name__} {op.key.decode()}" for op in self.success)
        conditions = " and ".join(
            f"{one.key.decode()} {one.field.value}={one.equals!r}" for one in self.compare
        )
        return f"if {conditions}: {ops}" if conditions else ops


class Grant(msgspec.Struct, frozen=True):
    """Create a lease, which ends unless it is renewed; etcd may make it longer than requested."""

    ttl_s: int


class KeepAlive(msgspec.Struct, frozen=True):
    """Renew a lease for its full time."""

    lease: int


class Revoke(msgspec.Struct, frozen=True):
    """End a lease and delete its keys; if it has already ended, nothing happens."""

    lease: int


Request = Txn | Grant | KeepAlive | Revoke


# Requests about the members of the cluster.


class ListMembers(msgspec.Struct, frozen=True):
    """Read the members on which a majority agrees (a linearizable read)."""


class AddMember(msgspec.Struct, frozen=True):
    """Add a voter that will be at this URL."""

    peer_url: str


class RemoveMember(msgspec.Struct, frozen=True):
    """Permanently remove a member from the cluster."""

    id: int


MemberRequest = ListMembers | AddMember | RemoveMember


# Answers.


class TxnDone(msgspec.Struct, frozen=True):
    """The outcome of a transaction."""

    revision: int
    succeeded: bool
    results: tuple[tuple[KeyValue, ...], ...] = ()
    """Per performed operation: the keys that a `Get` read; empty for others."""
    deleted: tuple[int, ...] = ()
    """Per performed operation: the number of keys that a `Delete` deleted; 0 for others."""

    def __str__(self) -> str:
        return f"{'done' if self.succeeded else 'not done'} at {self.revision}"


class Granted(msgspec.Struct, frozen=True):
    """A new lease."""

    lease: int
    ttl_s: int


class KeptAlive(msgspec.Struct, frozen=True):
    """A lease was renewed for this long; 0 if it has ended."""

    ttl_s: int


class Revoked(msgspec.Struct, frozen=True):
    """A lease has ended."""


class Members(msgspec.Struct, frozen=True):
    """The members of the cluster: ids by URL."""

    ids: dict[str, int]


class ProblemKind(Enum):
    """Kinds of problems, by the possible reactions."""

    UNREACHABLE = "unreachable"
    """No response; the request may have been performed. Another endpoint may respond."""
    LEASE_GONE = "lease gone"
    """The lease of the request has ended; nothing was done."""
    NO_SPACE = "no space"
    """etcd rejects writes until an operator frees space; nothing was done."""
    DENIED = "denied"
    """The user, password, certificate or permission is wrong. A retry does not help."""
    COMPACTED = "compacted"
    """The requested revision is no longer available."""
    REFUSED = "refused"
    """etcd rejects the request, for example because it is too large, or this is not etcd. Nothing was
    done."""
    CLOSED = "closed"
    """This client is closed and answers no more requests."""


class Problem(msgspec.Struct, frozen=True):
    """Why a request failed; `why` is one line for users, without the endpoint."""

    kind: ProblemKind
    why: str


Answer = TxnDone | Granted | KeptAlive | Revoked | Problem


# Watches.


class Change(msgspec.Struct, frozen=True):
    """A change of a key: its new value, or None if it was deleted or its lease ended."""

    key: bytes
    value: bytes | None
    mod_revision: int
    create_revision: int = 0

    def __str__(self) -> str:
        return f"{self.key.decode(errors='replace')}{' deleted' if self.value is None else ''}"


# Effects of the machines. Numbers are unique within a session.


class SendRequest(Effect):
    """Send a request; the outcome, which may be a `Problem`, is `RequestAnswered`."""

    number: int
    request: Request


class StartWatch(Effect):
    """Report every change in a range, starting at a revision, as `KeysChanged` with this number."""

    number: int
    key: bytes
    end: bytes
    start_revision: int


class StopWatch(Effect):
    """Stop a watch; if it has already ended, nothing happens."""

    number: int


class ReportUnreadable(Effect):
    """Inform the user that the stored data of a node is invalid and ignored."""

    key: bytes
    node: str
    why: str


EtcdEffect = SendRequest | StartWatch | StopWatch | ReportUnreadable

# Events for the machines.


class RequestAnswered(Event):
    """A request was answered. If no machine awaits its answer, it is ignored."""

    number: int
    answer: Answer


class KeysChanged(Event):
    """A watch reports changes, in order."""

    number: int
    changes: tuple[Change, ...]


class WatchEnded(Event):
    """A watch ended without `StopWatch`; no `KeysChanged` with its number follows."""

    number: int
    problem: Problem


EtcdEvent = RequestAnswered | KeysChanged | WatchEnded
