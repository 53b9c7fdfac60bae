"""One connection to one endpoint of etcd: HTTP/1.1 by h11, one request at a time.

Every failure is a `ConnectionProblem`, with the reason in one line and whether the request may have reached
etcd. A connection that has failed is unusable.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from holdfast.core.etcd.calls import ProblemKind
from holdfast.etcd.json_gateway import OK, QUOTE_CHARS_MAX, TLS_ONLY
from holdfast.etcd.optional_h11 import h11
from holdfast.net import addresses, async_addresses
from holdfast.net.async_addresses import error_text
from holdfast.net.endpoints import format_endpoint
from holdfast.printable import one_line, quoted

if TYPE_CHECKING:
    from collections.abc import Callable


ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""The limit of one response, and of one line of a watch. By default etcd accepts 1.5 MiB in one request, but a
range may hold many values."""
HEAD_BYTES_MAX = 64 * 1024

NOT_TLS = "it does not speak TLS: write http:// before the endpoint"
NO_HANDSHAKE = "it closed the connection during the TLS handshake"

_HTTP = b"HTTP/1."
_ALERT = b"\x15\x03"  # The first bytes of a TLS alert.


class ConnectionFault(Enum):
    """The faults that `etcd.diagnose` distinguishes."""

    SILENT = "silent"
    """The other side closed the connection without sending anything."""
    NOT_TLS = "not TLS"
    TLS_FAILED = "TLS failed"
    """TLS failed for another reason, such as its version."""
    OTHER = "other"


class ConnectionProblem(Exception):
    """A connection could not be made or kept."""

    def __init__(
        self,
        why: str,
        kind: ProblemKind = ProblemKind.UNREACHABLE,
        fault: ConnectionFault = ConnectionFault.OTHER,
        *,
        written: bool = False,
    ) -> None:
        super().__init__(why)
        self.why = why
        self.kind = kind
        self.fault = fault
        self.written = written
        """Whether a part of a request was sent, so that it may have been performed."""


class HttpReply(NamedTuple):
    """A complete response."""

    status: int
    body: bytes


class HttpConnection(asyncio.Protocol):
    """A connection from `open_connection` until `abort`, or until it fails."""

    def __init__(self, host_header: str) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done when the socket is closed."""
        self.local_address = ""
        self.on_ended: Callable[[HttpConnection], None] | None = None
        self._loop = loop
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._host_header = host_header
        self._has_received = False
        self._transport: asyncio.Transport | None = None
        self._problem: ConnectionProblem | None = None
        self._reply: asyncio.Future[HttpReply] | None = None
        self._on_line: Callable[[bytes], None] | None = None
        self._status = 0
        self._body = bytearray()
        self._scanned = 0  # `_body` contains no end of a line before this index.

    @property
    def problem(self) -> ConnectionProblem | None:
        """Why the connection failed, if it did."""
        return self._problem

    @property
    def is_idle(self) -> bool:
        """Whether another request can be sent."""
        return (
            self._problem is None
            and self._reply is None
            and self._http.our_state is h11.IDLE
            and self._http.their_state is h11.IDLE
        )

    # Requests.

    async def request(
        self,
        path: str,
        body: bytes,
        token: str = "",
        *,
        limit_s: float,
        wants_leader: bool = True,
    ) -> HttpReply:
        """Send a request and return the complete response, or raise `ConnectionProblem`."""
        reply = self._send(path, body, token, wants_leader=wants_leader)
        timer = self._loop.call_later(limit_s, self._fail_for_silence, limit_s)
        try:
            return await reply
        except asyncio.CancelledError:
            self.abort("the call was cancelled")
            raise
        finally:
            timer.cancel()

    async def stream(
        self,
        path: str,
        body: bytes,
        token: str,
        on_line: Callable[[bytes], None],
    ) -> HttpReply:
        """Send a request, pass every line of the response to `on_line`, and return when it ends.

        If the request fails, return the complete response instead. `on_line` may call `abort`. Raises
        `ConnectionProblem`.
        """
        self._on_line = on_line
        reply = self._send(path, body, token)
        try:
            return await reply
        finally:
            self.abort("the stream has ended")

    def abort(self, why: str, kind: ProblemKind = ProblemKind.UNREACHABLE) -> None:
        """End the connection now; a request under way fails with this reason."""
        self._fail(ConnectionProblem(why, kind))

    def _send(
        self, path: str, body: bytes, token: str, *, wants_leader: bool = True
    ) -> asyncio.Future[HttpReply]:
        if self._problem is not None:
            raise ConnectionProblem(self._problem.why, self._problem.kind)
        assert self.is_idle, "one request at a time"
        assert self._transport is not None
        headers = [
            ("Host", self._host_header),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
        ]
        if wants_leader:
            # With this header, a member without a leader responds immediately.
            headers.append(("Grpc-Metadata-Hasleader", "true"))
        if token:
            headers.append(("Authorization", token))
        http = self._http
        head = http.send(h11.Request(method="POST", target=path, headers=headers))
        data = http.send(h11.Data(data=body))
        end = http.send(h11.EndOfMessage())
        self._reply = self._loop.create_future()
        self._transport.write(b"".join((head or b"", data or b"", end or b"")))
        return self._reply

    def _fail_for_silence(self, limit_s: float) -> None:
        accepted = "" if self._has_received else "it accepts connections, but there was "
        self._fail(ConnectionProblem(f"{accepted}no response within {limit_s:.3g} s"))

    # Received data.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take over the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        address = transport.get_extra_info("sockname")
        self.local_address = addresses.as_ipv4_if_mapped(str(address[0])) if address else ""

    def data_received(self, data: bytes) -> None:
        """Process a part of a response."""
        if self._problem is not None:
            return
        if not self._has_received and not _begins_http(data):
            self._fail(_no_http(data))
            return
        self._has_received = True
        try:
            self._http.receive_data(data)
            while self._take(self._http.next_event()):
                pass
        except h11.RemoteProtocolError as error:
            why = f"it does not speak HTTP: {quoted(str(error))}"
            self._fail(ConnectionProblem(why, ProblemKind.REFUSED))

    def eof_received(self) -> bool:
        """Process the end of the stream; some responses end with it."""
        if self._problem is None:
            try:
                self._http.receive_data(b"")
                while self._take(self._http.next_event()):
                    pass
            except h11.RemoteProtocolError:
                self._fail(self._connection_problem(None))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Record why the connection was lost, unless this side aborted it."""
        if self._problem is None:
            self._fail(self._connection_problem(exc))
        if not self.ended.done():
            self.ended.set_result(None)
        if self.on_ended is not None:
            self.on_ended(self)

    def _take(self, event: object) -> bool:
        """Process an event; return whether to continue with the next."""
        kind = type(event)
        if kind is h11.Data:
            self._body += event.data  # type: ignore[attr-defined]
            if self._on_line is not None and self._status == OK:
                self._split(self._on_line)
            if len(self._body) > ANSWER_BYTES_MAX:
                why = f"its response is larger than {ANSWER_BYTES_MAX // 2**20} MiB"
                self._fail(ConnectionProblem(why, ProblemKind.REFUSED))
            return self._problem is None
        if kind is h11.Response:
            if self._reply is None:
                self._fail(
                    ConnectionProblem("it sent a response without a request", ProblemKind.REFUSED)
                )
                return False
            self._status = event.status_code  # type: ignore[attr-defined]
            return True
        if kind is h11.InformationalResponse:
            return True
        if kind is h11.EndOfMessage:
            self._finish()
            return self._problem is None and self._http.our_state is h11.IDLE
        if kind is h11.ConnectionClosed:
            self._fail(self._connection_problem(None))
        return False

    def _finish(self) -> None:
        reply, self._reply = self._reply, None
        body = bytes(self._body)
        self._body.clear()
        self._scanned = 0
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        else:
            self._fail(ConnectionProblem("it closed the connection"))
        if reply is not None and not reply.done():
            reply.set_result(HttpReply(self._status, body))

    def _split(self, on_line: Callable[[bytes], None]) -> None:
        while (end := self._body.find(b"\n", self._scanned)) >= 0:
            line = bytes(self._body[:end])
            del self._body[: end + 1]
            self._scanned = 0
            if line and self._problem is None:
                on_line(line)
        self._scanned = len(self._body)

    def _connection_problem(self, error: Exception | None) -> ConnectionProblem:
        closed = isinstance(error, ConnectionResetError | ssl.SSLEOFError | ssl.SSLZeroReturnError)
        if isinstance(error, ssl.SSLError) and not closed:
            return tls_problem(error)
        if error is not None and not closed:
            return ConnectionProblem(f"the connection was lost: {error_text(error)}")
        if self._has_received or self._reply is None:
            return ConnectionProblem("it closed the connection")
        return ConnectionProblem(
            "it closed the connection without a response", fault=ConnectionFault.SILENT
        )

    def _fail(self, problem: ConnectionProblem) -> None:
        if self._problem is not None:
            return
        self._problem = problem
        reply, self._reply = self._reply, None
        if reply is not None and not reply.done():
            problem.written = True
            reply.set_exception(problem)
        if self._transport is not None:
            self._transport.abort()


def _begins_http(data: bytes) -> bool:
    return data[: len(_HTTP)] == _HTTP[: len(data)]


def _no_http(data: bytes) -> ConnectionProblem:
    if data.startswith(_ALERT):
        return ConnectionProblem(TLS_ONLY, ProblemKind.DENIED)
    sent = one_line(data.decode(errors="replace").strip(), QUOTE_CHARS_MAX)
    return ConnectionProblem(f"it does not speak HTTP; it sent: {sent}", ProblemKind.REFUSED)


def tls_problem(error: ssl.SSLError) -> ConnectionProblem:
    """Return why TLS failed, and whether retrying can help."""
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return ConnectionProblem(NO_HANDSHAKE, fault=ConnectionFault.SILENT)
    if isinstance(error, ssl.SSLCertVerificationError):
        text = quoted(error.verify_message).rstrip(".")
        if error.verify_code in _OTHER_HOST:
            why = f"its certificate is for another host: {text} (or set tls_server_name)"
        elif error.verify_code in _EXPIRED:
            why = f"its certificate is out of date: {text} (or this machine's clock is wrong)"
        else:
            why = f"its certificate is not trusted: {text} (set cacert to the CA that signed it)"
        return ConnectionProblem(why, ProblemKind.DENIED)
    reason = error.reason or ""
    if reason in _PLAIN_TEXT:
        return ConnectionProblem(NOT_TLS, ProblemKind.DENIED, ConnectionFault.NOT_TLS)
    if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason:
        why = (
            f"it requires a client certificate signed by its CA (set cert and key): "
            f"{quoted(reason)}"
        )
        return ConnectionProblem(why, ProblemKind.DENIED)
    return ConnectionProblem(f"TLS failed: {quoted(str(error))}", fault=ConnectionFault.TLS_FAILED)


_EXPIRED = (9, 10)  # Not yet valid, no longer valid.
_OTHER_HOST = (62, 64)  # The name, or the address, is not in the certificate.
_PLAIN_TEXT = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE")


# Connecting. A name may have several addresses; they are tried in turn, and share the limit.

# A lost host is detected after about ten seconds, with or without a request under way.
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_PROBES = 4, 2, 3
UNACKNOWLEDGED_MS_MAX = 10_000


async def open_connection(
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | None = None,
    server_name: str = "",
    limit_s: float,
) -> HttpConnection:
    """Return a connection or raise `ConnectionProblem`, within the limit."""
    late = "no connection"
    try:
        async with asyncio.timeout(limit_s):
            try:
                found = await async_addresses.resolve_async(host, port)
            except OSError as error:
                raise ConnectionProblem(f"cannot resolve its name: {error_text(error)}") from None
            connected = await async_addresses.connect_first(found, limit_s, _set_options)
            late = "it accepts connections, but there was no TLS handshake"
            return await _wrap(connected, format_endpoint(host, port), tls, server_name or host)
    except TimeoutError:
        raise ConnectionProblem(f"{late} within {limit_s:.3g} s") from None
    except ssl.SSLError as error:
        raise tls_problem(error) from None
    except OSError as error:
        if tls is not None and isinstance(error, ConnectionResetError | ConnectionAbortedError):
            raise ConnectionProblem(NO_HANDSHAKE, fault=ConnectionFault.SILENT) from None
        raise ConnectionProblem(error_text(error)) from None


def _set_options(connected: socket.socket) -> None:
    addresses.use_small_segments(connected)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    addresses.keep_alive(connected, KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_PROBES)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS_MAX)


async def _wrap(
    connected: socket.socket, host_header: str, tls: ssl.SSLContext | None, server_name: str
) -> HttpConnection:
    connection = HttpConnection(host_header)
    loop = asyncio.get_running_loop()
    try:
        plain, _ = await loop.create_connection(lambda: connection, sock=connected)
    except BaseException:
        connected.close()
        raise
    if tls is None:
        return connection
    try:
        wrapped = await loop.start_tls(plain, connection, tls, server_hostname=server_name)
    except BaseException:
        # Do not close the socket directly: the loop would confuse it with the next socket of that number.
        plain.abort()
        raise
    if wrapped is None:
        raise ConnectionResetError
    connection.connection_made(wrapped)
    return connection
