"""Control clients at an agent's port: each must prove that it has the port's key before it sends a query.

The limits are those of a coordinator's port (`coordinator.admission`), but smaller: the number of
unfinished handshakes is limited, and a flood evicts its own connections first. Everything runs in the
control thread, so the agent's loop never waits for it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.control.node_server import CONNECTIONS_MAX, Client, goodbye
from holdfast.coordinator.admission import HANDSHAKE_S, Acceptor
from holdfast.coordinator.connections import READ_BYTES, ServerConnection
from holdfast.core.limits import WHY_CHARS_MAX
from holdfast.net.peer_user import NOT_REPORTED, UNKNOWN, is_own_user
from holdfast.net.tls import mutual_context
from holdfast.printable import one_line, quoted
from holdfast.wire.frames import encode_frame
from holdfast.wire.wire_errors import HandshakeRefused
from holdfast.wire.wire_limits import FRAME_BYTES_MAX, STATUS_FRAME_BYTES_MAX

if TYPE_CHECKING:
    from holdfast.control.node_server import NodeServer
    from holdfast.net.agent_port import AgentPort
    from holdfast.wire.messages import Hello, Message

AGENT = "the agent"
HALF_OPEN_MAX = 64
IDLE_S = 300.0
"""Clients send something every minute (`control.job_client.ALIVE_S`)."""
SWEEP_S = 30.0


class PortClient(Client):
    """A client that has proven that it has the port's key."""

    def __init__(self, server: NodeServer, peer: ServerConnection) -> None:
        super().__init__(server)
        self.peer = peer
        self.read_only = peer.read_only
        server.clients.add(self)

    def send(self, message: Message) -> None:
        frame = encode_frame(message, STATUS_FRAME_BYTES_MAX)
        if len(frame) > FRAME_BYTES_MAX:  # The state of a large job.
            self.peer.post_reply(frame)
        else:
            self.peer.post_whole(frame)

    @property
    def unread_bytes(self) -> int:
        return self.peer.unread_replies_bytes

    def drop(self, why: str, outcome: str = "", *, left: bool = False) -> None:
        self.peer.close(goodbye(why, outcome, left=left))


class PortServer:
    """Serves the control clients of one agent port in the running loop, until `close`."""

    def __init__(self, server: NodeServer, own: AgentPort) -> None:
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        self._server, self._own = server, own
        self._loop = asyncio.get_running_loop()
        self._clients: dict[ServerConnection, PortClient | None] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._tls = None
        if own.credentials.pem is not None:
            self._tls = mutual_context(*own.credentials.pem, serving=True)
        self._acceptor = Acceptor(None, self._make_peer, self._note, half_open_max=HALF_OPEN_MAX)
        self.adopt = self._acceptor.adopt

    def close(self) -> None:
        """Close unfinished connections; the caller drops the clients."""
        self._acceptor.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        for peer, client in [*self._clients.items()]:
            if client is None:
                peer.abort()

    def _make_peer(self, address: str, local_address: str) -> ServerConnection:
        return ServerConnection(
            self, None, address, local_address, key_for=self._own.key_for, server=AGENT
        )

    def _note(self, what: str) -> None:
        console.debug(f"control port: {what}")

    # For connections.

    def connected(self, peer: ServerConnection) -> None:
        peer.received_at = self._loop.time()
        self._clients[peer] = None
        if self._tls is not None:
            self._acceptor.spawn(peer.begin_tls(self._tls, HANDSHAKE_S))
        else:
            peer.use()
        self._sweep_later()

    def check_hello(self, peer: ServerConnection, hello: Hello) -> None:
        """Accept a client that has proven that it has the key, or refuse it."""
        self._acceptor.finished(peer)
        run_id = self._own.credentials.run_id
        if hello.run_id != run_id and not (hello.read_only and not hello.run_id):
            raise HandshakeRefused(f"this is an agent of the job {quoted(repr(run_id))}")
        if self._own.credentials.token is None and not is_own_user(peer.user):
            why = f": {NOT_REPORTED}; set HOLDFAST_TOKEN" if peer.user == UNKNOWN else ""
            raise HandshakeRefused(
                f"without a token, an agent serves only its own user on its host{why}"
            )
        if sum(one is not None for one in self._clients.values()) >= CONNECTIONS_MAX:
            why = f"the agent has {CONNECTIONS_MAX} connections already"
            raise HandshakeRefused(why, permanent=False)
        peer.read_only |= self._own.read_only
        self._clients[peer] = PortClient(self._server, peer)

    def received(self, peer: ServerConnection, message: Message) -> None:
        peer.received_at = self._loop.time()
        client = self._clients[peer]
        assert client is not None
        self._server.received(client, message)

    def wants_flush(self, peer: ServerConnection) -> None:
        self._loop.call_soon(peer.flush)

    def report_fault(self, peer: ServerConnection, why: str) -> None:
        self._note(f"closed a connection from {peer.address}: {one_line(why, WHY_CHARS_MAX)}")

    def disconnected(self, peer: ServerConnection) -> None:
        self._acceptor.finished(peer)
        client = self._clients.pop(peer, None)
        if client is not None:
            client.forget()

    # Idle connections.

    def _sweep_later(self) -> None:
        if self._sweeping is not None or not self._clients:
            return
        at = self._acceptor.next_deadline()
        delay_s = SWEEP_S if at is None else min(SWEEP_S, max(0.0, at - self._loop.time()))
        self._sweeping = self._loop.call_later(delay_s, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = None
        now = self._loop.time()
        self._acceptor.sweep(now)
        for peer in [one for one in self._clients if now - one.received_at >= IDLE_S]:
            if peer.closed:
                peer.abort()  # It was closed with unsent data, which the peer does not read.
            else:
                peer.reject(f"no message for {IDLE_S:g} s")
        self._sweep_later()
