"""A part of a store: every key gets a prefix, so that rounds do not see each other's keys.

It works on any store that this package or torch has, and asks of it only what is asked of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta


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

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values; raise what the store raises when the time is over."""
        more = () if timeout is None else (timeout,)
        self.underlying_store.wait(self._all(keys), *more)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
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

    def _full(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def _all(self, keys: Sequence[str]) -> list[str]:
        return [self._full(key) for key in keys]
