"""`EtcdStore`: keys and values in etcd, for all that can reach it; complete, and without torch.

Changes are transactions, waiting is by a watch. Four things to know. With `ttl_s`, what a store
writes stays while it, or a clone of it, is open, and goes that many seconds after `close` or the
end of the process; without, it stays for ever. Who writes a key last decides how long it stays. A
call during which etcd was lost raises `DistNetworkError`, and may have done its work or not; only
one that waits goes on. And etcd takes no value above 1.5 MiB, unless its `--max-request-bytes`
says so. `store_places` shows where in etcd everything is.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import TYPE_CHECKING

from holdfast.core.etcd_calls import Compare, Delete, Field, Get, Put
from holdfast.errors import UsageError
from holdfast.etcd.kept_lease import KeptLease
from holdfast.etcd.store_barriers import meet
from holdfast.etcd.store_places import Places
from holdfast.etcd.store_queues import Queues
from holdfast.etcd.store_transactions import Found, Transactions
from holdfast.etcd.store_waiting import Wait
from holdfast.store.errors import QueueEmptyError
from holdfast.store.memory import DEFAULT_TIMEOUT_S, added, as_bytes, as_seconds, named

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from holdfast.core.etcd_calls import Op
    from holdfast.etcd.blocking import EtcdClient


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
        self._places = Places(prefix)
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
            total = added(key, _value(found[0]), num)
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
