"""An agent's port in a job without a coordinator. Other nodes watch its presence there; clients control it.

An agent of a job on etcd, or over a shared state, listens on a port from its start. It stores the port's number
and a random key in etcd or in the shared state. A control client must prove that it has the key
(`wire.handshake.control_key`), and the job's token if there is one; if the nodes have certificates, the client
connects over TLS. Presence needs no key: it reveals nothing but an id.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import socket
import threading
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from holdfast import console
from holdfast.core.limits import CONTROL_KEY_BYTES
from holdfast.core.protocol import ControlPort
from holdfast.net import addresses, listening
from holdfast.net.half_open import HalfOpen
from holdfast.net.peer_user import is_own_user, user_of
from holdfast.net.presence import PRESENCE_REQUEST
from holdfast.net.token import choose_token
from holdfast.wire.handshake import READ_ONLY_ALL_PREFIX, READ_ONLY_PREFIX, control_key
from holdfast.wire.messages import Contact, Contacts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from holdfast.wire.messages import Hello

ON, READ_ONLY, OFF = "on", "read-only", "off"
PRESENCE_ID_BYTES = 16
WATCHERS_MAX = 64
"""The limit of connections that watch one agent's presence. When they end, the watching nodes check whether this agent
exited."""
UNDECIDED_MAX = 64
"""The limit of connections that have not sent their first bytes, and of control connections before `serve`."""
FIRST_BYTES_S = 10.0
SERVE_S = 5.0
"""How long a control connection waits for `serve`."""
ACCEPTED_AT_ONCE_MAX = 64
REOPEN_S = 1.0  # The pause when this process has no descriptor left.


class ControlCredentials(msgspec.Struct, frozen=True, kw_only=True):
    """The credentials with which a client controls the agents of one job, besides each agent's key."""

    run_id: str
    token: bytes | None = None
    pem: tuple[bytes, bytes, bytes] | None = None
    """With TLS: an authority, a certificate and its key."""

    def contacts(self, found: Iterable[tuple[str, str, ControlPort | None]]) -> Contacts:
        """Return the contacts of agents, given node, address and port of each."""
        token = self.token
        read_only = (token or b"").startswith(READ_ONLY_PREFIX)
        is_for_all = (token or b"").startswith(READ_ONLY_ALL_PREFIX)
        contacts = []
        for node, address, port in found:
            contact = Contact(node=node, address=address)
            if port is not None and address:
                secret = control_key(port.key, token, self.run_id, read_only=read_only)
                contact = Contact(node=node, address=address, port=port.port, secret=secret)
            contacts.append(contact)
        return Contacts(
            contacts=contacts,
            pem=list(self.pem or ()),
            run_id="" if is_for_all else self.run_id,
            read_only=read_only,
        )

    def __repr__(self) -> str:
        return f"ControlCredentials({self.run_id!r})"


class AgentPort:
    """The one port of an agent: other nodes watch its presence there, and control clients connect.

    It listens from its creation until `close`, only at `address` if that is an address of this host, otherwise on all
    addresses. The other nodes and clients use `address` too, also those on this host. Raises `OSError`. A connection that starts with `PRESENCE_REQUEST` receives `presence_id` and stays
    open. The callback of `serve` gets all others. The port belongs to the loop that called `open`.
    """

    def __init__(
        self,
        address: str,
        credentials: ControlCredentials,
        *,
        control: str = ON,
        shows_presence: bool = True,
    ) -> None:
        where = (
            listening.candidates_of(address, 0)
            if addresses.names_loopback(address)
            else listening.node_addresses(listening.address_of(address), 0)
        )
        self._listener = listening.listen(where)
        addresses.use_small_segments(self._listener)
        listening.defer_accept(self._listener, FIRST_BYTES_S)
        self.number = int(self._listener.getsockname()[1])
        self.presence_id = secrets.token_hex(PRESENCE_ID_BYTES) if shows_presence else ""
        self.control: ControlPort | None = None
        """The port number and key that a control client needs; None if the port accepts no control clients."""
        if control != OFF:
            self.control = ControlPort(self.number, os.urandom(CONTROL_KEY_BYTES))
        self.credentials = credentials
        self.read_only = control == READ_ONLY
        """Whether control clients may only read."""
        self._serve: Callable[[socket.socket, str], None] | None = None
        self._early: list[tuple[socket.socket, str]] = []  # Connections before `serve`.
        self._lock = threading.Lock()  # Guards `_serve` and `_early`.
        self._undecided = HalfOpen(UNDECIDED_MAX)
        self._watching = HalfOpen(WATCHERS_MAX, min_s=math.inf)
        self._loop: asyncio.AbstractEventLoop | None = None

    def fileno(self) -> int:
        """Return the listening descriptor. While any copy of it is open, the port accepts connections."""
        return self._listener.fileno()

    def key_for(self, hello: Hello) -> bytes:
        """Return the key that a control client must prove to have."""
        assert self.control is not None
        token = self.credentials.token
        return control_key(self.control.key, token, hello.run_id, read_only=hello.read_only)

    def open(self) -> None:
        """Accept connections in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._accept)

    def serve(self, serve: Callable[[socket.socket, str], None]) -> None:
        """Pass each control connection and its address to `serve`, in the loop's thread or this one."""
        with self._lock:
            self._serve, early, self._early = serve, self._early, []
        for connection, address in early:
            serve(connection, address)

    def close(self) -> None:
        """Close the port and the connections that it still owns; may be called more than once."""
        loop = self._loop
        if loop is not None and self._listener.fileno() >= 0:
            loop.remove_reader(self._listener)
        self._listener.close()
        with self._lock:
            self._serve, early, self._early = None, self._early, []
        for connection, _ in early:
            connection.close()
        for connection in (*self._watching.since, *self._undecided.since):
            self._drop(connection)

    def _accept(self) -> None:
        assert self._loop is not None
        for _ in range(ACCEPTED_AT_ONCE_MAX):
            try:
                connection, where = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue
            except OSError:  # No descriptor: without a pause the loop would retry at once.
                self._loop.remove_reader(self._listener)
                self._loop.call_later(REOPEN_S, self._reopen)
                return
            connection.setblocking(False)  # noqa: FBT003 (the name says it)
            self._decide(connection, addresses.as_ipv4_if_mapped(str(where[0])))

    def _reopen(self) -> None:
        if self._listener.fileno() >= 0:
            self.open()

    def _decide(self, connection: socket.socket, address: str, *, waited: bool = False) -> None:
        """Read the first bytes of a connection to find out its purpose; wait for them once."""
        assert self._loop is not None
        try:
            first = connection.recv(len(PRESENCE_REQUEST), socket.MSG_PEEK)
        except BlockingIOError:
            first = b""
        except OSError:
            self._drop(connection)
            return
        if len(first) < len(PRESENCE_REQUEST):
            if waited:
                self._drop(connection)
            else:
                self._wait(connection, address)
            return
        if waited:
            self._undecided.remove(connection)
            self._loop.remove_reader(connection)
        if first == PRESENCE_REQUEST:
            self._send_presence(connection, address)
        else:
            self._pass_to_server(connection, address)

    def _wait(self, connection: socket.socket, address: str) -> None:
        assert self._loop is not None
        if self._undecided.is_full:
            self._drop(self._undecided.next_to_close()[0])
        user = _stranger_at(connection)
        self._undecided.add(connection, address, self._loop.time(), user=user)
        self._loop.add_reader(connection, partial(self._decide, connection, address, waited=True))
        self._loop.call_later(FIRST_BYTES_S, self._expire, connection)

    def _expire(self, connection: socket.socket) -> None:
        if connection in self._undecided.since:
            self._drop(connection)

    def _send_presence(self, connection: socket.socket, address: str) -> None:
        assert self._loop is not None
        user, now = _stranger_at(connection), self._loop.time()
        if not self.presence_id or not self._has_room(address, user, now):
            connection.close()
            return
        self._watching.add(connection, address, now, user=user)
        try:
            connection.recv(len(PRESENCE_REQUEST))
            addresses.keep_alive(connection)
            # A new connection's buffer has room for the id.
            connection.send(self.presence_id.encode() + b"\n")
            self._loop.add_reader(connection, self._drop, connection)
        except OSError:
            self._drop(connection)

    def _has_room(self, address: str, user: int | None, now: float) -> bool:
        """Whether another watcher has room, if necessary that of an address with more than its share."""
        if self._watching.is_full and not self._watching.rejects(address, user):
            other, at = self._watching.next_to_close()
            if now >= at:
                self._drop(other)
        return not self._watching.is_full

    def _pass_to_server(self, connection: socket.socket, address: str) -> None:
        with self._lock:
            serve = self._serve
            if serve is None and self.control is not None and len(self._early) < UNDECIDED_MAX:
                assert self._loop is not None
                self._early.append((connection, address))
                self._loop.call_later(SERVE_S, self._close_early, connection)
                return
        if serve is not None and self.control is not None:
            serve(connection, address)
        else:
            connection.close()

    def _close_early(self, connection: socket.socket) -> None:
        """Close a control connection that nobody serves, for example in an agent with its own loop."""
        with self._lock:
            early = [one for one in self._early if one[0] is not connection]
            is_early, self._early = len(early) < len(self._early), early
        if is_early:
            connection.close()

    def _drop(self, connection: socket.socket) -> None:
        """Close a connection that has ended, or that sent unexpected data."""
        self._watching.remove(connection)
        self._undecided.remove(connection)
        if self._loop is not None and connection.fileno() >= 0:
            self._loop.remove_reader(connection)
        connection.close()


def _stranger_at(connection: socket.socket) -> int | None:
    """Return the user at the other end of a connection, if it is another user of this host."""
    user = user_of(connection)
    return None if is_own_user(user) else user


def open_agent_port(
    address: str, credentials: ControlCredentials, *, control: str, shows_presence: bool
) -> AgentPort | None:
    """Return the port of this agent, which accepts connections in the running loop.

    None if neither presence nor control is enabled, or if the port cannot be opened.
    """
    if control == OFF and not shows_presence:
        return None
    try:
        port = AgentPort(address, credentials, control=control, shows_presence=shows_presence)
    except OSError as problem:
        console.debug(f"this agent is reachable only from its own host: {problem}")
        return None
    port.open()
    return port


def explicit_token(environ: Mapping[str, str], *, read_only: bool = False) -> bytes | None:
    """Return the configured token, if any. This generates no token: access to the store already protects the job."""
    return choose_token(addresses.LOOPBACK, environ, read_only=read_only)
