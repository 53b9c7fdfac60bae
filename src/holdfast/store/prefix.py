"""A part of a store: every key gets a prefix, so that rounds do not see each other's keys.

It works on any store that this package or torch has, and asks of it only what is asked of it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class PrefixStore:
    """The keys of `store` that begin with `prefix/`, by the rest of their names."""

    def __init__(self, prefix: str, store: Any) -> None:
        self.prefix = prefix
        self.underlying_store = store

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value."""
        self.underlying_store.set(self._full(key), value)

    def get(self, key: str) -> bytes:
        """Return a key's value, waiting for it to have one."""
        return bytes(self.underlying_store.get(self._full(key)))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, 0 at first, and return what it is now."""
        return int(self.underlying_store.add(self._full(key), amount))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        """Wait until all keys are there; raise what the store raises when the time is over."""
        self.underlying_store.wait(self._all(keys), *_given(timeout))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return bool(self.underlying_store.check(self._all(keys)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value; return the value that it has afterwards."""
        return bytes(self.underlying_store.compare_set(self._full(key), expected, desired))

    def append(self, key: str, value: str | bytes) -> None:
        """Put a value after the one that a key has."""
        self.underlying_store.append(self._full(key), value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of all keys, waiting for each to have one."""
        return [bytes(value) for value in self.underlying_store.multi_get(self._all(keys))]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Give each key its value."""
        self.underlying_store.multi_set(self._all(keys), values)

    def delete_key(self, key: str) -> bool:
        """Take a key's value away; return whether it had one."""
        return bool(self.underlying_store.delete_key(self._full(key)))

    def num_keys(self) -> int:
        """Return how many keys the whole store has, as torch's does."""
        return int(self.underlying_store.num_keys())

    def list_keys(self) -> list[str]:
        """Return the keys of this part that have values."""
        begin = self._full("")
        keys = self.underlying_store.list_keys()
        return [key.removeprefix(begin) for key in keys if key.startswith(begin)]

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put a value at the end of a queue."""
        self.underlying_store.queue_push(self._full(key), value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue, waiting for one if told to `block`."""
        return bytes(self.underlying_store.queue_pop(self._full(key), block))

    def queue_len(self, key: str) -> int:
        """Return how many values a queue has."""
        return int(self.underlying_store.queue_len(self._full(key)))

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        """Wait until so many have come to this key.

        It is the store's own barrier. A `PrefixStore` of torch's makes one of several keys, so the
        two do not meet.
        """
        self.underlying_store.barrier(self._full(key), world_size, *_given(timeout))

    @property
    def timeout(self) -> timedelta:
        """How long a call of the whole store waits that is not told how long."""
        found: timedelta = self.underlying_store.timeout
        return found

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Set how long a call of the whole store waits that is not told how long."""
        self.underlying_store.set_timeout(*_given(timeout))

    def clone(self) -> PrefixStore:
        """Return the same part of a clone of the store."""
        return PrefixStore(self.prefix, self.underlying_store.clone())

    def has_extended_api(self) -> bool:
        """Return whether the store has `append`, `multi_get` and `multi_set`."""
        return bool(self.underlying_store.has_extended_api())

    def _full(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def _all(self, keys: Sequence[str]) -> list[str]:
        return [self._full(key) for key in keys]


def _given(timeout: timedelta | float | None) -> tuple[timedelta, ...]:
    """Return a time as torch's stores take it, or nothing if there is none."""
    if timeout is None:
        return ()
    return (timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout,)
