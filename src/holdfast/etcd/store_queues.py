"""Queues in etcd: one key says which values there are, and each value is a key of its own.

So a push or a pop moves one value, however many there are. A value whose writer's lease has ended
is skipped; it is counted until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.etcd_calls import Delete, Get, KeyValue, Put
from holdfast.etcd.store_places import pair
from holdfast.etcd.store_waiting import Wait

if TYPE_CHECKING:
    from holdfast.core.etcd_calls import Op
    from holdfast.etcd.store_places import Places
    from holdfast.etcd.store_transactions import Found, Transactions


class Queues:
    """The queues of a store."""

    def __init__(self, calls: Transactions, places: Places) -> None:
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
