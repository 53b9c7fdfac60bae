"""The client of a coordinator: connects to an endpoint and authenticates both sides.

A `CoordinatorConnector` holds what all clients of one loop share: endpoint, job, token and certificates.
A `ClientConnection` is one connection. Every failure is one line for the user and says whether retrying
can help: it cannot for a wrong token, but a coordinator that does not run yet may start.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from typing import TYPE_CHECKING

from holdfast.core.protocol import Status
from holdfast.errors import EnvironmentProblem
from holdfast.net import addresses, listening, tls
from holdfast.net.peer_user import listener_of
from holdfast.printable import quoted
from holdfast.wire.frames import TAKEN, FrameReader, IncomingParts, OutgoingParts, encode_frame
from holdfast.wire.handshake import COORDINATOR, ClientHandshake
from holdfast.wire.messages import Goodbye, Message, Part, PartTaken, decode
from holdfast.wire.sniff import check_server_bytes, explain_silent_close
from holdfast.wire.wire_errors import HandshakeRefused, NotOurProtocol, WireError
from holdfast.wire.wire_limits import FRAME_BYTES_MAX, HANDSHAKE_FRAME_BYTES_MAX

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from holdfast.net.addresses import Address
    from holdfast.wire.frames import Seal
    from holdfast.wire.messages import Hello

CONNECT_S = 3.0
HANDSHAKE_S = 10.0
MUTE_S = 1.0
"""A connection that was accepted and stays silent for this long is reported as a possible problem, since
coordinators respond in milliseconds. The handshake may still take `HANDSHAKE_S`."""
READ_BYTES = 256 * 1024
CONNECTING_MAX = 512
"""Connections that the clients of one loop open concurrently. More would only slow each of them down, until
the coordinator closes those with unfinished handshakes."""

MUTE = "it accepts the connection but does not respond: it is not a coordinator, or it is stopped"
MUTE_AGENT = "it accepts the connection but does not respond; it may be stopped"
NO_CERTIFICATE = (
    "it closed the connection after the TLS handshake without a response: it requires a certificate "
    "signed by its tls_ca (set tls_cert and tls_key here), or it is not a coordinator"
)


class ConnectFailed(Exception):
    """A connection failed or broke; `why` is one line."""

    reached = False
    """Whether a process accepted the connection."""

    def __init__(self, why: str, *, permanent: bool = False, refused: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.permanent = permanent
        self.refused = refused
        """Whether the host refused the connection: no process listens there."""


class ClientConnection(asyncio.BufferedProtocol):
    """One connection to the coordinator; `ready` completes with the handshake.

    `on_message` receives every message after that. `on_closed` receives the reason when the connection
    closes, unless `abort` closed it.
    """

    __slots__ = (
        "_buffer",
        "_handshake",
        "_has_received",
        "_has_tls",
        "_in_seal",
        "_incoming",
        "_open",
        "_out_seal",
        "_outgoing",
        "_reader",
        "_server",
        "_transport",
        "confirmed_at",
        "ended",
        "on_closed",
        "on_message",
        "problem",
        "ready",
    )  # fmt: skip

    def __init__(self, connector: CoordinatorConnector) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.on_message: Callable[[Message], None] | None = None
        self.on_closed: Callable[[str], None] | None = None
        self.problem: ConnectFailed | None = None
        self.confirmed_at: float | None = None
        self._buffer = connector.read_buffer
        self._has_tls = connector.has_tls
        self._reader = FrameReader(HANDSHAKE_FRAME_BYTES_MAX, tag_bytes=None)
        self._handshake: ClientHandshake | None = ClientHandshake(
            connector.token,
            run_id=connector.run_id,
            host=connector.host,
            port=connector.port,
            place=connector.place,
            read_only=connector.read_only,
            key_for=connector.key_for,
            server=connector.server,
        )
        self._server = connector.server
        self._out_seal: Seal | None = None
        self._in_seal: Seal | None = None
        self._transport: asyncio.Transport | None = None
        self._incoming = IncomingParts()
        self._outgoing = OutgoingParts()
        self._has_received = False
        self._open = True

    @property
    def is_open(self) -> bool:
        """Whether the handshake is complete and the connection open."""
        return self._open and self._handshake is None

    @property
    def is_mute(self) -> bool:
        """Whether the other side has sent nothing yet."""
        return not self._has_received

    # For the owner.

    def send(self, message: Message) -> None:
        """Send a message; it is lost if the connection has closed."""
        kind = "status" if type(message) is Status else ""
        self._send_frame(self._outgoing.send(encode_frame(message), kind))

    def send_whole(self, message: Message) -> None:
        """Send a message of any size in one piece: this connection has no heartbeats to delay."""
        self._send_frame(encode_frame(message))

    @property
    def unsent_bytes(self) -> int:
        """The bytes that the kernel has not accepted yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def expect_large(self, frame_bytes_max: int) -> None:
        """Accept frames up to this size, for replies about many nodes."""
        self._reader.frame_bytes_max = frame_bytes_max

    def abort(self) -> bool:
        """Close the connection now; return whether there was one."""
        self._open = False
        if self._transport is None:
            return False
        self._transport.abort()
        return True

    def close(self, why: str = "") -> None:
        """Close the connection once everything is sent; then `ended` completes."""
        if self._transport is None:
            return
        if self.is_open:
            for frame in (*self._outgoing.rest(), encode_frame(Goodbye(why=why))):
                self._send_frame(frame)
        self._open = False
        self._transport.close()

    def _send_frame(self, frame: bytes) -> None:
        if frame and self._open and self._transport is not None:
            seal = self._out_seal
            self._transport.write(frame if seal is None else seal.seal(frame))

    # For asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        assert self._handshake is not None
        self._transport = transport
        transport.write(self._handshake.start())

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (asyncio's signature)
        """Lend the buffer that all connections of the loop share."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if not self._open:
            return
        data = self._buffer[:nbytes]
        try:
            if not self._has_received:
                self._has_received = True
                check_server_bytes(bytes(data[:8]))
            self._process(self._reader.feed(data))
        except HandshakeRefused as error:
            if error.reply and self._transport is not None:
                self._transport.write(error.reply)
            self._end(ConnectFailed(error.why, permanent=error.permanent))
        except NotOurProtocol as error:
            self._end(ConnectFailed(str(error), permanent=True))
        except WireError as error:
            self._end(ConnectFailed(f"{self._server} sent invalid data: {error}"))

    def eof_received(self) -> bool:
        return False  # Close this half too.

    def connection_lost(self, exc: Exception | None) -> None:
        if self._open:
            self._end(self._loss(exc))
        if not self.ended.done():
            self.ended.set_result(None)

    def _process(self, bodies: list[bytes]) -> None:
        has_frames = bool(bodies)
        if self._handshake is not None:
            bodies = self._shake_hands(self._handshake, bodies)
        seal = self._in_seal
        for body in bodies:
            self._received(decode(body if seal is None else seal.open(body)))
            if not self._open:
                return
        if has_frames and self._reader.buffered_bytes:
            # The limits changed with the last frame: check the rest of the buffer again.
            self._process(self._reader.feed(b""))

    def _received(self, message: Message) -> None:
        if type(message) is Part:
            self._send_frame(TAKEN)
            body = self._incoming.take(message)
            if body is None:
                return
            message = decode(body)
        if type(message) is PartTaken:
            self._send_frame(self._outgoing.next_part())
        elif type(message) is Goodbye:
            why = quoted(message.why) or f"{self._server} closed the connection"
            self._end(ConnectFailed(why))
        elif self.on_message is not None:
            self.on_message(message)

    def _shake_hands(self, handshake: ClientHandshake, bodies: list[bytes]) -> list[bytes]:
        """Continue the handshake; return the messages after it."""
        for at, body in enumerate(bodies):
            reply = handshake.receive(body)
            self._reader.tag_bytes = handshake.tag_bytes
            if reply:
                assert self._transport is not None
                self._transport.write(reply)
            if handshake.done:
                self._handshake = None
                self._out_seal, self._in_seal = handshake.seals or (None, None)
                self._reader.frame_bytes_max = FRAME_BYTES_MAX
                if not self.ready.done():
                    self.ready.set_result(None)
                return bodies[at + 1 :]
        return []

    def _loss(self, exc: Exception | None) -> ConnectFailed:
        if self._handshake is None:
            why = f"the connection broke: {_describe(exc)}" if exc else "it was closed"
            return ConnectFailed(why)
        if exc is not None and self._has_tls and _is_tls_fault(exc):
            return ConnectFailed(tls.explain_failure(exc), permanent=True)
        if not self._has_received:
            # With TLS there is a transport only after this side has accepted the other's certificate.
            why = NO_CERTIFICATE if self._has_tls else explain_silent_close(tls=False)
            return ConnectFailed(why)
        return ConnectFailed("the connection was closed during the handshake")

    def _end(self, problem: ConnectFailed) -> None:
        self._open = False
        self.problem = problem
        if self._transport is not None:
            self._transport.close()
        if not self.ready.done():
            self.ready.set_exception(problem)
        elif self.on_closed is not None:
            self.on_closed(problem.why)


class CoordinatorConnector:
    """Connects to the coordinator at one endpoint; belongs to one loop.

    `has_psk` says whether TLS uses the token. With `own_users_only` a listener on this host must belong
    to this user or root. `place` is `Hello.place`. If all addresses of the endpoint refuse the connection, the
    connector calls `when_refused` with them; if that returns true, a process listens there now and the connector
    retries. With a `secret` it connects to an agent's port, and `server` names the agent in messages.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        run_id: str,
        token: bytes | None = None,
        tls: ssl.SSLContext | None = None,
        has_psk: bool = False,
        server_name: str | None = None,
        own_users_only: bool = False,
        place: int = 0,
        when_refused: Callable[[list[Address]], bool] | None = None,
        secret: bytes = b"",
        read_only: bool = False,
        server: str = COORDINATOR,
    ) -> None:
        self.key_for: Callable[[Hello], bytes] | None = (lambda _: secret) if secret else None
        self.read_only, self.server = read_only, server
        self.host = host
        self.port = port
        self.run_id = run_id
        self.place = place
        self.token = token
        self.has_tls, self.has_psk = tls is not None, has_psk
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        self.suspicion = ""
        """The likely problem with the attempt in progress; any thread may read it."""
        self._tls = tls
        self._server_name = server_name or host
        self._own_users_only = own_users_only
        self._when_refused = when_refused
        self._turns = asyncio.Semaphore(CONNECTING_MAX)

    async def connect(self) -> ClientConnection:
        """Return a connection after its handshake, or raise `ConnectFailed`."""
        async with self._turns:
            try:
                found = await addresses.resolve_async(self.host, self.port)
            except OSError as error:
                raise ConnectFailed(f"cannot resolve {self.host}: {_describe(error)}") from None
            try:
                connected = await self._connect_first(found)
            except OSError as error:
                refused = isinstance(error, ConnectionRefusedError)
                raise ConnectFailed(_describe(error), refused=refused) from None
            if self._own_users_only:
                _check_listener(connected, self.port)
            try:
                return await self._shake_hands(connected)
            except ConnectFailed as problem:
                problem.reached = True
                raise

    async def _connect_first(self, found: list[Address]) -> socket.socket:
        try:
            return await addresses.connect_first(found, CONNECT_S, addresses.use_small_segments)
        except ConnectionRefusedError:
            if self._when_refused is None or not self._when_refused(found):
                raise
            return await addresses.connect_first(found, CONNECT_S, addresses.use_small_segments)

    async def _shake_hands(self, connected: socket.socket) -> ClientConnection:
        loop = asyncio.get_running_loop()
        connection = ClientConnection(self)
        is_ready = False
        suspecting = loop.call_later(MUTE_S, self._suspect, connection)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await loop.create_connection(
                    lambda: connection,
                    sock=connected,
                    ssl=self._tls,
                    server_hostname=self._server_name if self._tls is not None else None,
                )
                await connection.ready
            if connection.problem is not None:  # It closed before the caller received it.
                raise connection.problem
            is_ready = True
        except ConnectFailed:
            raise
        except TimeoutError:
            slow = f"no handshake within {HANDSHAKE_S:g} s"
            mute = MUTE if self.server is COORDINATOR else MUTE_AGENT
            raise ConnectFailed(mute if connection.is_mute else slow) from None
        except OSError as error:
            if self.has_tls and _is_tls_fault(error):
                raise ConnectFailed(tls.explain_failure(error), permanent=True) from None
            raise ConnectFailed(explain_silent_close(self.has_tls, self.has_psk)) from None
        finally:
            suspecting.cancel()
            self.suspicion = ""
            # This includes a connection that became ready just as the attempt was cancelled.
            if not is_ready and not connection.abort():
                connected.close()
        return connection

    def _suspect(self, connection: ClientConnection) -> None:
        if connection.is_mute:
            self.suspicion = MUTE


def _check_listener(connected: socket.socket, port: int) -> None:
    try:
        listening.refuse_other_user(listener_of(connected), port)
    except EnvironmentProblem as problem:
        connected.close()
        raise ConnectFailed(str(problem), permanent=True) from None


def _is_tls_fault(error: Exception) -> bool:
    """Whether TLS itself rejected the connection, not the network."""
    return isinstance(error, ssl.SSLError) and not isinstance(
        error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)
    )


def _describe(error: Exception | None) -> str:
    """Return the text of a system error."""
    number = (error.errno or 0) if isinstance(error, OSError) else 0
    # If there is an error number, use the system's text, not asyncio's. Numbers below 0 come from the resolver.
    if number > 0:
        text = os.strerror(number)
    else:
        text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return quoted(text[:1].lower() + text[1:])
