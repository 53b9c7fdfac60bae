"""Forwards the connections of this node's workers to the workers' store on another node, for `store=private`.

Workers connect to a port on loopback, where the kernel reports the user of each connection. For each worker
the agent opens a connection to the store and proves that it has the generation's key. Then it forwards both
directions, in sealed frames towards the store, without interpreting or storing anything. One thread with
one epoll does this. While one side does not read, the agent does not read from the other.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.net.listening import raise_descriptor_limit
from holdfast.net.peer_user import NO_OWNER, NOT_REPORTED, UNKNOWN, is_own_user, user_of
from holdfast.store.tcp.store_connector import StoreConnector, problem_text
from holdfast.wire.store_proof import FORWARD
from holdfast.wire.wire_errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.net.addresses import Address
    from holdfast.wire.store_proof import AgentProof, SealedStream

RECEIVE_BYTES = 64 * 1024
PENDING_BYTES_MAX = 1024 * 1024
"""While more bytes wait for one side of a connection, the agent does not read from the other side."""
CONNECTIONS_MAX = 16_384
RESOLVE_S = 60.0
PROVE_S = 60.0
"""The limit for the store to accept a connection: its agent may be slower than the workers."""
BACKLOG = 4096
WARNINGS_MAX = 3
NO_ROOM_S = 0.2  # How long to accept no connection when no descriptor is free.
_IN, _OUT = select.EPOLLIN, select.EPOLLOUT

_running: set[Forwarder] = set()


class _End:
    """One end of a forwarded connection: its socket, and the bytes to send to it."""

    __slots__ = ("events", "forward", "is_done", "pending", "socket")

    def __init__(self, forward: _Forward, connection: socket.socket) -> None:
        self.forward = forward
        self.socket = connection
        self.pending = bytearray()
        self.is_done = False
        """Whether the peer has closed its side: it sends nothing more."""
        self.events = -1


class _Forward:
    """A worker's connection, and the agent's connection to the store for it."""

    __slots__ = ("begun", "proof", "store", "stream", "worker")

    def __init__(self, worker: socket.socket, store: socket.socket, proof: AgentProof) -> None:
        self.worker = _End(self, worker)
        self.store = _End(self, store)
        self.store.pending += proof.start()
        self.proof = proof
        self.stream: SealedStream | None = None
        self.begun = time.monotonic()


class Forwarder:
    """Forwards from a listening socket, which it owns, to a store. It runs from `start` until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        host: str,
        port: int,
        key: bytes,
        generation: int,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self._on_failure = on_failure
        self._listener = listener
        self._connector = StoreConnector(host, port, key, generation, FORWARD)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._ends: dict[int, _End] = {}  # By descriptor.
        self._unproven: dict[_Forward, None] = {}  # The oldest first.
        self._addresses: list[Address] = []
        self._warnings = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-forwarder", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._listener.setblocking(False)  # noqa: FBT003 (the name says it)
        self._listener.listen(BACKLOG)
        self._epoll.register(self._listener.fileno(), _IN)
        self._epoll.register(self._wake, _IN)
        _running.add(self)
        self._thread.start()

    def close(self) -> None:
        """Close all connections."""
        if self._closed.is_set():
            return
        self._closed.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        _running.discard(self)
        for end in tuple(self._ends.values()):
            self._close(end.forward)
        self._epoll.close()
        self._listener.close()
        os.close(self._wake)

    def abandon(self) -> None:
        """Close the copies that a forked child has of these connections."""
        for one in (self._listener, *(end.socket for end in self._ends.values())):
            one.close()
        self._epoll.close()
        os.close(self._wake)

    # The loop.

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 (the thread must not fail silently)
            console.error(
                f"workers on this node cannot reach their store: {console.describe(error)}"
            )
            if self._on_failure is not None:
                self._on_failure(console.describe(error))

    def _serve(self) -> None:
        try:
            self._addresses = self._connector.resolve(RESOLVE_S)
        except OSError as error:
            self._warn(problem_text(error))
        listener = self._listener.fileno()
        while not self._closed.is_set():
            for descriptor, events in self._epoll.poll(self._timeout()):
                end = self._ends.get(descriptor)
                if end is not None:
                    self._on_ready(end, events)
                elif descriptor == listener:
                    self._accept()
            self._sweep(time.monotonic())

    def _timeout(self) -> float:
        """Return the seconds until the oldest unproven connection times out; negative: never."""
        if not self._unproven:
            return -1
        return max(0.0, next(iter(self._unproven)).begun + PROVE_S - time.monotonic())

    def _sweep(self, now: float) -> None:
        """Close connections that the store did not accept in time."""
        while self._unproven and now - next(iter(self._unproven)).begun >= PROVE_S:
            self._warn(f"no response within {PROVE_S:g} s")
            self._close(next(iter(self._unproven)))

    def _accept(self) -> None:
        try:
            worker, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and not raise_descriptor_limit():
                self._closed.wait(NO_ROOM_S)
            return
        user = user_of(worker)
        if user == UNKNOWN and raise_descriptor_limit():
            user = user_of(worker)
        if not is_own_user(user) or not self._addresses or len(self._ends) >= 2 * CONNECTIONS_MAX:
            if user == UNKNOWN:
                self._warn(f"{NOT_REPORTED}; --worker-store omits this check")
            elif not is_own_user(user) and user != NO_OWNER:
                console.warning(
                    f"workers' store: refused a connection of another user (uid {user})"
                )
            worker.close()
            return
        try:
            store = self._connect(self._addresses[0])
        except OSError as error:
            self._fail(problem_text(error))
            worker.close()
            return
        worker.setblocking(False)  # noqa: FBT003 (the name says it)
        worker.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        forward = _Forward(worker, store, self._connector.proof())
        self._unproven[forward] = None
        for end in (forward.worker, forward.store):
            self._ends[end.socket.fileno()] = end
            self._watch(end)

    def _connect(self, address: Address) -> socket.socket:
        """Begin to connect to the store, or raise `OSError`."""
        store = self._connector.socket_for(address)
        store.setblocking(False)  # noqa: FBT003 (the name says it)
        try:
            store.connect(address.sockaddr)
        except BlockingIOError:
            pass
        except OSError:
            store.close()
            raise
        return store

    def _on_ready(self, end: _End, events: int) -> None:
        forward = end.forward
        try:
            if events & _OUT and end.pending:
                self._flush(end)
            if events & ~_OUT and end.events & _IN:
                self._read(end)
            elif events & ~_OUT:  # The peer closed while this side was not read.
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        except BlockingIOError:
            pass
        except (OSError, WireError) as error:
            if forward.stream is None and end is forward.store:
                self._fail(problem_text(error))
            elif isinstance(error, WireError):
                self._warn(str(error))
            self._close(forward)
            return
        self._update(forward)

    def _read(self, end: _End) -> None:
        forward = end.forward
        data = end.socket.recv(RECEIVE_BYTES)
        if not data:
            end.is_done = True
            if forward.stream is None and end is forward.store:
                raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        elif end is forward.worker:
            assert forward.stream is not None
            forward.store.pending += forward.stream.seal(data)
        elif forward.stream is not None:
            forward.worker.pending += forward.stream.open(data)
        else:
            forward.store.pending += forward.proof.receive(data)
            if forward.proof.done:
                forward.stream = forward.proof.stream()
                del self._unproven[forward]

    def _flush(self, end: _End) -> None:
        sent = end.socket.send(end.pending)
        del end.pending[:sent]

    def _update(self, forward: _Forward) -> None:
        """Watch both sides for their next events; close both once one is done and everything is sent."""
        for one, other in ((forward.worker, forward.store), (forward.store, forward.worker)):
            if one.is_done and not other.pending:
                self._close(forward)
                return
        for end in (forward.worker, forward.store):
            self._watch(end)

    def _watch(self, end: _End) -> None:
        forward = end.forward
        other = forward.store if end is forward.worker else forward.worker
        reads = not end.is_done and len(other.pending) < PENDING_BYTES_MAX
        if end is forward.worker and forward.stream is None:
            reads = False  # The store has not accepted it yet.
        events = (_IN if reads else 0) | (_OUT if end.pending else 0)
        if events == end.events:
            return
        change: Callable[[int, int], None] = (
            self._epoll.register if end.events < 0 else self._epoll.modify
        )
        change(end.socket.fileno(), events)
        end.events = events

    def _close(self, forward: _Forward) -> None:
        self._unproven.pop(forward, None)
        for end in (forward.worker, forward.store):
            if self._ends.pop(end.socket.fileno(), None) is None:
                continue
            # A copy in a child that is being forked would keep it registered, and open.
            self._epoll.unregister(end.socket.fileno())
            try:
                end.socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # The other side closed first.
            end.socket.close()

    def _fail(self, problem: str) -> None:
        """Use another address for the worker's next attempt."""
        self._addresses = [*self._addresses[1:], *self._addresses[:1]]
        self._warn(problem)

    def _warn(self, problem: str) -> None:
        self._warnings += 1
        if self._warnings <= WARNINGS_MAX and not self._closed.is_set():
            console.warning(f"workers on this node cannot reach {self._connector.store}: {problem}")


def _after_fork() -> None:
    for forwarder in _running:
        forwarder.abandon()
    _running.clear()


os.register_at_fork(after_in_child=_after_fork)
