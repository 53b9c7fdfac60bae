"""The key-value interfaces that agents, handlers and workers share.

`Store` is all of it, and torch's stores have it too. The narrow ones below are what some parts of
Holdfast ask for, so that a store of the user's own needs no more. Keys are text, values bytes; text
that is given for a value is kept as UTF-8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta


class RoundStore(Protocol):
    """What an agent asks of the store of a round."""

    def set(self, key: str, value: str, /) -> object:
        """Give a key a value."""

    def get(self, key: str, /) -> bytes:
        """Return a key's value, waiting for it to have one."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, 0 at first, and return what it is now."""

    def wait(self, keys: Sequence[str], timeout: timedelta, /) -> object:
        """Wait until all keys have values; raise when the time is over."""


class ComparingStore(Protocol):
    """A store in which many may change one key without losing a change."""

    def get(self, key: str, /) -> bytes:
        """Return a key's value, waiting for it to have one."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key if it has the expected value; return the value that it has afterwards.

        A missing key is set if nothing is expected. If something is, that is returned and nothing
        is set: the answer alone does not tell this from a key that has the expected value.
        """


@runtime_checkable
class Store(Protocol):
    """All that a store offers.

    Whatever waits raises `StoreTimeoutError` when its time is over: `timeout`, unless it is given
    one. Values and queues are kept apart under their keys, and only values are counted and listed;
    but `check` and `wait` are content with a queue that has something in it.
    """

    def set(self, key: str, value: str, /) -> object:
        """Give a key a value."""

    def get(self, key: str, /) -> bytes:
        """Return a key's value, waiting for it to have one."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, 0 at first, and return what it is now; it is kept as decimal digits.

        Raises `DistStoreError` if the key's value does not begin with a number.
        """

    def wait(self, keys: Sequence[str], timeout: timedelta = ..., /) -> object:
        """Wait until all keys are there at once; raise naming those that are not."""

    def check(self, keys: Sequence[str], /) -> bool:
        """Return whether all keys are there."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key if it has the expected value; return the value that it has afterwards.

        A missing key is set if nothing is expected; if something is, that is returned.
        """

    def append(self, key: str, value: str, /) -> object:
        """Put a value after the one that a key has."""

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        """Return the values of all keys, waiting for each to have one."""

    def multi_set(self, keys: Sequence[str], values: Sequence[str], /) -> object:
        """Give each key its value."""

    def delete_key(self, key: str, /) -> bool:
        """Take a key's value away; return whether it had one."""

    def num_keys(self) -> int:
        """Return how many keys have values."""

    def list_keys(self) -> list[str]:
        """Return the keys that have values, in any order."""

    def queue_push(self, key: str, value: str, /) -> object:
        """Put a value at the end of a queue."""

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue, waiting for one, also when another was faster.

        Without `block`, raise `QueueEmptyError` if there is none.
        """

    def queue_len(self, key: str, /) -> int:
        """Return how many values a queue has."""

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        """Wait until so many have come to this key; its value is how many have."""

    @property
    def timeout(self) -> timedelta:
        """How long a call waits that is not told how long."""

    def set_timeout(self, timeout: timedelta, /) -> object:
        """Set how long a call waits that is not told how long."""

    def clone(self) -> Any:
        """Return another store of the same keys, with a timeout of its own.

        Threads that wait with stores of their own never wait for each other.
        """

    def has_extended_api(self) -> bool:
        """Return whether there are `append`, `multi_get` and `multi_set`."""
