"""A web server for figures and probes: one short question, one answer, and the connection ends.

The one thing to know: whoever connects may be anybody, and gets no more of us than is written here.
A request has `REQUEST_BYTES_MAX`, an exchange `EXCHANGE_S` from the first byte to the last, and
when one more comes than there may be, the oldest has to go. All of it happens in one thread that
never waits for a single client, so that one that is slow or talks nonsense is nobody's trouble.
"""

from __future__ import annotations

import errno
import select
import socket
import threading
import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.errors import EnvironmentProblem

if TYPE_CHECKING:
    from collections.abc import Callable

    Answer = tuple[int, str, bytes]
    """A status, the type of what comes with it, and that itself."""

REQUEST_BYTES_MAX = 8 * 1024
CONNECTIONS_MAX = 32
EXCHANGE_S = 5.0
"""From the connection until it is closed; where nothing is wrong that takes milliseconds."""
NO_ROOM_S = 0.2  # The wait when this process has no descriptor left.
STOP_S = 5.0  # How long `close` waits for the thread; only an `answer` that hangs needs it all.
READ_BYTES = 4096
BACKLOG = 128

PLAIN = "text/plain; charset=utf-8"
REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}


class HttpServer:
    """Answers GET and HEAD from `start` until `close`.

    `answer` gets the path, without what comes after a `?`, and returns status, content type and
    body. It is called in the server's thread, and must not wait: meanwhile nobody is served. One
    that raises is told of once, and whoever asked gets a 500. `name` is how the person knows it,
    and `host_name` what the person calls the host, if there is a choice.
    """

    def __init__(
        self,
        host: str,
        port: int,
        answer: Callable[[str], Answer],
        *,
        name: str = "http",
        host_name: str = "",
    ) -> None:
        self.host = host
        self.port = port
        """Where it listens; 0 until `start` chooses one that is free."""
        self._answer = answer
        self._name = name
        self._host_name = host_name
        self._listener: socket.socket | None = None
        self._lifeline: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._blamed = False

    def start(self) -> None:
        """Listen, and serve from now on; raise `EnvironmentProblem` if that cannot be."""
        if self._thread is not None:
            return
        try:
            listener = _listen(self.host, self.port)
        except OSError as problem:
            bad_host = isinstance(problem, socket.gaierror) or problem.errno == errno.EADDRNOTAVAIL
            if bad_host and self._host_name:
                raise EnvironmentProblem(
                    f"{self._host_name}: cannot listen at {self.host}: "
                    f"{problem.strerror or problem}",
                    hint="give an address of this host, or leave it out",
                ) from None
            raise EnvironmentProblem(
                f"{self._name}: cannot listen at {self.host or '*'}, port {self.port}: "
                f"{problem.strerror or problem}",
                hint="free the port, choose another, or 0 for any that is free",
            ) from None
        self.port = listener.getsockname()[1]
        self._lifeline, lifeline = socket.socketpair()
        serving = _Serving(listener, lifeline, self._respond)
        self._listener = listener
        self._thread = threading.Thread(
            target=serving.run, name=f"holdfast-{self._name.strip('-')}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End every exchange and free the port. May be called at any time, also twice."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        assert self._listener is not None
        assert self._lifeline is not None
        _hang_up(self._lifeline)  # The thread sees that, and closes all that it has.
        thread.join(STOP_S)
        if thread.is_alive():  # It hangs in `answer`: nobody new comes to it, at least.
            _shut(self._listener)

    def _respond(self, head: bytes) -> bytes:
        """Return all that is sent for a request."""
        method, path, status = _understand(head)
        if status:
            return _response(status, PLAIN, f"{REASONS[status]}\n".encode())
        try:
            found = self._answer(path)
        except Exception as problem:  # noqa: BLE001 (a figure that fails must not end the server)
            if not self._blamed:
                self._blamed = True
                console.warning(f"{self._name}: {path}: {type(problem).__name__}: {problem}")
            found = 500, PLAIN, b"Internal Server Error\n"
        return _response(*found, with_body=method != "HEAD")


def _understand(head: bytes) -> tuple[str, str, int]:
    """Return the method and the path of a request, and a status if it is to be refused."""
    words = head.split(b"\n", 1)[0].rstrip(b"\r").split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/"):
        return "", "", 400
    method, target, version = words
    if version not in (b"HTTP/1.1", b"HTTP/1.0"):
        return "", "", 505
    if method not in (b"GET", b"HEAD"):
        return "", "", 405
    if not target.startswith(b"/") or any(not 0x21 <= one <= 0x7E for one in target):
        return "", "", 400
    return method.decode(), target.partition(b"?")[0].decode(), 0


def _response(status: int, kind: str, body: bytes, *, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}\r\n"
        f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        + ("Allow: GET, HEAD\r\n" if status == 405 else "")
        + "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (body if with_body else b"")


class _Exchange:
    """One connection: first its request is read, then the answer is sent, then it hangs up."""

    __slots__ = ("request", "since", "socket", "unsent")

    def __init__(self, peer: socket.socket, since: float) -> None:
        self.socket = peer
        self.since = since
        self.request = bytearray()
        self.unsent: memoryview | None = None
        """What is left of the answer; None while there is none, empty once all is sent."""


class _Serving:
    """The thread: the listening socket and the exchanges, the oldest first."""

    def __init__(
        self,
        listener: socket.socket,
        lifeline: socket.socket,
        respond: Callable[[bytes], bytes],
    ) -> None:
        self._listener = listener
        self._lifeline = lifeline
        self._respond = respond
        self._poll = select.poll()
        self._exchanges: dict[int, _Exchange] = {}
        self._accept_at: float | None = None

    def run(self) -> None:
        self._poll.register(self._lifeline, select.POLLIN)
        self._poll.register(self._listener, select.POLLIN)
        try:
            while self._turn():
                pass
        finally:
            for number in [*self._exchanges]:
                self._end(number)
            self._lifeline.close()
            _hang_up(self._listener)

    def _turn(self) -> bool:
        """Serve whoever can be served now, or wait until someone can be; false is the end."""
        wants_in = False
        for descriptor, _ in self._poll.poll(self._patience_ms()):
            if descriptor == self._lifeline.fileno():
                return False
            elif descriptor in self._exchanges:
                self._serve(descriptor)
            else:
                wants_in = True
        now = time.monotonic()
        for number, exchange in [*self._exchanges.items()]:
            if now - exchange.since < EXCHANGE_S:
                break
            self._end(number)
        if self._accept_at is not None and now >= self._accept_at:
            self._accept_at = None
            self._poll.modify(self._listener, select.POLLIN)
        if wants_in:
            self._accept(now)
        return True

    def _patience_ms(self) -> float | None:
        until = self._accept_at
        for exchange in self._exchanges.values():
            end = exchange.since + EXCHANGE_S
            until = end if until is None else min(until, end)
            break
        return None if until is None else max(0.0, until - time.monotonic()) * 1000 + 1

    def _accept(self, now: float) -> None:
        """Let one in, so that those who are here have their turn before the next."""
        try:
            peer, _ = self._listener.accept()
        except OSError as problem:
            if problem.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._accept_at = now + NO_ROOM_S
                self._poll.modify(self._listener, 0)
            return
        if len(self._exchanges) >= CONNECTIONS_MAX:
            self._end(next(iter(self._exchanges)))
        peer.setblocking(False)  # noqa: FBT003 (the name says it)
        number = peer.fileno()
        self._exchanges[number] = _Exchange(peer, now)
        self._poll.register(number, select.POLLIN)
        self._serve(number)

    def _serve(self, number: int) -> None:
        exchange = self._exchanges[number]
        try:
            if exchange.unsent:
                self._send(number, exchange)
            else:
                self._read(number, exchange)
        except BlockingIOError:
            pass  # It will be told of when there is more.
        except OSError:
            self._end(number)

    def _read(self, number: int, exchange: _Exchange) -> None:
        data = exchange.socket.recv(READ_BYTES)
        if not data:
            self._end(number)
        elif exchange.unsent is None:
            request = exchange.request
            request += data
            ends = [at for at in (request.find(b"\r\n\r\n"), request.find(b"\n\n")) if at >= 0]
            if ends:
                answer = self._respond(bytes(request[: min(ends)]))
            elif len(request) >= REQUEST_BYTES_MAX:
                answer = _response(431, PLAIN, b"Request Header Fields Too Large\n")
            else:
                return
            exchange.unsent = memoryview(answer)
            self._send(number, exchange)

    def _send(self, number: int, exchange: _Exchange) -> None:
        assert exchange.unsent is not None
        try:
            exchange.unsent = exchange.unsent[exchange.socket.send(exchange.unsent) :]
        except BlockingIOError:
            pass
        if exchange.unsent:
            self._poll.modify(number, select.POLLOUT)
        else:
            # Only once the client is done as well is it closed: what it still sends would
            # otherwise make the kernel throw away an answer that is on its way.
            exchange.socket.shutdown(socket.SHUT_WR)
            self._poll.modify(number, select.POLLIN)

    def _end(self, number: int) -> None:
        self._poll.unregister(number)
        _hang_up(self._exchanges.pop(number).socket)


def _listen(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    family, _, _, _, address = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)  # noqa: FBT003 (the name says it)
    except BaseException:
        listener.close()
        raise
    return listener


def _hang_up(peer: socket.socket) -> None:
    """Close a socket, even if a process that was forked just now has a copy of it."""
    _shut(peer)
    peer.close()


def _shut(peer: socket.socket) -> None:
    try:
        peer.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # The other side was first.
