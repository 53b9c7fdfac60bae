"""What a client of a TCPStore says, as bytes. Nothing is sent here.

The one thing to know: a request that is above a limit raises `ValueError` here, with the limit in
the message. A server would hang up on it without a word.
"""

from __future__ import annotations

import os
import struct

from holdfast.store import tcp_protocol as words
from holdfast.store.memory import as_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

I64_MIN, I64_MAX = -(2**63), 2**63 - 1

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")


def hello(nonce: int) -> bytes:
    """The first words of a connection. They leave in one piece: torch's server insists on that."""
    return _opcode(words.VALIDATE) + _U32.pack(words.MAGIC) + _opcode(words.PING) + _U32.pack(nonce)


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
    parts = [_opcode(words.MULTI_SET), _count(keys)]
    for key, value in zip(keys, values, strict=True):
        parts += (_key(key), _value(key, value))
    return b"".join(parts)


def compare_set(key: str, expected: str | bytes, desired: str | bytes) -> bytes:
    """COMPARE_SET."""
    return _opcode(words.COMPARE_SET) + _key(key) + _value(key, expected) + _value(key, desired)


def add(key: str, amount: int) -> bytes:
    """ADD."""
    return _opcode(words.ADD) + _key(key) + _number(amount)


def barrier(key: str, world_size: int) -> bytes:
    """BARRIER."""
    return _opcode(words.BARRIER) + _key(key) + _number(world_size)


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
    if key != words.INIT_KEY:
        name = b"/" + name
    if len(name) > words.KEY_BYTES_MAX:
        raise ValueError(
            f"{key[:40]}...: a key of {len(name)} bytes is too long; a TCPStore takes "
            f"{words.KEY_BYTES_MAX}, the slash before it included"
        )
    return _U64.pack(len(name)) + name


def _value(key: str, value: str | bytes) -> bytes:
    content = as_bytes(value)
    if len(content) > words.VALUE_BYTES_MAX:
        raise ValueError(
            f"{key}: a value of {len(content)} bytes is too large; a TCPStore takes "
            f"{words.VALUE_BYTES_MAX}"
        )
    return _U64.pack(len(content)) + content


def _count(keys: Sequence[str]) -> bytes:
    if isinstance(keys, str):
        raise TypeError(f"keys are a list of texts, not one: {keys!r}")
    if len(keys) > words.KEYS_MAX:
        raise ValueError(
            f"{len(keys)} keys at once are too many; a TCPStore takes {words.KEYS_MAX}"
        )
    return _U64.pack(len(keys))


def _number(number: int) -> bytes:
    if not I64_MIN <= number <= I64_MAX:
        raise ValueError(f"{number} does not fit into the 64 bits that a TCPStore counts with")
    return _I64.pack(number)
