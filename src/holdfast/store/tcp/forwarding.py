"""A node's own door to the workers' store of another node, for `store=private`.

Workers of this node connect to a port on loopback, where the kernel is asked whose each connection
is. For each of them one more leads to the store, over which this agent proves the generation's key;
from then on all that the two say to each other is passed on in sealed frames. Nothing is understood,
kept or answered here. One thread, one epoll; whoever does not read is not read for.
"""

from __future__ import annotations

import _socket
import errno
import os
import select
import threading
import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.net.addresses import resolve_within
from holdfast.net.endpoints import format_endpoint
from holdfast.net.listening import raise_descriptor_limit
from holdfast.net.peer_user import NOBODY, is_own_user, user_of
from holdfast.wire.errors import WireError
from holdfast.wire.store_proof import FORWARD, AgentProof

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.net.addresses import Address
    from holdfast.wire.store_proof import SealedStream

RECEIVE_BYTES = 64 * 1024
PENDING_BYTES_MAX = 1024 * 1024
"""So much may wait for one side of a connection before the other is not read any more."""
CONNECTIONS_MAX = 16_384
RESOLVE_S = 60.0
PROVE_S = 60.0
"""How long the store may take to accept a connection: its agent may be slower than the workers."""
BACKLOG = 4096
WARNINGS_MAX = 3
NO_ROOM_S = 0.2  # The pause in accepting when no descriptor is left.
_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
_BUSY = (errno.EAGAIN, errno.EINPROGRESS)


_running: set[Forwarder] = set()


class _End:
    """One end of a forwarded connection: its socket, and what waits to be sent there."""

    __slots__ = ("events", "forward", "is_done", "pending", "socket")

    def __init__(self, forward: _Forward, socket: _socket.socket) -> None:
        self.forward = forward
        self.socket = socket
        self.pending = bytearray()
        self.is_done = False
        """Whether nothing more comes from it."""
        self.events = -1


class _Forward:
    """A worker's connection, and the one that leads on to the store."""

    __slots__ = ("begun", "proof", "store", "stream", "worker")

    def __init__(self, worker: _socket.socket, store: _socket.socket, proof: AgentProof) -> None:
        self.worker = _End(self, worker)
        self.store = _End(self, store)
        self.store.pending += proof.start()
        self.proof = proof
        self.stream: SealedStream | None = None
        self.begun = time.monotonic()


class Forwarder:
    """Forwards from a listening socket, which belongs to it from now on, to a store; until `close`."""

    def __init__(
        self,
        listener: _socket.socket,
        host: str,
        port: int,
        key: bytes,
        generation: int,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self._on_failure = on_failure
        self._listener = listener
        self._host = host
        self._port = port
        self._key = key
        self._generation = generation
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._ends: dict[int, _End] = {}  # By descriptor.
        self._unproven: dict[_Forward, None] = {}  # The oldest first.
        self._addresses: list[Address] = []
        self._warnings = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-forwarder", daemon=True)

    def start(self) -> None:
        """Forward in a thread from now on."""
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
            self._end(end.forward)
        self._epoll.close()
        self._listener.close()
        os.close(self._wake)

    def abandon(self) -> None:
        """In a forked child, whose these connections are not: close its copies."""
        for one in (self._listener, *(end.socket for end in self._ends.values())):
            one.close()
        self._epoll.close()
        os.close(self._wake)

    # The loop.

    def _run(self) -> None:
        try:
            self._forward()
        except BaseException as error:  # noqa: BLE001 (nobody else would hear of it)
            console.error(f"workers here cannot reach their store: {console.describe(error)}")
            if self._on_failure is not None:
                self._on_failure(console.describe(error))

    def _forward(self) -> None:
        try:
            self._addresses = resolve_within(self._host, self._port, RESOLVE_S)
        except OSError as error:
            self._warn(f"its name is not known here: {error.strerror or error}")
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
        """Seconds until a connection has waited for the store for too long; negative: never."""
        if not self._unproven:
            return -1
        return max(0.0, next(iter(self._unproven)).begun + PROVE_S - time.monotonic())

    def _sweep(self, now: float) -> None:
        """End connections that the store did not accept in time."""
        while self._unproven and now - next(iter(self._unproven)).begun >= PROVE_S:
            self._warn(f"no answer within {PROVE_S:g} s")
            self._end(next(iter(self._unproven)))

    def _accept(self) -> None:
        try:
            descriptor, _ = self._listener._accept()  # type: ignore[attr-defined]
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and not raise_descriptor_limit():
                self._closed.wait(NO_ROOM_S)
            return
        worker = _socket.socket(fileno=descriptor)
        user = user_of(worker)
        if not is_own_user(user) or not self._addresses or len(self._ends) >= 2 * CONNECTIONS_MAX:
            if user not in (NOBODY, None) and not is_own_user(user):
                console.warning(
                    f"workers' store: refused a connection of another user (uid {user})"
                )
            worker.close()
            return
        try:
            store = self._connect(self._addresses[0])
        except OSError as error:
            self._fail(error.strerror or str(error))
            worker.close()
            return
        worker.setblocking(False)  # noqa: FBT003 (the name says it)
        worker.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        forward = _Forward(worker, store, AgentProof(self._key, self._generation, FORWARD))
        self._unproven[forward] = None
        for end in (forward.worker, forward.store):
            self._ends[end.socket.fileno()] = end
            self._watch(end)

    def _connect(self, address: Address) -> _socket.socket:
        """Begin to connect to the store, or raise `OSError`."""
        store = _socket.socket(address.family, _socket.SOCK_STREAM)
        store.setblocking(False)  # noqa: FBT003 (the name says it)
        store.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        store.setsockopt(_socket.SOL_SOCKET, _socket.SO_KEEPALIVE, 1)
        problem = store.connect_ex(address.sockaddr)
        if problem and problem not in _BUSY:
            store.close()
            raise OSError(problem, os.strerror(problem))
        return store

    def _on_ready(self, end: _End, events: int) -> None:
        forward = end.forward
        try:
            if events & _OUT and end.pending:
                self._flush(end)
            if events & ~_OUT and end.events & _IN:
                self._read(end)
            elif events & ~_OUT:  # It is gone, and nobody was to read from it.
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        except BlockingIOError:
            pass
        except (OSError, WireError) as error:
            if forward.stream is None and end is forward.store:
                self._fail((error.strerror if isinstance(error, OSError) else "") or str(error))
            elif isinstance(error, WireError):
                self._warn(str(error))
            self._end(forward)
            return
        self._go_on(forward)

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

    def _go_on(self, forward: _Forward) -> None:
        """Send what waits, and see what to wait for; end it once one side is done and all is sent."""
        for one, other in ((forward.worker, forward.store), (forward.store, forward.worker)):
            if one.is_done and not other.pending:
                self._end(forward)
                return
        for end in (forward.worker, forward.store):
            self._watch(end)

    def _watch(self, end: _End) -> None:
        forward = end.forward
        other = forward.store if end is forward.worker else forward.worker
        reads = not end.is_done and len(other.pending) < PENDING_BYTES_MAX
        if end is forward.worker and forward.stream is None:
            reads = False  # The store has yet to accept it.
        events = (_IN if reads else 0) | (_OUT if end.pending else 0)
        if events == end.events:
            return
        change: Callable[[int, int], None] = (
            self._epoll.register if end.events < 0 else self._epoll.modify
        )
        change(end.socket.fileno(), events)
        end.events = events

    def _end(self, forward: _Forward) -> None:
        self._unproven.pop(forward, None)
        for end in (forward.worker, forward.store):
            if self._ends.pop(end.socket.fileno(), None) is None:
                continue
            # A copy in a process that was forked just now would keep it registered, and open.
            self._epoll.unregister(end.socket.fileno())
            try:
                end.socket.shutdown(_socket.SHUT_RDWR)
            except OSError:
                pass  # The other side was first.
            end.socket.close()

    def _fail(self, problem: str) -> None:
        """Another address may do better, for the worker's next attempt."""
        self._addresses = [*self._addresses[1:], *self._addresses[:1]]
        self._warn(problem)

    def _warn(self, problem: str) -> None:
        self._warnings += 1
        if self._warnings <= WARNINGS_MAX and not self._closed.is_set():
            where = format_endpoint(self._host, self._port)
            console.warning(
                f"workers here cannot reach their store of generation {self._generation} at "
                f"{where}: {problem}"
            )


def _after_fork() -> None:
    for forwarder in _running:
        forwarder.abandon()
    _running.clear()


os.register_at_fork(after_in_child=_after_fork)
