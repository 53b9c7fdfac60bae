"""PyTorch's TCPStore protocol, sans-IO: operations, limits, and the encoding of requests.

A request is one byte for the operation, then its fields. Integers are little-endian. A key or value is sent as
its length (u64) and its bytes. The first request of a connection must be VALIDATE with `MAGIC`.
Responses carry no request number: they arrive in the order of the requests. SET, APPEND, MULTI_SET,
QUEUE_PUSH and VALIDATE have no response. To learn that such a request has arrived, a client then sends one
with a response.
"""

from __future__ import annotations

import os
from struct import Struct
from typing import TYPE_CHECKING

from holdfast.store.memory_store import as_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

VALIDATE = 0
SET = 1
COMPARE_SET = 2
GET = 3
ADD = 4
CHECK = 5
WAIT = 6
GETNUMKEYS = 7
DELETE_KEY = 8
APPEND = 9
MULTI_GET = 10
MULTI_SET = 11
CANCEL_WAIT = 12
PING = 13
QUEUE_PUSH = 14
QUEUE_POP = 15
QUEUE_LEN = 16
LIST_KEYS = 17
BARRIER = 18

OPERATIONS = 19

PROOF = 0xA5
"""The first byte that an agent sends to a store. It is not an operation; see `wire.store_proof`."""

MAGIC = 0x3C85F7CE
"""The field of VALIDATE: it names the protocol and its version."""

READY, NOT_READY = 0, 1  # Responses to CHECK.
STOP_WAITING, WAIT_CANCELED = 0, 1  # Responses to WAIT and BARRIER, and to CANCEL_WAIT.

KEY_BYTES_MAX = 8192
VALUE_BYTES_MAX = 8 * 1024 * 1024
KEYS_MAX = 131_072
"""How many keys one CHECK, WAIT, MULTI_GET or MULTI_SET may name."""
REQUEST_BYTES_MAX = 256 * 1024 * 1024
"""Limit of one request. It matters only for requests with many keys: each field has its own limit, but 131,072
values of the maximum size would be a terabyte."""

INIT_KEY = "init/"
"""The key of the counter of clients, the only key without a leading `/` on the wire."""

_u64, _i64, _u32 = (Struct(f"<{letter}") for letter in "QqI")

# The client's side: a request above a limit raises `ValueError` with the limit in the message. A
# server would close the connection without an explanation.


def encode(operation: int) -> bytes:
    """Encode GETNUMKEYS, LIST_KEYS or CANCEL_WAIT."""
    return operation.to_bytes(1, "little")


def encode_key(operation: int, key: str) -> bytes:
    """Encode GET, DELETE_KEY, QUEUE_POP or QUEUE_LEN."""
    return encode(operation) + _key(key)


def encode_keys(operation: int, keys: Sequence[str]) -> bytes:
    """Encode CHECK, WAIT or MULTI_GET."""
    return b"".join((encode(operation), _count(keys), *map(_key, keys)))


def encode_number(operation: int, key: str, number: int) -> bytes:
    """Encode ADD or BARRIER."""
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{number} is out of range: a TCPStore counts with 64 bits")
    return encode(operation) + _key(key) + _i64.pack(number)


def encode_values(operation: int, key: str, *values: str | bytes) -> bytes:
    """Encode SET, APPEND, QUEUE_PUSH (one value) or COMPARE_SET (expected and desired)."""
    return b"".join((encode(operation), _key(key), *(_value(key, value) for value in values)))


def encode_pairs(keys: Sequence[str], values: Sequence[str | bytes]) -> bytes:
    """Encode MULTI_SET."""
    if len(keys) != len(values):
        raise ValueError(f"multi_set: {len(keys)} keys, but {len(values)} values")
    parts = [encode(MULTI_SET), _count(keys)]
    for key, value in zip(keys, values, strict=True):
        parts += (_key(key), _value(key, value))
    return b"".join(parts)


def encode_hello(nonce: int) -> bytes:
    """Encode VALIDATE and PING. Send them in one piece: torch's server requires it."""
    return encode(VALIDATE) + _u32.pack(MAGIC) + encode(PING) + _u32.pack(nonce)


def own_nonce() -> int:
    """Return the number to send with PING; the response repeats it."""
    return os.getpid() & 0xFFFFFFFF


def decode_key(key: bytes) -> str | None:
    """Return a key from LIST_KEYS without its leading `/`; None for the counter of clients."""
    if not key.startswith(b"/"):
        return None
    return key[1:].decode("utf-8", "surrogateescape")


def _key(key: str) -> bytes:
    name = key.encode("utf-8", "surrogateescape")
    if key != INIT_KEY:
        name = b"/" + name
    if len(name) > KEY_BYTES_MAX:
        raise ValueError(
            f"{key[:40]}...: a key of {len(name)} bytes is too long; a TCPStore accepts "
            f"{KEY_BYTES_MAX}, including the slash before it"
        )
    return _u64.pack(len(name)) + name


def _value(key: str, value: str | bytes) -> bytes:
    content = as_bytes(value)
    if len(content) > VALUE_BYTES_MAX:
        raise ValueError(
            f"{key}: a value of {len(content)} bytes is too large; a TCPStore accepts "
            f"{VALUE_BYTES_MAX}"
        )
    return _u64.pack(len(content)) + content


def _count(keys: Sequence[str]) -> bytes:
    if isinstance(keys, str):
        raise TypeError(f"keys must be a list of strings, not one string: {keys!r}")
    if len(keys) > KEYS_MAX:
        raise ValueError(f"{len(keys)} keys are too many at once; a TCPStore accepts {KEYS_MAX}")
    return _u64.pack(len(keys))


# The server's side.

_VALUE, _KEY, _NUMBER, _WORD, _KEYS, _PAIRS = range(6)  # The kinds of fields.

_FIELDS = {
    VALIDATE: (_WORD,),
    SET: (_KEY, _VALUE),
    COMPARE_SET: (_KEY, _VALUE, _VALUE),
    GET: (_KEY,),
    ADD: (_KEY, _NUMBER),
    CHECK: (_KEYS,),
    WAIT: (_KEYS,),
    GETNUMKEYS: (),
    DELETE_KEY: (_KEY,),
    APPEND: (_KEY, _VALUE),
    MULTI_GET: (_KEYS,),
    MULTI_SET: (_PAIRS,),
    CANCEL_WAIT: (),
    PING: (_WORD,),
    QUEUE_PUSH: (_KEY, _VALUE),
    QUEUE_POP: (_KEY,),
    QUEUE_LEN: (_KEY,),
    LIST_KEYS: (),
    BARRIER: (_KEY, _NUMBER),
}
_SHAPES = tuple(_FIELDS[operation] for operation in range(OPERATIONS))
_REPEATED = {_KEYS: (_KEY,), _PAIRS: (_KEY, _VALUE)}

# By kind of field: its width, how to unpack it, its limit, and the message above the limit.
_BYTES = (8, 8, 8, 4, 8, 8)
_UNPACK = tuple(one.unpack_from for one in (_u64, _u64, _i64, _u32, _u64, _u64))
_MAX = (VALUE_BYTES_MAX, KEY_BYTES_MAX, (1 << 63) - 1, (1 << 32) - 1, KEYS_MAX, KEYS_MAX)
_TOO_MUCH = (
    "a value of %d bytes; the limit is %d",
    "a key of %d bytes; the limit is %d",
    "",
    "",
    "a request of %d keys; the limit is %d",
    "a request of %d keys; the limit is %d",
)


class Requests:
    """The requests of one client, in order. Feed it only when `next` returned None.

    Every byte is parsed only once, however the network splits the stream: an incomplete request keeps its
    complete fields, and parsing continues only when the next field is complete.
    """

    __slots__ = (
        "_at", "_before", "_data", "_fields", "_gathered", "_left", "_needed", "_operation",
        "_shape", "problem", "validated",
    )  # fmt: skip

    def __init__(self) -> None:
        self.validated = False
        self.problem = ""
        """How the client violated the protocol; then there are no more requests."""
        self._data = b""
        self._at = 0
        # The request being read: its operation and shape, how many fields are missing, the fields so far.
        self._operation = -1
        self._shape: tuple[int, ...] = ()
        self._left = 0
        self._fields: list[Any] = []
        self._before = 0  # How many of its bytes have been parsed into fields.
        self._gathered = bytearray()  # The beginning of an incomplete field.
        self._needed = 0

    @property
    def unfinished_bytes(self) -> int:
        """How many bytes of an incomplete request are buffered."""
        return self._before + len(self._gathered)

    @property
    def idle(self) -> bool:
        """Whether the client is validated and its next byte begins a request."""
        return self.validated and not self._needed and self._at >= len(self._data)

    @property
    def wanted_bytes(self) -> int:
        """How many bytes complete the current field; 0 if that is not known."""
        return self._needed - len(self._gathered)

    def feed(self, data: bytes) -> None:
        """Add the next bytes from the client."""
        if self.problem:
            return
        if self._needed:
            self._gathered += data
            if len(self._gathered) < self._needed:
                return
            data = bytes(self._gathered)
            self._gathered.clear()
            self._needed = 0
        self._data = data
        self._at = 0

    def next(self) -> tuple[int, list[Any]] | None:
        """Return the next operation and its fields, or None if it is incomplete."""
        data = self._data
        at = self._at
        end = len(data)
        if at >= end:
            return None
        operation = self._operation
        if operation < 0:
            operation = data[at]
            if operation >= OPERATIONS or (operation == VALIDATE) is self.validated:
                self._reject(_unexpected(operation, validated=self.validated))
                return None
            at += 1
            shape = _SHAPES[operation]
            left = len(shape)
            fields: list[Any] = []
        else:
            shape, left, fields = self._shape, self._left, self._fields
        width = len(shape)
        while left:
            kind = shape[len(fields) % width]
            needed = at + _BYTES[kind]
            if needed <= end:
                number: int = _UNPACK[kind](data, at)[0]
                if number > _MAX[kind]:
                    self._reject(_TOO_MUCH[kind] % (number, _MAX[kind]))
                    return None
                if kind <= _KEY:
                    start = needed
                    needed += number
                    if needed <= end:
                        fields.append(data[start:needed])
                        at = needed
                        left -= 1
                        continue
                elif kind <= _WORD:
                    fields.append(number)
                    at = needed
                    left -= 1
                    continue
                else:
                    at = needed
                    shape = _REPEATED[kind]
                    width = len(shape)
                    left = number * width
                    continue
            self._suspend(operation, shape, left, fields, at, needed - at)
            return None
        self._at = at
        self._operation = -1
        self._before = 0
        return (operation, fields) if operation != VALIDATE else self._validate(fields[0])

    def _validate(self, magic: int) -> tuple[int, list[Any]] | None:
        if magic != MAGIC:
            self._reject("the client speaks another protocol or another version")
            return None
        self.validated = True
        return self.next()

    def _suspend(
        self,
        operation: int,
        shape: tuple[int, ...],
        left: int,
        fields: list[Any],
        at: int,
        needed: int,
    ) -> None:
        """Keep an incomplete request until its next field is complete."""
        self._before += at - self._at
        if self._before + needed > REQUEST_BYTES_MAX:
            self._reject(f"a request of more than {REQUEST_BYTES_MAX} bytes")
            return
        self._operation, self._shape, self._left, self._fields = operation, shape, left, fields
        self._gathered += self._data[at:]
        self._needed = needed
        self._data = b""
        self._at = 0

    def _reject(self, problem: str) -> None:
        self.problem = problem
        self._data = b""
        self._at = 0
        self._operation = -1
        self._fields = []
        self._gathered = bytearray()
        self._needed = self._before = 0


def _unexpected(operation: int, *, validated: bool) -> str:
    if not validated:
        return "the client does not speak PyTorch's TCPStore protocol"
    if operation == VALIDATE:
        return "the client sent VALIDATE twice"
    return f"unknown operation {operation}"
