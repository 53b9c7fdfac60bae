"""Both ends of a connection to the coordinator: decoding, sending, and limits.

::

    accepted ── TLS, if enabled ───► HANDSHAKE ── token proven ──► OPEN ──► closed
                                        └── too slow, invalid, too many ─────┘

`Framing` turns received bytes into messages, and frames into the bytes to send. It performs the handshake, seals
frames, and splits large messages into parts, for either end. `ServerConnection` is the end that accepts: of the
coordinator, and of an agent's control port. `ClientConnection` is the end that connects (`coordinator.connect`
opens it).

No peer can delay another. All connections of a loop read into one shared buffer, so an idle connection needs almost
no memory. Data that a peer does not read is kept up to a limit; then the server drops the peer. This module does not
handle jobs.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Protocol

from holdfast.core.protocol import Status
from holdfast.core.quotas import UNREAD_BYTES_MAX
from holdfast.net import addresses
from holdfast.net.async_addresses import error_text
from holdfast.net.half_open import network_of
from holdfast.net.tls import explain_failure
from holdfast.printable import quoted
from holdfast.wire.frames import TAKEN, FrameReader, IncomingParts, OutgoingParts, encode_frame
from holdfast.wire.handshake import COORDINATOR, ClientHandshake, ServerHandshake, refusal
from holdfast.wire.messages import Goodbye, Message, Part, PartTaken, decode
from holdfast.wire.sniff import check_client_bytes, check_server_bytes, explain_silent_close
from holdfast.wire.wire_errors import HandshakeRefused, NotOurProtocol, WireError
from holdfast.wire.wire_limits import FRAME_BYTES_MAX, HANDSHAKE_FRAME_BYTES_MAX, PART_BYTES

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from holdfast.coordinator.connect import CoordinatorConnector
    from holdfast.wire.frames import Seal
    from holdfast.wire.messages import Hello

READ_BYTES = 256 * 1024
UNREAD_SHARE_KEPT = 0.75
"""Above the limit of unread data, connections are closed until this share of the limit remains."""

NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL")
"""OpenSSL's reasons for a client that does not speak TLS."""
TLS_RECORD = 0x16  # The first byte of a TLS client.
PEER_HAS_TLS = "it speaks TLS and this side does not (set tls_ca or tls=psk here as well)"
PEER_HAS_NO_TLS = "it does not speak TLS"
NO_CERTIFICATE = (
    "it closed the connection after the TLS handshake without a response: it requires a certificate "
    "signed by its tls_ca (set tls_cert and tls_key here), or it is not a coordinator"
)

NodeKey = tuple[str, str, int]
"""Run id, node and incarnation of the node that a connection belongs to."""


class Framing:
    """The bytes of one end. It performs no I/O; the connection sends what it returns.

    `outgoing` splits large messages into parts. Pass each frame to `sealed` immediately before it is sent.
    """

    __slots__ = (
        "_check_first",
        "_handshake",
        "_in_seal",
        "_incoming",
        "_out_seal",
        "has_received",
        "outgoing",
        "reader",
    )  # fmt: skip

    def __init__(
        self,
        handshake: ClientHandshake | ServerHandshake,
        check_first: Callable[[bytes], None],
    ) -> None:
        """`check_first` raises if the first bytes are of another protocol."""
        self.has_received = False
        """Whether the other side has sent anything."""
        self.reader = FrameReader(HANDSHAKE_FRAME_BYTES_MAX, tag_bytes=None)
        self.outgoing = OutgoingParts()
        self._handshake: ClientHandshake | ServerHandshake | None = handshake
        self._check_first = check_first
        self._out_seal: Seal | None = None
        self._in_seal: Seal | None = None
        self._incoming: IncomingParts | None = None  # Most connections never need it.

    @property
    def is_ready(self) -> bool:
        """Whether the handshake is complete."""
        return self._handshake is None

    def start(self) -> bytes:
        """Return the first bytes of the end that connects."""
        assert isinstance(self._handshake, ClientHandshake)
        return self._handshake.start()

    def sealed(self, frame: bytes) -> bytes:
        """Return the next frame to send as bytes."""
        return frame if self._out_seal is None else self._out_seal.seal(frame)

    def receive(self, data: memoryview) -> Iterator[Message | bytes]:
        """Yield the messages that these bytes complete, and bytes to send; stop once the connection closes.

        The step that completes the handshake yields bytes, even if they are empty.
        """
        if not self.has_received:
            self.has_received = True
            self._check_first(bytes(data[:8]))
        bodies = self.reader.feed(data)
        while bodies:
            for body in bodies:
                if self._handshake is not None:
                    yield self._shake_hands(self._handshake, body)
                    continue
                seal = self._in_seal
                message = decode(body if seal is None else seal.open(body))
                if type(message) is PartTaken:
                    yield self._sealed_if_any(self.outgoing.next_part())
                elif type(message) is Part:
                    self._incoming = incoming = self._incoming or IncomingParts()
                    yield self.sealed(TAKEN)
                    whole = incoming.take(message)
                    if whole is not None:
                        yield decode(whole)
                else:
                    yield message
            # The limits changed with the last frame: check the rest of the buffer again.
            bodies = self.reader.feed(b"") if self.reader.buffered_bytes else []

    def _sealed_if_any(self, frame: bytes) -> bytes:
        return self.sealed(frame) if frame else b""

    def _shake_hands(self, handshake: ClientHandshake | ServerHandshake, body: bytes) -> bytes:
        """Continue the handshake; return the bytes to send."""
        reply = handshake.receive(body)
        self.reader.tag_bytes = handshake.tag_bytes
        if handshake.done:
            self._handshake = None
            self._out_seal, self._in_seal = handshake.seals or (None, None)
            self.reader.frame_bytes_max = FRAME_BYTES_MAX
        return reply


# The end that accepts.


class ConnectionOwner(Protocol):
    """The server that a connection belongs to, as the connection uses it."""

    read_buffer: memoryview

    def connected(self, peer: ServerConnection) -> None: ...

    def check_hello(self, peer: ServerConnection, hello: Hello) -> None:
        """Raise `HandshakeRefused` if an authenticated client cannot be served."""

    def received(self, peer: ServerConnection, message: Message) -> None: ...

    def wants_flush(self, peer: ServerConnection) -> None:
        """Call `flush` soon."""

    def report_fault(self, peer: ServerConnection, why: str) -> None:
        """Report a connection that was closed because its peer sent invalid data, or did not read."""

    def disconnected(self, peer: ServerConnection) -> None: ...


class ServerConnection(asyncio.BufferedProtocol):
    """One connection; the server owns it."""

    __slots__ = (
        "_framing",
        "_out",
        "_out_bytes",
        "_owner",
        "_posted_bytes",
        "_raw",
        "_reply_end",
        "_transport",
        "address",
        "attached",
        "closed",
        "has_share",
        "is_remote",
        "key",
        "knows_end",
        "local_address",
        "network",
        "node",
        "read_only",
        "received_at",
        "run_id",
        "user",
    )  # fmt: skip

    def __init__(
        self,
        owner: ConnectionOwner,
        token: bytes | None,
        address: str,
        local_address: str,
        *,
        key_for: Callable[[Hello], bytes] | None = None,
        server: str = COORDINATOR,
    ) -> None:
        """Create a connection; `ServerHandshake` explains `key_for` and `server`."""
        self.address = address
        self.network = network_of(address)
        self.has_share = False
        """Whether it counts against the share of its network."""
        self.is_remote = not addresses.is_loopback(address)
        self.local_address = local_address
        self.user: int | None = None
        """The user of the other process, if it is on this host."""
        self.run_id = ""
        """The job in its hello; empty for an operator."""
        self.read_only = False
        """Whether the client may only read."""
        self.attached: tuple[str, str] | None = None
        """The job and node that respond to queries over it."""
        self.node = ""
        """The only node that may use it, after its first message."""
        self.key: NodeKey | None = None
        self.received_at = 0.0
        self.knows_end = False
        """Whether the server has sent it the final view of its job."""
        self.closed = False
        self._owner = owner
        handshake = ServerHandshake(
            token, check_hello=self._check_hello, key_for=key_for, server=server
        )
        self._framing = Framing(handshake, check_client_bytes)
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._posted_bytes = 0  # In total.
        self._reply_end = 0  # The total after the last large reply.
        self._raw: asyncio.Transport | None = None
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        """Whether the handshake is complete and the connection open."""
        return self._framing.is_ready and not self.closed

    # For asyncio, and TLS.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._raw = transport
        transport.set_write_buffer_limits(high=UNREAD_BYTES_MAX)
        if self.closed:
            transport.abort()
            return
        self._owner.connected(self)

    def use(self, transport: asyncio.Transport | None = None) -> None:
        """Start sending, over TLS if given its transport."""
        self._transport = transport or self._raw
        if transport is not None:
            transport.set_write_buffer_limits(high=UNREAD_BYTES_MAX)
        self.flush()

    async def begin_tls(self, context: ssl.SSLContext, limit_s: float) -> None:
        """Make this a TLS connection, then start sending."""
        raw = self._raw
        assert raw is not None
        raw.pause_reading()
        loop = asyncio.get_running_loop()
        twin = _duplicate(raw)  # asyncio closes the original silently when the handshake fails.
        try:
            transport = await loop.start_tls(
                raw, self, context, server_side=True, ssl_handshake_timeout=limit_s
            )
        except asyncio.CancelledError:  # The server stops.
            self.abort()
            self._owner.disconnected(self)
            raise
        except Exception as error:  # noqa: BLE001 (asyncio raises more types than it documents)
            self.reject(explain_failure(error))
            self._owner.disconnected(self)  # asyncio does not report a reset connection.
            if twin is not None and getattr(error, "reason", None) in NOT_TLS:
                _send_last(twin, refusal(PEER_HAS_TLS))
            return
        finally:
            if twin is not None:
                twin.close()
        if transport is None or self.closed:  # It closed meanwhile.
            self.abort()
            self._owner.disconnected(self)
            return
        self.use(transport)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (asyncio's signature)
        """Lend the buffer that all connections share: its content is processed immediately."""
        return self._owner.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self.closed:
            return
        data = self._owner.read_buffer[:nbytes]
        try:
            for one in self._framing.receive(data):
                if isinstance(one, bytes):
                    self._send(one)
                else:
                    self._owner.received(self, one)
                if self.closed:
                    return
        except HandshakeRefused as error:
            self.reject(str(error), error.reply, is_fault=not error.is_probe)
        except NotOurProtocol as error:
            # A TLS client cannot read the reply, but recognizes that this is not TLS.
            self.reject(str(error), refusal(PEER_HAS_NO_TLS) if data[0] == TLS_RECORD else b"")
        except WireError as error:
            self.reject(str(error))
        except Exception as error:  # noqa: BLE001 (a bug must cost one connection, not all)
            self.reject(f"this is a bug in Holdfast: {error!r}")

    def pause_writing(self) -> None:
        self.reject("it does not read what it receives")

    def eof_received(self) -> bool:
        return False  # Close this half too.

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio's signature)
        self._out.clear()
        self._out_bytes = 0
        self.closed = True
        self._owner.disconnected(self)

    # For the server.

    def post(self, frame: bytes, kind: str = "") -> None:
        """Send a frame, together with all others of this iteration of the loop.

        A large frame is sent in parts; of each `kind`, only the newest frame is kept waiting. Data beyond the
        limit for unread data is written immediately; if the kernel does not accept it, the peer is dropped.
        """
        if len(frame) > PART_BYTES:
            outgoing = self._framing.outgoing
            frame = outgoing.send(frame, kind)
            if outgoing.unsent_bytes > UNREAD_BYTES_MAX:
                self.pause_writing()
        self._post(frame)

    def _post(self, frame: bytes) -> None:
        if frame and not self.closed:
            self._send(self._framing.sealed(frame))

    def _send(self, data: bytes) -> None:
        if not data:
            return
        if not self._out:
            self._owner.wants_flush(self)
        self._out.append(data)
        self._out_bytes += len(data)
        self._posted_bytes += len(data)
        if self._out_bytes > UNREAD_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        if self._out and self._transport is not None and not self.closed:
            out, self._out = self._out, []
            self._out_bytes = 0
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    @property
    def unread_replies_bytes(self) -> int:
        """The bytes that the kernel does not accept because the peer does not read; views do not count."""
        return self._unsent_bytes + self._framing.outgoing.unsent_replies_bytes

    @property
    def has_unsent_reply(self) -> bool:
        """Whether a large reply, or a part of it, is still unsent."""
        return max(0, self._posted_bytes - self._unsent_bytes) < self._reply_end

    @property
    def _unsent_bytes(self) -> int:
        unsent = self._out_bytes
        if self._transport is not None:
            unsent += self._transport.get_write_buffer_size()
        if self._raw is not None and self._raw is not self._transport:  # With TLS there are two.
            unsent += self._raw.get_write_buffer_size()
        return unsent

    def post_reply(self, frame: bytes) -> None:
        """Send a frame that may exceed the limit for unread data."""
        if self._transport is not None:
            self._transport.set_write_buffer_limits(high=UNREAD_BYTES_MAX + len(frame))
        self._post(frame)
        self._reply_end = self._posted_bytes

    def post_whole(self, frame: bytes) -> None:
        """Send a frame in one piece: this connection has no heartbeats to delay."""
        self._post(frame)

    def close(self, last_frame: bytes = b"") -> None:
        """Close once everything is sent."""
        if self.closed:
            return
        for frame in (*self._framing.outgoing.rest(), last_frame):
            self._post(frame)
        self.flush()
        transport = self._transport
        self.closed = True
        if transport is None:
            self.abort()
            return
        transport.close()

    def abort(self) -> None:
        """Close now; unsent data is lost."""
        self.closed = True
        for transport in (self._transport, self._raw):
            if transport is not None:
                transport.abort()

    def reject(self, why: str, reply: bytes = b"", *, is_fault: bool = True) -> None:
        """Close with a reply, if there is one, and report a fault of the other side to the owner."""
        if self.closed:
            return
        if is_fault:
            self._owner.report_fault(self, why)
        if reply:
            self.close(reply)
        else:
            self.abort()

    def _check_hello(self, hello: Hello) -> None:
        self.run_id, self.read_only = hello.run_id, hello.read_only
        self._owner.check_hello(self, hello)


class UnreadReplies:
    """Counts the replies that all connections leave unread."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._unread: dict[ServerConnection, int] = {}  # In bytes, at the last check.
        self._total = 0

    def note(self, peer: ServerConnection) -> list[ServerConnection]:
        """Check a connection that was sent a reply; return the other connections to close."""
        self._update_unread(peer)
        if self._total <= self._bytes_max:
            return []
        for one in [*self._unread]:  # Peers may have read much since, or some data is not sent yet.
            one.flush()
            self._update_unread(one)
        if self._total <= self._bytes_max:
            return []
        to_close: list[ServerConnection] = []
        for one in sorted(self._unread, key=self._unread.__getitem__, reverse=True):
            if one is not peer:
                to_close.append(one)
                self.forget(one)
            if self._total <= UNREAD_SHARE_KEPT * self._bytes_max:
                break
        return to_close

    def forget(self, peer: ServerConnection) -> None:
        self._total -= self._unread.pop(peer, 0)

    def _update_unread(self, peer: ServerConnection) -> None:
        self.forget(peer)
        unread = 0 if peer.closed else peer.unread_replies_bytes
        if unread:
            self._unread[peer] = unread
            self._total += unread


def _duplicate(transport: asyncio.Transport) -> socket.socket | None:
    """Return a copy of the connection that stays open when the transport closes its own."""
    try:
        twin: socket.socket = transport.get_extra_info("socket").dup()
    except OSError:
        return None  # It has closed, or no descriptor is left.
    return twin


def _send_last(connection: socket.socket, frame: bytes) -> None:
    """Send a frame; the kernel accepts all of it immediately, since nothing was sent before."""
    try:
        connection.send(frame)
    except OSError:
        pass  # The client has disconnected.


# The end that connects.


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
        "_framing",
        "_has_tls",
        "_open",
        "_server",
        "_transport",
        "confirmed_at",
        "ended",
        "goodbye",
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
        self.goodbye = Goodbye()
        """The last message of the other side, if it closed the connection intentionally."""
        self.confirmed_at: float | None = None
        self._buffer = connector.read_buffer
        self._has_tls = connector.has_tls
        handshake = ClientHandshake(
            connector.token,
            run_id=connector.run_id,
            host=connector.host,
            port=connector.port,
            endpoint_index=connector.endpoint_index,
            read_only=connector.read_only,
            key_for=connector.key_for,
            server=connector.server,
        )
        self._framing = Framing(handshake, check_server_bytes)
        self._server = connector.server
        self._transport: asyncio.Transport | None = None
        self._open = True

    @property
    def is_open(self) -> bool:
        """Whether the handshake is complete and the connection open."""
        return self._open and self._framing.is_ready

    @property
    def is_mute(self) -> bool:
        """Whether the other side has sent nothing yet."""
        return not self._framing.has_received

    # For the owner.

    def send(self, message: Message) -> None:
        """Send a message; it is lost if the connection has closed."""
        kind = "status" if type(message) is Status else ""
        self._send_frame(self._framing.outgoing.send(encode_frame(message), kind))

    def send_whole(self, message: Message) -> None:
        """Send a message of any size in one piece: this connection has no heartbeats to delay."""
        self._send_frame(encode_frame(message))

    @property
    def unsent_bytes(self) -> int:
        """The bytes that the kernel has not accepted yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def expect_large(self, frame_bytes_max: int) -> None:
        """Accept frames up to this size, for replies about many nodes."""
        self._framing.reader.frame_bytes_max = frame_bytes_max

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
            for frame in (*self._framing.outgoing.rest(), encode_frame(Goodbye(why=why))):
                self._send_frame(frame)
        self._open = False
        self._transport.close()

    def _send_frame(self, frame: bytes) -> None:
        if frame and self._open and self._transport is not None:
            self._transport.write(self._framing.sealed(frame))

    def _send(self, data: bytes) -> None:
        if data and self._transport is not None:
            self._transport.write(data)
        if self._framing.is_ready and not self.ready.done():
            self.ready.set_result(None)

    # For asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._framing.start())

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (asyncio's signature)
        """Lend the buffer that all connections of the loop share."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if not self._open:
            return
        data = self._buffer[:nbytes]
        try:
            for one in self._framing.receive(data):
                if isinstance(one, bytes):
                    self._send(one)
                else:
                    self._received(one)
                if not self._open:
                    return
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
            self._end(self._connect_failure(exc))
        if not self.ended.done():
            self.ended.set_result(None)

    def _received(self, message: Message) -> None:
        if type(message) is Goodbye:
            why = quoted(message.why) or f"{self._server} closed the connection"
            self.goodbye = message
            self._end(ConnectFailed(why))
        elif self.on_message is not None:
            self.on_message(message)

    def _connect_failure(self, exc: Exception | None) -> ConnectFailed:
        if self._framing.is_ready:
            why = f"the connection broke: {error_text(exc)}" if exc else "it was closed"
            return ConnectFailed(why)
        if exc is not None and self._has_tls and is_tls_fault(exc):
            return ConnectFailed(explain_failure(exc), permanent=True)
        if self.is_mute:
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


def is_tls_fault(error: Exception) -> bool:
    """Whether TLS itself rejected the connection, not the network."""
    return isinstance(error, ssl.SSLError) and not isinstance(
        error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)
    )
