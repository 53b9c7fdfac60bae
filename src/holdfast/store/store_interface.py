"""The key-value interfaces that agents, handlers and workers share.

`Store` is the whole interface, which torch's stores implement too. Some parts of Holdfast accept a narrower
one, so a custom store needs to implement less. Keys are text and values are bytes; a text value is stored as
UTF-8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta


class RoundStore(Protocol):
    """The part of the interface that an agent uses in the store of a round."""

    def set(self, key: str, value: str, /) -> object:
        """Set the value of a key."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key, waiting until it has one."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which starts at 0, and return the sum."""

    def wait(self, keys: Sequence[str], timeout: timedelta, /) -> object:
        """Wait until all keys have values; raise on timeout."""

    def check(self, keys: Sequence[str], /) -> bool:
        """Return whether all keys have values."""


class ComparingStore(Protocol):
    """A store in which many clients can change one key without losing a change."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key, waiting until it has one."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key if it has the expected value; return the value it then has.

        A missing key is set if `expected` is empty. Otherwise nothing changes, and `expected` is returned, so the
        result looks as if the key had that value.
        """


@runtime_checkable
class Store(Protocol):
    """The whole interface of a store.

    Calls that wait raise `StoreTimeoutError` after `timeout`, or after the timeout they are given. A key
    may have a value and a queue; only values are counted and listed, but a queue that is not empty
    satisfies `check` and `wait`.
    """

    def set(self, key: str, value: str, /) -> object:
        """Set the value of a key."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key, waiting until it has one."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which starts at 0, and return the sum; it is stored as decimal digits.

        Raises `DistStoreError` if the key's value does not begin with a number.
        """

    def wait(self, keys: Sequence[str], timeout: timedelta = ..., /) -> object:
        """Wait until all keys exist at the same time; the error of a timeout names the missing ones."""

    def check(self, keys: Sequence[str], /) -> bool:
        """Return whether all keys exist."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key if it has the expected value; return the value it then has.

        A missing key is set if `expected` is empty; otherwise nothing changes, and `expected` is returned.
        """

    def append(self, key: str, value: str, /) -> object:
        """Append to the value of a key."""

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        """Return the values of all keys, waiting until each has one."""

    def multi_set(self, keys: Sequence[str], values: Sequence[str], /) -> object:
        """Set the values of several keys."""

    def delete_key(self, key: str, /) -> bool:
        """Delete the value of a key; return whether it had one."""

    def num_keys(self) -> int:
        """Return how many keys have values."""

    def list_keys(self) -> list[str]:
        """Return the keys that have values, in any order."""

    def queue_push(self, key: str, value: str, /) -> object:
        """Append a value to a queue."""

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue, waiting until there is one.

        Without `block`, raise `QueueEmptyError` if the queue is empty.
        """

    def queue_len(self, key: str, /) -> int:
        """Return how many values a queue has."""

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        """Wait until `world_size` callers have arrived at this key; the key's value is their number so far."""

    @property
    def timeout(self) -> timedelta:
        """How long calls wait by default."""

    def set_timeout(self, timeout: timedelta, /) -> object:
        """Set how long calls wait by default."""

    def clone(self) -> Any:
        """Return another store of the same keys, with its own timeout.

        Threads that each have their own store never wait for each other.
        """

    def has_extended_api(self) -> bool:
        """Return whether the store has `append`, `multi_get` and `multi_set`."""
