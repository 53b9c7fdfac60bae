"""Does what a request of the TCPStore protocol asks for, and words the answer."""

from __future__ import annotations

import _socket as socket  # Its methods are called for every request; the wrapper adds nothing.
import errno
import os
import select
import time
from struct import Struct

from holdfast import console
from holdfast.net.listening import descriptor_limit, raise_descriptor_limit
from holdfast.store.key_space import BYTES_MAX, KeySpace, RequestRejected
from holdfast.store.tcp.protocol import (
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
    Requests,
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

    Raises `RequestRejected` if that cannot be done; then the client has to be closed.
    """
    if space.promises:
        about_one_queue = operation == QUEUE_POP or (operation == WAIT and len(fields) == 1)
        space.release(client, fields[0] if about_one_queue else None)
    return _PERFORM[operation](space, client, fields)


def _unknown(_space: KeySpace, _client: int, _fields: list[Any]) -> bytes:
    raise RequestRejected("an operation that has no answer")


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
        raise RequestRejected(f"an answer would be longer than {ANSWER_BYTES_MAX} bytes")
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


# One client of a `TcpStoreServer`, as its loop knows it.


class ClientConnection:
    """One client: its socket, what it has sent, and what it has not read yet."""

    __slots__ = (
        "address", "descriptor", "is_plain", "number", "receive", "requests", "send", "since",
        "socket", "unfinished", "unsent",
    )  # fmt: skip

    def __init__(self, number: int, peer: socket.socket, address: object, now: float) -> None:
        self.number = number
        self.socket = peer
        self.descriptor = peer.fileno()
        self.receive = peer.recv
        self.send = peer.send
        self.address = address
        self.requests = Requests()
        self.is_plain = False
        """Whether its next byte begins a request, and it has read all answers to those before."""
        self.since = now
        self.unfinished = 0
        self.unsent = bytearray()

    def kept_bytes(self) -> int:
        """How much is kept of its request that is not complete, and of answers it did not read."""
        return self.unfinished + len(self.unsent)

    def __str__(self) -> str:
        match self.address:
            case (str(host), int(port), *_):
                return f"{host.removeprefix('::ffff:')}:{port}"
        return "a client"


# The loop that serves the connections of a `TcpStoreServer`, in one thread.
#
# Nobody stalls the others. A client that does not read its answers is not read from either, so
# that
# no more of them pile up; one that sends many requests at once has its turn after every
# `TURN_BYTES` of answers; one that breaks the rules is closed, and nobody else notices.


RECEIVE_BYTES = 16 * 1024
RECEIVE_LARGE_BYTES = 1024 * 1024  # At most, where a large value is known to come.
SEND_BYTES = 1024 * 1024
TURN_BYTES = 256 * 1024
EVENTS_MAX = 256  # Connections served between two looks at who else is there.
ACCEPTED_AT_ONCE = 64
CONNECTIONS_MAX = 65_536
DESCRIPTORS_LEFT = 256  # What the rest of this process may need; but not more than half.
VALIDATE_S = 30.0
HALF_OPEN_MAX = 1024  # Connections that have not said yet that they are clients of this protocol.
HALF_OPEN_MIN_S = 1.0  # What each of them has before it must go for another.
PROMISE_S = 1.0  # How long at least, and twice at most, a queue keeps something for who was told.
NO_ROOM_S = 0.2  # The wait when this process has no descriptor left.
WARNINGS_MAX = 10

_GONE = (errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.EINTR)
_IN, _OUT = select.EPOLLIN, select.EPOLLOUT

_loops: list[ServingLoop] = []  # Those of this process: they share its descriptors.


class ServingLoop:
    """Serves until the descriptor `wake` is readable."""

    def __init__(self, listener: socket.socket, epoll: select.epoll, wake: int) -> None:
        self.connections: dict[int, ClientConnection] = {}
        """By the number that each has in the key space, as long as it is open."""
        self._by_descriptor: dict[int, ClientConnection] = {}
        self._listener = listener
        self._epoll = epoll
        self._wake = wake
        self._space = KeySpace(BYTES_MAX)
        self._half_open: dict[ClientConnection, None] = {}  # The oldest first.
        self._again: dict[ClientConnection, None] = {}  # Those who had a turn and have more to do.
        self._accept_at: float | None = None  # When to go on, while nothing is accepted.
        self._promises_at: float | None = None  # When to look for old ones, while there are any.
        self._numbers = 0
        self._kept_bytes = 0  # Of requests that are not complete, and of answers not read yet.
        self._warnings = 0
        self._connections_max = _connections_possible()
        _loops.append(self)

    def run(self) -> None:
        """Serve everybody."""
        poll, by_descriptor = self._epoll.poll, self._by_descriptor
        listener = self._listener.fileno()
        at_once = answers_at_once(self._space)
        _, _, promised = self._space.for_looking_up()
        patience = self._patience()
        while True:
            accept = False
            for descriptor, _events in poll(patience, EVENTS_MAX):
                connection = by_descriptor.get(descriptor)
                if connection is not None:
                    if not connection.is_plain:
                        self._hear(connection)
                        continue
                    # Most of what comes is answered here, in few steps: each counts where the
                    # workers that wait for the answers have taken all cores.
                    try:
                        data = connection.receive(RECEIVE_BYTES)
                    except BlockingIOError:
                        continue
                    except OSError:
                        data = b""
                    known = at_once(connection.number, data) if data else None
                    if known is None:
                        self._take(connection, data)
                    else:
                        self._send(connection, known)
                elif descriptor == listener:
                    accept = True
                elif descriptor == self._wake:
                    return
            if self._again:
                self._give_turns()
            if accept:
                self._accept()
            patience = -1.0
            if (
                self._half_open
                or self._again
                or self._accept_at is not None
                or self._promises_at is not None
                or promised
            ):
                self._tend(time.monotonic())
                patience = self._patience()

    def _give_turns(self) -> None:
        for connection in list(self._again):
            if self._again.pop(connection, connection) is None and not connection.unsent:
                self._serve(connection)

    def close(self) -> None:
        """Close all connections."""
        for connection in self.connections.values():
            _hang_up(connection.socket)
        self._end()

    def abandon(self) -> None:
        """Close this process's copies of the connections, which go on elsewhere."""
        for connection in self.connections.values():
            connection.socket.close()
        self._end()

    def _end(self) -> None:
        self.connections.clear()
        _loops.remove(self)

    # One connection

    def _hear(self, connection: ClientConnection) -> None:
        """A client that has not read its answers can do so, or one says more of a request."""
        if connection.unsent:
            self._send_more(connection)
            return
        if connection in self._again:
            return  # What it said before has its turn first.
        wanted = max(RECEIVE_BYTES, min(connection.requests.wanted_bytes, RECEIVE_LARGE_BYTES))
        try:
            data = connection.receive(wanted)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._take(connection, data)

    def _take(self, connection: ClientConnection, data: bytes) -> None:
        if data:
            connection.requests.feed(data)
            self._serve(connection)
        else:
            self._drop(connection)

    def _serve(self, connection: ClientConnection) -> None:
        """Do what a client asked for, as far as all of it has come and its turn goes."""
        requests, space = connection.requests, self._space
        number = connection.number
        answers = []
        size = 0
        problem = ""
        try:
            while (request := requests.next()) is not None:
                one = answer(space, number, request[0], request[1])
                if one:
                    answers.append(one)
                    size += len(one)
                if space.woken:
                    self._wake_others(connection, answers)
                if size > TURN_BYTES:
                    self._again[connection] = None
                    break
        except RequestRejected as refused:
            problem = str(refused)
        if answers:
            self._send(connection, answers[0] if len(answers) == 1 else b"".join(answers))
        if requests.problem or problem:
            self._expel(connection, requests.problem or problem)
            return
        if requests.unfinished_bytes != connection.unfinished and number in self.connections:
            self._kept_bytes += requests.unfinished_bytes - connection.unfinished
            connection.unfinished = requests.unfinished_bytes
            self._check_room()
        connection.is_plain = requests.idle and not connection.unsent
        if requests.validated and connection in self._half_open:
            del self._half_open[connection]
            self._room_again()

    def _wake_others(self, connection: ClientConnection | None, answers: list[bytes]) -> None:
        """Answer those whose wait has ended; the one that is being served in its turn."""
        space = self._space
        while space.woken:
            woken, space.woken = space.woken, []
            for number in woken:
                other = self.connections.get(number)
                if other is connection is not None:
                    answers.append(WOKEN)
                elif other is not None:
                    self._send(other, WOKEN)

    def _send(self, connection: ClientConnection, data: bytes) -> None:
        sent = 0
        if not connection.unsent:
            try:
                sent = connection.send(data)
            except BlockingIOError:
                pass
            except OSError:
                self._drop(connection)
                return
            if sent == len(data):
                return
            self._epoll.modify(connection.descriptor, _OUT)
            connection.is_plain = False
        connection.unsent += memoryview(data)[sent:]
        self._kept_bytes += len(data) - sent
        self._check_room()

    def _send_more(self, connection: ClientConnection) -> None:
        """A client has read some of its answers, or is gone."""
        unsent = connection.unsent
        try:
            with memoryview(unsent) as view:
                sent = connection.send(view[:SEND_BYTES])
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)
            return
        del unsent[:sent]
        self._kept_bytes -= sent
        if not unsent:
            self._epoll.modify(connection.descriptor, _IN)
            self._again[connection] = None  # What it asked for meanwhile.

    def _check_room(self) -> None:
        """If too much is kept for all of them, let the one go that most of it is kept for."""
        if self._kept_bytes > BYTES_MAX:
            most = max(self.connections.values(), key=ClientConnection.kept_bytes)
            self._expel(most, f"requests and answers of more than {BYTES_MAX} bytes in all")

    def _expel(self, connection: ClientConnection, problem: str) -> None:
        if connection.number not in self.connections:
            return
        text = f"the store for the workers closed the connection of {connection}: {problem}"
        if connection.requests.validated:
            self._warn(text)
        else:
            console.debug(text)  # Whoever it is, it is none of the workers.
        self._drop(connection)

    def _drop(self, connection: ClientConnection) -> None:
        """Close a connection and forget its client."""
        if connection.number not in self.connections:
            return
        self._shut(connection)
        self._space.leave(connection.number)
        if self._space.woken:
            self._wake_others(None, [])
        self._room_again()

    def _shut(self, connection: ClientConnection) -> None:
        del self.connections[connection.number]
        del self._by_descriptor[connection.descriptor]
        self._half_open.pop(connection, None)
        self._again.pop(connection, None)
        self._kept_bytes -= connection.kept_bytes()
        # A copy in a process that was forked just now would keep it there otherwise.
        self._epoll.unregister(connection.descriptor)
        _hang_up(connection.socket)

    # All connections

    def _patience(self) -> float:
        """How long nothing has to be done, if nobody sends anything; negative for ever."""
        if self._again:
            return 0
        until = self._accept_at
        if self._promises_at is not None:
            until = self._promises_at if until is None else min(until, self._promises_at)
        if self._half_open:
            oldest = next(iter(self._half_open)).since + VALIDATE_S
            until = oldest if until is None else min(until, oldest)
        return -1 if until is None else max(0.0, until - time.monotonic())

    def _tend(self, now: float) -> None:
        while self._half_open:
            oldest = next(iter(self._half_open))
            if now - oldest.since < VALIDATE_S:
                break
            self._expel(oldest, f"it said nothing within {VALIDATE_S:g} s")
        if self._accept_at is not None and now >= self._accept_at:
            self._accept_at = None
            self._epoll.modify(self._listener.fileno(), _IN)
        if self._promises_at is not None and now >= self._promises_at:
            self._promises_at = None
            self._space.end_old_promises()
            self._wake_others(None, [])
        if self._promises_at is None and self._space.promises:
            self._promises_at = now + PROMISE_S

    def _accept(self) -> None:
        now = time.monotonic()
        for _ in range(ACCEPTED_AT_ONCE):
            if not self._may_accept(now):
                return
            try:
                descriptor, address = self._listener._accept()  # type: ignore[attr-defined]
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _GONE or (error.errno == errno.EMFILE and self._raise_limit()):
                    continue
                self._warn(
                    "the store for the workers cannot take another connection now: "
                    f"{error.strerror} ({os.getpid()} is the process)"
                )
                self._pause(now + NO_ROOM_S)
                return
            self._welcome(socket.socket(fileno=descriptor), address, now)

    def _welcome(self, peer: socket.socket, address: object, now: float) -> None:
        peer.setblocking(False)  # noqa: FBT003 (the name says it)
        connection = ClientConnection(self._numbers, peer, address, now)
        self._numbers += 1
        if len(self.connections) >= self._connections_max:
            limit = f"{self._connections_max} connections (ulimit -Hn of the agent sets the limit)"
            self._warn(f"the store for the workers has no room for {connection}: it has {limit}")
            peer.close()
            return
        try:
            self._epoll.register(connection.descriptor, _IN)
        except OSError as error:  # The kernel has no memory for it, or a limit of its own.
            self._warn(f"the store for the workers cannot serve {connection}: {error.strerror}")
            peer.close()
            return
        self.connections[connection.number] = connection
        self._by_descriptor[connection.descriptor] = connection
        if len(self._half_open) >= HALF_OPEN_MAX:
            oldest = next(iter(self._half_open))
            self._expel(oldest, "it said nothing yet, and others want to connect")
        self._half_open[connection] = None

    def _may_accept(self, now: float) -> bool:
        """Whether there is room for one more, which is half open at first.

        If the oldest that is half open had its time, it goes then.
        """
        in_all = sum(len(loop.connections) for loop in _loops)
        if in_all >= self._connections_max:
            self._raise_limit()
        if len(self.connections) < self._connections_max <= in_all:
            self._warn(
                "the store for the workers cannot take another connection now: with those of the "
                f"generation before there are {in_all} (ulimit -Hn of the agent sets the limit)"
            )
            self._pause(now + NO_ROOM_S)
            return False
        if len(self._half_open) < HALF_OPEN_MAX:
            return True
        oldest = next(iter(self._half_open))
        if now - oldest.since < HALF_OPEN_MIN_S:
            self._pause(oldest.since + HALF_OPEN_MIN_S)
            return False
        return True

    def _raise_limit(self) -> bool:
        is_higher = raise_descriptor_limit()
        self._connections_max = _connections_possible()
        return is_higher

    def _pause(self, until: float) -> None:
        self._accept_at = until
        self._epoll.modify(self._listener.fileno(), 0)

    def _room_again(self) -> None:
        if self._accept_at is not None:
            self._accept_at = 0.0

    def _warn(self, text: str) -> None:
        self._warnings += 1
        (console.warning if self._warnings <= WARNINGS_MAX else console.debug)(text)


def _connections_possible() -> int:
    limit = descriptor_limit()
    return min(CONNECTIONS_MAX, limit - min(DESCRIPTORS_LEFT, limit // 2))


def _hang_up(peer: socket.socket) -> None:
    """Close a connection, even if a process that was forked just now has a copy of it."""
    try:
        peer.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # The client was first.
    peer.close()
