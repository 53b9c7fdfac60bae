"""The server's side of one connection to the coordinator: decoding, sending, and limits.

::

    accepted ── TLS, if enabled ───► HANDSHAKE ── token proven ──► OPEN ──► closed
                                        └── too slow, invalid, too many ─────┘

No peer can delay another. All connections read into one shared buffer, so an idle connection needs almost no
memory. Data that a peer does not read is kept up to a limit; then the peer is dropped. This module does not
handle jobs.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from holdfast.core.quotas import UNREAD_BYTES_MAX
from holdfast.net import addresses
from holdfast.net.half_open import network_of
from holdfast.net.tls import explain_failure
from holdfast.wire.frames import TAKEN, FrameReader, IncomingParts, OutgoingParts
from holdfast.wire.handshake import COORDINATOR, ServerHandshake, refusal
from holdfast.wire.messages import Message, Part, PartTaken, decode
from holdfast.wire.sniff import check_client_bytes
from holdfast.wire.wire_errors import HandshakeRefused, NotOurProtocol, WireError
from holdfast.wire.wire_limits import FRAME_BYTES_MAX, HANDSHAKE_FRAME_BYTES_MAX, PART_BYTES

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

    from holdfast.wire.frames import Seal
    from holdfast.wire.messages import Hello

READ_BYTES = 256 * 1024
RELIEF = 0.75
"""Above the limit of unread data, connections are closed until this share of the limit remains."""

NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL")
"""OpenSSL's reasons for a client that does not speak TLS."""
TLS_RECORD = 0x16  # The first byte of a TLS client.
SPEAK_TLS = "it speaks TLS and this side does not (set tls_ca or tls=psk here as well)"
SPEAK_PLAIN = "it does not speak TLS"

NodeKey = tuple[str, str, int]
"""Run id, node and incarnation of the node that a connection belongs to."""


class ConnectionOwner(Protocol):
    """The server that a connection belongs to, as the connection uses it."""

    read_buffer: memoryview

    def connected(self, peer: ServerConnection) -> None: ...

    def check_hello(self, peer: ServerConnection, hello: Hello) -> None:
        """Raise `HandshakeRefused` if an authenticated client cannot be served."""

    def received(self, peer: ServerConnection, message: Message) -> None: ...

    def wants_flush(self, peer: ServerConnection) -> None:
        """Call `flush` soon."""

    def faulty(self, peer: ServerConnection, why: str) -> None:
        """Report a connection that was closed because its peer sent invalid data, or did not read."""

    def disconnected(self, peer: ServerConnection) -> None: ...


class ServerConnection(asyncio.BufferedProtocol):
    """One connection; the server owns it."""

    __slots__ = (
        "_handshake",
        "_in_seal",
        "_incoming",
        "_out",
        "_out_bytes",
        "_out_seal",
        "_outgoing",
        "_owner",
        "_posted_bytes",
        "_raw",
        "_reader",
        "_reply_end",
        "_started",
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
        """Whether it may change nothing."""
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
        self._reader = FrameReader(HANDSHAKE_FRAME_BYTES_MAX, tag_bytes=None)
        self._handshake: ServerHandshake | None = ServerHandshake(
            token, check_hello=self._check_hello, key_for=key_for, server=server
        )
        self._out_seal: Seal | None = None
        self._in_seal: Seal | None = None
        self._started = False
        self._incoming: IncomingParts | None = None  # Most connections never need it.
        self._outgoing = OutgoingParts()
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._posted_bytes = 0  # In total.
        self._reply_end = 0  # The total after the last large reply.
        self._raw: asyncio.Transport | None = None
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        """Whether the handshake is complete and the connection open."""
        return self._handshake is None and not self.closed

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
        twin = _duplicate(raw)  # asyncio closes its own silently when the handshake fails.
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
                _send_last(twin, refusal(SPEAK_TLS))
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
            if not self._started:
                self._started = True
                check_client_bytes(bytes(data[:8]))
            self._process(self._reader.feed(data))
        except HandshakeRefused as error:
            self.reject(str(error), error.reply, is_fault=not error.is_probe)
        except NotOurProtocol as error:
            # A TLS client cannot read the reply, but recognizes that this is not TLS.
            self.reject(str(error), refusal(SPEAK_PLAIN) if data[0] == TLS_RECORD else b"")
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
            frame = self._outgoing.send(frame, kind)
            if self._outgoing.unsent_bytes > UNREAD_BYTES_MAX:
                self.pause_writing()
        self._post(frame)

    def _post(self, frame: bytes) -> None:
        if frame and not self.closed:
            seal = self._out_seal
            self._queue(frame if seal is None else seal.seal(frame))

    def _queue(self, frame: bytes) -> None:
        if not self._out:
            self._owner.wants_flush(self)
        self._out.append(frame)
        self._out_bytes += len(frame)
        self._posted_bytes += len(frame)
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
        return self._unsent_bytes + self._outgoing.unsent_replies_bytes

    @property
    def owes_reply(self) -> bool:
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
        for frame in (*self._outgoing.rest(), last_frame):
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
            self._owner.faulty(self, why)
        if reply:
            self.close(reply)
        else:
            self.abort()

    def _check_hello(self, hello: Hello) -> None:
        self.run_id, self.read_only = hello.run_id, hello.read_only
        self._owner.check_hello(self, hello)

    def _process(self, bodies: list[bytes]) -> None:
        has_frames = bool(bodies)
        if self._handshake is not None:
            bodies = self._shake_hands(self._handshake, bodies)
        received = self._owner.received
        seal = self._in_seal
        for body in bodies:
            message = decode(body if seal is None else seal.open(body))
            if type(message) is Part or type(message) is PartTaken:
                self._take_part(message)
            else:
                received(self, message)
            if self.closed:
                return
        if has_frames and self._reader.buffered_bytes:
            # The limits changed with the last frame: check the rest of the buffer again.
            self._process(self._reader.feed(b""))

    def _shake_hands(self, handshake: ServerHandshake, bodies: list[bytes]) -> list[bytes]:
        """Continue the handshake; return the messages after it."""
        for at, body in enumerate(bodies):
            reply = handshake.receive(body)
            self._queue(reply)
            if handshake.done:
                self._handshake = None
                self._out_seal, self._in_seal = handshake.seals or (None, None)
                self._reader.frame_bytes_max = FRAME_BYTES_MAX
                self._reader.tag_bytes = handshake.tag_bytes
                return bodies[at + 1 :]
        return []

    def _take_part(self, message: Part | PartTaken) -> None:
        if type(message) is PartTaken:
            self._post(self._outgoing.next_part())
            return
        assert type(message) is Part
        self._incoming = incoming = self._incoming or IncomingParts()
        self._post(TAKEN)
        body = incoming.take(message)
        if body is not None:
            self._owner.received(self, decode(body))


class UnreadReplies:
    """Counts the replies that all connections leave unread."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._unread: dict[ServerConnection, int] = {}  # When each was last checked.
        self._total = 0

    def note(self, peer: ServerConnection) -> list[ServerConnection]:
        """Check a connection that was sent a reply; return the other connections to close."""
        self._measure(peer)
        if self._total <= self._bytes_max:
            return []
        for one in [*self._unread]:  # Peers may have read much of it since, or it is not sent yet.
            one.flush()
            self._measure(one)
        if self._total <= self._bytes_max:
            return []
        to_close: list[ServerConnection] = []
        for one in sorted(self._unread, key=self._unread.__getitem__, reverse=True):
            if one is not peer:
                to_close.append(one)
                self.forget(one)
            if self._total <= RELIEF * self._bytes_max:
                break
        return to_close

    def forget(self, peer: ServerConnection) -> None:
        self._total -= self._unread.pop(peer, 0)

    def _measure(self, peer: ServerConnection) -> None:
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
