"""Does what a request of the TCPStore protocol asks for, and words the answer."""

from __future__ import annotations

from struct import Struct

from holdfast.store.key_space import KeySpace, Refused
from holdfast.store.tcp_protocol import (
    ADD,
    APPEND,
    BARRIER,
    CANCEL_WAIT,
    CHECK,
    COMPARE_SET,
    DELETE_KEY,
    GET,
    GETNUMKEYS,
    LIST_KEYS,
    MULTI_GET,
    MULTI_SET,
    NOT_READY,
    OPERATIONS,
    PING,
    QUEUE_LEN,
    QUEUE_POP,
    QUEUE_PUSH,
    READY,
    SET,
    STOP_WAITING,
    WAIT,
    WAIT_CANCELED,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

ANSWER_BYTES_MAX = 256 * 1024 * 1024
"""How long one answer may be: a request of a few bytes may ask for the same value many times."""

REMEMBERED_MAX = 4096
REMEMBERED_BYTES_MAX = 256
"""How many requests are known by sight, and how long they may be: a megabyte or two in all."""

WOKEN = bytes((STOP_WAITING,))
_CANCELED = bytes((WAIT_CANCELED,))
_READY, _NOT_READY = bytes((READY,)), bytes((NOT_READY,))
_NOTHING = b""

_u64 = Struct("<Q").pack
_i64 = Struct("<q").pack
_u32 = Struct("<I").pack


_ONE = _u64(1)
_length = int.from_bytes


def answers_at_once(space: KeySpace) -> Callable[[int, bytes], bytes | None]:
    """Return what answers the two requests that workers make most, and says None to others.

    These are GET, and WAIT for one key, of a key that is there: as `data`, whole and alone. What
    is not so simple is for `answer`; that would say the same of these, in several times the time.
    Workers mostly ask for the same keys, so what a request means is remembered.
    """
    values, waits, promised = space.for_looking_up()
    of_key = values.get
    remembered: dict[bytes, tuple[bool, bytes]] = {}

    def answer_at_once(client: int, data: bytes) -> bytes | None:
        meaning = remembered.get(data)
        if meaning is None:
            meaning = _meaning(data)
            if meaning is None:
                return None
            if len(data) <= REMEMBERED_BYTES_MAX:
                if len(remembered) >= REMEMBERED_MAX:
                    remembered.clear()
                remembered[data] = meaning
        waits_only, key = meaning
        value = of_key(key)
        if value is None or client in waits or promised:
            return None
        return WOKEN if waits_only else _u64(len(value)) + value

    return answer_at_once


def _meaning(data: bytes) -> tuple[bool, bytes] | None:
    """Return the key of a whole request, and whether it is WAIT or GET; None of another one."""
    operation = data[0]
    if operation == WAIT:
        if data[1:9] == _ONE and _length(data[9:17], "little") == len(data) - 17:
            return True, data[17:]
    elif operation == GET and _length(data[1:9], "little") == len(data) - 9:
        return False, data[9:]
    return None


def answer(space: KeySpace, client: int, operation: int, fields: list[Any]) -> bytes:
    """Do it, and return what the client is answered now: nothing, if it has to wait.

    Raises `Refused` if that cannot be done; then the client has to be closed.
    """
    if space.promises:
        about_one_queue = operation == QUEUE_POP or (operation == WAIT and len(fields) == 1)
        space.release(client, fields[0] if about_one_queue else None)
    return _PERFORM[operation](space, client, fields)


def _unknown(_space: KeySpace, _client: int, _fields: list[Any]) -> bytes:
    raise Refused("an operation that has no answer")


def _set(space: KeySpace, _client: int, fields: list[Any]) -> bytes:
    space.set(fields[0], fields[1])
    return _NOTHING


def _compare_set(space: KeySpace, _client: int, fields: list[Any]) -> bytes:
    value = space.compare_set(fields[0], fields[1], fields[2])
    return _u64(len(value)) + value


def _get(space: KeySpace, _client: int, fields: list[Any]) -> bytes:
    value = space.get(fields[0])
    return _u64(len(value)) + value


def _add(space: KeySpace, _client: int, fields: list[Any]) -> bytes:
    return _i64(space.add(fields[0], fields[1]))


def _check(space: KeySpace, _client: int, fields: list[Any]) -> bytes:
    return _READY if space.has(fields) else _NOT_READY


def _wait(space: KeySpace, client: int, fields: list[Any]) -> bytes:
    return WOKEN if space.wait(client, fields) else _NOTHING


def _count_keys(space: KeySpace, _client: int, _fields: list[Any]) -> bytes:
    return _i64(len(space))


def _delete(space: KeySpace, _client: int, fields: list[Any]) -> bytes:
    return _i64(space.delete(fields[0]))


def _append(space: KeySpace, _client: int, fields: list[Any]) -> bytes:
    space.append(fields[0], fields[1])
    return _NOTHING


def _multi_get(space: KeySpace, _client: int, fields: list[Any]) -> bytes:
    return _blobs([space.get(key) for key in fields])


def _multi_set(space: KeySpace, _client: int, fields: list[Any]) -> bytes:
    space.multi_set(fields[::2], fields[1::2])
    return _NOTHING


def _cancel(space: KeySpace, client: int, _fields: list[Any]) -> bytes:
    space.cancel(client)
    return _CANCELED


def _ping(_space: KeySpace, _client: int, fields: list[Any]) -> bytes:
    return _u32(fields[0])


def _push(space: KeySpace, _client: int, fields: list[Any]) -> bytes:
    space.push(fields[0], fields[1])
    return _NOTHING


def _pop(space: KeySpace, client: int, fields: list[Any]) -> bytes:
    length, value = space.pop(client, fields[0])
    return _i64(length) + _u64(len(value)) + value if length else _i64(0)


def _queue_length(space: KeySpace, _client: int, fields: list[Any]) -> bytes:
    return _i64(space.queue_length(fields[0]))


def _list_keys(space: KeySpace, _client: int, _fields: list[Any]) -> bytes:
    keys = list(space.keys())
    return _i64(len(keys)) + _blobs(keys)


def _barrier(space: KeySpace, client: int, fields: list[Any]) -> bytes:
    return WOKEN if space.barrier(client, fields[0], fields[1]) else _NOTHING


def _blobs(values: Sequence[bytes | bytearray]) -> bytes:
    if sum(map(len, values)) + 8 * len(values) > ANSWER_BYTES_MAX:
        raise Refused(f"an answer would be longer than {ANSWER_BYTES_MAX} bytes")
    return b"".join([part for value in values for part in (_u64(len(value)), value)])


_DONE_BY: dict[int, Callable[[KeySpace, int, list[Any]], bytes]] = {
    SET: _set,
    COMPARE_SET: _compare_set,
    GET: _get,
    ADD: _add,
    CHECK: _check,
    WAIT: _wait,
    GETNUMKEYS: _count_keys,
    DELETE_KEY: _delete,
    APPEND: _append,
    MULTI_GET: _multi_get,
    MULTI_SET: _multi_set,
    CANCEL_WAIT: _cancel,
    PING: _ping,
    QUEUE_PUSH: _push,
    QUEUE_POP: _pop,
    QUEUE_LEN: _queue_length,
    LIST_KEYS: _list_keys,
    BARRIER: _barrier,
}
# VALIDATE is not among them: it never gets here.
_PERFORM = tuple(_DONE_BY.get(operation, _unknown) for operation in range(OPERATIONS))
