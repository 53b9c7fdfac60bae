"""Where in etcd a store keeps what belongs to a key.

Keys are kept as they are, so that any text is a key and a person can read them with `etcdctl`. The
one thing to know: a control character, the unit separator (here `|`), stands where a prefix cannot
have it. So a store never takes keys of another for its own, also where one prefix begins with the
other. A key that has that character in it gets it doubled.

```text
<prefix>/|k<key>|v          a value
<prefix>/|k<key>|q          "<first> <count>", while there is something in the queue
<prefix>/|e<key>|<number>   one value of it
<prefix>/|b<key>|           "<turn> <came>": how often all have come, and how many have since
```

Value and queue are neighbours, so that one watch sees whichever of them comes.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.etcd.calls import end_of_prefix
from holdfast.errors import UsageError

MARK = b"\x1f"
NUMBER_DIGITS = 20
"""Numbers of a queue's values are written so that they sort as they came."""


class KeyRange(NamedTuple):
    """A key of etcd's, or a range of them."""

    key: bytes
    end: bytes = b""


class StoreKeys:
    """The places of one store."""

    def __init__(self, prefix: str) -> None:
        if MARK.decode() in prefix:
            raise UsageError(f"the prefix {prefix!r} of a store has a control character in it")
        root = prefix.encode() + MARK
        self._keys, self._entries, self._barriers = root + b"k", root + b"e", root + b"b"

    def value(self, key: str) -> KeyRange:
        """Where a key's value is."""
        return KeyRange(self._keys + _closed(key) + b"v")

    def queue(self, key: str) -> KeyRange:
        """Where is written which values a queue has."""
        return KeyRange(self._keys + _closed(key) + b"q")

    def either(self, key: str) -> KeyRange:
        """The range of both."""
        begin = self._keys + _closed(key)
        return KeyRange(begin + b"q", begin + b"w")

    def entry(self, key: str, number: int) -> KeyRange:
        """Where a value of a queue is."""
        return KeyRange(self._entries + _closed(key) + b"%0*d" % (NUMBER_DIGITS, number))

    def barrier(self, key: str) -> KeyRange:
        """Where is written who has come to a barrier."""
        return KeyRange(self._barriers + _closed(key))

    def all_keys(self) -> KeyRange:
        """The range of all values and queues."""
        return KeyRange(self._keys, end_of_prefix(self._keys))

    def key_of(self, place: bytes) -> str | None:
        """Return the key whose value is at a place; None if it is not the place of a value."""
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
