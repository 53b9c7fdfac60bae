"""Transactions of a store: what is asked of etcd, with the errors that stores raise.

The one thing to know: a change is made from what was read, on the condition that nobody changed it
meanwhile, and again from what is there then. That only one can win at a time costs many who change
one key some attempts; they pause for a random time, longer and longer, so that all get through.
"""

from __future__ import annotations

import random
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from msgspec.structs import replace

from holdfast.core.etcd.calls import (
    Compare,
    Delete,
    Field,
    Get,
    KeyValue,
    Op,
    ProblemKind,
    Put,
    Txn,
    TxnDone,
)
from holdfast.errors import UsageError
from holdfast.etcd.async_client import CLOSED
from holdfast.etcd.lease import KeptLease
from holdfast.etcd.store_layout import StoreKeys, pair
from holdfast.etcd.sync_client import EtcdError
from holdfast.store.errors import (
    DistError,
    DistNetworkError,
    DistStoreError,
    QueueEmptyError,
    StoreTimeoutError,
)
from holdfast.store.memory import (
    DEFAULT_TIMEOUT_S,
    add_to_counter,
    as_bytes,
    as_seconds,
    barrier_timed_out,
    named,
    wait_timed_out,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Self

    from holdfast.core.etcd.calls import Op
    from holdfast.etcd.store_layout import KeyRange
    from holdfast.etcd.sync_client import EtcdClient


TXN_OPS_MAX = 128
"""As many operations as etcd takes in one transaction, unless it is told otherwise."""
TXN_BYTES_MAX = 1024 * 1024
"""Values are put together in one transaction up to this; etcd takes 1.5 MiB, unless told."""
ATTEMPTS_MAX = 1000
"""After so many attempts to change a key that others change all the time, an error is raised."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.005, 0.4
"""Of the random times up to which attempts pause: shorter ones cost many writers more attempts."""
LEASES_MAX = 3
"""A write is begun again so many times because the lease it was to hang on has ended."""

T = TypeVar("T")
Found = KeyValue | None


class RangeRead(NamedTuple):
    """What was found at some places, one after the other, at a revision of the whole of etcd."""

    found: tuple[KeyValue, ...]
    revision: int


class Transactions:
    """The transactions of one store. What it writes hangs on a lease, if there is one."""

    def __init__(self, client: EtcdClient, lease: KeptLease | None) -> None:
        self.client = client
        self.lease = lease

    @property
    def where(self) -> str:
        """The place as words for messages."""
        return f" in etcd at {self.client.settings.where}"

    def look(
        self, spots: Sequence[KeyRange], *, keys_only: bool = False, limit_s: float | None = None
    ) -> list[RangeRead]:
        """Read places: at one moment, if they are not more than a transaction may have."""
        looks: list[RangeRead] = []
        for begin in range(0, len(spots), TXN_OPS_MAX):
            some = spots[begin : begin + TXN_OPS_MAX]
            done = self.transact(success=[Get(*spot, keys_only) for spot in some], limit_s=limit_s)
            looks += [RangeRead(found, done.revision) for found in done.results]
        return looks

    def read(self, spot: KeyRange) -> Found:
        """Read one place."""
        return _first(self.look([spot])[0].found)

    def write(self, contents: dict[KeyRange, bytes]) -> None:
        """Write places: all at one moment, if a transaction can have them."""
        for some in _parts(contents):
            self.transact(success=some)

    def change(
        self,
        spots: Sequence[KeyRange],
        make: Callable[[list[Found]], tuple[Sequence[Op], T]],
        known: Sequence[Found] | None = None,
    ) -> tuple[T, TxnDone | None]:
        """Change places by what `make` makes of what is there, as if nobody else did.

        `make` returns operations and an outcome, and may be called many times; what it returned
        last is true. Where nothing is `known`, it is called first with nothing at all, since many
        changes are the first. Returns the outcome, and what etcd answered if anything was done.
        """
        found: list[Found] = [None] * len(spots) if known is None else list(known)
        for attempt, pause_s in enumerate(_pauses()):
            ops, outcome = make(found)
            if not ops and (known is not None or attempt):
                return outcome, None
            done = self.transact(
                compare=[
                    Compare(spot.key, Field.MOD, 0 if one is None else one.mod_revision)
                    for spot, one in zip(spots, found, strict=True)
                ],
                success=ops,
                failure=[Get(*spot) for spot in spots],
            )
            if done.succeeded:
                return outcome, done
            found = [_first(result) for result in done.results]
            if attempt % 2:  # Every other attempt is made at once, from what is new.
                time.sleep(pause_s)
        raise DistStoreError(
            f"{spots[0].key!r}{self.where} could not be changed in {ATTEMPTS_MAX} attempts: others "
            "changed it each time"
        )

    def transact(
        self,
        *,
        compare: Sequence[Compare] = (),
        success: Sequence[Op] = (),
        failure: Sequence[Op] = (),
        limit_s: float | None = None,
    ) -> TxnDone:
        """Carry out one transaction, in less than `limit_s` if etcd's own limit is longer."""
        if limit_s is not None:
            limit_s = min(limit_s, self.client.settings.call_s)
        writes = any(isinstance(op, Put) for op in success)
        for _ in range(LEASES_MAX):
            lease = 0
            try:
                if writes and self.lease is not None:
                    lease = self.lease.current()
                    success = [
                        replace(op, lease=lease) if isinstance(op, Put) else op for op in success
                    ]
                txn = Txn(tuple(compare), tuple(success), tuple(failure))
                done = self.client.call(txn, limit_s)
            except EtcdError as problem:
                if problem.kind is not ProblemKind.LEASE_GONE or self.lease is None:
                    raise as_store_error(problem) from None
                self.lease.lost(lease)
            else:
                assert isinstance(done, TxnDone)
                return done
        raise DistStoreError(
            f"the lease of the store{self.where} ended {LEASES_MAX} times in a row"
        )


def as_store_error(problem: EtcdError) -> DistError:
    """Return a problem with etcd as what stores raise."""
    # With a client that was closed, no call will ever succeed again.
    is_away = problem.kind is ProblemKind.UNREACHABLE and problem.why != CLOSED.why
    return (DistNetworkError if is_away else DistStoreError)(str(problem))


def _first(found: Sequence[KeyValue]) -> Found:
    return found[0] if found else None


def _pauses() -> Iterator[float]:
    """Yield how long to pause after each attempt."""
    longest = PAUSE_S_MIN
    for _ in range(ATTEMPTS_MAX):
        yield random.uniform(0, longest)  # noqa: S311 (it only spreads the attempts)
        longest = min(2 * longest, PAUSE_S_MAX)


def _parts(contents: dict[KeyRange, bytes]) -> Iterator[list[Put]]:
    some: list[Put] = []
    size = 0
    for spot, value in contents.items():
        more = len(spot.key) + len(value)
        if some and (len(some) == TXN_OPS_MAX or size + more > TXN_BYTES_MAX):
            yield some
            some, size = [], 0
        some.append(Put(spot.key, value))
        size += more
    if some:
        yield some


# Waiting for keys of a store: by a watch on the one that is missing, never by looking again.
#
# Those that are missing are waited for one after the other; when none is left, one look at all
# tells
# whether they are there at once. A watch that ends is no matter: after a look at what happened in
# between, there is another. So an etcd that is started again, or forgets old revisions, costs
# those
# who wait nothing but the time it is away; only the look they begin with has to succeed.


AWAY_PAUSE_S_MIN, AWAY_PAUSE_S_MAX = 0.01, 1.0
"""Between two attempts to watch, while etcd is away."""
LOOK_S_MIN = 3.0
"""A look may take so long, also when less of the time is left; the first as long as any call."""
NEXT_S_MAX = 3600.0
"""A watch is asked for news for so long at a time; some waits have no end that a clock knows."""


class Wait:
    """One wait for places, by the names they have for the caller."""

    def __init__(
        self,
        calls: Transactions,
        spots: dict[str, KeyRange],
        timeout_s: float,
        *,
        keys_only: bool = False,
        accepts: Callable[[KeyValue], bool] = lambda _: True,
    ) -> None:
        self._calls = calls
        self._spots = spots
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._keys_only = keys_only
        self._accepts = accepts
        self._pause_s = AWAY_PAUSE_S_MIN
        self._was_there = False

    def result(self) -> dict[str, KeyValue]:
        """Return what is at each place, once something is at all of them that is accepted.

        Raises `StoreTimeoutError` naming those where there is nothing when the time is over. May
        be called again, within the same time.
        """
        try:
            looks = self._look_again(self._spots) if self._was_there else self._look(self._spots)
            self._was_there = True
            return self._until_all_there(looks)
        except _Over:
            return self._at_last()

    def _until_all_there(self, looks: dict[str, RangeRead]) -> dict[str, KeyValue]:
        seen_before: dict[str, int] = {}
        while True:
            there = self._there(looks)
            missing = [name for name in looks if name not in there]
            if not missing and len(looks) == len(self._spots):
                seen = {name: one.create_revision for name, one in there.items()}
                # More than one transaction has are looked at twice: what was there at both times,
                # and not made anew, was there in between, all of it at once.
                if len(looks) <= TXN_OPS_MAX or seen == seen_before:
                    return there
                seen_before = seen
            elif missing:
                seen_before = {}
                name = missing[0]
                came = self._follow(self._spots[name], looks[name].revision)
                if came is not None:
                    if len(self._spots) == 1:
                        return {name: came}
                    missing.remove(name)
            looks = self._look_again(missing or self._spots)

    def _at_last(self) -> dict[str, KeyValue]:
        """Look a last time, so that what is missing can be named."""
        where, names = self._calls.where, list(self._spots)
        try:
            there = self._there(self._look(names))
        except DistNetworkError as problem:
            raise wait_timed_out(names, self._timeout_s, f" since {problem}") from None
        if len(there) == len(names):
            return there
        raise wait_timed_out([name for name in names if name not in there], self._timeout_s, where)

    def _there(self, looks: dict[str, RangeRead]) -> dict[str, KeyValue]:
        there = {}
        for name, look in looks.items():
            for one in look.found:
                if self._accepts(one):
                    there[name] = one
        return there

    def _look(self, names: Iterable[str]) -> dict[str, RangeRead]:
        left_s = self._deadline - time.monotonic()
        limit_s = max(LOOK_S_MIN, left_s) if self._was_there else None
        names = list(names)
        spots = [self._spots[name] for name in names]
        looks = self._calls.look(spots, keys_only=self._keys_only, limit_s=limit_s)
        return dict(zip(names, looks, strict=True))

    def _look_again(self, names: Iterable[str]) -> dict[str, RangeRead]:
        """Look as soon as etcd answers."""
        while True:
            try:
                return self._look(names)
            except DistNetworkError:
                self._pause()

    def _follow(self, spot: KeyRange, revision: int) -> KeyValue | None:
        """Return what comes to a place after a revision; None if it must be looked for again."""
        alive: dict[bytes, KeyValue] = {}
        try:
            with self._calls.client.watch(spot.key, spot.end, revision + 1) as watch:
                while True:
                    try:
                        changes = watch.next(min(self._time_left_s(), NEXT_S_MAX))
                    except TimeoutError:
                        continue
                    self._pause_s = AWAY_PAUSE_S_MIN
                    for one in changes:
                        alive.pop(one.key, None)
                        if one.value is not None:
                            alive[one.key] = KeyValue(
                                key=one.key,
                                value=one.value,
                                create_revision=one.create_revision,
                                mod_revision=one.mod_revision,
                            )
                    # What was deleted again meanwhile did not come.
                    for came in alive.values():
                        if self._accepts(came):
                            return came
        except EtcdError as problem:
            if problem.kind is ProblemKind.UNREACHABLE:
                self._pause()
            elif problem.kind is not ProblemKind.COMPACTED:
                raise as_store_error(problem) from None
            return None

    def _pause(self) -> None:
        pause_s = self._pause_s * random.uniform(0.5, 1)  # noqa: S311 (it only spreads attempts)
        time.sleep(min(self._time_left_s(), pause_s))
        self._pause_s = min(2 * self._pause_s, AWAY_PAUSE_S_MAX)

    def _time_left_s(self) -> float:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise _Over
        return left_s


class _Over(Exception):
    """The time is over."""


# Queues in etcd: one key says which values there are, and each value is a key of its own.
#
# So a push or a pop moves one value, however many there are. A value whose writer's lease has
# ended
# is skipped; it is counted until then.


class Queues:
    """The queues of a store."""

    def __init__(self, calls: Transactions, places: StoreKeys) -> None:
        self._calls = calls
        self._places = places

    def push(self, key: str, value: bytes) -> None:
        """Put a value at the end."""
        spot = self._places.queue(key)

        def make(found: list[Found]) -> tuple[list[Op], None]:
            first, count = _numbers(found[0])
            entry = self._places.entry(key, first + count)
            return [Put(entry.key, value), Put(spot.key, b"%d %d" % (first, count + 1))], None

        self._calls.change([spot], make)

    def pop(self, key: str, timeout_s: float | None) -> bytes | None:
        """Take the first value, waiting for one unless there is no time; None if there is none."""
        spot = self._places.queue(key)
        wait = None if timeout_s is None else Wait(self._calls, {key: spot}, timeout_s)
        while True:
            now = self._calls.read(spot) if wait is None else wait.result()[key]
            if now is None:
                return None
            value = self._take(key, now)
            if value is not None:
                return value

    def length(self, key: str) -> int:
        """Return how many values there are."""
        return _numbers(self._calls.read(self._places.queue(key)))[1]

    def _take(self, key: str, now: KeyValue) -> bytes | None:
        """Take the first value of a queue of which something is known; None if there is none."""
        spot = self._places.queue(key)

        def make(found: list[Found]) -> tuple[list[Op], bool]:
            first, count = _numbers(found[0])
            if not count:
                return [], False
            entry = self._places.entry(key, first).key
            after = Put(spot.key, b"%d %d" % (first + 1, count - 1))
            return [Get(entry), Delete(entry), after if count > 1 else Delete(spot.key)], True

        took, done = self._calls.change([spot], make, known=[now])
        if not took or done is None or not done.results[0]:
            return None
        return done.results[0][0].value


def _numbers(found: Found) -> tuple[int, int]:
    return (0, 0) if found is None else pair(found.value)


# A barrier in etcd: how many have come is counted, and those who wait watch for the next turn.
#
# When the last has come, the turn is one higher and the count begins anew: so nobody who comes
# early
# to the next can be taken for one of this.


def meet(
    calls: Transactions, places: StoreKeys, key: str, world_size: int, timeout_s: float
) -> None:
    """Come to a barrier and wait until so many have; raise `StoreTimeoutError` if they do not."""
    barrier = places.barrier(key)
    turn, came = _come(calls, places, key, world_size)
    if came >= world_size:
        return
    passed = False
    try:
        Wait(
            calls, {key: barrier}, timeout_s, accepts=lambda one: pair(one.value)[0] != turn
        ).result()
        passed = True
    except StoreTimeoutError as late:
        passed, came = _give_up(calls, places, key, turn)
        if not passed:
            raise barrier_timed_out(key, came, world_size, timeout_s, calls.where) from late
    except BaseException:  # A signal's handler may have ended the wait, too.
        with suppress(DistError):
            _give_up(calls, places, key, turn)
        raise


def _come(calls: Transactions, places: StoreKeys, key: str, world_size: int) -> tuple[int, int]:
    """Be counted at a barrier; return which turn of it this is, and how many have come."""
    value, barrier = places.value(key), places.barrier(key)

    def make(found: list[Found]) -> tuple[list[Op], tuple[int, int]]:
        now, counted = found
        add_to_counter(
            key, None if now is None else now.value, 0
        )  # What is no count has another use.
        turn, came = (0, 0) if counted is None else pair(counted.value)
        came += 1
        after = (turn, came) if came < world_size else (turn + 1, 0)
        return [Put(value.key, b"%d" % came), Put(barrier.key, b"%d %d" % after)], (turn, came)

    return calls.change([value, barrier], make)[0]


def _give_up(calls: Transactions, places: StoreKeys, key: str, turn: int) -> tuple[bool, int]:
    """Be counted no more; return whether all have come after all, and how many else."""
    value, barrier = places.value(key), places.barrier(key)

    def make(found: list[Found]) -> tuple[list[Op], tuple[bool, int]]:
        now, counted = found
        if counted is None:
            return [], (False, 1)
        current, came = pair(counted.value)
        if current != turn:
            return [], (True, came)
        ops: list[Op] = [Put(barrier.key, b"%d %d" % (turn, came - 1))]
        if now is not None:
            ops.append(Put(value.key, b"%d" % (came - 1)))
        return ops, (False, came)

    return calls.change([value, barrier], make)[0]


# `EtcdStore`: keys and values in etcd, for all that can reach it; complete, and without torch.
#
# Changes are transactions, waiting is by a watch. Four things to know. With `ttl_s`, what a store
# writes stays while it, or a clone of it, is open, and goes that many seconds after `close` or the
# end of the process; without, it stays for ever. Who writes a key last decides how long it stays.
# A
# call during which etcd was lost raises `DistNetworkError`, and may have done its work or not;
# only
# one that waits goes on. And etcd takes no value above 1.5 MiB, unless its `--max-request-bytes`
# says so. `store_places` shows where in etcd everything is.


class EtcdStore:
    """The keys of etcd that are below a prefix. Threads may share it; calls do not wait in turn.

    The client is the caller's to close, unless `closes_client` says that it goes with this store.
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
            raise UsageError(f"ttl_s: {ttl_s} is no time; accepted: whole seconds from 1, 0 for no")
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
        self._places = StoreKeys(prefix)
        self._calls = Transactions(client, lease)
        self._queues = Queues(self._calls, self._places)
        # A store that is forgotten without being closed is not kept alive for ever.
        self._end = weakref.finalize(self, lease.release if lease else _nothing)

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value."""
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        """Return a key's value, waiting for it to have one."""
        return self.multi_get([key])[0]

    def add(self, key: str, num: int) -> int:
        """Add to a counter, 0 at first, and return what it is now."""
        spot = self._places.value(key)

        def make(found: list[Found]) -> tuple[list[Op], int]:
            total = add_to_counter(key, _value(found[0]), num)
            return [Put(spot.key, b"%d" % total)], total

        return self._calls.change([spot], make)[0]

    def wait(self, keys: Sequence[str], override_timeout: timedelta | float | None = None) -> None:
        """Wait until all keys are there at once; raise `StoreTimeoutError` naming the others."""
        spots = {key: self._places.either(key) for key in keys}
        Wait(self._calls, spots, self._seconds(override_timeout), keys_only=True).result()

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        spots = [self._places.either(key) for key in dict.fromkeys(keys)]
        return all(look.found for look in self._calls.look(spots, keys_only=True))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value; return the value that it has afterwards.

        A missing key is set if nothing is expected; if something is, that is returned.
        """
        spot, wanted, new = self._places.value(key), as_bytes(expected), as_bytes(desired)
        if wanted:
            done = self._calls.transact(
                compare=[Compare(spot.key, Field.VALUE, wanted)],
                success=[Put(spot.key, new)],
                failure=[Get(spot.key)],
            )
            if done.succeeded:
                return new
            return done.results[0][0].value if done.results[0] else wanted

        def make(found: list[Found]) -> tuple[list[Op], bytes]:
            now = _value(found[0])
            return ([], now) if now else ([Put(spot.key, new)], new)

        return self._calls.change([spot], make)[0]

    def append(self, key: str, value: str | bytes) -> None:
        """Put a value after the one that a key has."""
        spot, more = self._places.value(key), as_bytes(value)

        def make(found: list[Found]) -> tuple[list[Op], None]:
            return [Put(spot.key, (_value(found[0]) or b"") + more)], None

        self._calls.change([spot], make)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of all keys, waiting until all have one."""
        spots = {key: self._places.value(key) for key in keys}
        found = Wait(self._calls, spots, self._timeout_s).result()
        return [found[key].value for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Give each key its value: all at once, up to 128 keys and a mebibyte."""
        given = dict(zip(keys, values, strict=True))
        self._calls.write(
            {self._places.value(key): as_bytes(value) for key, value in given.items()}
        )

    def delete_key(self, key: str) -> bool:
        """Take a key's value away; return whether it had one."""
        done = self._calls.transact(success=[Delete(self._places.value(key).key)])
        return done.deleted[0] > 0

    def num_keys(self) -> int:
        """Return how many keys have values."""
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        """Return the keys that have values."""
        (look,) = self._calls.look([self._places.all_keys()], keys_only=True)
        keys = (self._places.key_of(one.key) for one in look.found)
        return [key for key in keys if key is not None]

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put a value at the end of a queue."""
        self._queues.push(key, as_bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue, waiting for one, also when another was faster.

        Without `block`, raise `QueueEmptyError` if there is none.
        """
        value = self._queues.pop(key, self._timeout_s if block else None)
        if value is None:
            raise QueueEmptyError(f"the queue {named([key])}{self._calls.where} is empty")
        return value

    def queue_len(self, key: str) -> int:
        """Return how many values a queue has."""
        return self._queues.length(key)

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        """Wait until so many have come to this key; its value is how many have.

        Who gives up is not counted any more, and who comes after all have passed begins anew. But
        one that is killed while it waits stays counted.
        """
        meet(self._calls, self._places, key, world_size, self._seconds(timeout))

    @property
    def timeout(self) -> timedelta:
        """How long a call waits that is not told how long."""
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Set how long a call waits that is not told how long."""
        self._timeout_s = as_seconds(timeout)

    def clone(self) -> EtcdStore:
        """Return another store of the same keys and client, with a timeout of its own."""
        other = EtcdStore.__new__(type(self))
        lease = self._lease.share() if self._lease else None
        other._begin(self.client, self.prefix, self._timeout_s, lease)
        return other

    def has_extended_api(self) -> bool:
        """Return that there are `append`, `multi_get` and `multi_set`."""
        return True

    def close(self) -> None:
        """Keep what was written alive no longer; it goes after `ttl_s` seconds, if it has them."""
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


def _value(found: Found) -> bytes | None:
    return None if found is None else found.value


def _nothing() -> None:
    """Do nothing, at the end of a store that nothing hangs on."""
