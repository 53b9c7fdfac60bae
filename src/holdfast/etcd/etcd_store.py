"""`EtcdStore`: keys and values in etcd, without torch.

Changes are transactions, waits are watches; `store_layout` lists the keys used in etcd.

- With `ttl_s`, written keys exist while the store or a clone of it is open; etcd deletes them `ttl_s` seconds
  after `close` or the exit of the process. Without it they stay forever. The last writer of a key determines
  its lifetime.
- If etcd is lost during a call, the call raises `DistNetworkError`, although etcd may have performed it. Waits
  continue instead.
- By default etcd accepts no value above 1.5 MiB (its `--max-request-bytes`).
"""

from __future__ import annotations

import random
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from holdfast.core.etcd.calls import Compare, Delete, Field, Get, KeyValue, ProblemKind, Put, Txn
from holdfast.errors import UsageError
from holdfast.etcd.lease import KeptLease, transact
from holdfast.etcd.store_layout import StoreKeys, pair
from holdfast.etcd.sync_client import EtcdError
from holdfast.store.memory_store import (
    DEFAULT_TIMEOUT_S,
    add_to_counter,
    as_bytes,
    as_seconds,
    barrier_timed_out,
    named,
    wait_timed_out,
)
from holdfast.store.store_errors import (
    DistError,
    DistNetworkError,
    DistStoreError,
    QueueEmptyError,
    StoreTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Self

    from holdfast.core.etcd.calls import Op, TxnDone
    from holdfast.etcd.store_layout import KeyRange
    from holdfast.etcd.sync_client import EtcdClient

TXN_OPS_MAX = 128
"""Operations per transaction; etcd's default limit."""
TXN_BYTES_MAX = 1024 * 1024
"""Bytes of values per transaction; etcd's default limit is 1.5 MiB."""
ATTEMPTS_MAX = 1000
"""How many times a change is attempted while other writers are faster; then an error is raised."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.005, 0.4
"""The random pause between attempts has a maximum that doubles from the first value to the second. With shorter
pauses many writers need more attempts."""
UNREACHABLE_PAUSE_S_MIN, UNREACHABLE_PAUSE_S_MAX = 0.01, 1.0
"""The pause between two attempts to read or watch while etcd is unreachable."""
READ_S_MIN = 3.0
"""The minimum limit of a read, even if less of the timeout is left."""
NEXT_S_MAX = 3600.0
"""The longest single wait for a watch, since some timeouts exceed the range of a clock."""

T = TypeVar("T")
Found = KeyValue | None


class RangeRead(NamedTuple):
    """The content of a range at a revision."""

    found: tuple[KeyValue, ...]
    revision: int


class Transactions:
    """The transactions of one store, with the errors that stores raise.

    A change is computed from the content that was read. If the content has changed since, the change is
    computed again. If several writers change a key, one succeeds at a time; the others pause for random,
    growing times, so that all succeed eventually.
    """

    def __init__(self, client: EtcdClient, lease: KeptLease | None) -> None:
        self.client = client
        self._lease = lease

    @property
    def where(self) -> str:
        """The store's location, for messages."""
        return f" in etcd at {self.client.settings.where}"

    def read(
        self, ranges: Sequence[KeyRange], *, keys_only: bool = False, limit_s: float | None = None
    ) -> list[RangeRead]:
        """Read ranges, atomically if they fit into one transaction."""
        reads: list[RangeRead] = []
        for begin in range(0, len(ranges), TXN_OPS_MAX):
            some = ranges[begin : begin + TXN_OPS_MAX]
            done = self.transact(success=[Get(*one, keys_only) for one in some], limit_s=limit_s)
            reads += [RangeRead(found, done.revision) for found in done.results]
        return reads

    def read_one(self, place: KeyRange) -> Found:
        """Read one key."""
        return _first(self.read([place])[0].found)

    def write(self, values: dict[KeyRange, bytes]) -> None:
        """Write keys, atomically if they fit into one transaction."""
        for some in _portions(values):
            self.transact(success=some)

    def change(
        self,
        places: Sequence[KeyRange],
        decide: Callable[[list[Found]], tuple[Sequence[Op], T]],
        known: Sequence[Found] | None = None,
    ) -> tuple[T, TxnDone | None]:
        """Change keys atomically.

        `decide` receives the content of the keys and returns operations and an outcome. It may be called
        many times; the last outcome counts. If nothing is `known`, it is first called as if no key existed,
        because many changes create their keys. Returns the outcome, and etcd's response if there were
        operations.
        """
        found: list[Found] = [None] * len(places) if known is None else list(known)
        for attempt, pause_s in enumerate(_pauses()):
            ops, outcome = decide(found)
            if not ops and (known is not None or attempt):
                return outcome, None
            done = self.transact(
                compare=[
                    Compare(place.key, Field.MOD, 0 if one is None else one.mod_revision)
                    for place, one in zip(places, found, strict=True)
                ],
                success=ops,
                failure=[Get(*place) for place in places],
            )
            if done.succeeded:
                return outcome, done
            found = [_first(result) for result in done.results]
            if attempt % 2:  # Every other attempt follows at once, with the content just read.
                time.sleep(pause_s)
        raise DistStoreError(
            f"could not change {places[0].key!r}{self.where} in {ATTEMPTS_MAX} attempts: another writer "
            "was faster each time"
        )

    def transact(
        self,
        *,
        compare: Sequence[Compare] = (),
        success: Sequence[Op] = (),
        failure: Sequence[Op] = (),
        limit_s: float | None = None,
    ) -> TxnDone:
        """Perform one transaction, within `limit_s` or the client's own limit."""
        if limit_s is not None:
            limit_s = min(limit_s, self.client.settings.call_s)
        txn = Txn(tuple(compare), tuple(success), tuple(failure))
        try:
            return transact(self.client, txn, self._lease, limit_s)
        except EtcdError as problem:
            raise as_store_error(problem) from None


def as_store_error(problem: EtcdError) -> DistError:
    """Return a problem with etcd as the error that stores raise."""
    is_unreachable = problem.kind is ProblemKind.UNREACHABLE
    return (DistNetworkError if is_unreachable else DistStoreError)(str(problem))


def _first(found: Sequence[KeyValue]) -> Found:
    return found[0] if found else None


def _pauses() -> Iterator[float]:
    """Yield how long to pause after each attempt."""
    longest = PAUSE_S_MIN
    for _ in range(ATTEMPTS_MAX):
        yield random.uniform(0, longest)  # noqa: S311 (it only spreads the attempts)
        longest = min(2 * longest, PAUSE_S_MAX)


def _portions(values: dict[KeyRange, bytes]) -> Iterator[list[Put]]:
    some: list[Put] = []
    size = 0
    for place, value in values.items():
        more = len(place.key) + len(value)
        if some and (len(some) == TXN_OPS_MAX or size + more > TXN_BYTES_MAX):
            yield some
            some, size = [], 0
        some.append(Put(place.key, value))
        size += more
    if some:
        yield some


class KeyWait:
    """Waits for keys with a watch on a missing key, without polling.

    It waits for missing keys one after the other. When none is missing, one read of all keys shows whether
    they exist at the same time. If a watch ends, the wait reads the keys again and opens another watch. So
    it survives a restart of etcd or a compaction of its history; only the first read must succeed.
    """

    def __init__(
        self,
        calls: Transactions,
        ranges: dict[str, KeyRange],
        timeout_s: float,
        *,
        keys_only: bool = False,
        accepts: Callable[[KeyValue], bool] = lambda _: True,
    ) -> None:
        self._calls = calls
        self._ranges = ranges
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._keys_only = keys_only
        self._accepts = accepts
        self._pause_s = UNREACHABLE_PAUSE_S_MIN
        self._has_read = False

    def result(self) -> dict[str, KeyValue]:
        """Return the content of each range, once all have an accepted value.

        At the timeout, raises `StoreTimeoutError`, which names the missing keys. May be called again until then.
        """
        try:
            reads = self._read_again(self._ranges) if self._has_read else self._read(self._ranges)
            self._has_read = True
            return self._wait_for_all(reads)
        except _TimedOut:
            return self._read_at_timeout()

    def _wait_for_all(self, reads: dict[str, RangeRead]) -> dict[str, KeyValue]:
        seen_before: dict[str, int] = {}
        while True:
            accepted = self._accepted(reads)
            missing = [name for name in reads if name not in accepted]
            if not missing and len(reads) == len(self._ranges):
                seen = {name: one.create_revision for name, one in accepted.items()}
                # Keys that do not fit into one transaction are read twice. If all were present both times and
                # none was created again, all were present at the same time in between.
                if len(reads) <= TXN_OPS_MAX or seen == seen_before:
                    return accepted
                seen_before = seen
            elif missing:
                seen_before = {}
                name = missing[0]
                accepted_value = self._follow(self._ranges[name], reads[name].revision)
                if accepted_value is not None:
                    if len(self._ranges) == 1:
                        return {name: accepted_value}
                    missing.remove(name)
            reads = self._read_again(missing or self._ranges)

    def _read_at_timeout(self) -> dict[str, KeyValue]:
        """Read the keys once more, to name those that are missing."""
        where, names = self._calls.where, list(self._ranges)
        try:
            accepted = self._accepted(self._read(names))
        except DistNetworkError as problem:
            raise wait_timed_out(names, self._timeout_s, f" since {problem}") from None
        if len(accepted) == len(names):
            return accepted
        raise wait_timed_out(
            [name for name in names if name not in accepted], self._timeout_s, where
        )

    def _accepted(self, reads: dict[str, RangeRead]) -> dict[str, KeyValue]:
        accepted = {}
        for name, read in reads.items():
            for one in read.found:
                if self._accepts(one):
                    accepted[name] = one
        return accepted

    def _read(self, names: Iterable[str]) -> dict[str, RangeRead]:
        left_s = self._deadline - time.monotonic()
        limit_s = max(READ_S_MIN, left_s) if self._has_read else None
        names = list(names)
        ranges = [self._ranges[name] for name in names]
        reads = self._calls.read(ranges, keys_only=self._keys_only, limit_s=limit_s)
        return dict(zip(names, reads, strict=True))

    def _read_again(self, names: Iterable[str]) -> dict[str, RangeRead]:
        """Read; retry until etcd responds."""
        while True:
            try:
                return self._read(names)
            except DistNetworkError:
                self._pause()

    def _follow(self, range_: KeyRange, revision: int) -> KeyValue | None:
        """Return the first accepted value after a revision, or None if the range must be read again."""
        alive: dict[bytes, KeyValue] = {}
        try:
            with self._calls.client.watch(range_.key, range_.end, revision + 1) as watch:
                while True:
                    try:
                        changes = watch.next(min(self._time_left_s(), NEXT_S_MAX))
                    except TimeoutError:
                        continue
                    self._pause_s = UNREACHABLE_PAUSE_S_MIN
                    for one in changes:
                        alive.pop(one.key, None)
                        if one.value is not None:
                            alive[one.key] = KeyValue(
                                key=one.key,
                                value=one.value,
                                create_revision=one.create_revision,
                                mod_revision=one.mod_revision,
                            )
                    # A value that was deleted meanwhile does not count.
                    for accepted_value in alive.values():
                        if self._accepts(accepted_value):
                            return accepted_value
        except EtcdError as problem:
            if problem.kind is ProblemKind.UNREACHABLE:
                self._pause()
            elif problem.kind is not ProblemKind.COMPACTED:
                raise as_store_error(problem) from None
            return None

    def _pause(self) -> None:
        pause_s = self._pause_s * random.uniform(0.5, 1)  # noqa: S311 (it only spreads attempts)
        time.sleep(min(self._time_left_s(), pause_s))
        self._pause_s = min(2 * self._pause_s, UNREACHABLE_PAUSE_S_MAX)

    def _time_left_s(self) -> float:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise _TimedOut
        return left_s


class _TimedOut(Exception):
    pass


class EtcdStore:
    """The keys of etcd below a prefix. Threads may share it; their calls run concurrently.

    The caller closes the client, unless `closes_client` is set.
    """

    def __init__(
        self,
        etcd_client: EtcdClient,
        etcd_store_prefix: str,
        timeout: timedelta | None = None,
        *,
        ttl_s: int = 0,
        closes_client: bool = False,
    ) -> None:
        if ttl_s < 0:
            raise UsageError(
                f"ttl_s: {ttl_s} is not accepted; accepted: whole seconds, 0 for no limit"
            )
        self._begin(
            etcd_client,
            etcd_store_prefix if etcd_store_prefix.endswith("/") else f"{etcd_store_prefix}/",
            DEFAULT_TIMEOUT_S if timeout is None else as_seconds(timeout),
            KeptLease(etcd_client, ttl_s) if ttl_s else None,
            closes_client=closes_client,
        )

    def _begin(
        self,
        client: EtcdClient,
        prefix: str,
        timeout_s: float,
        lease: KeptLease | None,
        *,
        closes_client: bool = False,
    ) -> None:
        self.client = client
        self.prefix = prefix
        self._timeout_s = timeout_s
        self._lease = lease
        self._closes_client = closes_client
        self._keys = StoreKeys(prefix)
        self._calls = Transactions(client, lease)
        # Release the lease even if the store is garbage-collected without `close`.
        self._end = weakref.finalize(self, lease.release if lease else _nothing)

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        """Return the value of a key, after waiting until it has one."""
        return self.multi_get([key])[0]

    def add(self, key: str, num: int) -> int:
        """Add to a counter, which starts at 0, and return its new value."""
        place = self._keys.value(key)

        def decide(found: list[Found]) -> tuple[list[Op], int]:
            total = add_to_counter(key, _value(found[0]), num)
            return [Put(place.key, b"%d" % total)], total

        return self._calls.change([place], decide)[0]

    def wait(self, keys: Sequence[str], override_timeout: timedelta | float | None = None) -> None:
        """Wait until all keys exist at the same time; `StoreTimeoutError` names the missing ones."""
        ranges = {key: self._keys.value_or_queue(key) for key in keys}
        KeyWait(self._calls, ranges, self._seconds(override_timeout), keys_only=True).result()

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        ranges = [self._keys.value_or_queue(key) for key in dict.fromkeys(keys)]
        return all(one.found for one in self._calls.read(ranges, keys_only=True))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value; return its value afterwards.

        If the key is missing and `expected` is empty, it is set; otherwise `expected` is returned.
        """
        place, wanted, new = self._keys.value(key), as_bytes(expected), as_bytes(desired)
        if wanted:
            done = self._calls.transact(
                compare=[Compare(place.key, Field.VALUE, wanted)],
                success=[Put(place.key, new)],
                failure=[Get(place.key)],
            )
            if done.succeeded:
                return new
            return done.results[0][0].value if done.results[0] else wanted

        def decide(found: list[Found]) -> tuple[list[Op], bytes]:
            now = _value(found[0])
            return ([], now) if now else ([Put(place.key, new)], new)

        return self._calls.change([place], decide)[0]

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        place, more = self._keys.value(key), as_bytes(value)

        def decide(found: list[Found]) -> tuple[list[Op], None]:
            return [Put(place.key, (_value(found[0]) or b"") + more)], None

        self._calls.change([place], decide)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of all keys, after waiting until all have one."""
        ranges = {key: self._keys.value(key) for key in keys}
        found = KeyWait(self._calls, ranges, self._timeout_s).result()
        return [found[key].value for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set the values of all keys, atomically for up to 128 keys and one mebibyte."""
        given = dict(zip(keys, values, strict=True))
        self._calls.write({self._keys.value(key): as_bytes(value) for key, value in given.items()})

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it had a value."""
        done = self._calls.transact(success=[Delete(self._keys.value(key).key)])
        return done.deleted[0] > 0

    def num_keys(self) -> int:
        """Return how many keys have values."""
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        """Return the keys that have values."""
        (read,) = self._calls.read([self._keys.all_keys()], keys_only=True)
        keys = (self._keys.key_of(one.key) for one in read.found)
        return [key for key in keys if key is not None]

    # A queue: one key stores the number of the first value and the count, and each value is a separate key. So
    # the cost of a push or pop does not depend on the length. If the lease of a value's writer has ended, a pop
    # skips the value, but `queue_len` counts it until then.

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put a value at the end of a queue."""
        queue, content = self._keys.queue(key), as_bytes(value)

        def decide(found: list[Found]) -> tuple[list[Op], None]:
            first, count = _pair(found[0])
            entry = self._keys.entry(key, first + count)
            return [Put(entry.key, content), Put(queue.key, b"%d %d" % (first, count + 1))], None

        self._calls.change([queue], decide)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the first value of a queue, after waiting until there is one.

        Without `block`, raise `QueueEmptyError` if there is none.
        """
        queue = self._keys.queue(key)
        wait = KeyWait(self._calls, {key: queue}, self._timeout_s) if block else None
        while found := self._calls.read_one(queue) if wait is None else wait.result()[key]:
            value = self._pop(key, found)
            if value is not None:
                return value
        raise QueueEmptyError(f"the queue {named([key])}{self._calls.where} is empty")

    def _pop(self, key: str, known: KeyValue) -> bytes | None:
        queue = self._keys.queue(key)

        def decide(found: list[Found]) -> tuple[list[Op], bool]:
            first, count = _pair(found[0])
            if not count:
                return [], False
            entry = self._keys.entry(key, first).key
            rest = Put(queue.key, b"%d %d" % (first + 1, count - 1))
            return [Get(entry), Delete(entry), rest if count > 1 else Delete(queue.key)], True

        removed, done = self._calls.change([queue], decide, known=[known])
        if not removed or done is None or not done.results[0]:
            return None
        return done.results[0][0].value

    def queue_len(self, key: str) -> int:
        """Return how many values a queue has."""
        return _pair(self._calls.read_one(self._keys.queue(key)))[1]

    # A barrier counts arrivals, and the callers watch for the next turn. The last arrival increments the
    # turn and resets the count, so an early arrival for the next turn is not counted in this one.

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        """Wait until `world_size` callers have arrived at this key.

        A caller that times out is no longer counted. An arrival after the barrier opened starts the
        next turn. A caller that is killed while it waits stays counted.
        """
        timeout_s = self._seconds(timeout)
        turn, arrived = self._arrive(key, world_size)
        if arrived >= world_size:
            return
        try:
            KeyWait(
                self._calls,
                {key: self._keys.barrier(key)},
                timeout_s,
                accepts=lambda one: pair(one.value)[0] != turn,
            ).result()
        except StoreTimeoutError as late:
            passed, arrived = self._withdraw(key, turn)
            if not passed:
                where = self._calls.where
                raise barrier_timed_out(key, arrived, world_size, timeout_s, where) from late
        except BaseException:  # For example from a signal handler.
            with suppress(DistError):
                self._withdraw(key, turn)
            raise

    def _arrive(self, key: str, world_size: int) -> tuple[int, int]:
        """Count an arrival at a barrier; return the turn and the number of arrivals."""
        value, barrier = self._keys.value(key), self._keys.barrier(key)

        def decide(found: list[Found]) -> tuple[list[Op], tuple[int, int]]:
            add_to_counter(key, _value(found[0]), 0)  # Raises if the value is not a count.
            turn, arrived = _pair(found[1])
            arrived += 1
            after = (turn, arrived) if arrived < world_size else (turn + 1, 0)
            ops: list[Op] = [
                Put(value.key, b"%d" % arrived),
                Put(barrier.key, b"%d %d" % after),
            ]
            return ops, (turn, arrived)

        return self._calls.change([value, barrier], decide)[0]

    def _withdraw(self, key: str, turn: int) -> tuple[bool, int]:
        """Withdraw an arrival; return whether the barrier opened meanwhile, and the number of arrivals before."""
        value, barrier = self._keys.value(key), self._keys.barrier(key)

        def decide(found: list[Found]) -> tuple[list[Op], tuple[bool, int]]:
            if found[1] is None:
                return [], (False, 1)
            current, arrived = pair(found[1].value)
            if current != turn:
                return [], (True, arrived)
            ops: list[Op] = [Put(barrier.key, b"%d %d" % (turn, arrived - 1))]
            if found[0] is not None:
                ops.append(Put(value.key, b"%d" % (arrived - 1)))
            return ops, (False, arrived)

        return self._calls.change([value, barrier], decide)[0]

    @property
    def timeout(self) -> timedelta:
        """How long a call waits if it has no timeout."""
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Set how long a call waits if it has no timeout."""
        self._timeout_s = as_seconds(timeout)

    def clone(self) -> EtcdStore:
        """Return another store with the same keys and client, and a separate timeout."""
        other = EtcdStore.__new__(type(self))
        lease = self._lease.share() if self._lease else None
        other._begin(self.client, self.prefix, self._timeout_s, lease)
        return other

    def has_extended_api(self) -> bool:
        """Return True: the store has `append`, `multi_get` and `multi_set`."""
        return True

    def close(self) -> None:
        """Stop renewing the lease: with `ttl_s`, written keys are deleted that many seconds later."""
        self._end()
        if self._lease:
            self._lease.join()
        if self._closes_client:
            self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _seconds(self, timeout: timedelta | float | None) -> float:
        return self._timeout_s if timeout is None else as_seconds(timeout)


def _pair(found: Found) -> tuple[int, int]:
    return (0, 0) if found is None else pair(found.value)


def _value(found: Found) -> bytes | None:
    return None if found is None else found.value


def _nothing() -> None:
    """Do nothing at the end of a store without a lease."""
