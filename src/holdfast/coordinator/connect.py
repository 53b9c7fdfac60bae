"""The client of a coordinator: connects to an endpoint and authenticates both sides.

A `CoordinatorConnector` holds the endpoint, job, token and certificates that all clients of one loop share. It
opens each connection (`coordinator.connections`). Every failure is one line for the user and says whether a retry can
help: a wrong token stays wrong, but a coordinator that does not run yet may start.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from holdfast.coordinator.connections import (
    READ_BYTES,
    ClientConnection,
    ConnectFailed,
    is_tls_fault,
)
from holdfast.errors import EnvironmentProblem
from holdfast.net import addresses, async_addresses, listening, tls
from holdfast.net.async_addresses import error_text
from holdfast.net.peer_user import NOT_REPORTED, UNKNOWN, listener_of
from holdfast.wire.handshake import COORDINATOR
from holdfast.wire.sniff import explain_silent_close

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

    from holdfast.net.addresses import Address
    from holdfast.wire.messages import Hello

CONNECT_S = 3.0
HANDSHAKE_S = 10.0
MUTE_S = 1.0
"""A connection that was accepted and stays silent for this long is reported as a possible problem, since
coordinators respond in milliseconds. The handshake may still take `HANDSHAKE_S`."""
CONNECTING_MAX = 512
"""Connections that the clients of one loop open concurrently. More would only slow each of them down, until
the coordinator closes those with unfinished handshakes."""

MUTE = "it accepts the connection but does not respond: it is not a coordinator, or it is stopped"
MUTE_AGENT = "it accepts the connection but does not respond; it may be stopped"


class CoordinatorConnector:
    """Connects to the coordinator at one endpoint; belongs to one loop.

    `has_psk` says whether TLS uses the token. With `own_users_only` a listener on this host must belong
    to this user or root. `endpoint_index` is the endpoint's position in a list. If all addresses of the
    endpoint refuse the connection, the connector calls `on_refused` with them; if that returns true, a process
    listens there now and the connector retries. With a `secret` it connects to an agent's port, and `server`
    names the agent in messages.
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
        endpoint_index: int = 0,
        on_refused: Callable[[list[Address]], bool] | None = None,
        secret: bytes = b"",
        read_only: bool = False,
        server: str = COORDINATOR,
    ) -> None:
        self.key_for: Callable[[Hello], bytes] | None = (lambda _: secret) if secret else None
        self.read_only, self.server = read_only, server
        self.host = host
        self.port = port
        self.run_id = run_id
        self.endpoint_index = endpoint_index
        self.token = token
        self.has_tls, self.has_psk = tls is not None, has_psk
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        self.suspicion = ""
        """The likely problem with the attempt in progress; any thread may read it."""
        self._tls = tls
        self._server_name = server_name or host
        self._own_users_only = own_users_only
        self._on_refused = on_refused
        self._turns = asyncio.Semaphore(CONNECTING_MAX)

    async def connect(self) -> ClientConnection:
        """Return a connection after its handshake, or raise `ConnectFailed`."""
        async with self._turns:
            try:
                found = await async_addresses.resolve_async(self.host, self.port)
            except OSError as error:
                raise ConnectFailed(f"cannot resolve {self.host}: {error_text(error)}") from None
            try:
                connected = await self._connect_first(found)
            except OSError as error:
                refused = isinstance(error, ConnectionRefusedError)
                raise ConnectFailed(error_text(error), refused=refused) from None
            if self._own_users_only:
                _check_listener(connected, self.port)
            try:
                return await self._shake_hands(connected)
            except ConnectFailed as problem:
                problem.reached = True
                raise

    async def _connect_first(self, found: list[Address]) -> socket.socket:
        try:
            return await async_addresses.connect_first(
                found, CONNECT_S, addresses.use_small_segments
            )
        except ConnectionRefusedError:
            if self._on_refused is None or not self._on_refused(found):
                raise
            return await async_addresses.connect_first(
                found, CONNECT_S, addresses.use_small_segments
            )

    async def _shake_hands(self, connected: socket.socket) -> ClientConnection:
        loop = asyncio.get_running_loop()
        connection = ClientConnection(self)
        is_ready = False
        suspecting = loop.call_later(MUTE_S, self._note_suspicion, connection)
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
            if self.has_tls and is_tls_fault(error):
                raise ConnectFailed(tls.explain_failure(error), permanent=True) from None
            raise ConnectFailed(explain_silent_close(self.has_tls, self.has_psk)) from None
        finally:
            suspecting.cancel()
            self.suspicion = ""
            # This includes a connection that became ready just as the attempt was cancelled.
            if not is_ready and not connection.abort():
                connected.close()
        return connection

    def _note_suspicion(self, connection: ClientConnection) -> None:
        if connection.is_mute:
            self.suspicion = MUTE


def _check_listener(connected: socket.socket, port: int) -> None:
    user = listener_of(connected)
    try:
        if user == UNKNOWN:
            raise EnvironmentProblem(
                f"cannot check who listens on port {port}: {NOT_REPORTED}",
                hint="set HOLDFAST_TOKEN or HOLDFAST_TOKEN_FILE to the same value on both sides",
            )
        listening.refuse_other_user(user, port)
    except EnvironmentProblem as problem:
        connected.close()
        raise ConnectFailed(str(problem), permanent=True) from None
