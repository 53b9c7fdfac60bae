"""The keys of etcd that a store uses.

Keys are stored as they are, so any text is a key and `etcdctl` shows them readably. A control character, the
unit separator (here `|`), marks the end of a prefix, which cannot contain it. So a store never confuses
another's keys with its own, even if one prefix begins with the other. In a key that character is
doubled.

```text
<prefix>/|k<key>|v          a value
<prefix>/|k<key>|q          "<first> <count>", while the queue has values
<prefix>/|e<key>|<number>   one value of the queue
<prefix>/|b<key>|           "<turn> <arrived>": how often all have arrived, and how many since
```

Value and queue are adjacent, so one watch covers both.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.etcd.calls import end_of_prefix
from holdfast.errors import UsageError

MARK = b"\x1f"
NUMBER_DIGITS = 20
"""Padding, so that the numbers of a queue's values sort in order."""


class KeyRange(NamedTuple):
    """A key of etcd's, or a range of them."""

    key: bytes
    end: bytes = b""


class StoreKeys:
    """The keys of one store."""

    def __init__(self, prefix: str) -> None:
        if MARK.decode() in prefix:
            raise UsageError(f"the prefix {prefix!r} of a store has a control character in it")
        root = prefix.encode() + MARK
        self._keys, self._entries, self._barriers = root + b"k", root + b"e", root + b"b"

    def value(self, key: str) -> KeyRange:
        """The value of a key."""
        return KeyRange(self._keys + _closed(key) + b"v")

    def queue(self, key: str) -> KeyRange:
        """Which values a queue has."""
        return KeyRange(self._keys + _closed(key) + b"q")

    def either(self, key: str) -> KeyRange:
        """The range of both."""
        begin = self._keys + _closed(key)
        return KeyRange(begin + b"q", begin + b"w")

    def entry(self, key: str, number: int) -> KeyRange:
        """One value of a queue."""
        return KeyRange(self._entries + _closed(key) + b"%0*d" % (NUMBER_DIGITS, number))

    def barrier(self, key: str) -> KeyRange:
        """The count of a barrier."""
        return KeyRange(self._barriers + _closed(key))

    def all_keys(self) -> KeyRange:
        """The range of all values and queues."""
        return KeyRange(self._keys, end_of_prefix(self._keys))

    def key_of(self, place: bytes) -> str | None:
        """Return the key whose value an etcd key holds; None if it holds something else."""
        if not place.startswith(self._keys) or not place.endswith(MARK + b"v"):
            return None
        middle = place[len(self._keys) : -len(MARK) - 1]
        return middle.replace(MARK + MARK, MARK).decode(errors="replace")


def pair(content: bytes) -> tuple[int, int]:
    """Return the two numbers of a queue or a barrier."""
    one, other = content.split()
    return int(one), int(other)


def _closed(key: str) -> bytes:
    return key.encode().replace(MARK, MARK + MARK) + MARK
