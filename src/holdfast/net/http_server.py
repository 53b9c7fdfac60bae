"""An HTTP server for health checks, metrics and control: one request and one response per connection.

Any client may connect, so these limits apply: the head of a request has at most `HEAD_BYTES_MAX`, and the server
limits the body. A request must arrive within `EXCHANGE_S`, and the client must read the response within the same
time. Above the limit of clients, the server closes the oldest connection of the address with the most
connections (`half_open`); connections whose response it is computing are exempt. One thread does all reading and
writing and never waits for a single client, so a slow client does not delay the others.

A server on loopback is for programs on its own host, not for web pages. The author of a page can make a name
resolve to 127.0.0.1 and then read what a browser receives from this server. So a server on loopback refuses
requests for a name that is not its own.

The server calls `respond` in its thread, so `respond` must not block. With `in_threads` each call has its own thread.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from holdfast import console
from holdfast.errors import EnvironmentProblem
from holdfast.net import addresses, listening
from holdfast.net.half_open import HalfOpen

if TYPE_CHECKING:
    from collections.abc import Callable

HEAD_BYTES_MAX = 8 * 1024
CONNECTIONS_MAX = 32
EXCHANGE_S = 5.0
"""The limit for a request to arrive, and for the client to read the response; usually both take milliseconds."""
NO_DESCRIPTOR_S = 0.2  # The pause when this process has no descriptor left.
STOP_S = 5.0  # How long `close` waits for the thread; only a hanging `respond` needs all of it.
READ_BYTES = 64 * 1024
BACKLOG = 128

PLAIN = "text/plain; charset=utf-8"
REASONS = {
    200: "OK",
    201: "Created",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    411: "Length Required",
    413: "Content Too Large",
    421: "Misdirected Request",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}

_serving: weakref.WeakSet[HttpServer] = weakref.WeakSet()


class HttpRequest(NamedTuple):
    """One valid request."""

    method: str
    path: str
    query: str = ""
    """The raw text after the first `?`."""
    body: bytes = b""
    host: str = ""
    """The requested host, with the port; empty if the request has none."""


class HttpResponse(NamedTuple):
    """The response to a request."""

    status: int
    content_type: str
    content: bytes


def listen_tcp(host: str, port: int, *, name: str, host_name: str = "") -> socket.socket:
    """Return a listening socket, on every address if `host` is empty; port 0 is any free one.

    Raises `EnvironmentProblem`; `name` and `host_name` are the user's settings for port and host.
    """
    try:
        found = addresses.resolve(host, port) if host else listening.wildcard_addresses(port)
        return listening.listen(found[:2], BACKLOG)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        if host_name and (
            isinstance(problem, socket.gaierror) or problem.errno == errno.EADDRNOTAVAIL
        ):
            raise EnvironmentProblem(
                f"{host_name}: cannot listen on {host}: {reason}",
                hint="set an address of this host, or leave it out",
            ) from None
        raise EnvironmentProblem(
            f"{name}: cannot listen on {host or '*'}, port {port}: {reason}",
            hint="free the port, choose another, or 0 for any free port",
        ) from None


class HttpServer:
    """Serves on a listening socket, which it owns, from its creation until `close`.

    If `respond` raises, the client receives a 500, and the first such error is reported. A connection that `admit`
    rejects is closed without a response. A method that is not in `methods` receives a 405, and a body larger than
    `body_bytes_max` a 413. A server on loopback accepts requests for `host_name`, `localhost` and addresses;
    other names receive a 421.
    """

    def __init__(
        self,
        listener: socket.socket,
        respond: Callable[[HttpRequest], HttpResponse],
        *,
        name: str = "http",
        methods: tuple[str, ...] = ("GET", "HEAD"),
        body_bytes_max: int = 0,
        connections_max: int = CONNECTIONS_MAX,
        in_threads: bool = False,
        admit: Callable[[socket.socket], bool] | None = None,
        host_name: str = "",
    ) -> None:
        self._listener = listener
        self._host_names = ("localhost", host_name.lower()) if _is_loopback(listener) else None
        self._respond = respond
        self._name = name
        self._methods = methods
        self._body_bytes_max = body_bytes_max
        self._connections_max = connections_max
        self._in_threads = in_threads
        self._admit = admit
        self._fault_reported = False
        self._exchanges: dict[int, _Exchange] = {}  # By descriptor.
        # All except those with a running `respond` thread.
        self._unanswered = HalfOpen(connections_max)
        self._accept_at: float | None = None
        # Filled by threads of `in_threads`.
        self._answered: deque[tuple[_Exchange, bytes]] = deque()
        self._finish_by: float | None = None  # Set when the server closes.
        self._wakes, self._wake = socket.socketpair()
        self._poll = select.poll()
        listener.setblocking(False)  # noqa: FBT003 (the name says it)
        self._thread = threading.Thread(
            target=self._run, name=f"holdfast-{name.strip('-')}", daemon=True
        )
        _serving.add(self)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._listener.getsockname()[1])

    def close(self, finish_s: float = 0.0) -> None:
        """Stop accepting, end all exchanges, and release the port; may be called twice.

        Exchanges in progress have `finish_s` to finish.
        """
        if self not in _serving:
            return
        _serving.discard(self)
        self._finish_by = time.monotonic() + finish_s
        self._wake_up()
        if self._thread is not threading.current_thread():
            self._thread.join(finish_s + STOP_S)
        if self._thread.is_alive():  # `respond` hangs; at least refuse new clients.
            _shut(self._listener, socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Close a forked child's copies: they would keep the sockets open after the parent closes them."""
        self._listener.close()
        self._wakes.close()
        self._wake.close()
        for exchange in self._exchanges.values():
            exchange.socket.close()

    # In the thread.

    def _run(self) -> None:
        self._poll.register(self._wakes, select.POLLIN)
        self._poll.register(self._listener, select.POLLIN)
        try:
            while self._turn():
                pass
        finally:
            for exchange in [*self._exchanges.values()]:
                self._end(exchange)
            _close(self._listener)
            self._wakes.close()
            self._wake.close()

    def _turn(self) -> bool:
        """Serve every client that is ready, or wait for one; return False at the end."""
        can_accept = False
        for descriptor, _ in self._poll.poll(self._timeout_ms()):
            if descriptor == self._wakes.fileno():
                self._wakes.recv(READ_BYTES)
            elif descriptor in self._exchanges:
                self._serve(self._exchanges[descriptor])
            else:
                can_accept = True
        while self._answered:
            exchange, response = self._answered.popleft()
            if exchange.socket.fileno() in self._exchanges:
                self._start_sending(exchange, response)
        now = time.monotonic()
        for exchange in [*self._exchanges.values()]:
            if exchange.deadline is not None and now >= exchange.deadline:
                self._end(exchange)
        if self._finish_by is not None:
            for exchange in [*self._exchanges.values()]:
                if exchange.unsent is None and exchange.deadline is not None:
                    self._end(exchange)  # It has not sent a request yet.
            return bool(self._exchanges) and now < self._finish_by
        if self._accept_at is not None and now >= self._accept_at:
            self._accept_at = None
            self._poll.modify(self._listener, select.POLLIN)
        if can_accept:
            self._accept(now)
        return True

    def _timeout_ms(self) -> float | None:
        times = [one.deadline for one in self._exchanges.values() if one.deadline is not None]
        times += [one for one in (self._accept_at, self._finish_by) if one is not None]
        return max(0.0, min(times) - time.monotonic()) * 1000 + 1 if times else None

    def _accept(self, now: float) -> None:
        """Accept only one connection, so that open connections are served before the next one."""
        try:
            client, where = self._listener.accept()
        except OSError as problem:
            if problem.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._accept_at = now + NO_DESCRIPTOR_S
                self._poll.modify(self._listener, 0)
            return
        if self._admit is not None and not self._admit(client):
            client.close()
            return
        client.setblocking(False)  # noqa: FBT003 (the name says it)
        address = where[0] if isinstance(where, tuple) else ""  # A socket file's clients have none.
        exchange = _Exchange(client, address, now + EXCHANGE_S)
        if len(self._exchanges) >= self._connections_max and self._unanswered.since:
            oldest, _ = self._unanswered.next_to_close()
            self._end(oldest)
        # The closed connection may itself have been above the limit, so there may still be no room.
        full = len(self._exchanges) >= self._connections_max
        self._exchanges[client.fileno()] = exchange
        self._unanswered.add(exchange, exchange.address, now)
        self._poll.register(client, select.POLLIN)
        if full:
            self._start_sending(exchange, _failure(503))
        else:
            self._serve(exchange)

    def _serve(self, exchange: _Exchange) -> None:
        try:
            if exchange.unsent:
                self._send(exchange)
            else:
                self._read(exchange)
        except BlockingIOError:
            pass  # The rest follows later.
        except OSError:
            self._end(exchange)

    def _read(self, exchange: _Exchange) -> None:
        data = exchange.socket.recv(READ_BYTES)
        if exchange.unsent is not None or exchange.deadline is None:
            if not data:  # Any other data after the request is ignored.
                self._end(exchange)
            return
        received = exchange.received
        received += data
        head_bytes, body_at = _find_head(received)
        if head_bytes < 0:
            if not data:
                self._end(exchange)
            elif len(received) >= HEAD_BYTES_MAX:
                self._start_sending(exchange, _failure(431))
            return
        request, length, status = parse_head(bytes(received[:head_bytes]), self._methods)
        if not status and length > self._body_bytes_max:
            # If the limit is 0, the server uses no bodies, and ignores this one.
            status, length = (413, 0) if self._body_bytes_max else (0, 0)
        if not status and self._host_names is not None:
            status = 0 if is_requested_host(request.host, self._host_names) else 421
        if status:
            self._start_sending(exchange, _failure(status, self._methods))
        elif len(received) - body_at >= length:
            body = bytes(received[body_at : body_at + length])
            self._answer(exchange, request._replace(body=body))
        elif not data:
            text = f"received {len(received) - body_at} bytes of {length}\n"
            self._start_sending(exchange, _encode(HttpResponse(400, PLAIN, text.encode())))

    def _answer(self, exchange: _Exchange, request: HttpRequest) -> None:
        if not self._in_threads:
            self._start_sending(exchange, self._response_to(request))
            return

        def answer() -> None:
            self._answered.append((exchange, self._response_to(request)))
            self._wake_up()

        exchange.deadline = None  # No deadline while the thread works.
        self._unanswered.remove(exchange)
        self._poll.unregister(exchange.socket)
        thread = threading.Thread(target=answer, name=self._thread.name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # No thread can be started.
            self._start_sending(exchange, _failure(503))

    def _response_to(self, request: HttpRequest) -> bytes:
        try:
            response = self._respond(request)
        except Exception as problem:  # noqa: BLE001 (a fault there must not end the server)
            if not self._fault_reported:
                self._fault_reported = True
                console.warning(
                    f"{self._name}: {request.path}: {type(problem).__name__}: {problem}"
                )
            return _failure(500)
        return _encode(response, with_content=request.method != "HEAD")

    def _start_sending(self, exchange: _Exchange, response: bytes) -> None:
        now = time.monotonic()
        if exchange.deadline is None:
            self._poll.register(exchange.socket, 0)
            self._unanswered.add(exchange, exchange.address, now)
        exchange.unsent = memoryview(response)
        exchange.deadline = now + EXCHANGE_S
        try:
            self._send(exchange)
        except OSError:
            self._end(exchange)

    def _send(self, exchange: _Exchange) -> None:
        assert exchange.unsent is not None
        try:
            exchange.unsent = exchange.unsent[exchange.socket.send(exchange.unsent) :]
        except BlockingIOError:
            pass
        if exchange.unsent:
            self._poll.modify(exchange.socket, select.POLLOUT)
        else:
            # Close only after the client has closed its side: if it sent more data after a close, the
            # kernel would discard a response in transit.
            exchange.socket.shutdown(socket.SHUT_WR)
            self._poll.modify(exchange.socket, select.POLLIN)

    def _end(self, exchange: _Exchange) -> None:
        del self._exchanges[exchange.socket.fileno()]
        self._unanswered.remove(exchange)
        if exchange.deadline is not None:
            self._poll.unregister(exchange.socket)
        _close(exchange.socket)

    def _wake_up(self) -> None:
        try:
            self._wake.send(b"\0")
        except OSError:
            pass  # The server has ended.


class _Exchange:
    """One connection: the server reads the request, sends the response, and closes it."""

    __slots__ = ("address", "deadline", "received", "socket", "unsent")

    def __init__(self, client: socket.socket, address: str, deadline: float) -> None:
        self.socket = client
        self.address = address
        self.deadline: float | None = deadline
        """None while a thread works on the response."""
        self.received = bytearray()
        self.unsent: memoryview | None = None
        """The unsent part of the response; None before there is a response, empty once all is sent."""


def parse_head(head: bytes, methods: tuple[str, ...]) -> tuple[HttpRequest, int, int]:
    """Return a request, the length of its body, and a status if it is refused."""
    lines = head.split(b"\n")
    words = lines[0].rstrip(b"\r").split(b" ")
    nothing = HttpRequest("", "")
    if len(words) != 3 or not words[2].startswith(b"HTTP/"):
        return nothing, 0, 400
    method, target, version = words
    if version not in (b"HTTP/1.1", b"HTTP/1.0"):
        return nothing, 0, 505
    if method.decode("latin-1") not in methods:
        return nothing, 0, 405
    if not target.startswith(b"/") or any(not 0x21 <= one <= 0x7E for one in target):
        return nothing, 0, 400
    path, _, query = target.decode().partition("?")
    length, hosts = b"0", []
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        match name.strip().lower():
            case b"content-length":
                length = value.strip()
            case b"host":
                hosts.append(value.strip().decode("latin-1"))
            case b"transfer-encoding":
                return nothing, 0, 411
    if not length.isdigit():
        return nothing, 0, 411
    if len(hosts) > 1:
        return nothing, 0, 400
    request = HttpRequest(method.decode(), path, query, host="".join(hosts))
    # A number with more digits than Python parses is too large anyway.
    return request, int(length[:20]), 0


def is_requested_host(host: str, names: tuple[str, ...]) -> bool:
    """Return whether a request's host is one of these names, an address, or empty."""
    name, port_sign, port = host.rpartition(":")
    if not port_sign or not port.isdigit():
        name = host
    name = name.lower().removesuffix(".")
    bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    return not host or (bool(name) and name in names) or addresses.is_ip(bare)


def _is_loopback(listener: socket.socket) -> bool:
    inet = listener.family in (socket.AF_INET, socket.AF_INET6)
    return inet and addresses.is_loopback(listener.getsockname()[0])


def _find_head(received: bytearray) -> tuple[int, int]:
    """Return where the head of a request ends and its body begins; -1 until the head is complete."""
    ends = [
        (at, at + len(mark)) for mark in (b"\r\n\r\n", b"\n\n") if (at := received.find(mark)) >= 0
    ]
    return min(ends, default=(-1, -1))


def _failure(status: int, methods: tuple[str, ...] = ()) -> bytes:
    response = HttpResponse(status, PLAIN, f"{REASONS[status]}\n".encode())
    return _encode(response, allow=methods if status == 405 else ())


def _encode(
    response: HttpResponse, *, with_content: bool = True, allow: tuple[str, ...] = ()
) -> bytes:
    head = (
        f"HTTP/1.1 {response.status} {REASONS.get(response.status, 'Status')}\r\n"
        f"Content-Type: {response.content_type}\r\nContent-Length: {len(response.content)}\r\n"
        + (f"Allow: {', '.join(allow)}\r\n" if allow else "")
        + "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1", "replace") + (response.content if with_content else b"")


def _close(one: socket.socket) -> None:
    """Close a socket, even if a child that is being forked has a copy."""
    _shut(one, socket.SHUT_RDWR)
    one.close()


def _shut(one: socket.socket, how: int) -> None:
    try:
        one.shutdown(how)
    except OSError:
        pass  # The other side closed first.


def _abandon_all() -> None:
    for server in [*_serving]:
        server.abandon()
    _serving.clear()


os.register_at_fork(after_in_child=_abandon_all)
