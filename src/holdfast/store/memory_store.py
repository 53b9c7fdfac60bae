"""A store inside one process, for jobs with one node and for agents that share a process.

All stores use the functions at the end, which convert values and timeouts and format messages.
"""

from __future__ import annotations

import threading
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING

from holdfast.store.store_errors import (
    DistStoreError,
    QueueEmptyError,
    StoreTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DEFAULT_TIMEOUT_S = 300.0
KEYS_SHOWN_MAX = 8
KEY_CHARS_SHOWN_MAX = 100
COUNT_MIN, COUNT_MAX = -(1 << 63), (1 << 63) - 1


class _MemoryBarrier:
    """The callers that wait at one key."""

    __slots__ = ("arrived", "complete")

    def __init__(self) -> None:
        self.arrived = 0
        self.complete = False


class MemoryStore:
    """Keys and values behind one lock; a wait sleeps until something changes. See `Store`."""

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}  # An empty queue is removed.
        self._barriers: dict[str, _MemoryBarrier] = {}
        self._changed = threading.Condition()  # Guards everything, and is notified of changes.
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = add_to_counter(key, self._values.get(key), amount)
            self._values[key] = b"%d" % total
            self._changed.notify_all()
            return total

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        with self._changed:
            self._await(keys, self._exists, self._seconds(timeout))

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(map(self._exists, keys))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        with self._changed:
            current = self._values.get(key)
            if current is None and expected:
                return as_bytes(expected)
            if current is None or current == as_bytes(expected):
                current = self._values[key] = as_bytes(desired)
                self._changed.notify_all()
            return current

    def append(self, key: str, value: str | bytes) -> None:
        with self._changed:
            self._values[key] = self._values.get(key, b"") + as_bytes(value)
            self._changed.notify_all()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self._changed:
            self._await(keys, self._values.__contains__, self._timeout_s)
            return [self._values[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        given = dict(zip(keys, map(as_bytes, values), strict=True))
        with self._changed:
            self._values.update(given)
            self._changed.notify_all()

    def delete_key(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        with self._changed:
            return len(self._values)

    def list_keys(self) -> list[str]:
        with self._changed:
            return list(self._values)

    def queue_push(self, key: str, value: str | bytes) -> None:
        with self._changed:
            self._queues.setdefault(key, deque()).append(as_bytes(value))
            self._changed.notify_all()

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        with self._changed:
            if block:
                self._await([key], self._queues.__contains__, self._timeout_s)
            queue = self._queues.get(key)
            if queue is None:
                raise QueueEmptyError(f"the queue {named([key])} is empty")
            value = queue.popleft()
            if not queue:
                del self._queues[key]
            return value

    def queue_len(self, key: str) -> int:
        with self._changed:
            return len(self._queues.get(key, ()))

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        """See `Store`. A caller that times out is no longer counted; after all have passed, the
        next caller starts a new barrier.
        """
        seconds = self._seconds(timeout)
        with self._changed:
            add_to_counter(key, self._values.get(key), 0)  # Raises if the value is not a counter.
            mine = self._barriers.setdefault(key, _MemoryBarrier())
            self._count(key, mine, 1)
            if mine.arrived >= world_size:
                mine.complete = True
                del self._barriers[key]
                return
            try:
                self._sleep(lambda: mine.complete, seconds)
            finally:  # A signal handler may have ended the sleep too.
                if not mine.complete:
                    arrived = mine.arrived
                    self._count(key, mine, -1)
                    if not mine.arrived:
                        del self._barriers[key]
            if not mine.complete:
                raise barrier_timed_out(key, arrived, world_size, seconds)

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: timedelta | float) -> None:
        self._timeout_s = as_seconds(timeout)

    def clone(self) -> MemoryStore:
        other = MemoryStore(self._timeout_s)
        other._values, other._queues = self._values, self._queues
        other._barriers, other._changed = self._barriers, self._changed
        return other

    def has_extended_api(self) -> bool:
        return True

    def _exists(self, key: str) -> bool:
        return key in self._values or key in self._queues

    def _count(self, key: str, barrier: _MemoryBarrier, more: int) -> None:
        barrier.arrived += more
        if more > 0 or key in self._values:
            self._values[key] = b"%d" % barrier.arrived
        self._changed.notify_all()

    def _seconds(self, timeout: timedelta | float | None) -> float:
        return self._timeout_s if timeout is None else as_seconds(timeout)

    def _await(self, keys: Sequence[str], exists: Callable[[str], bool], timeout_s: float) -> None:
        if not self._sleep(lambda: all(map(exists, keys)), timeout_s):
            raise wait_timed_out([key for key in keys if not exists(key)], timeout_s)

    def _sleep(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        return self._changed.wait_for(is_over, min(timeout_s, threading.TIMEOUT_MAX))


# Functions for all stores


def as_bytes(value: str | bytes) -> bytes:
    """Return a value as bytes; text is encoded as UTF-8."""
    return value.encode() if isinstance(value, str) else bytes(value)


def as_seconds(timeout: timedelta | float) -> float:
    """Return a timeout in seconds."""
    return timeout if isinstance(timeout, (int, float)) else timeout.total_seconds()


def add_to_counter(key: str, value: bytes | None, amount: int) -> int:
    """Return the counter's new value.

    Text after the number is ignored, as in C. Raises `DistStoreError` if the value does not begin with a
    number, or if the result exceeds 64 bits.
    """
    text = (b"0" if value is None else value).lstrip()
    end = int(text[:1] in (b"+", b"-"))
    while text[end : end + 1].isdigit():
        end += 1
    try:
        now = int(text[:end])
    except ValueError:
        raise DistStoreError(
            f"cannot add to {named([key])}: its value {text[:20]!r} is not a number"
        ) from None
    if not COUNT_MIN <= now + amount <= COUNT_MAX:
        raise DistStoreError(
            f"cannot add {amount} to {named([key])}, which is {text[:end].decode():.30}: "
            "a counter has 64 bits"
        )
    return now + amount


def named(keys: Sequence[str]) -> str:
    """Return keys for a message, shortened."""
    text = ", ".join(
        key if len(key) <= KEY_CHARS_SHOWN_MAX else f"{key[:KEY_CHARS_SHOWN_MAX]}..."
        for key in keys[:KEYS_SHOWN_MAX]
    )
    more = len(keys) - KEYS_SHOWN_MAX
    return f"{text} and {more} more" if more > 0 else text


def wait_timed_out(missing: Sequence[str], waited_s: float, where: str = "") -> DistStoreError:
    """Return the error of a wait that timed out; `where` ends the message."""
    return StoreTimeoutError(f"no value for {named(missing)} within {waited_s:g} s{where}")


def barrier_timed_out(
    key: str, arrived: int, world_size: int, waited_s: float, where: str = ""
) -> DistStoreError:
    """Return the error of a barrier that timed out."""
    return StoreTimeoutError(
        f"only {arrived} of {world_size} reached the barrier {named([key])} within {waited_s:g} s{where}"
    )
