"""A store inside one process: for jobs of one node, and for agents that share a process."""

from __future__ import annotations

import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

DEFAULT_TIMEOUT_S = 300.0


class MemoryStore:
    """Keys and values behind one lock; `get` and `wait` sleep until a value comes."""

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value."""
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        """Return a key's value, waiting for it to have one."""
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, 0 at first, and return what it is now."""
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values; raise `TimeoutError` naming those that have none."""
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        with self._changed:
            self._await(keys, seconds)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        with self._changed:
            return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value; return the value that it has afterwards.

        A missing key is set if nothing is expected; if something is, that is returned.
        """
        with self._changed:
            current = self._values.get(key)
            if current is None and expected:
                return as_bytes(expected)
            if current is None or current == as_bytes(expected):
                current = self._values[key] = as_bytes(desired)
                self._changed.notify_all()
            return current

    def append(self, key: str, value: str | bytes) -> None:
        """Put a value after the one that a key has."""
        with self._changed:
            self._values[key] = self._values.get(key, b"") + as_bytes(value)
            self._changed.notify_all()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of all keys, waiting for each to have one."""
        with self._changed:
            self._await(keys, self._timeout_s)
            return [self._values[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Give each key its value."""
        with self._changed:
            for key, value in zip(keys, values, strict=True):
                self._values[key] = as_bytes(value)
            self._changed.notify_all()

    def delete_key(self, key: str) -> bool:
        """Take a key's value away; return whether it had one."""
        with self._changed:
            return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return how many keys have values."""
        with self._changed:
            return len(self._values)

    def _await(self, keys: Sequence[str], timeout_s: float) -> None:
        if not self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout_s):
            missing = ", ".join(key for key in keys if key not in self._values)
            raise TimeoutError(f"no value came within {timeout_s:g} s for: {missing}")


def as_bytes(value: str | bytes) -> bytes:
    """Return a value as it is kept; text is kept as UTF-8."""
    return value.encode() if isinstance(value, str) else bytes(value)
