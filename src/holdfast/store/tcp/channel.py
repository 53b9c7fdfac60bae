"""One connection to a TCPStore server: requests go out, answers are read, all by a deadline.

The one thing to know: answers carry no number, they only come in order. So a connection on which
anything went wrong, time being over included, is of no use any more: the answer that comes late
would be taken for that of the next request. Whoever catches an error of these methods closes it.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import time

from holdfast.net.addresses import check_not_itself, resolve_within
from holdfast.net.endpoints import format_endpoint
from holdfast.store.errors import DistNetworkError, StoreTimeoutError
from holdfast.store.tcp import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.net.addresses import Address


ANSWER_BYTES_MAX = 1 << 30
"""No value is larger. Values above the limit of one request come of many APPENDs."""
READ_BYTES = 1 << 16
POLL_S_MAX = 3600.0  # The kernel takes 32 bits of milliseconds; a deadline may be further away.

# A server whose host is gone without a word is found out after about two minutes of waiting.
KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 60),
    (socket.TCP_KEEPINTVL, 15),
    (socket.TCP_KEEPCNT, 4),
)

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")


class DeadlinePassed(Exception):
    """The deadline passed; the kernel's own `TimeoutError` is a loss of the connection instead."""


class InvalidResponse(Exception):
    """What was answered is not what the protocol says; the message says what it was."""


class Connection:
    """A connected socket and what was read ahead from it."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.deadline = deadline
        """When to give up, by `time.monotonic`; set it before every request."""
        self._socket = sock
        self._unread = bytearray()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        sock.setblocking(False)  # noqa: FBT003 (the name says it)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def ask(self, request: bytes) -> None:
        """Send a request; raise `OSError` if the server is known to be gone.

        Not all requests are answered, so this look is all that tells of a loss in time.
        """
        try:
            ahead = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            pass
        else:
            if not ahead:
                raise _hung_up()
            self._unread += ahead
        self.finish()
        self.send(request)

    def send(self, request: bytes) -> None:
        """Send bytes, whatever may be there to be read."""
        rest = memoryview(request)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                writable = select.poll()
                writable.register(self._socket, select.POLLOUT)
                self._sleep(writable)

    def finish(self) -> None:
        """Raise `InvalidResponse` if there is more than what was asked for."""
        if self._unread:
            raise InvalidResponse(f"{len(self._unread)} bytes that nobody asked for")

    def read(self, count: int) -> bytes:
        """Return exactly so many bytes, or raise `DeadlinePassed` or `OSError`."""
        unread = self._unread
        while len(unread) < count:
            self._sleep(self._readable)
            try:
                more = self._socket.recv(max(READ_BYTES, min(count - len(unread), 1 << 20)))
            except BlockingIOError:
                continue
            if not more:
                raise _hung_up()
            unread += more
        taken = bytes(unread[:count])
        del unread[:count]
        return taken

    def u8(self) -> int:
        """Read one byte."""
        return self.read(1)[0]

    def u32(self) -> int:
        """Read a number of 4 bytes."""
        return int(_U32.unpack(self.read(4))[0])

    def i64(self) -> int:
        """Read a number of 8 bytes, which may be below 0."""
        return int(_I64.unpack(self.read(8))[0])

    def count(self, most: int) -> int:
        """Read how many of something there are."""
        number = self.i64()
        if not 0 <= number <= most:
            raise InvalidResponse(f"the number {number}, where one from 0 to {most} was expected")
        return number

    def blob(self) -> bytes:
        """Read a value."""
        size = int(_U64.unpack(self.read(8))[0])
        if size > ANSWER_BYTES_MAX:
            raise InvalidResponse(f"a value of {size} bytes")
        return self.read(size)

    def abort(self) -> None:
        """Make whoever reads from it in another thread stop with `ConnectionError`."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # It is lost already.

    def close(self) -> None:
        """Close it. A process forked from this one keeps its own descriptor of it."""
        self._socket.close()

    def _sleep(self, poll: select.poll) -> None:
        left = self.deadline - time.monotonic()
        # What is there already is taken, however late it is: this process may have been stopped.
        ready = poll.poll(math.ceil(min(max(left, 0.0), POLL_S_MAX) * 1000))
        if not ready and time.monotonic() >= self.deadline:
            raise DeadlinePassed("time is over")


def _hung_up() -> ConnectionError:
    return ConnectionResetError("the server closed the connection")


# Reaching a TCPStore server: names are resolved, addresses tried, and all of it again until then.
#
# A server may come up after its clients, and its name may be known later still, so every failure
# is
# tried again after a pause that grows. The one thing to know: a server that takes the connection
# and
# says nothing is frozen, and told of as one that does not answer; a new attempt would not help it.


PAUSE_S_MIN = 0.02
PAUSE_S_MAX = 1.0
PAUSE_GROWTH = 1.7
ATTEMPT_S_MAX = 5.0
"""How long one address may take to take the connection; then the next gets its turn."""

NO_TIME = "there was no time to try"


def connect(host: str, port: int, deadline: float, timeout_s: float, about: str) -> Connection:
    """Return a connection on which the server has answered, by the deadline.

    Raises `DistNetworkError` with all addresses that were tried, or if somebody else answers, and
    `StoreTimeoutError` if nobody does on a connection. These messages begin with `about`, which
    says what the connection is for, and tell `timeout_s`.
    """
    where = format_endpoint(host, port)
    pause = PAUSE_S_MIN
    problems = {where: NO_TIME}
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
                if left <= 0:  # What was wrong when there was time says more.
                    problems[place] = before.get(place, NO_TIME)
                    continue
                attempt_s = min(ATTEMPT_S_MAX, left / (len(found) - number))
                try:
                    return _greeted(_open_socket(one, attempt_s), deadline, timeout_s, about)
                except StoreTimeoutError:
                    raise  # It is an OSError too.
                except OSError as problem:
                    problems[place] = _reason(problem)
        jitter = 0.5 + os.urandom(1)[0] / 255
        time.sleep(max(0.0, min(pause * jitter, deadline - time.monotonic())))
        pause = min(pause * PAUSE_GROWTH, PAUSE_S_MAX)


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


def _greeted(sock: socket.socket, deadline: float, timeout_s: float, about: str) -> Connection:
    """Say hello, and return the connection when it was answered."""
    nonce = protocol.own_nonce()
    try:
        connection = Connection(sock, deadline)
        connection.send(protocol.hello(nonce))
        echo = connection.u32()
        if echo != nonce:
            raise InvalidResponse(f"PING {nonce:#x} with {echo:#x}")
        connection.finish()
    except InvalidResponse as problem:
        sock.close()
        raise DistNetworkError(
            f"{about}: what listens there is no TCPStore: it answered {problem}"
        ) from None
    except DeadlinePassed:
        sock.close()
        raise StoreTimeoutError(
            f"{about}: the server took the connection, but did not answer within {timeout_s:g} s; "
            "its process is stopped or overloaded, or it is no TCPStore"
        ) from None
    except BaseException:
        sock.close()
        raise
    return connection


def _unreachable(about: str, timeout_s: float, problems: dict[str, str]) -> DistNetworkError:
    tried = "; ".join(f"{address}: {reason}" for address, reason in problems.items())
    return DistNetworkError(
        f"{about}: the server could not be reached within {timeout_s:g} s ({tried})"
    )


def _reason(problem: Exception) -> str:
    if isinstance(problem, TimeoutError) and not problem.args[1:]:
        return str(problem) if problem.args else "no answer"
    return getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
