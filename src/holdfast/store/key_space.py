"""The values and queues that the clients of one store share, and the waits of these clients.

Pure: no I/O and no clock. A client is a number. Every operation is a call. If it ends waits, it appends
their clients to `woken`, which the caller empties after every call.

Differences from PyTorch's server:

- A wait ends when all its keys exist at the same time: a key that is deleted meanwhile is awaited again, and a
  failed compare_set wakes no client.
- A barrier counts the clients that wait at it. A client that times out or disconnects is no longer counted; when
  all have passed, the next client starts a new barrier. (PyTorch's server counts calls forever, so every
  later client passes.) The value of its key is the number of arrived clients, as in PyTorch.
- A client that waits for a single queue and is woken has a value reserved until its next request, so no other
  client takes it first: a blocking pop always finds a value. A client that never pops would hold its value
  forever, so the caller ends old reservations ("promises") from time to time.
- Cancelling costs only as much as the wait itself.
- Clients can have a `ClientShare`, so that the clients of one share cannot fill the space. A value counts against
  the share of the client that wrote it, until a client of another share overwrites it or it is deleted.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, KeysView, Mapping, Sequence, Sized

BYTES_MAX = 1 << 30
"""Limit of a key space: keys, values, queues, and the keys of multi-key waits. A wait for a single key is not
counted, because its connection costs more."""
ENTRY_BYTES = 128
"""The overhead counted per entry, so that the number of small entries is limited too."""
APPENDED_BYTES_MAX = 256 * 1024 * 1024
"""Limit of a value that grows by appending: the size of one response."""

_I64_MIN, _I64_MAX = -(1 << 63), (1 << 63) - 1
_NUMBER_BYTES_MAX = 64  # How many bytes of a value are parsed as a number; the longest has 20.


class RequestRejected(Exception):
    """The operation was refused and nothing has changed. The caller must disconnect the client."""


class StoreFull(RequestRejected):
    """The store has no room for the request."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(f"the store is full: it holds {bytes_max} bytes at most")


class ClientShare:
    """The part of a store that some clients may use, and how much of it they use.

    The caller counts their `connections`, and the bytes `buffered` for them.
    """

    __slots__ = ("buffered", "bytes_held", "bytes_max", "connections", "part", "whose")

    def __init__(self, whose: str, bytes_max: int, part: int) -> None:
        self.whose = whose
        self.part = part
        self.bytes_max = bytes_max // part
        self.bytes_held = 0
        self.buffered = 0
        self.connections = 0

    def check(self, more: int) -> None:
        """Raise `ShareUsedUp` if the share has no room for this many more bytes."""
        if more > 0 and self.bytes_held + self.buffered + more > self.bytes_max:
            raise ShareUsedUp(self)


class ShareUsedUp(RequestRejected):
    """The clients of this share have used it up; the store may still have room."""

    def __init__(self, share: ClientShare) -> None:
        super().__init__(f"the store holds {share.bytes_max} bytes for {share.whose} at most")


class _MultiKeyWait:
    """A wait for several keys, until none is missing."""

    __slots__ = ("bytes", "client", "keys", "missing", "share")

    def __init__(
        self, client: int, keys: frozenset[bytes], missing: int, share: ClientShare | None
    ) -> None:
        self.client = client
        self.keys = keys
        self.missing = missing
        self.share = share
        self.bytes = sum(map(len, keys)) + len(keys) * ENTRY_BYTES


class _Barrier:
    """The clients that wait at one key, in the order they arrived."""

    __slots__ = ("key", "waiting")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.waiting: dict[int, None] = {}


class KeySpace:
    """The state of one store. See the module for what its operations guarantee."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.woken: list[int] = []
        """The clients whose wait has ended. The caller empties it."""
        self.bytes_held = 0
        self.bytes_max = bytes_max
        self.share: ClientShare | None = None
        """The share that the next calls count against; None for the store as a whole."""
        self._values: dict[bytes, bytes | bytearray] = {}
        # The share of a value, and its size there.
        self._shares: dict[bytes, tuple[ClientShare, int]] = {}
        # No queue is empty. A queued value counts against its share as if it were alone in its queue.
        self._queues: dict[bytes, deque[tuple[bytes, ClientShare | None]]] = {}
        # For each waiting client: one key, several keys, or a barrier.
        self._waits: dict[int, bytes | _MultiKeyWait | _Barrier] = {}
        self._single: dict[bytes, dict[int, None]] = {}
        self._several: dict[bytes, dict[_MultiKeyWait, None]] = {}
        self._barriers: dict[bytes, _Barrier] = {}
        # The queue of each client's promised value, and the number of promised values per queue.
        self._promises: dict[int, bytes] = {}
        self._promised: dict[bytes, int] = {}
        # Clients whose promises the next `end_old_promises` ends.
        self._old_promises: set[int] = set()

    # Values

    def set(self, key: bytes, value: bytes) -> None:
        old = self._values.get(key)
        if old is None:
            self._hold_value(key, len(value), 0)
            self._values[key] = value
            self._wake_waiting(key)
        else:
            self._hold_value(key, len(value), len(key) + len(old) + ENTRY_BYTES)
            self._values[key] = value

    def multi_set(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Set all of the keys, or none."""
        more = sum(map(len, keys)) + sum(map(len, values)) + len(keys) * ENTRY_BYTES
        if self.share is not None:
            self.share.check(more)
        self._hold(more)  # Raises unless there is room even if all keys are new.
        self.bytes_held -= more
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: bytes) -> bytes | bytearray:
        """Return the value of a key, or an empty value if it is missing."""
        return self._values.get(key, b"")

    def lookup_views(self) -> tuple[Mapping[bytes, bytes | bytearray], Container[int], Sized]:
        """Return live views of the values, the waiting clients, and the promises.

        As long as no value is promised, the caller may read a value here for a client that does not wait.
        """
        return self._values, self._waits, self._promised

    def add(self, key: bytes, amount: int) -> int:
        old = self._values.get(key)
        total = amount if old is None else _number(old) + amount
        if not _I64_MIN <= total <= _I64_MAX:
            raise RequestRejected("the counter would exceed 64 bits")
        self.set(key, b"%d" % total)
        return total

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes | bytearray:
        current = self._values.get(key)
        if current is None and expected:
            return expected
        if current is not None and current != expected:
            return current
        self.set(key, desired)
        return desired

    def append(self, key: bytes, value: bytes) -> None:
        old = self._values.get(key)
        if old is None:
            self.set(key, value)
            return
        if len(old) + len(value) > APPENDED_BYTES_MAX:
            raise RequestRejected(f"the value would exceed {APPENDED_BYTES_MAX} bytes")
        self._hold_value(key, len(old) + len(value), len(key) + len(old) + ENTRY_BYTES)
        if not isinstance(old, bytearray):
            old = self._values[key] = bytearray(old)  # So that it is not copied each time.
        old += value

    def delete(self, key: bytes) -> bool:
        """Delete the value of a key; return whether it had one. Its queue stays."""
        old = self._values.pop(key, None)
        if old is None:
            return False
        self.bytes_held -= len(key) + len(old) + ENTRY_BYTES
        if key in self._shares:
            share, held = self._shares.pop(key)
            share.bytes_held -= held
        if key not in self._queues:
            self._vanished(key)
        return True

    def keys(self) -> KeysView[bytes]:
        """Return the keys that have values, not those of queues."""
        return self._values.keys()

    def __len__(self) -> int:
        return len(self._values)

    def has(self, keys: Iterable[bytes]) -> bool:
        """Return whether each key has a value, or a queue that is not empty."""
        values, queues = self._values, self._queues
        return all(key in values or key in queues for key in keys)

    # Queues

    def push(self, key: bytes, value: bytes) -> None:
        """Append to a queue. Wake one of the clients that wait only for it."""
        queue, share = self._queues.get(key), self.share
        alone = len(key) + len(value) + 2 * ENTRY_BYTES
        if share is not None:
            share.check(alone)
        if queue is None:
            self._hold(alone)
            queue = self._queues[key] = deque(((value, share),))
            if key not in self._values:
                self._count_down(key)
        else:
            self._hold(len(value) + ENTRY_BYTES)
            queue.append((value, share))
        if share is not None:
            share.bytes_held += alone
        self._offer(key)

    def pop(self, client: int, key: bytes) -> tuple[int, bytes]:
        """Take the first value of a queue; return the length of the queue before, and the value.

        Values promised to other clients count as taken.
        """
        if self._promises.get(client) == key:
            self._forget_promise(client)
        queue = self._queues.get(key)
        if queue is None or len(queue) <= self._promised.get(key, 0):
            return 0, b""
        length = len(queue)
        value, share = queue.popleft()
        self.bytes_held -= len(value) + ENTRY_BYTES
        if share is not None:
            share.bytes_held -= len(key) + len(value) + 2 * ENTRY_BYTES
        if not queue:
            del self._queues[key]
            self.bytes_held -= len(key) + ENTRY_BYTES
            if key not in self._values:
                self._vanished(key)
        return length, value

    def queue_length(self, key: bytes) -> int:
        return len(self._queues.get(key, ()))

    # Waiting

    def wait(self, client: int, keys: Sequence[bytes]) -> bool:
        """Return whether all keys exist. If not, the client waits until they do."""
        if len(keys) == 1:
            return self._wait_for_one(client, keys[0])
        self._not_waiting_yet(client)
        missing = sum(not self.has((key,)) for key in set(keys))
        if not missing:
            return True
        wait = _MultiKeyWait(client, frozenset(keys), missing, self.share)
        if wait.share is not None:
            wait.share.check(wait.bytes)
        self._hold(wait.bytes)
        if wait.share is not None:
            wait.share.bytes_held += wait.bytes
        self._waits[client] = wait
        for key in wait.keys:
            self._several.setdefault(key, {})[wait] = None
        return False

    def barrier(self, client: int, key: bytes, size: int) -> bool:
        """Return whether `size` clients have arrived, including this one. If not, it waits for them."""
        self._not_waiting_yet(client)
        if key in self._values:
            _number(self._values[key])  # Rejects a key whose value is not a counter.
        barrier = self._barriers.get(key)
        arrived = 1 if barrier is None else len(barrier.waiting) + 1
        self.set(key, b"%d" % arrived)
        if arrived < size:
            if barrier is None:
                barrier = self._barriers[key] = _Barrier(key)
            barrier.waiting[client] = None
            self._waits[client] = barrier
            return False
        if barrier is not None:
            del self._barriers[key]
            for other in barrier.waiting:
                del self._waits[other]
            self.woken += barrier.waiting
        return True

    def cancel(self, client: int) -> None:
        """End a client's wait, if it has one."""
        wait = self._waits.pop(client, None)
        if wait is None:
            return
        if isinstance(wait, bytes):
            self._drop_single(wait, client)
        elif isinstance(wait, _MultiKeyWait):
            self._drop_several(wait)
        else:
            del wait.waiting[client]
            if not wait.waiting:
                del self._barriers[wait.key]
            if (old := self._values.get(wait.key)) is not None:
                # Even if the store is full: there is no client to reject.
                value = self._values[wait.key] = b"%d" % len(wait.waiting)
                self.bytes_held += len(value) - len(old)

    def leave(self, client: int) -> None:
        """Forget a client that has disconnected."""
        self.cancel(client)
        self.release(client)

    @property
    def promises(self) -> bool:
        """Whether any value is promised. If so, the caller calls `release` before each request."""
        return bool(self._promises)

    def release(self, client: int, still_wanted: bytes | None = None) -> None:
        """End a client's promise at its next request, unless that is for the promised queue."""
        promised = self._promises.get(client)
        if promised is not None and promised != still_wanted:
            self._forget_promise(client)
            self._offer(promised)

    def end_old_promises(self) -> None:
        """End the promises that already existed at the previous call."""
        for client in self._old_promises & self._promises.keys():
            self.release(client)
        self._old_promises = set(self._promises)

    # Internals

    def _wait_for_one(self, client: int, key: bytes) -> bool:
        if key in self._values or self._promises.get(client) == key:
            return True
        self._not_waiting_yet(client)
        queue = self._queues.get(key)
        if queue is not None and len(queue) > self._promised.get(key, 0):
            self._promise(client, key)
            return True
        self._waits[client] = key
        self._single.setdefault(key, {})[client] = None
        return False

    def _not_waiting_yet(self, client: int) -> None:
        if client in self._waits:
            raise RequestRejected("a client cannot wait twice at the same time")

    def _wake_waiting(self, key: bytes) -> None:
        """Wake the clients that wait for a key which just got its first value."""
        singles = self._single.pop(key, None)
        if singles is not None:
            for client in singles:
                del self._waits[client]
            self.woken += singles
        if key not in self._queues:
            self._count_down(key)

    def _count_down(self, key: bytes) -> None:
        """Update the multi-key waits for a key that appeared: one key fewer is missing."""
        for wait in list(self._several.get(key, ())):
            wait.missing -= 1
            if not wait.missing:
                del self._waits[wait.client]
                self._drop_several(wait)
                self.woken.append(wait.client)

    def _vanished(self, key: bytes) -> None:
        """Update the multi-key waits for a key that has neither a value nor a queue any more."""
        for wait in self._several.get(key, ()):
            wait.missing += 1

    def _drop_single(self, key: bytes, client: int) -> None:
        singles = self._single[key]
        del singles[client]
        if not singles:
            del self._single[key]

    def _drop_several(self, wait: _MultiKeyWait) -> None:
        self.bytes_held -= wait.bytes
        if wait.share is not None:
            wait.share.bytes_held -= wait.bytes
        for key in wait.keys:
            waits = self._several[key]
            del waits[wait]
            if not waits:
                del self._several[key]

    def _offer(self, key: bytes) -> None:
        """Promise the values of a queue to the clients that wait for it, in order."""
        queue, singles = self._queues.get(key), self._single.get(key)
        while queue and singles and len(queue) > self._promised.get(key, 0):
            client = next(iter(singles))
            del self._waits[client]
            self._drop_single(key, client)
            self._promise(client, key)
            self.woken.append(client)

    def _promise(self, client: int, key: bytes) -> None:
        self._promises[client] = key
        self._promised[key] = self._promised.get(key, 0) + 1

    def _forget_promise(self, client: int) -> None:
        key = self._promises.pop(client)
        self._old_promises.discard(client)
        self._promised[key] -= 1
        if not self._promised[key]:
            del self._promised[key]

    def _hold_value(self, key: bytes, value_bytes: int, before: int) -> None:
        """Make room for a value, whose key took `before` bytes so far, and count it against the share."""
        size = len(key) + value_bytes + ENTRY_BYTES
        share = self.share
        if share is None and key not in self._shares:
            self._hold(size - before)
            return
        earlier, counted = self._shares.get(key, (None, 0))
        if share is not None:
            share.check(size - counted if earlier is share else size)
        self._hold(size - before)
        if earlier is not None:
            earlier.bytes_held -= counted
            del self._shares[key]
        if share is not None:
            share.bytes_held += size
            self._shares[key] = (share, size)

    def _hold(self, more: int) -> None:
        held = self.bytes_held + more
        if more > 0 and held > self.bytes_max:
            raise StoreFull(self.bytes_max)
        self.bytes_held = held


def _number(value: bytes | bytearray) -> int:
    """Return the number at the beginning of a value; the rest is ignored, as in C."""
    # No regular expression: importing `re` would delay the first client of each store.
    if value.isdigit() and len(value) < 19:
        return int(value)
    text = bytes(value[:_NUMBER_BYTES_MAX]).lstrip(b" \t\n\v\f\r")
    digits = text[1:] if text[:1] in (b"+", b"-") else text
    length = len(digits) - len(digits.lstrip(b"0123456789"))
    number = int(digits[:length]) if length else _I64_MAX + 2
    if text[:1] == b"-":
        number = -number
    if not _I64_MIN <= number <= _I64_MAX:
        raise RequestRejected("the value is not a number")
    return number
