"""The key-value interface agents share; `torch.distributed`'s stores satisfy it."""

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
