"""A client's connection to a TCPStore server, and the `Channel` that opens and reopens it.

Responses carry no number; they arrive in the order of the requests. So after any failure, including an expired
deadline, a connection is unusable: a late response would be taken for that of the next request. `Channel`
closes it, the call raises, and the next call reconnects. A failed call is never repeated, since the server
may have received it.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import threading
import time
import weakref
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.net.addresses import check_not_itself, keep_alive, resolve_within
from holdfast.net.endpoints import format_endpoint
from holdfast.store.memory_store import named
from holdfast.store.store_errors import (
    DistError,
    DistNetworkError,
    DistStoreError,
    SilentServerError,
    StoreTimeoutError,
)
from holdfast.store.tcp import tcp_protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from holdfast.net.addresses import Address
    from holdfast.store.tcp.embedded import SharedServer

    Result = TypeVar("Result")

RESPONSE_BYTES_MAX = 1 << 30
"""Limit of one value. Many APPENDs can make a value larger than one request."""
READ_BYTES = 1 << 16
POLL_S_MAX = 3600.0  # poll() takes 32 bits of milliseconds; a deadline may be further away.


CONNECT_PAUSE_S_MIN = 0.02
CONNECT_PAUSE_S_MAX = 1.0
CONNECT_PAUSE_GROWTH = 1.7
ATTEMPT_S_MAX = 5.0
"""The limit for one address to accept the connection; then the next address is tried."""
NOT_TRIED = "not tried in time"

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")


class DeadlinePassed(Exception):
    """The deadline passed. (`TimeoutError` is the kernel's, for a lost connection.)"""


class InvalidResponse(Exception):
    """The server's response violates the protocol; the message says how."""


class WaitTimedOut(Exception):
    """A wait timed out, as the message says; the connection is still usable."""


class Connection:
    """A connected socket and the bytes read ahead from it."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.deadline = deadline
        """When to give up, by `time.monotonic`; set it before every request."""
        self._socket = sock
        self._unread = bytearray()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        sock.setblocking(False)  # noqa: FBT003 (the name says it)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)

    def request(self, request: bytes) -> None:
        """Send a request; raise `OSError` if the connection is known to be lost.

        Not all requests have a response, so only this check notices a loss in time.
        """
        try:
            ahead = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            pass
        else:
            if not ahead:
                raise _closed_by_server()
            self._unread += ahead
        self.expect_no_more()
        self.send(request)

    def send(self, request: bytes) -> None:
        """Send bytes, without checking for unread data."""
        rest = memoryview(request)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                writable = select.poll()
                writable.register(self._socket, select.POLLOUT)
                self._sleep(writable)

    def expect_no_more(self) -> None:
        """Raise `InvalidResponse` if the server sent more than the response."""
        if self._unread:
            raise InvalidResponse(f"{len(self._unread)} bytes more than expected")

    def read(self, count: int) -> bytes:
        """Return exactly `count` bytes, or raise `DeadlinePassed` or `OSError`."""
        unread = self._unread
        while len(unread) < count:
            self._sleep(self._readable)
            try:
                more = self._socket.recv(max(READ_BYTES, min(count - len(unread), 1 << 20)))
            except BlockingIOError:
                continue
            if not more:
                raise _closed_by_server()
            unread += more
        taken = bytes(unread[:count])
        del unread[:count]
        return taken

    def u8(self) -> int:
        return self.read(1)[0]

    def u32(self) -> int:
        return int(_U32.unpack(self.read(4))[0])

    def i64(self) -> int:
        return int(_I64.unpack(self.read(8))[0])

    def count(self, most: int) -> int:
        number = self.i64()
        if not 0 <= number <= most:
            raise InvalidResponse(f"{number} where a count from 0 to {most} was expected")
        return number

    def blob(self) -> bytes:
        size = int(_U64.unpack(self.read(8))[0])
        if size > RESPONSE_BYTES_MAX:
            raise InvalidResponse(f"a value of {size} bytes")
        return self.read(size)

    def abort(self) -> None:
        """Make a read in another thread fail with `ConnectionError`."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # It is closed already.

    def close(self) -> None:
        """Close it. A forked child keeps its own descriptor."""
        self._socket.close()

    def _sleep(self, poll: select.poll) -> None:
        left = self.deadline - time.monotonic()
        # Data that has arrived is read even after the deadline: this process may have been stopped.
        ready = poll.poll(math.ceil(min(max(left, 0.0), POLL_S_MAX) * 1000))
        if not ready and time.monotonic() >= self.deadline:
            raise DeadlinePassed


def _closed_by_server() -> ConnectionError:
    return ConnectionResetError("the server closed the connection")


# Connecting.


def connect(host: str, port: int, deadline: float, timeout_s: float, about: str) -> Connection:
    """Return a connection on which the server has responded, by the deadline.

    A server may start after its clients, and its name may resolve even later, so every failure is retried after a
    growing pause. Raises `DistNetworkError` with all tried addresses, or if the server is not a TCPStore. Raises
    `SilentServerError` if the server accepts and does not respond (it is frozen; a retry would not help).
    The messages begin with `about`.
    """
    where = format_endpoint(host, port)
    pause = CONNECT_PAUSE_S_MIN
    problems = {where: NOT_TRIED}
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise _unreachable(about, timeout_s, problems)
        try:
            found = resolve_within(host, port, left)
        except OSError as problem:
            problems = {where: _reason(problem)}
        else:
            before, problems = problems, {}
            for number, one in enumerate(found):
                place = format_endpoint(*one.sockaddr[:2])
                left = deadline - time.monotonic()
                if left <= 0:  # The problem of an earlier attempt is more useful.
                    problems[place] = before.get(place, NOT_TRIED)
                    continue
                attempt_s = min(ATTEMPT_S_MAX, left / (len(found) - number))
                try:
                    return _handshake(_open_socket(one, attempt_s), deadline, timeout_s, about)
                except StoreTimeoutError:
                    raise  # It is an OSError too.
                except OSError as problem:
                    problems[place] = _reason(problem)
        jitter = 0.5 + os.urandom(1)[0] / 255
        time.sleep(max(0.0, min(pause * jitter, deadline - time.monotonic())))
        pause = min(pause * CONNECT_PAUSE_GROWTH, CONNECT_PAUSE_S_MAX)


def _open_socket(address: Address, timeout_s: float) -> socket.socket:
    sock = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(address.sockaddr)
        check_not_itself(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def _handshake(sock: socket.socket, deadline: float, timeout_s: float, about: str) -> Connection:
    nonce = tcp_protocol.own_nonce()
    try:
        connection = Connection(sock, deadline)
        connection.send(tcp_protocol.encode_hello(nonce))
        echo = connection.u32()
        if echo != nonce:
            raise InvalidResponse(f"{echo:#x} to PING {nonce:#x}")
        connection.expect_no_more()
    except InvalidResponse as problem:
        sock.close()
        raise DistNetworkError(f"{about}: not a TCPStore: it responded {problem}") from None
    except DeadlinePassed:
        sock.close()
        raise SilentServerError(
            f"{about}: the server accepted the connection, but did not respond within "
            f"{timeout_s:g} s; its process is stopped or overloaded, or it is not a TCPStore"
        ) from None
    except BaseException:
        sock.close()
        raise
    return connection


def _unreachable(about: str, timeout_s: float, problems: dict[str, str]) -> DistNetworkError:
    tried = "; ".join(f"{address}: {reason}" for address, reason in problems.items())
    return DistNetworkError(f"{about}: cannot reach the server within {timeout_s:g} s ({tried})")


def _reason(problem: OSError) -> str:
    if isinstance(problem, TimeoutError) and not problem.args[1:]:
        return str(problem) if problem.args else "no response"
    return problem.strerror or str(problem) or type(problem).__name__


# The channel.


class Channel:
    """Connects on first use, and reconnects after a loss; one call at a time."""

    def __init__(self, host: str, port: int, server: SharedServer | None) -> None:
        self.where = format_endpoint(host, port)
        self.server = server
        self._address = server.address if server else host
        self._port = port
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._lost = ""  # Why the last connection was closed.
        self._closed = False
        _channels.add(self)

    def call(
        self,
        operation: str,
        keys: Sequence[str],
        exchange: Callable[[Connection], Result],
        timeout_s: float,
    ) -> Result:
        """Run `exchange` on the connection, and return its result.

        Raises `DistNetworkError` for a lost connection, `StoreTimeoutError` when time is up, and
        `DistStoreError` for an invalid response. Calls of other threads wait until this one ends.
        """
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)):
            raise StoreTimeoutError(
                f"{self._about(operation, keys)}: another thread used the store for {timeout_s:g} s"
            )
        try:
            connection = self._connection
            if connection is None or self._closed:
                connection = self._connect(deadline, timeout_s, self._about(operation, keys))
            connection.deadline = deadline
            result = exchange(connection)
            connection.expect_no_more()
        except WaitTimedOut as problem:
            raise StoreTimeoutError(
                f"{self._about(operation)}: {problem} within {timeout_s:g} s"
            ) from None
        except BaseException as problem:
            # After any exception, also KeyboardInterrupt, a response may still be in transit.
            self._give_up()
            failure = self._failure(problem, self._about(operation, keys), timeout_s)
            if failure is None:
                raise
            raise failure from None
        finally:
            self._lock.release()
            if self._closed:
                self._drop_if_unused()
        return result

    def close(self) -> None:
        """Close the connection permanently, also during a call, and release the server."""
        self._closed = True
        connection = self._connection
        if not self._drop_if_unused() and connection is not None:
            connection.abort()  # The call in progress fails and drops the connection.
        server, self.server = self.server, None
        if server is not None:
            server.release()

    def forget_after_fork(self) -> None:
        """Reset in a forked child: the connection, the server and the lock's holder belong to the parent.

        Only the descriptor is closed, so the parent is unaffected.
        """
        self._lock = threading.Lock()
        self._drop()
        self._lost = ""
        self.server = None

    def _connect(self, deadline: float, timeout_s: float, about: str) -> Connection:
        if not self._closed:
            if self._lost:
                console.info(f"reconnecting to the store at {self.where}: {self._lost}")
            self._connection = connect(self._address, self._port, deadline, timeout_s, about)
            self._lost = ""
        if self._connection is None or self._closed:
            raise self._is_closed()
        return self._connection

    def _drop_if_unused(self) -> bool:
        """Close the connection unless a call is using it; return whether it was closed.

        A call in progress closes the connection when it ends.
        """
        if not self._lock.acquire(blocking=False):
            return False
        self._drop()
        self._lock.release()
        return True

    def _give_up(self) -> None:
        if self._connection is not None:
            self._lost = "the last connection was closed after a failure"
            self._drop()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _failure(self, problem: BaseException, about: str, timeout_s: float) -> DistError | None:
        """Return the error to raise in place of `problem`; None to raise it as it is."""
        if self._closed and isinstance(problem, Exception):
            return self._is_closed()
        match problem:
            case DistError():
                return None
            case DeadlinePassed():
                self._lost = f"no response within {timeout_s:g} s"
                return StoreTimeoutError(f"{about}: {self._lost}")
            case OSError():
                self._lost = problem.strerror or str(problem)
                return DistNetworkError(f"{about}: {self._lost}")
            case InvalidResponse():
                self._lost = f"invalid response: {problem}"
                return DistStoreError(f"{about}: {self._lost}")
        return None

    def _is_closed(self) -> DistStoreError:
        return DistStoreError(f"the store at {self.where} is closed in this process")

    def _about(self, operation: str, keys: Sequence[str] = ()) -> str:
        of = f" of {named(keys)}" if keys else ""
        return f"the store at {self.where}{operation and f': {operation}'}{of}"


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _forget_after_fork() -> None:
    for channel in list(_channels):
        channel.forget_after_fork()


os.register_at_fork(after_in_child=_forget_after_fork)
