"""A model of etcd as its clients see it, without processes or a network.

It has no clock and does nothing by itself. Time is an argument, and a lease ends when `expire` is called, or
when it is renewed too late, as in etcd. `tests/unit/simulator/test_sim_etcd_real.py` sends the same
requests to a real etcd and compares the answers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from holdfast.core.etcd.calls import (
    Answer,
    Change,
    Compare,
    Delete,
    Field,
    Get,
    Grant,
    Granted,
    KeepAlive,
    KeptAlive,
    KeyValue,
    Op,
    Problem,
    ProblemKind,
    Put,
    Request,
    Revoke,
    Revoked,
    Txn,
    TxnDone,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Sink = Callable[[int, tuple[Change, ...]], None]
    """Receives the changes of one revision."""

FIRST_REVISION = 1  # The revision of a new etcd.
FIRST_LEASE = 1001  # Unlike any revision or time of a short run, so that they are not confused.
LEASE_S_MIN = 2  # etcd's minimum: 1.5 times its election timeout, rounded up.
LEASE_S_MAX = 9_000_000_000
ELECTION_S = 1.0  # A new leader of etcd adds its election timeout to the full time of a lease.
OPS_MAX = 128  # In one list of a transaction; etcd's default, like the next limit.
REQUEST_BYTES_MAX = 1_572_864
HISTORY_REVISIONS_MAX = 200_000  # Above this, the older half is compacted.
ALL_AFTER = b"\0"  # The end of an open range.

LEASE_NOT_FOUND = Problem(ProblemKind.LEASE_GONE, "requested lease not found")
NO_SPACE = Problem(ProblemKind.NO_SPACE, "database space exceeded")
COMPACTED = Problem(ProblemKind.COMPACTED, "required revision has been compacted")
FUTURE = Problem(ProblemKind.REFUSED, "required revision is a future revision")
EMPTY_KEY = Problem(ProblemKind.REFUSED, "key is not provided")
DUPLICATE_KEY = Problem(ProblemKind.REFUSED, "duplicate key given in txn request")
TOO_MANY_OPS = Problem(ProblemKind.REFUSED, "too many operations in txn request")
TOO_LARGE = Problem(ProblemKind.REFUSED, "request is too large")
TTL_TOO_LARGE = Problem(ProblemKind.REFUSED, "too large lease TTL")


class _StoredLease:
    __slots__ = ("ends_at", "keys", "ttl_s")

    def __init__(self, ttl_s: int, ends_at: float) -> None:
        self.ttl_s = ttl_s
        self.ends_at = ends_at
        self.keys: set[bytes] = set()


class _Subscription:
    __slots__ = ("end", "key", "sink", "start")

    def __init__(self, key: bytes, end: bytes, start: int, sink: Sink) -> None:
        self.key = key
        self.end = end
        self.start = start
        self.sink = sink


def in_range(one: bytes, key: bytes, end: bytes) -> bool:
    """Return whether a key is in the range of `key` and `end`."""
    if not end:
        return one == key
    return one >= key and (end == ALL_AFTER or one < end)


class SimEtcd:
    """The keys, leases, history and watches of one etcd."""

    def __init__(self, *, revision: int = FIRST_REVISION) -> None:
        self.revision = revision
        """The newest revision."""
        self.compacted = 0
        """Watches that begin before this revision are refused; 0 before any compaction."""
        self.full = False
        """Whether etcd is out of space."""
        self._stored: dict[bytes, KeyValue] = {}
        self._keys: list[bytes] = []  # The keys of `_stored`, sorted.
        self._leases: dict[int, _StoredLease] = {}
        self._leases_granted = 0
        self._history: list[tuple[int, tuple[Change, ...]]] = []
        self._known_from = revision + 1  # The revision of the first entry of the history.
        self._subscriptions: dict[int, _Subscription] = {}
        self._subscribed = 0

    # Requests.

    def perform(self, now: float, request: Request) -> Answer:
        """Perform a request atomically."""
        if isinstance(request, Txn):
            return self._transact(request)
        if isinstance(request, Grant):
            return self._grant(now, request.ttl_s)
        if isinstance(request, KeepAlive):
            return self._keep_alive(now, request.lease)
        return self._revoke(request)

    def _transact(self, request: Txn) -> TxnDone | Problem:
        problem = self._why_invalid(request)
        if problem is not None:
            return problem
        succeeded = all(self._is_true(one) for one in request.compare)
        ops = request.success if succeeded else request.failure
        for op in ops:
            if isinstance(op, Put) and op.lease and op.lease not in self._leases:
                return LEASE_NOT_FOUND
        revision = self.revision + 1
        changes: list[Change] = []
        results: list[tuple[KeyValue, ...]] = []
        deleted: list[int] = []
        for op in ops:
            before = len(changes)
            found: tuple[KeyValue, ...] = ()
            if isinstance(op, Get):
                found = self._read(op)
            elif isinstance(op, Put):
                changes.append(self._put(op, revision))
            else:
                changes += [self._drop(key, revision) for key in self._range(op.key, op.end)]
            results.append(found)
            deleted.append(len(changes) - before if isinstance(op, Delete) else 0)
        self._commit(changes)
        return TxnDone(self.revision, succeeded, tuple(results), tuple(deleted))

    def _why_invalid(self, request: Txn) -> Problem | None:
        """Return why etcd would refuse a transaction before evaluating it."""
        branches = (request.success, request.failure)
        if max(len(request.compare), *map(len, branches)) > OPS_MAX:
            return TOO_MANY_OPS
        size = sum(len(one.key) for one in request.compare)
        puts, named = False, True
        for ops in branches:
            written: set[bytes] = set()
            for op in ops:
                size += len(op.key)
                named = named and bool(op.key or (not isinstance(op, Put) and op.end))
                if isinstance(op, Put):
                    size += len(op.value)
                    puts = True
                    if op.key in written or _deletes(ops, op.key):
                        return DUPLICATE_KEY
                    written.add(op.key)
        if not all(one.key for one in request.compare) or not named:
            return EMPTY_KEY
        if size > REQUEST_BYTES_MAX:
            return TOO_LARGE
        return NO_SPACE if puts and self.full else None

    def _is_true(self, compare: Compare) -> bool:
        stored = self._stored.get(compare.key)
        if stored is None:
            return compare.field is not Field.VALUE and compare.equals == 0
        if compare.field is Field.VALUE:
            return compare.equals == stored.value
        if compare.field is Field.VERSION:
            return compare.equals == stored.version
        if compare.field is Field.CREATE:
            return compare.equals == stored.create_revision
        return compare.equals == stored.mod_revision

    # Keys.

    def _range(self, key: bytes, end: bytes) -> list[bytes]:
        """Return the keys in a range, in order."""
        if not end:
            return [key] if key in self._stored else []
        low = bisect_left(self._keys, key)
        high = len(self._keys) if end == ALL_AFTER else bisect_left(self._keys, end)
        return self._keys[low:high]

    def _read(self, op: Get) -> tuple[KeyValue, ...]:
        found = tuple(self._stored[key] for key in self._range(op.key, op.end))
        if op.keys_only:
            found = tuple(
                KeyValue(
                    key=one.key,
                    create_revision=one.create_revision,
                    mod_revision=one.mod_revision,
                    version=one.version,
                    lease=one.lease,
                )
                for one in found
            )
        return found

    def _put(self, op: Put, revision: int) -> Change:
        before = self._stored.get(op.key)
        if before is None:
            insort(self._keys, op.key)
        elif before.lease:
            self._leases[before.lease].keys.discard(op.key)
        if op.lease:
            self._leases[op.lease].keys.add(op.key)
        created = before.create_revision if before else revision
        self._stored[op.key] = KeyValue(
            key=op.key,
            value=op.value,
            create_revision=created,
            mod_revision=revision,
            version=before.version + 1 if before else 1,
            lease=op.lease,
        )
        return Change(op.key, op.value, revision, created)

    def _drop(self, key: bytes, revision: int) -> Change:
        stored = self._stored.pop(key)
        del self._keys[bisect_left(self._keys, key)]
        if stored.lease:
            self._leases[stored.lease].keys.discard(key)
        return Change(key, None, revision)

    # Leases.

    def _grant(self, now: float, ttl_s: int) -> Granted | Problem:
        if self.full:
            return NO_SPACE  # Creating a lease is a write, too.
        if ttl_s > LEASE_S_MAX:
            return TTL_TOO_LARGE
        ttl_s = max(ttl_s, LEASE_S_MIN)
        number = FIRST_LEASE + self._leases_granted
        self._leases_granted += 1
        self._leases[number] = _StoredLease(ttl_s, now + ttl_s)
        return Granted(number, ttl_s)

    def _keep_alive(self, now: float, number: int) -> KeptAlive:
        lease = self._leases.get(number)
        if lease is None:
            return KeptAlive(0)
        if lease.ends_at <= now:
            self._end(number)  # etcd ends the lease before it answers.
            return KeptAlive(0)
        lease.ends_at = now + lease.ttl_s
        return KeptAlive(lease.ttl_s)

    def _revoke(self, request: Revoke) -> Revoked:
        if request.lease in self._leases:
            self._end(request.lease)
        return Revoked()

    def _end(self, number: int) -> None:
        keys, revision = sorted(self._leases[number].keys), self.revision + 1
        changes = [self._drop(key, revision) for key in keys]
        del self._leases[number]
        self._commit(changes)

    def next_expiry(self) -> float | None:
        """Return when the first lease ends unless it is renewed."""
        return min((lease.ends_at for lease in self._leases.values()), default=None)

    def expire(self, now: float) -> None:
        """End all expired leases, each in a revision of its own if it has keys."""
        over = [(one.ends_at, number) for number, one in self._leases.items() if one.ends_at <= now]
        for _, number in sorted(over):
            self._end(number)

    def failover(self, now: float) -> None:
        """Change etcd's leader, or restart a single member: leases get their full time again."""
        for lease in self._leases.values():
            lease.ends_at = now + lease.ttl_s + ELECTION_S

    # History and watches.

    def _commit(self, changes: list[Change]) -> None:
        """Store changes as a new revision, if there are any, and notify watches."""
        if not changes:
            return
        self.revision += 1
        self._history.append((self.revision, tuple(changes)))
        if len(self._history) > HISTORY_REVISIONS_MAX:
            self.compact(self.revision - HISTORY_REVISIONS_MAX // 2)
        for one in list(self._subscriptions.values()):
            if self.revision >= one.start:
                self._notify(one, self.revision, self._history[-1][1])

    def _notify(self, one: _Subscription, revision: int, changes: tuple[Change, ...]) -> None:
        seen = tuple(change for change in changes if in_range(change.key, one.key, one.end))
        if seen:
            one.sink(revision, seen)

    def changes_since(
        self, key: bytes, end: bytes, revision: int
    ) -> list[tuple[int, tuple[Change, ...]]] | Problem:
        """Return the changes of a range's keys in this revision and later."""
        if revision < self.compacted:
            return COMPACTED
        found = []
        for at, changes in self._history[max(0, revision - self._known_from) :]:
            seen = tuple(change for change in changes if in_range(change.key, key, end))
            if seen:
                found.append((at, seen))
        return found

    def subscribe(self, key: bytes, end: bytes, start_revision: int, sink: Sink) -> int | Problem:
        """Call `sink` for each revision that changes a key of the range, in order.

        Existing revisions from `start_revision` on are delivered before this returns; 0 begins with the
        next revision. Returns a number for `unsubscribe`.
        """
        start = start_revision or self.revision + 1
        if start < self.compacted:
            return COMPACTED
        one = _Subscription(key, end, start, sink)
        for revision, changes in self._history[max(0, start - self._known_from) :]:
            self._notify(one, revision, changes)
        self._subscribed += 1
        self._subscriptions[self._subscribed] = one
        return self._subscribed

    def unsubscribe(self, number: int) -> None:
        """Stop calling a sink; if it is unknown, nothing happens."""
        self._subscriptions.pop(number, None)

    def compact(self, revision: int) -> Problem | None:
        """Remove the history before this revision; stored keys remain.

        Watches that are up to date miss nothing. A watch that begins at this revision is accepted, but
        before etcd 3.5.16 it does not get the deletions of this revision.
        """
        if revision <= self.compacted:
            return COMPACTED
        if revision > self.revision:
            return FUTURE
        self.compacted = revision
        del self._history[: max(0, revision - self._known_from)]
        if self._known_from <= revision:
            self._known_from = revision
            self._history[0] = (revision, _remaining_after_compaction(self._history[0][1]))
        return None


def _remaining_after_compaction(changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """Return the changes of a compacted revision that remain."""
    last = {change.key: change for change in changes}
    return tuple(one for one in changes if one.value is not None and last[one.key] is one)


def _deletes(ops: tuple[Op, ...], key: bytes) -> bool:
    """Return whether etcd finds a deletion of this key among the operations.

    It does not check open ranges; there it performs the operations in order.
    """
    return any(
        isinstance(op, Delete) and op.end != ALL_AFTER and in_range(key, op.key, op.end)
        for op in ops
    )
