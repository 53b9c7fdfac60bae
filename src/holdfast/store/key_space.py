"""The values and queues that the clients of one store share, and who waits for what.

Pure: no I/O and no clock. A client is a number. An operation is a call; whoever no longer has to
wait because of it is put on `woken`, and the caller has to empty that after every call.

What is better here than in PyTorch's server:

- A wait ends when all its keys are there at the same time: a key that is deleted meanwhile is
  awaited again, and an exchange that fails wakes nobody.
- A barrier counts those who wait at it. One that gives up or goes away is not counted any more;
  and when all have passed, the next one to come begins a new barrier. (PyTorch's counts calls,
  for ever: it lets everybody pass from then on.) The key of a barrier has the number of those who
  have come, as there; in the end all of them.
- Whoever waits for a queue alone and is told that it has something has that promised until its
  next request, so that nobody else takes it before: a pop that blocks never finds nothing. But a
  client may only have wanted to know, or be stopped: the caller ends old promises now and then.
- Giving up costs as much as what the client itself waits for.
"""

from __future__ import annotations

from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterable, KeysView, Mapping, Sequence, Sized

BYTES_MAX = 1 << 30
"""How much a key space may hold: keys, values, queues, and the keys of those who wait for several.
Who waits for one holds no more than that key, and has a connection that costs more."""
ENTRY_BYTES = 128
"""What each of these costs besides its own bytes, so that many small ones have a limit too."""
APPENDED_BYTES_MAX = 256 * 1024 * 1024
"""How long a value may become by appending to it: no more than what one answer may hold."""

_I64_MIN, _I64_MAX = -(1 << 63), (1 << 63) - 1
_NUMBER_BYTES_MAX = 64  # How far it is looked for a number; the longest has 20.


class RequestRejected(Exception):
    """The key space does not do that; nothing has changed. The client is to be closed."""


class StoreFull(RequestRejected):
    """There is no room for it."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(f"the store is full: it holds {bytes_max} bytes at most")


class _MultiKeyWait:
    """A wait for more than one key, until none is missing."""

    __slots__ = ("bytes", "client", "keys", "missing")

    def __init__(self, client: int, keys: frozenset[bytes], missing: int) -> None:
        self.client = client
        self.keys = keys
        self.missing = missing
        self.bytes = sum(map(len, keys)) + len(keys) * ENTRY_BYTES


class _Barrier:
    """Those who wait at one key for the others, in the order in which they came."""

    __slots__ = ("key", "waiting")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.waiting: dict[int, None] = {}


class KeySpace:
    """One store's state. See the module for what its operations promise."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.woken: list[int] = []
        """Who is to be told that what they waited for is here. The caller empties it."""
        self.bytes_held = 0
        self.bytes_max = bytes_max
        self._values: dict[bytes, bytes | bytearray] = {}
        self._queues: dict[bytes, deque[bytes]] = {}  # None of them is empty.
        # Every client that waits, and for what: one key, several, or the others at a barrier.
        self._waits: dict[int, bytes | _MultiKeyWait | _Barrier] = {}
        self._single: dict[bytes, dict[int, None]] = {}
        self._several: dict[bytes, dict[_MultiKeyWait, None]] = {}
        self._barriers: dict[bytes, _Barrier] = {}
        # From which queue a client may take, and for how many clients a queue keeps something.
        self._promises: dict[int, bytes] = {}
        self._promised: dict[bytes, int] = {}
        self._old_promises: set[int] = set()  # To whom; they end at the next call for it.

    # Values

    def set(self, key: bytes, value: bytes) -> None:
        """Give a key a value."""
        old = self._values.get(key)
        if old is None:
            self._hold(len(key) + len(value) + ENTRY_BYTES)
            self._values[key] = value
            self._appeared(key)
        else:
            self._hold(len(value) - len(old))
            self._values[key] = value

    def multi_set(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Give each key its value: all of them, or none."""
        more = sum(map(len, keys)) + sum(map(len, values)) + len(keys) * ENTRY_BYTES
        self._hold(more)  # Is there room, even if all of them are new?
        self.bytes_held -= more
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: bytes) -> bytes | bytearray:
        """Return a key's value; nothing if it has none, which looks like an empty one."""
        return self._values.get(key, b"")

    def for_looking_up(self) -> tuple[Mapping[bytes, bytes | bytearray], Container[int], Sized]:
        """Return the values, who waits, and what is promised to anybody: as they are at any time.

        Who waits for nothing, while nothing is promised, may be told of a value without a call.
        """
        return self._values, self._waits, self._promised

    def add(self, key: bytes, amount: int) -> int:
        """Add to a counter, 0 at first, and return what it is now."""
        old = self._values.get(key)
        total = amount if old is None else _number(old) + amount
        if not _I64_MIN <= total <= _I64_MAX:
            raise RequestRejected("a counter would leave the range of 64 bits")
        self.set(key, b"%d" % total)
        return total

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes | bytearray:
        """Set a key if it has the expected value; return the value that it has afterwards.

        A missing key is set if nothing is expected; if something is, that is returned.
        """
        current = self._values.get(key)
        if current is None and expected:
            return expected
        if current is not None and current != expected:
            return current
        self.set(key, desired)
        return desired

    def append(self, key: bytes, value: bytes) -> None:
        """Put a value after the one that a key has."""
        old = self._values.get(key)
        if old is None:
            self.set(key, value)
            return
        if len(old) + len(value) > APPENDED_BYTES_MAX:
            raise RequestRejected(f"a value would become longer than {APPENDED_BYTES_MAX} bytes")
        self._hold(len(value))
        if not isinstance(old, bytearray):
            old = self._values[key] = bytearray(old)  # So that it is not copied again each time.
        old += value

    def delete(self, key: bytes) -> bool:
        """Take a key's value away; return whether it had one. Queues stay."""
        old = self._values.pop(key, None)
        if old is None:
            return False
        self.bytes_held -= len(key) + len(old) + ENTRY_BYTES
        if key not in self._queues:
            self._vanished(key)
        return True

    def keys(self) -> KeysView[bytes]:
        """Return the keys that have values; queues are not among them."""
        return self._values.keys()

    def __len__(self) -> int:
        return len(self._values)

    def has(self, keys: Iterable[bytes]) -> bool:
        """Return whether all keys have a value, or a queue with something in it."""
        values, queues = self._values, self._queues
        return all(key in values or key in queues for key in keys)

    # Queues

    def push(self, key: bytes, value: bytes) -> None:
        """Put a value at the end of a queue. Of those who wait for it alone, one is woken."""
        queue = self._queues.get(key)
        if queue is None:
            self._hold(len(key) + len(value) + 2 * ENTRY_BYTES)
            queue = self._queues[key] = deque((value,))
            if key not in self._values:
                self._count_down(key)
        else:
            self._hold(len(value) + ENTRY_BYTES)
            queue.append(value)
        self._offer(key)

    def pop(self, client: int, key: bytes) -> tuple[int, bytes]:
        """Take the first value of a queue; return how many there were, and it.

        What is promised to others counts as taken already.
        """
        if self._promises.get(client) == key:
            self._forget_promise(client)
        queue = self._queues.get(key)
        if queue is None or len(queue) <= self._promised.get(key, 0):
            return 0, b""
        length = len(queue)
        value = queue.popleft()
        self.bytes_held -= len(value) + ENTRY_BYTES
        if not queue:
            del self._queues[key]
            self.bytes_held -= len(key) + ENTRY_BYTES
            if key not in self._values:
                self._vanished(key)
        return length, value

    def queue_length(self, key: bytes) -> int:
        """Return how many values a queue has."""
        return len(self._queues.get(key, ()))

    # Waiting

    def wait(self, client: int, keys: Sequence[bytes]) -> bool:
        """Return whether all keys are there. If not, the client is woken when they are."""
        if len(keys) == 1:
            return self._wait_for_one(client, keys[0])
        self._not_waiting_yet(client)
        missing = sum(not self.has((key,)) for key in set(keys))
        if not missing:
            return True
        wait = _MultiKeyWait(client, frozenset(keys), missing)
        self._hold(wait.bytes)
        self._waits[client] = wait
        for key in wait.keys:
            self._several.setdefault(key, {})[wait] = None
        return False

    def barrier(self, client: int, key: bytes, size: int) -> bool:
        """Return whether `size` clients have come, this one included; if not, it is woken then."""
        self._not_waiting_yet(client)
        if key in self._values:
            _number(self._values[key])  # A key that is used for something else is left alone.
        barrier = self._barriers.get(key)
        came = 1 if barrier is None else len(barrier.waiting) + 1
        self.set(key, b"%d" % came)
        if came < size:
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
                # However full it is here: nobody is there any more who could be refused this.
                value = self._values[wait.key] = b"%d" % len(wait.waiting)
                self.bytes_held += len(value) - len(old)

    def leave(self, client: int) -> None:
        """Forget a client: it is gone."""
        self.cancel(client)
        self.release(client)

    @property
    def promises(self) -> bool:
        """Whether anything is promised to anybody: then `release` is wanted before requests."""
        return bool(self._promises)

    def release(self, client: int, still_wanted: bytes | None = None) -> None:
        """Take note that a client begins its next request, which is about this queue or none."""
        promised = self._promises.get(client)
        if promised is not None and promised != still_wanted:
            self._forget_promise(client)
            self._offer(promised)

    def end_old_promises(self) -> None:
        """End the promises that were there when this was called before, and are still."""
        for client in self._old_promises & self._promises.keys():
            self.release(client)
        self._old_promises = set(self._promises)

    # How it is done

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
            raise RequestRejected("a client cannot wait for two things at a time")

    def _appeared(self, key: bytes) -> None:
        """A key has a value that had none: that is good for all who wait for it."""
        singles = self._single.pop(key, None)
        if singles is not None:
            for client in singles:
                del self._waits[client]
            self.woken += singles
        if key not in self._queues:
            self._count_down(key)

    def _count_down(self, key: bytes) -> None:
        """A key is there that was not: those who wait for several have one less to wait for."""
        for wait in list(self._several.get(key, ())):
            wait.missing -= 1
            if not wait.missing:
                del self._waits[wait.client]
                self._drop_several(wait)
                self.woken.append(wait.client)

    def _vanished(self, key: bytes) -> None:
        """A key is gone: it has neither a value nor a queue any more."""
        for wait in self._several.get(key, ()):
            wait.missing += 1

    def _drop_single(self, key: bytes, client: int) -> None:
        singles = self._single[key]
        del singles[client]
        if not singles:
            del self._single[key]

    def _drop_several(self, wait: _MultiKeyWait) -> None:
        self.bytes_held -= wait.bytes
        for key in wait.keys:
            waits = self._several[key]
            del waits[wait]
            if not waits:
                del self._several[key]

    def _offer(self, key: bytes) -> None:
        """Promise what a queue has to those who wait for it, in the order in which they came."""
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

    def _hold(self, more: int) -> None:
        held = self.bytes_held + more
        if more > 0 and held > self.bytes_max:
            raise StoreFull(self.bytes_max)
        self.bytes_held = held


def _number(value: bytes | bytearray) -> int:
    """Return the number that a value begins with; what follows does not matter, as in C."""
    # No regular expression: their module would make the first client of each store wait.
    if value.isdigit() and len(value) < 19:
        return int(value)
    text = bytes(value[:_NUMBER_BYTES_MAX]).lstrip(b" \t\n\v\f\r")
    digits = text[1:] if text[:1] in (b"+", b"-") else text
    length = len(digits) - len(digits.lstrip(b"0123456789"))
    number = int(digits[:length]) if length else _I64_MAX + 2
    if text[:1] == b"-":
        number = -number
    if not _I64_MIN <= number <= _I64_MAX:
        raise RequestRejected("a value that is no number cannot be counted")
    return number
