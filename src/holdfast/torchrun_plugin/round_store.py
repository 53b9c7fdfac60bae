"""The store of a round as torchrun's agent uses it: torch's interface over our coordinator's keys.

The agents agree on ranks through it, and wait in it for each other at the end. That wait, the exit
barrier, is the only sign that a node's workers succeeded. So the store reports it to the coordinator,
which otherwise could not distinguish a finished node from a lost one.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.distributed import DistNetworkError, DistStoreError, Store

from holdfast.errors import HoldfastError
from holdfast.rendezvous.membership_handler import RoundOver
from holdfast.torchrun_plugin.plugin_node import RoundKeys

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import timedelta

    from holdfast.torchrun_plugin.plugin_node import PluginNode

EXIT_BARRIER = "torchelastic/agent/terminal_state"


class PluginRoundStore(Store):  # type: ignore[misc]
    """The keys that the agents of one round share."""

    def __init__(self, node: PluginNode, scope: str) -> None:
        super().__init__()
        self._node = node
        self._scope = scope

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        with self._keys() as keys:
            keys.set(key, value)

    def get(self, key: str) -> bytes:
        """Return a key's value, waiting until it has one."""
        with self._keys() as keys:
            return keys.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return its new value."""
        if key.startswith(EXIT_BARRIER):
            self._node.report_done()
        with self._keys() as keys:
            return keys.add(key, amount)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        with self._keys() as all_keys:
            all_keys.wait(list(keys), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        with self._keys() as all_keys:
            return all_keys.check(list(keys))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value; return the value that it has afterwards."""
        with self._keys() as keys:
            return keys.compare_set(key, expected, desired)

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        with self._keys() as keys:
            keys.append(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of all keys, waiting until each has one."""
        with self._keys() as all_keys:
            return all_keys.multi_get(list(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set the values of several keys."""
        with self._keys() as all_keys:
            all_keys.multi_set(list(keys), list(values))

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        with self._keys() as keys:
            return keys.delete_key(key)

    def num_keys(self) -> int:
        """Return how many keys have values."""
        with self._keys() as keys:
            return keys.num_keys()

    def has_extended_api(self) -> bool:
        """Return True: the store has `append`, `multi_get` and `multi_set`."""
        return True

    @contextmanager
    def _keys(self) -> Iterator[RoundKeys]:
        """Return the keys with the current timeout; raises torch's errors in place of ours."""
        try:
            yield RoundKeys(self._node, self._scope, self.timeout.total_seconds())
        except RoundOver as over:
            raise DistStoreError(f"the round is over: {over}") from None
        except TimeoutError as error:
            raise DistStoreError(str(error)) from None
        except (ConnectionError, HoldfastError) as error:
            raise DistNetworkError(str(error)) from None
