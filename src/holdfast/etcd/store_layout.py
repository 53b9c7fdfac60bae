"""The keys in etcd that a store uses.

Keys are stored unencoded, so any text is a valid key, and `etcdctl` shows readable keys. The unit separator, a
control character (shown as `|` below), ends the prefix, which cannot contain it. So the keys of two stores never
collide, even if one prefix begins with the other. Within a key that character is doubled.

```text
<prefix>/|k<key>|v          a value
<prefix>/|k<key>|q          "<first> <count>", while the queue has values
<prefix>/|e<key>|<number>   one value of the queue
<prefix>/|b<key>|           "<turn> <arrived>": how often the barrier opened, and arrivals since then
```

Value and queue are adjacent, so one watch covers both.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.etcd.calls import end_of_prefix
from holdfast.errors import UsageError

MARK = b"\x1f"
NUMBER_DIGITS = 20
"""Numbers of a queue's values are padded to this length, so that they sort in order."""


class KeyRange(NamedTuple):
    """A key in etcd, or a range of keys."""

    key: bytes
    end: bytes = b""


class StoreKeys:
    """The keys of one store."""

    def __init__(self, prefix: str) -> None:
        if MARK.decode() in prefix:
            raise UsageError(f"the prefix {prefix!r} of a store contains a control character")
        root = prefix.encode() + MARK
        self._keys, self._entries, self._barriers = root + b"k", root + b"e", root + b"b"

    def value(self, key: str) -> KeyRange:
        """The value of a key."""
        return KeyRange(self._keys + _terminated_key(key) + b"v")

    def queue(self, key: str) -> KeyRange:
        """The first number and the count of a queue's values."""
        return KeyRange(self._keys + _terminated_key(key) + b"q")

    def value_or_queue(self, key: str) -> KeyRange:
        """The range that contains value and queue."""
        begin = self._keys + _terminated_key(key)
        return KeyRange(begin + b"q", begin + b"w")

    def entry(self, key: str, number: int) -> KeyRange:
        """One value of a queue."""
        return KeyRange(self._entries + _terminated_key(key) + b"%0*d" % (NUMBER_DIGITS, number))

    def barrier(self, key: str) -> KeyRange:
        """The count of a barrier."""
        return KeyRange(self._barriers + _terminated_key(key))

    def all_keys(self) -> KeyRange:
        """The range of all values and queues."""
        return KeyRange(self._keys, end_of_prefix(self._keys))

    def key_of(self, place: bytes) -> str | None:
        """Return the store's key of an etcd key that contains a value; None for other keys."""
        if not place.startswith(self._keys) or not place.endswith(MARK + b"v"):
            return None
        middle = place[len(self._keys) : -len(MARK) - 1]
        return middle.replace(MARK + MARK, MARK).decode(errors="replace")


def pair(content: bytes) -> tuple[int, int]:
    """Return the two numbers of a queue or a barrier."""
    one, other = content.split()
    return int(one), int(other)


def _terminated_key(key: str) -> bytes:
    return key.encode().replace(MARK, MARK + MARK) + MARK
