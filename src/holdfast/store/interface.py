"""The key-value interfaces agents share; `torch.distributed`'s stores satisfy them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta


class Store(Protocol):
    """What an agent asks of the store of a round. Keys are text, values bytes."""

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


class FullStore(Store, ComparingStore, Protocol):
    """All that the stores of this package offer, with the meaning it has for torch's."""

    def check(self, keys: Sequence[str], /) -> bool:
        """Return whether all keys have values."""

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
