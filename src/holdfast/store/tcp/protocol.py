"""PyTorch's TCPStore protocol: its words and its limits, for the server and the client.

A request is one byte, the operation, and its body; integers are little-endian, a text is its length
as u64 and its bytes. The one thing to know: some operations have no answer at all (SET, APPEND,
MULTI_SET, QUEUE_PUSH, VALIDATE), so a client that must know has to ask something after them.
"""

from __future__ import annotations

import os
import struct
from struct import Struct

from holdfast.store.memory import as_bytes

TYPE_CHECKING = False
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

MAGIC = 0x3C85F7CE
"""What VALIDATE carries: a client of this protocol, and of this version of it."""

READY, NOT_READY = 0, 1  # What CHECK is answered.
STOP_WAITING, WAIT_CANCELED = 0, 1  # What WAIT and BARRIER are answered, and CANCEL_WAIT.

KEY_BYTES_MAX = 8192
VALUE_BYTES_MAX = 8 * 1024 * 1024
KEYS_MAX = 131_072
"""How many keys one CHECK, WAIT, MULTI_GET or MULTI_SET may name."""

INIT_KEY = "init/"
"""The counter of clients, and the only key without a `/` before it on the wire."""


# What a client of a TCPStore says, as bytes. Nothing is sent here.
#
# The one thing to know: a request that is above a limit raises `ValueError` here, with the limit
# in
# the message. A server would hang up on it without a word.


I64_MIN, I64_MAX = -(2**63), 2**63 - 1

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")


def hello(nonce: int) -> bytes:
    """The first words of a connection. They leave in one piece: torch's server insists on that."""
    return _opcode(VALIDATE) + _U32.pack(MAGIC) + _opcode(PING) + _U32.pack(nonce)


def own_nonce() -> int:
    """Return what to send with PING, which is answered with the same."""
    return os.getpid() & 0xFFFFFFFF


def put(opcode: int, key: str, value: str | bytes) -> bytes:
    """SET, APPEND or QUEUE_PUSH."""
    return _opcode(opcode) + _key(key) + _value(key, value)


def put_all(keys: Sequence[str], values: Sequence[str | bytes]) -> bytes:
    """MULTI_SET."""
    if len(keys) != len(values):
        raise ValueError(f"multi_set: {len(keys)} keys and {len(values)} values")
    parts = [_opcode(MULTI_SET), _count(keys)]
    for key, value in zip(keys, values, strict=True):
        parts += (_key(key), _value(key, value))
    return b"".join(parts)


def compare_set(key: str, expected: str | bytes, desired: str | bytes) -> bytes:
    """COMPARE_SET."""
    return _opcode(COMPARE_SET) + _key(key) + _value(key, expected) + _value(key, desired)


def add(key: str, amount: int) -> bytes:
    """ADD."""
    return _opcode(ADD) + _key(key) + _number(amount)


def barrier(key: str, world_size: int) -> bytes:
    """BARRIER."""
    return _opcode(BARRIER) + _key(key) + _number(world_size)


def of_key(opcode: int, key: str) -> bytes:
    """GET, DELETE_KEY, QUEUE_POP or QUEUE_LEN."""
    return _opcode(opcode) + _key(key)


def of_keys(opcode: int, keys: Sequence[str]) -> bytes:
    """CHECK, WAIT or MULTI_GET."""
    return b"".join((_opcode(opcode), _count(keys), *map(_key, keys)))


def bare(opcode: int) -> bytes:
    """GETNUMKEYS, LIST_KEYS or CANCEL_WAIT."""
    return _opcode(opcode)


def name_of(key: bytes) -> str | None:
    """Return a key of LIST_KEYS as callers know it; None for the counter of clients."""
    if not key.startswith(b"/"):
        return None
    return key[1:].decode("utf-8", "surrogateescape")


def _opcode(opcode: int) -> bytes:
    return opcode.to_bytes(1, "little")


def _key(key: str) -> bytes:
    name = key.encode("utf-8", "surrogateescape")
    if key != INIT_KEY:
        name = b"/" + name
    if len(name) > KEY_BYTES_MAX:
        raise ValueError(
            f"{key[:40]}...: a key of {len(name)} bytes is too long; a TCPStore takes "
            f"{KEY_BYTES_MAX}, the slash before it included"
        )
    return _U64.pack(len(name)) + name


def _value(key: str, value: str | bytes) -> bytes:
    content = as_bytes(value)
    if len(content) > VALUE_BYTES_MAX:
        raise ValueError(
            f"{key}: a value of {len(content)} bytes is too large; a TCPStore takes "
            f"{VALUE_BYTES_MAX}"
        )
    return _U64.pack(len(content)) + content


def _count(keys: Sequence[str]) -> bytes:
    if isinstance(keys, str):
        raise TypeError(f"keys are a list of texts, not one: {keys!r}")
    if len(keys) > KEYS_MAX:
        raise ValueError(f"{len(keys)} keys at once are too many; a TCPStore takes {KEYS_MAX}")
    return _U64.pack(len(keys))


def _number(number: int) -> bytes:
    if not I64_MIN <= number <= I64_MAX:
        raise ValueError(f"{number} does not fit into the 64 bits that a TCPStore counts with")
    return _I64.pack(number)


# What one client of the TCPStore protocol sends, cut into requests.
#
# Every byte is looked at once, however the network cut it: a request that is not all here yet
# keeps
# the fields it has, and is not looked at again before enough has come for the next one. The first
# request has to be VALIDATE with the right number. Nothing comes out before it, and it never does.


REQUEST_BYTES_MAX = 256 * 1024 * 1024
"""How much one request may hold in all. It matters only for those of many keys: each field has a
limit of its own, but 131,072 of the largest values would be a terabyte."""

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

# By kind: how it is read, how large it may be, and what is said if it is larger.
_u64, _i64, _u32 = (Struct(f"<{letter}") for letter in "QqI")
_BYTES = (8, 8, 8, 4, 8, 8)
_UNPACK = tuple(one.unpack_from for one in (_u64, _u64, _i64, _u32, _u64, _u64))
_MAX = (VALUE_BYTES_MAX, KEY_BYTES_MAX, (1 << 63) - 1, (1 << 32) - 1, KEYS_MAX, KEYS_MAX)
_TOO_MUCH = (
    "a value of %d bytes; %d is the most",
    "a key of %d bytes; %d is the most",
    "",
    "",
    "a request of %d keys; %d is the most",
    "a request of %d keys; %d is the most",
)


class Requests:
    """The requests of one client, in order. Feed it when `next` has nothing more, never before."""

    __slots__ = (
        "_at", "_before", "_data", "_fields", "_gathered", "_left", "_needed", "_operation",
        "_shape", "problem", "validated",
    )  # fmt: skip

    def __init__(self) -> None:
        self.validated = False
        self.problem = ""
        """Why nothing more comes out: what the client sent is not this protocol."""
        self._data = b""
        self._at = 0
        # The request that is being read: what it is, what it holds, and how much is to come.
        self._operation = -1
        self._shape: tuple[int, ...] = ()
        self._left = 0
        self._fields: list[Any] = []
        self._before = 0  # How many bytes of it went into fields already.
        self._gathered = bytearray()  # The beginning of the field that is not all here.
        self._needed = 0

    @property
    def unfinished_bytes(self) -> int:
        """How much is kept of a request that is not all here."""
        return self._before + len(self._gathered)

    @property
    def idle(self) -> bool:
        """Whether the next byte begins a request of a client that has introduced itself."""
        return self.validated and not self._needed and self._at >= len(self._data)

    @property
    def wanted_bytes(self) -> int:
        """How much has to come before there can be anything new; 0 if that is not known."""
        return self._needed - len(self._gathered)

    def feed(self, data: bytes) -> None:
        """Take what came next from the client."""
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
        """Return the next operation and its fields, or nothing if it is not all here."""
        data = self._data
        at = self._at
        end = len(data)
        if at >= end:
            return None
        operation = self._operation
        if operation < 0:
            operation = data[at]
            if operation >= OPERATIONS or (operation == VALIDATE) is self.validated:
                self._refuse(_unexpected(operation, validated=self.validated))
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
                    self._refuse(_TOO_MUCH[kind] % (number, _MAX[kind]))
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
            self._refuse("a client of another protocol, or of another version of it")
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
        """Keep the request that is being read until enough has come for its next field."""
        self._before += at - self._at
        if self._before + needed > REQUEST_BYTES_MAX:
            self._refuse(f"a request of more than {REQUEST_BYTES_MAX} bytes")
            return
        self._operation, self._shape, self._left, self._fields = operation, shape, left, fields
        self._gathered += self._data[at:]
        self._needed = needed
        self._data = b""
        self._at = 0

    def _refuse(self, problem: str) -> None:
        self.problem = problem
        self._data = b""
        self._at = 0
        self._operation = -1
        self._fields = []
        self._gathered = bytearray()
        self._needed = self._before = 0


def _unexpected(operation: int, *, validated: bool) -> str:
    if not validated:
        return "a client that does not speak PyTorch's TCPStore protocol"
    if operation == VALIDATE:
        return "a client that introduces itself twice"
    return f"an operation that does not exist: {operation}"
