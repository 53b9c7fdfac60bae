"""The server of a TCPStore: it executes requests, and one loop serves all connections.

One thread, one epoll. No client stalls the others: the server stops reading from a client that does not read its
responses; a client with many requests yields after every `TURN_BYTES` of responses; a client that violates
the protocol is disconnected, without effect on the others. `embedded` starts the thread, and imports this
module when the first client connects.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from struct import Struct
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.net.addresses import packed
from holdfast.net.half_open import HalfOpen
from holdfast.net.listening import descriptor_limit, raise_descriptor_limit
from holdfast.net.peer_user import NO_OWNER, NOT_REPORTED, UNKNOWN, is_own_user, user_of
from holdfast.store.key_space import BYTES_MAX, KeySpace, RequestRejected, ShareUsedUp
from holdfast.store.tcp import tcp_protocol
from holdfast.store.tcp.embedded import PRIVATE
from holdfast.store.tcp.host_admission import HELD_PART, HELD_S, HostAdmission
from holdfast.store.tcp.tcp_protocol import GET, QUEUE_POP, WAIT, Requests
from holdfast.wire import store_proof
from holdfast.wire.store_proof import OwnerAnswer, OwnerQueries
from holdfast.wire.wire_errors import ProofRefused, WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from holdfast.store.key_space import ClientShare
    from holdfast.store.tcp.embedded import HostAccess

RESPONSE_BYTES_MAX = 256 * 1024 * 1024
"""The limit of one response: a small request may read the same value many times."""
REMEMBERED_MAX = 4096
REMEMBERED_BYTES_MAX = 256
"""How many decoded requests are cached, and the maximum length of each: 1 or 2 MB in total."""
RECEIVE_BYTES = 16 * 1024
RECEIVE_LARGE_BYTES = 1024 * 1024  # The maximum, when a large value is expected.
SEND_BYTES = 1024 * 1024
TURN_BYTES = 256 * 1024
EVENTS_MAX = 256  # Connections served between two polls.
ACCEPTED_AT_ONCE = 64
CONNECTIONS_MAX = 65_536
DESCRIPTORS_LEFT = 256  # Reserved for the rest of this process, but at most half of the limit.
VALIDATE_S = 30.0
HALF_OPEN_MAX = 1024  # Connections that have not sent VALIDATE yet.
HALF_OPEN_MIN_S = 1.0  # The minimum time of each, unless its host exceeds its share.
PROMISE_S = 1.0  # A queue reserves a value for a woken client for 1 to 2 times this.
NO_ROOM_S = 0.2  # How long to accept no connection when no descriptor is free.
WARNINGS_MAX = 10

# What a request does.

WOKEN = bytes((tcp_protocol.STOP_WAITING,))
_CANCELED = bytes((tcp_protocol.WAIT_CANCELED,))
_READY, _NOT_READY = bytes((tcp_protocol.READY,)), bytes((tcp_protocol.NOT_READY,))

_u64 = Struct("<Q").pack
_i64 = Struct("<q").pack
_u32 = Struct("<I").pack
_ONE = _u64(1)
_length = int.from_bytes


def respond(space: KeySpace, client: int, operation: int, fields: list[Any]) -> bytes | None:
    """Execute a request, and return its response; None if there is none, or not yet.

    Raises `RequestRejected` if it cannot be executed; then the caller disconnects the client.
    """
    if space.promises:
        about_one_queue = operation == QUEUE_POP or (operation == WAIT and len(fields) == 1)
        space.release(client, fields[0] if about_one_queue else None)
    return _PERFORM[operation](space, client, fields)


def fast_responder(space: KeySpace) -> Callable[[int, bytes], bytes | None]:
    """Return a function that responds to the two most frequent requests, and to no other.

    These are GET, and WAIT for one key, if the key has a value and the received bytes are exactly one request.
    `respond` returns the same, several times slower. Workers mostly read the same keys, so decoded
    requests are cached.
    """
    values, waits, promised = space.lookup_views()
    value_of = values.get
    remembered: dict[bytes, tuple[bool, bytes]] = {}

    def respond_fast(client: int, data: bytes) -> bytes | None:
        decoded = remembered.get(data)
        if decoded is None:
            decoded = _decode_common(data)
            if decoded is None:
                return None
            if len(data) <= REMEMBERED_BYTES_MAX:
                if len(remembered) >= REMEMBERED_MAX:
                    remembered.clear()
                remembered[data] = decoded
        is_wait, key = decoded
        value = value_of(key)
        if value is None or client in waits or promised:
            return None
        return WOKEN if is_wait else _u64(len(value)) + value

    return respond_fast


def _decode_common(data: bytes) -> tuple[bool, bytes] | None:
    """Return whether a request is WAIT, and its key; None unless it is one WAIT or GET of a key."""
    operation = data[0]
    if operation == WAIT:
        if data[1:9] == _ONE and _length(data[9:17], "little") == len(data) - 17:
            return True, data[17:]
    elif operation == GET and _length(data[1:9], "little") == len(data) - 9:
        return False, data[9:]
    return None


def _blob(value: bytes | bytearray) -> bytes:
    return _u64(len(value)) + value


def _blobs(values: Sequence[bytes | bytearray]) -> bytes:
    if sum(map(len, values)) + 8 * len(values) > RESPONSE_BYTES_MAX:
        raise RequestRejected(f"its response would exceed {RESPONSE_BYTES_MAX} bytes")
    return b"".join([part for value in values for part in (_u64(len(value)), value)])


def _pop(space: KeySpace, client: int, fields: list[Any]) -> bytes:
    length, value = space.pop(client, fields[0])
    return _i64(length) + _blob(value) if length else _i64(0)


def _list_keys(space: KeySpace, _client: int, _fields: list[Any]) -> bytes:
    keys = list(space.keys())
    return _i64(len(keys)) + _blobs(keys)


def _cancel_wait(space: KeySpace, client: int, _fields: list[Any]) -> bytes:
    space.cancel(client)
    return _CANCELED


def _no_such_operation(_space: KeySpace, _client: int, _fields: list[Any]) -> bytes:
    raise RequestRejected("this operation has no response")


# VALIDATE is not among them: `Requests` consumes it.
_BY_OPERATION: dict[int, Callable[[KeySpace, int, list[Any]], bytes | None]] = {
    tcp_protocol.SET: lambda space, _, f: space.set(f[0], f[1]),
    tcp_protocol.COMPARE_SET: lambda space, _, f: _blob(space.compare_set(f[0], f[1], f[2])),
    tcp_protocol.GET: lambda space, _, f: _blob(space.get(f[0])),
    tcp_protocol.ADD: lambda space, _, f: _i64(space.add(f[0], f[1])),
    tcp_protocol.CHECK: lambda space, _, f: _READY if space.has(f) else _NOT_READY,
    tcp_protocol.WAIT: lambda space, client, f: WOKEN if space.wait(client, f) else None,
    tcp_protocol.GETNUMKEYS: lambda space, _, __: _i64(len(space)),
    tcp_protocol.DELETE_KEY: lambda space, _, f: _i64(space.delete(f[0])),
    tcp_protocol.APPEND: lambda space, _, f: space.append(f[0], f[1]),
    tcp_protocol.MULTI_GET: lambda space, _, f: _blobs([space.get(key) for key in f]),
    tcp_protocol.MULTI_SET: lambda space, _, f: space.multi_set(f[::2], f[1::2]),
    tcp_protocol.CANCEL_WAIT: _cancel_wait,
    tcp_protocol.PING: lambda _, __, f: _u32(f[0]),
    tcp_protocol.QUEUE_PUSH: lambda space, _, f: space.push(f[0], f[1]),
    tcp_protocol.QUEUE_POP: _pop,
    tcp_protocol.QUEUE_LEN: lambda space, _, f: _i64(space.queue_length(f[0])),
    tcp_protocol.LIST_KEYS: _list_keys,
    tcp_protocol.BARRIER: lambda space, client, f: (
        WOKEN if space.barrier(client, f[0], f[1]) else None
    ),
}
_PERFORM = tuple(
    _BY_OPERATION.get(operation, _no_such_operation) for operation in range(tcp_protocol.OPERATIONS)
)


# The connections and the loop.


class StoreConnection:
    """One client: its socket, its incomplete request, and the responses that it has not read yet."""

    __slots__ = (
        "address", "agent", "asked", "descriptor", "greet", "host", "is_idle", "number", "proof",
        "receive", "requests", "send", "share", "socket", "stream", "unfinished", "unsent",
        "verdict",
    )  # fmt: skip

    def __init__(self, number: int, peer: socket.socket, address: object) -> None:
        self.host = b""
        """The address of its host; empty for this host."""
        self.share: ClientShare | None = None
        self.greet: Callable[[StoreConnection], None] | None = None
        """Handles its data until the store accepts it as a client."""
        self.proof: store_proof.StoreProof | None = None
        self.stream: store_proof.SealedStream | None = None
        """Opens and seals the frames, if an agent forwards a worker's traffic over this connection."""
        self.agent: _Agent | None = None
        """The agent at the other end, which attests its host."""
        self.asked: dict[StoreConnection, None] | None = None
        """The agents that have not answered yet whose connection this is; None if none was asked."""
        self.verdict = _NO_VERDICT
        """The answer that counts if no other agent answers `OWN`."""
        self.number = number
        self.socket = peer
        self.descriptor = peer.fileno()
        self.receive = peer.recv
        self.send = peer.send
        self.address = address
        self.requests = Requests()
        self.is_idle = False
        """Whether its next byte begins a request, and the client has read all responses."""
        self.unfinished = 0
        self.unsent = bytearray()

    def buffered_bytes(self) -> int:
        """Bytes buffered: of an incomplete request, and of responses that were not read."""
        return self.unfinished + len(self.unsent)

    @property
    def host_name(self) -> str:
        """The address of its host, for messages."""
        match self.address:
            case (str(host), *_):
                return host.removeprefix("::ffff:")
        return "a host"

    def __str__(self) -> str:
        match self.address:
            case (str(_), int(port), *_):
                return f"{self.host_name}:{port}"
        return "a client"


class _Agent:
    """The agent at the other end of a connection: its host's connections that it identifies."""

    __slots__ = ("queries", "waiting")

    def __init__(self, stream: store_proof.SealedStream) -> None:
        self.queries = OwnerQueries(stream)
        self.waiting: dict[StoreConnection, None] = {}
        """Connections to ask for once it has answered others."""


_NO_VERDICT = OwnerAnswer(0, 0)
_WHY = {
    0: (
        "no agent of this job attested its host",
        "--rdzv-conf store=private lets agents forward, store=open serves every host",
    ),
    store_proof.NOT_FOUND: (
        "its host's agent does not find it: its address may be translated on the way",
        "--rdzv-conf store=private lets agents forward, store=open serves every host",
    ),
    store_proof.NOT_REPORTED: (
        "its host's kernel does not report who owns it",
        "--rdzv-conf store=open serves every host",
    ),
}
"""Why a connection from another host is refused, and the remedy."""

_GONE = (errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.EINTR)
_IN, _OUT, _CLOSED_ONLY = select.EPOLLIN, select.EPOLLOUT, select.EPOLLRDHUP

_loops: list[ServingLoop] = []  # All loops of this process: they share its descriptors.


class ServingLoop:
    """Serves the hosts of `access`, or every host if it is None, until the descriptor `wake` is readable."""

    def __init__(
        self,
        listener: socket.socket,
        epoll: select.epoll,
        wake: int,
        access: HostAccess | None = None,
    ) -> None:
        self.connections: dict[int, StoreConnection] = {}
        """The open connections, by client number in the key space."""
        self._by_descriptor: dict[int, StoreConnection] = {}
        self._listener = listener
        self._epoll = epoll
        self._wake = wake
        self._space = KeySpace(BYTES_MAX)
        self._half_open = HalfOpen(HALF_OPEN_MAX, HALF_OPEN_MIN_S)
        # Connections of other hosts, until an agent attests the host and knows their user; they are not read.
        self._held = HalfOpen(0)
        # The connections of agents that answer queries, by host.
        self._agents: dict[bytes, dict[StoreConnection, None]] = {}
        # Connections from other hosts, by host.
        self._remote: dict[bytes, dict[StoreConnection, None]] = {}
        # Connections that yielded with requests left.
        self._again: dict[StoreConnection, None] = {}
        self._accept_at: float | None = None  # When to accept again, while paused.
        self._promises_at: float | None = None  # When to end old promises, if there are any.
        self._numbers = 0
        self._buffered_bytes = 0  # Of incomplete requests and unread responses.
        self._warnings = 0
        self._connections_max = _connections_possible()
        self._admission = HostAdmission(access) if access is not None else None
        _loops.append(self)

    def run(self) -> None:
        """Serve all clients."""
        poll, by_descriptor = self._epoll.poll, self._by_descriptor
        listener = self._listener.fileno()
        respond_fast = fast_responder(self._space)
        _, _, promised = self._space.lookup_views()
        timeout = self._poll_timeout()
        while True:
            accept = False
            for descriptor, _events in poll(timeout, EVENTS_MAX):
                connection = by_descriptor.get(descriptor)
                if connection is not None:
                    if not connection.is_idle:
                        self._on_ready(connection)
                        continue
                    # The fast path for most requests. Every step counts, since waiting workers may
                    # keep all cores busy.
                    try:
                        data = connection.receive(RECEIVE_BYTES)
                    except BlockingIOError:
                        continue
                    except OSError:
                        data = b""
                    known = respond_fast(connection.number, data) if data else None
                    if known is None:
                        self._on_received(connection, data)
                    else:
                        self._send(connection, known)
                elif descriptor == listener:
                    accept = True
                elif descriptor == self._wake:
                    return
            if self._again:
                self._continue_turns()
            if accept:
                self._accept()
            timeout = -1.0
            if (
                self._half_open.since
                or self._held.since
                or self._again
                or self._accept_at is not None
                or self._promises_at is not None
                or promised
            ):
                self._check_deadlines(time.monotonic())
                timeout = self._poll_timeout()

    def _continue_turns(self) -> None:
        for connection in list(self._again):
            if self._again.pop(connection, connection) is None and not connection.unsent:
                self._serve(connection)

    def close(self) -> None:
        """Close all connections."""
        for connection in self.connections.values():
            _shut_down(connection.socket)
        self._end()

    def abandon(self) -> None:
        """Close this process's copies of the connections, which belong to the parent."""
        for connection in self.connections.values():
            connection.socket.close()
        self._end()

    def _end(self) -> None:
        self.connections.clear()
        _loops.remove(self)

    # One connection

    def _on_ready(self, connection: StoreConnection) -> None:
        """Handle a connection that is ready to be read or written."""
        if connection.unsent:
            self._send_more(connection)
            return
        if connection.greet is not None:
            connection.greet(connection)
            return
        if connection in self._again:
            return  # Its earlier requests are served first.
        wanted = max(RECEIVE_BYTES, min(connection.requests.wanted_bytes, RECEIVE_LARGE_BYTES))
        try:
            data = connection.receive(wanted)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._on_received(connection, data)

    def _on_received(self, connection: StoreConnection, data: bytes) -> None:
        if data:
            connection.requests.feed(data)
            self._serve(connection)
        else:
            self._drop(connection)

    def _serve(self, connection: StoreConnection) -> None:
        """Execute the complete requests of a client, up to the end of its turn."""
        requests, space = connection.requests, self._space
        number = connection.number
        space.share = connection.share
        responses = []
        size = 0
        problem = ""
        try:
            while (request := requests.next()) is not None:
                one = respond(space, number, request[0], request[1])
                if one:
                    responses.append(one)
                    size += len(one)
                if space.woken:
                    self._send_woken(connection, responses)
                if size > TURN_BYTES:
                    self._again[connection] = None
                    break
        except RequestRejected as refused:
            problem = str(refused)
        if responses:
            self._send(connection, responses[0] if len(responses) == 1 else b"".join(responses))
        if requests.problem or problem:
            self._disconnect(connection, requests.problem or problem)
            return
        if requests.unfinished_bytes != connection.unfinished and number in self.connections:
            more = requests.unfinished_bytes - connection.unfinished
            connection.unfinished = requests.unfinished_bytes
            self._buffer(connection, more)
        connection.is_idle = requests.idle and not connection.unsent
        if requests.validated and connection in self._half_open.since:
            self._half_open.remove(connection)
            self._resume_accepting()

    def _send_woken(self, connection: StoreConnection | None, responses: list[bytes]) -> None:
        """Send the response to each client whose wait has ended; that of `connection` goes to `responses`."""
        space = self._space
        while space.woken:
            woken, space.woken = space.woken, []
            for number in woken:
                other = self.connections.get(number)
                if other is connection is not None:
                    responses.append(WOKEN)
                elif other is not None:
                    self._send(other, WOKEN)

    def _send(self, connection: StoreConnection, data: bytes) -> None:
        sent = 0
        if connection.stream is not None:
            data = connection.stream.seal(data)
        if not connection.unsent:
            try:
                sent = connection.send(data)
            except BlockingIOError:
                pass
            except OSError:
                self._drop(connection)
                return
            if sent == len(data):
                return
            self._epoll.modify(connection.descriptor, _OUT)
            connection.is_idle = False
        connection.unsent += memoryview(data)[sent:]
        self._buffer(connection, len(data) - sent)

    def _send_more(self, connection: StoreConnection) -> None:
        """Send more of the responses that a client has not read yet."""
        unsent = connection.unsent
        try:
            with memoryview(unsent) as view:
                sent = connection.send(view[:SEND_BYTES])
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)
            return
        del unsent[:sent]
        self._buffer(connection, -sent)
        if not unsent:
            self._epoll.modify(connection.descriptor, _IN)
            if connection.greet is None:
                self._again[connection] = None  # It may have sent requests meanwhile.

    def _buffer(self, connection: StoreConnection, more: int) -> None:
        """Count the buffered bytes; above the limit, disconnect the client with the most."""
        self._buffered_bytes += more
        if connection.share is not None:
            connection.share.buffered += more
        if more > 0 and self._buffered_bytes > BYTES_MAX:
            most = max(self.connections.values(), key=StoreConnection.buffered_bytes)
            self._disconnect(most, f"more than {BYTES_MAX} bytes are buffered for all clients")
        share = connection.share
        if more > 0 and share is not None and share.bytes_held + share.buffered > share.bytes_max:
            mates = [one for one in self.connections.values() if one.share is share]
            most = max(mates, key=StoreConnection.buffered_bytes)
            self._disconnect(most, str(ShareUsedUp(share)))

    def _disconnect(self, connection: StoreConnection, problem: str) -> None:
        if connection.number not in self.connections:
            return
        text = f"workers' store: disconnected {connection}: {problem}"
        if connection.requests.validated:
            self._warn(text)
        else:
            console.debug(text)  # It is not a worker.
        self._drop(connection)

    def _drop(self, connection: StoreConnection) -> None:
        """Close a connection and forget its client."""
        if connection.number not in self.connections:
            return
        self._shut(connection)
        self._space.leave(connection.number)
        if self._space.woken:
            self._send_woken(None, [])
        self._resume_accepting()

    def _shut(self, connection: StoreConnection) -> None:
        del self.connections[connection.number]
        del self._by_descriptor[connection.descriptor]
        self._half_open.remove(connection)
        self._held.remove(connection)
        if connection.host:
            del self._remote[connection.host][connection]
            if not self._remote[connection.host]:
                del self._remote[connection.host]
        for agent in connection.asked or ():
            if agent.agent is not None:
                agent.agent.waiting.pop(connection, None)
        self._again.pop(connection, None)
        self._buffered_bytes -= connection.buffered_bytes()
        self._move_to_share(connection, None)
        # Otherwise a copy in a child that is being forked would keep it registered.
        self._epoll.unregister(connection.descriptor)
        _shut_down(connection.socket)
        if connection.agent is not None:
            self._forget_agent(connection)

    # Admission

    def _greet(self, connection: StoreConnection) -> None:
        """Serve, hold or refuse a new connection, depending on its first byte and its host."""
        assert self._admission is not None
        try:
            first = connection.receive(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            first = b""
        if not first:
            self._drop(connection)
        elif first[0] == tcp_protocol.PROOF:
            self._start_proof(connection)
        elif not connection.host or self._admission.serves_every_host:
            connection.greet = None
            self._on_ready(connection)
        elif self._admission.serves_attested_hosts:
            self._hold(connection)
            self._ask(connection, list(self._agents.get(connection.host, ())))
        else:
            self._refuse(connection)

    def _hold(self, connection: StoreConnection) -> None:
        """Do not read from a connection until an agent on its host says that it belongs to the job's user."""
        self._half_open.remove(connection)
        self._resume_accepting()
        if not self._held.since:
            self._raise_limit()
            self._held = HalfOpen(self._connections_max // HELD_PART)
        if self._held.is_full:
            other, _ = self._held.next_to_close()
            self._refuse(other)
        self._held.add(connection, connection.host_name, time.monotonic())
        connection.greet = self._drop  # From now on epoll reports only that it closed.
        self._epoll.modify(connection.descriptor, _CLOSED_ONLY)

    def _refuse(self, connection: StoreConnection) -> None:
        assert self._admission is not None
        verdict = connection.verdict
        if verdict.whose == store_proof.OTHER:
            why, hint = f"it belongs to another user of that host (uid {verdict.user})", ""
        elif self._admission.access.mode == PRIVATE:
            why = "it is not an agent of this job (store=private)"
            hint = "--rdzv-conf store=open serves every host"
        elif connection.asked:
            why, hint = f"its host's agent did not respond within {HELD_S:g} s", ""
        else:
            why, hint = _WHY[verdict.whose]
        if not self._admission.is_reported(connection.host, why):
            text = f"workers' store: refused {connection}: {why}"
            self._warn(f"{text} ({hint})" if hint else text)
        self._drop(connection)

    def _start_proof(self, connection: StoreConnection) -> None:
        assert self._admission is not None
        access = self._admission.access
        if not access.key:
            self._disconnect(connection, "this store accepts no proof")
            return
        purpose = store_proof.FORWARD if access.mode == PRIVATE else store_proof.ATTEST
        connection.proof = store_proof.StoreProof(access.key, access.generation, purpose)
        connection.greet = self._continue_proof
        self._continue_proof(connection)

    def _continue_proof(self, connection: StoreConnection) -> None:
        """Process the next part of an agent's proof."""
        assert connection.proof is not None
        try:
            data = connection.receive(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        try:
            reply = connection.proof.receive(data)
        except ProofRefused as refused:
            self._warn(f"workers' store: refused {connection}: {refused}")
            self._drop(connection)
            return
        if connection.proof.done and connection.host:
            self._add_host(connection)
        if reply:
            self._send(connection, reply)
        if connection.proof.done:
            self._complete_proof(connection, connection.proof)

    def _complete_proof(self, connection: StoreConnection, proof: store_proof.StoreProof) -> None:
        """Receive the agent's answers from now on; with `store=private`, a worker's traffic."""
        if connection.number not in self.connections:
            return
        stream, receive = proof.stream(), connection.receive
        connection.proof, connection.greet = None, None
        if proof.purpose == store_proof.ATTEST:
            connection.agent, connection.greet = _Agent(stream), self._receive_answers
            self._half_open.remove(connection)
            self._resume_accepting()
            return

        def receive_sealed(count: int, flags: int = 0) -> bytes:
            data = receive(count, flags)
            try:
                opened = stream.open(data) if data else b""
            except WireError as error:
                self._warn(f"workers' store: disconnected {connection}: {error}")
                raise OSError(errno.EBADMSG, str(error)) from None
            if data and not opened:
                raise BlockingIOError  # The frame is incomplete.
            return opened

        connection.stream, connection.receive = stream, receive_sealed

    def _add_host(self, agent: StoreConnection) -> None:
        """Count the connections from an agent's host against the host's own share."""
        assert self._admission is not None
        share = self._admission.add(agent.host, agent.host_name)
        for mate in self._remote[agent.host]:
            self._move_to_share(mate, share)

    def _move_to_share(self, connection: StoreConnection, share: ClientShare | None) -> None:
        """Move a connection, and the bytes buffered for it, to another share."""
        for one, sign in ((connection.share, -1), (share, 1)):
            if one is not None:
                one.connections += sign
                one.buffered += sign * connection.buffered_bytes()
        connection.share = share

    # The users of connections from other hosts

    def _receive_answers(self, connection: StoreConnection) -> None:
        """Process an agent's answers."""
        assert connection.agent is not None
        queries = connection.agent.queries
        try:
            data = connection.receive(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        was_ready = queries.is_ready
        try:
            answers = queries.receive(data)
        except WireError as error:
            self._warn(f"workers' store: disconnected {connection}: {error}")
            self._drop(connection)
            return
        if queries.is_ready and not was_ready and connection.host:
            self._add_agent(connection)
        for answer in answers:
            self._on_answer(connection, answer)

    def _add_agent(self, agent: StoreConnection) -> None:
        """Ask an agent for the users of its host's connections from now on, and of those that are held."""
        self._agents.setdefault(agent.host, {})[agent] = None
        now = time.monotonic()
        for mate in list(self._remote[agent.host]):
            if mate not in self._held.since:
                continue
            if mate.asked is None:  # The limit for the answer begins now.
                self._held.remove(mate)
                self._held.add(mate, mate.host_name, now)
            self._ask(mate, [agent])

    def _ask(self, connection: StoreConnection, agents: list[StoreConnection]) -> None:
        """Ask agents on a connection's host whose it is."""
        for agent in agents:
            if agent.agent is None or connection.number not in self.connections:
                continue
            connection.asked = connection.asked or {}
            connection.asked[agent] = None
            agent.agent.waiting[connection] = None
            self._send_queries(agent, agent.agent)

    def _send_queries(self, connection: StoreConnection, agent: _Agent) -> None:
        while agent.waiting and agent.queries.has_room and connection.number in self.connections:
            asked = next(iter(agent.waiting))
            del agent.waiting[asked]
            port = asked.address[1] if isinstance(asked.address, tuple) else 0
            self._send(connection, agent.queries.query(asked.number, asked.host, port))

    def _on_answer(self, agent: StoreConnection, answer: OwnerAnswer) -> None:
        if agent.agent is not None:
            self._send_queries(agent, agent.agent)
        connection = self.connections.get(answer.number)
        if connection is None or connection.asked is None or agent not in connection.asked:
            return
        if answer.whose == store_proof.OWN:
            self._serve_held(connection)
            return
        connection.verdict = max(connection.verdict, answer, key=lambda one: one.whose)
        self._end_question(connection, agent)

    def _end_question(self, connection: StoreConnection, agent: StoreConnection) -> None:
        """Stop waiting for an agent's answer. After the last one, refuse the connection, unless none answered."""
        assert connection.asked is not None
        del connection.asked[agent]
        if not connection.asked and connection.verdict.whose:
            self._refuse(connection)

    def _forget_agent(self, agent: StoreConnection) -> None:
        """Ask an agent no more, because its connection has closed."""
        agents = self._agents.get(agent.host, {})
        agents.pop(agent, None)
        if not agents:
            self._agents.pop(agent.host, None)
        for mate in list(self._remote.get(agent.host, ())):
            if mate.asked and agent in mate.asked:
                self._end_question(mate, agent)

    def _serve_held(self, connection: StoreConnection) -> None:
        """Serve a connection that belongs to the job's user."""
        for agent in connection.asked or ():
            if agent.agent is not None:
                agent.agent.waiting.pop(connection, None)
        connection.asked, connection.greet = None, None
        self._held.remove(connection)
        self._half_open.add(connection, connection.host_name, time.monotonic())
        self._epoll.modify(connection.descriptor, _IN)

    # All connections

    def _poll_timeout(self) -> float:
        """Return the seconds until the next deadline; negative if there is none."""
        if self._again:
            return 0
        until = self._accept_at
        if self._promises_at is not None:
            until = self._promises_at if until is None else min(until, self._promises_at)
        for group, limit_s in ((self._half_open, VALIDATE_S), (self._held, HELD_S)):
            if group.since:
                oldest = next(iter(group.since.values())) + limit_s
                until = oldest if until is None else min(until, oldest)
        return -1 if until is None else max(0.0, until - time.monotonic())

    def _check_deadlines(self, now: float) -> None:
        while self._half_open.since:
            oldest, since = next(iter(self._half_open.since.items()))
            if now - since < VALIDATE_S:
                break
            self._disconnect(oldest, f"it sent nothing within {VALIDATE_S:g} s")
        while self._held.since:
            oldest, since = next(iter(self._held.since.items()))
            if now - since < HELD_S:
                break
            self._refuse(oldest)
        if self._accept_at is not None and now >= self._accept_at:
            self._accept_at = None
            self._epoll.modify(self._listener.fileno(), _IN)
        if self._promises_at is not None and now >= self._promises_at:
            self._promises_at = None
            self._space.end_old_promises()
            self._send_woken(None, [])
        if self._promises_at is None and self._space.promises:
            self._promises_at = now + PROMISE_S

    def _accept(self) -> None:
        now = time.monotonic()
        for _ in range(ACCEPTED_AT_ONCE):
            if not self._may_accept(now):
                return
            try:
                descriptor, address = self._listener._accept()  # type: ignore[attr-defined]
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _GONE or (error.errno == errno.EMFILE and self._raise_limit()):
                    continue
                self._warn(
                    "workers' store: cannot accept another connection now: "
                    f"{error.strerror} (pid {os.getpid()})"
                )
                self._pause_accepting(now + NO_ROOM_S)
                return
            self._admit(socket.socket(fileno=descriptor), address, now)

    def _admit(self, peer: socket.socket, address: object, now: float) -> None:
        """Accept a new connection, unless another user of this host opened it."""
        connection = StoreConnection(self._numbers, peer, address)
        self._numbers += 1
        user = user_of(peer)
        if user == UNKNOWN and self._raise_limit():  # No descriptor may have been free to query it.
            user = user_of(peer)
        if not is_own_user(user):
            if user == UNKNOWN:
                hint = "" if self._admission is None else "; --worker-store omits this check"
                self._warn(f"workers' store: refused {connection}: {NOT_REPORTED}{hint}")
            elif user != NO_OWNER:
                self._warn(
                    f"workers' store: refused {connection}: it belongs to another user (uid {user})"
                )
            peer.close()
            return
        if self._admission is not None:
            connection.greet = self._greet
            if user is None:
                connection.host = packed(connection.host_name)
        self._add(connection, now)

    def _add(self, connection: StoreConnection, now: float) -> None:
        peer, share = connection.socket, None
        if connection.host and self._admission is not None:
            share = self._admission.share_of(connection.host)
        peer.setblocking(False)  # noqa: FBT003 (the name says it)
        if share is not None and share.connections >= self._connections_max // share.part:
            self._raise_limit()
        most = self._connections_max
        why = ""
        if len(self.connections) >= most:
            why = f"it already has {most} connections"
        elif share is not None and share.connections >= most // share.part:
            why = f"{share.connections} of its {most} connections are for {share.whose}"
        if why:
            self._warn(
                f"workers' store: refused {connection}: {why} (raise the agent's ulimit -Hn)"
            )
            peer.close()
            return
        try:
            self._epoll.register(connection.descriptor, _IN)
        except OSError as error:  # The kernel has no memory for it, or a limit of its own.
            self._warn(f"workers' store: cannot serve {connection}: {error.strerror}")
            peer.close()
            return
        self._move_to_share(connection, share)
        if connection.host:
            self._remote.setdefault(connection.host, {})[connection] = None
        self.connections[connection.number] = connection
        self._by_descriptor[connection.descriptor] = connection
        if self._half_open.is_full:
            other, _ = self._half_open.next_to_close()
            self._disconnect(other, "it has sent nothing yet, and other clients want to connect")
        self._half_open.add(connection, connection.host_name, now)

    def _may_accept(self, now: float) -> bool:
        """Return whether there is room for one more connection, which starts half open.

        At the limit of half-open connections there is room if one of them may be closed; `_add` closes it.
        """
        total = sum(len(loop.connections) for loop in _loops)
        if total >= self._connections_max:
            self._raise_limit()
        if len(self.connections) < self._connections_max <= total:
            self._warn(
                "workers' store: cannot accept another connection now: there are "
                f"{total}, including the previous generation's (raise the agent's ulimit -Hn)"
            )
            self._pause_accepting(now + NO_ROOM_S)
            return False
        if not self._half_open.is_full:
            return True
        _, at = self._half_open.next_to_close()
        if now < at:
            self._pause_accepting(at)
            return False
        return True

    def _raise_limit(self) -> bool:
        is_higher = raise_descriptor_limit()
        self._connections_max = _connections_possible()
        return is_higher

    def _pause_accepting(self, until: float) -> None:
        self._accept_at = until
        self._epoll.modify(self._listener.fileno(), 0)

    def _resume_accepting(self) -> None:
        if self._accept_at is not None:
            self._accept_at = 0.0

    def _warn(self, text: str) -> None:
        self._warnings += 1
        (console.warning if self._warnings <= WARNINGS_MAX else console.debug)(text)


def _connections_possible() -> int:
    limit = descriptor_limit()
    return min(CONNECTIONS_MAX, limit - min(DESCRIPTORS_LEFT, limit // 2))


def _shut_down(peer: socket.socket) -> None:
    """Close a connection, even if a child that is being forked has a copy of it."""
    try:
        peer.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # The client closed first.
    peer.close()
