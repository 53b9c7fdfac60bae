"""A part of a store. Every key gets a prefix, so that each round has its own keys.

It works on any store of this package or of torch.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class PrefixStore:
    """The keys of `store` that begin with `prefix/`, without that prefix. See `Store`."""

    def __init__(self, prefix: str, store: Any) -> None:
        self.prefix = prefix
        self.underlying_store = store

    def set(self, key: str, value: str | bytes) -> None:
        self.underlying_store.set(self._full(key), value)

    def get(self, key: str) -> bytes:
        return bytes(self.underlying_store.get(self._full(key)))

    def add(self, key: str, amount: int) -> int:
        return int(self.underlying_store.add(self._full(key), amount))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        self.underlying_store.wait(self._all(keys), *_timeout_argument(timeout))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self.underlying_store.check(self._all(keys)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return bytes(self.underlying_store.compare_set(self._full(key), expected, desired))

    def append(self, key: str, value: str | bytes) -> None:
        self.underlying_store.append(self._full(key), value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [bytes(value) for value in self.underlying_store.multi_get(self._all(keys))]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self.underlying_store.multi_set(self._all(keys), values)

    def delete_key(self, key: str) -> bool:
        return bool(self.underlying_store.delete_key(self._full(key)))

    def num_keys(self) -> int:
        return int(self.underlying_store.num_keys())

    def list_keys(self) -> list[str]:
        begin = self._full("")
        keys = self.underlying_store.list_keys()
        return [key.removeprefix(begin) for key in keys if key.startswith(begin)]

    def queue_push(self, key: str, value: str | bytes) -> None:
        self.underlying_store.queue_push(self._full(key), value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return bytes(self.underlying_store.queue_pop(self._full(key), block))

    def queue_len(self, key: str) -> int:
        return int(self.underlying_store.queue_len(self._full(key)))

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        """Use the store's own barrier.

        Torch's `PrefixStore` builds a barrier from several keys, so the two do not work together.
        """
        self.underlying_store.barrier(self._full(key), world_size, *_timeout_argument(timeout))

    @property
    def timeout(self) -> timedelta:
        found: timedelta = self.underlying_store.timeout
        return found

    def set_timeout(self, timeout: timedelta | float) -> None:
        self.underlying_store.set_timeout(*_timeout_argument(timeout))

    def clone(self) -> PrefixStore:
        return PrefixStore(self.prefix, self.underlying_store.clone())

    def has_extended_api(self) -> bool:
        return bool(self.underlying_store.has_extended_api())

    def _full(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def _all(self, keys: Sequence[str]) -> list[str]:
        return [self._full(key) for key in keys]


def _timeout_argument(timeout: timedelta | float | None) -> tuple[timedelta, ...]:
    """Return the timeout as positional arguments for torch's stores; no argument for None."""
    if timeout is None:
        return ()
    return (timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout,)
