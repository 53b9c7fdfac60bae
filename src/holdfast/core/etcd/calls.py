"""Requests to etcd, its answers, and the effects that carry them, as plain values.

The machines that run on etcd (`core.etcd.etcd_session`, `core.etcd.leader`) return these requests as
effects and take the answers in as events. A real client performs them over the network, the
simulator in a store of its own, so that the same decisions run in both.

A `Problem` says whether the request may have been performed all the same: only `UNREACHABLE` leaves
that open. Revisions are etcd's: every change of any key makes a higher one.
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
    """Store a value; with a lease, it goes when the lease does."""

    key: bytes
    value: bytes
    lease: int = 0


class Get(msgspec.Struct, frozen=True):
    """Read a key, or all keys from `key` up to `end`, `end` itself left out."""

    key: bytes
    end: bytes = b""
    keys_only: bool = False


class Delete(msgspec.Struct, frozen=True):
    """Remove a key, or all keys of a range; the result says how many were there."""

    key: bytes
    end: bytes = b""


Op = Put | Get | Delete


class Field(Enum):
    """What a condition compares. All but `VALUE` are 0 for a key that does not exist."""

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
    """Do `success` if all conditions hold, else `failure`; atomically."""

    compare: tuple[Compare, ...] = ()
    success: tuple[Op, ...] = ()
    failure: tuple[Op, ...] = ()

    def __str__(self) -> str:
        """For stories: what is done to which keys, without values."""
        ops = ", ".join(f"{type(op).__name__} {op.key.decode()}" for op in self.success)
        conditions = " and ".join(
            f"{one.key.decode()} {one.field.value}={one.equals!r}" for one in self.compare
        )
        return f"if {conditions}: {ops}" if conditions else ops


class Grant(msgspec.Struct, frozen=True):
    """Create a lease that ends unless it is renewed; etcd may make it longer than requested."""

    ttl_s: int


class KeepAlive(msgspec.Struct, frozen=True):
    """Renew a lease for its whole time."""

    lease: int


class Revoke(msgspec.Struct, frozen=True):
    """End a lease and delete its keys; one that is gone already is fine."""

    lease: int


Request = Txn | Grant | KeepAlive | Revoke


# Requests about the cluster itself.


class ListMembers(msgspec.Struct, frozen=True):
    """Read who is a member, as most of the members know it."""


class AddMember(msgspec.Struct, frozen=True):
    """Make a voter of a member that will be at this URL."""

    peer_url: str


class RemoveMember(msgspec.Struct, frozen=True):
    """Take a member out of the cluster, for good."""

    id: int


MemberRequest = ListMembers | AddMember | RemoveMember


# Answers.


class TxnDone(msgspec.Struct, frozen=True):
    """The outcome of a transaction."""

    revision: int
    succeeded: bool
    results: tuple[tuple[KeyValue, ...], ...] = ()
    """One for each operation that was performed: what a `Get` read, empty for the others."""
    deleted: tuple[int, ...] = ()
    """Likewise, how many keys a `Delete` removed, 0 for the others."""

    def __str__(self) -> str:
        return f"{'done' if self.succeeded else 'not done'} at {self.revision}"


class Granted(msgspec.Struct, frozen=True):
    """A new lease."""

    lease: int
    ttl_s: int


class KeptAlive(msgspec.Struct, frozen=True):
    """A lease goes on for this long; 0 if it is gone."""

    ttl_s: int


class Revoked(msgspec.Struct, frozen=True):
    """A lease is gone."""


class Members(msgspec.Struct, frozen=True):
    """The members of the cluster: the URL of each with its id."""

    ids: dict[str, int]


class ProblemKind(Enum):
    """Kinds of problems, by what can be done about them."""

    UNREACHABLE = "unreachable"
    """No answer: the request may have been performed or not. Another endpoint may answer."""
    LEASE_GONE = "lease gone"
    """The lease named has ended; nothing was done."""
    NO_SPACE = "no space"
    """etcd takes no more writes until somebody makes room; nothing was done."""
    DENIED = "denied"
    """Wrong user, password, certificate or permission; trying again does not help."""
    COMPACTED = "compacted"
    """The revision asked for is no longer known."""
    REFUSED = "refused"
    """etcd does not do this: the request is too large, or this is not etcd; nothing was done."""
    CLOSED = "closed"
    """This client is closed: no request will be answered any more."""


class Problem(msgspec.Struct, frozen=True):
    """Why there is no answer; `why` is one line for a person, without the endpoint."""

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


# Effects of the machines. Numbers are unique in one session.


class SendRequest(Effect):
    """Send a request; its answer, or why there is none, comes back as `RequestAnswered`."""

    number: int
    request: Request


class StartWatch(Effect):
    """Report every change in a range from a revision on, as `KeysChanged` of this number."""

    number: int
    key: bytes
    end: bytes
    start_revision: int


class StopWatch(Effect):
    """Report no more changes; a watch that has ended already is fine."""

    number: int


class ReportUnreadable(Effect):
    """Tell the person that what is stored for a node cannot be used, and is ignored."""

    key: bytes
    node: str
    why: str


EtcdEffect = SendRequest | StartWatch | StopWatch | ReportUnreadable

# Events for the machines.


class RequestAnswered(Event):
    """A request was answered; it is ignored if nobody waits for it any more."""

    number: int
    answer: Answer


class KeysChanged(Event):
    """A watch saw changes, in order."""

    number: int
    changes: tuple[Change, ...]


class WatchEnded(Event):
    """A watch ended by itself; no `KeysChanged` of this number follows."""

    number: int
    problem: Problem


EtcdEvent = RequestAnswered | KeysChanged | WatchEnded
