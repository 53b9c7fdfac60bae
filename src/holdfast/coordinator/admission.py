"""Admission: connections that never finish their handshake do not block the others.

At most `HALF_OPEN_MAX` connections may be in their handshake. If another connection arrives,
`net.half_open` selects a connection to close. Each connection has a minimum time for its handshake. As long as none
may be closed and none completes its handshake, the server accepts nothing; new connections wait in the kernel's
queue.

The server does not use asyncio's accept loop, which empties the whole queue before it reads from any connection.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from holdfast.net import addresses, listening
from holdfast.net.half_open import HalfOpen
from holdfast.net.peer_user import is_own_user, user_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.coordinator.connections import ServerConnection

HALF_OPEN_MAX = 1024
HALF_OPEN_MIN_S = 1.0
OVERSIZED_MIN_S = 0.05
"""The minimum time of a connection that sent its first message, if its address exceeds its share of the places.
It grows with the number of places, so that a full kernel queue of such connections passes through them in
`HALF_OPEN_MIN_S`."""
HANDSHAKE_S = 10.0
FIRST_BYTES = 8  # Every first message is longer, including TLS's.
ACCEPTED_AT_ONCE_MAX = 64  # Then the loop serves established connections.
ADOPTED_MAX = 64
NO_DESCRIPTOR_S = 0.2  # The pause when this process has no descriptor left.

_GONE = (errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.EAGAIN, errno.EINTR)


class Acceptor:
    """Accepts connections on a listening socket and limits unfinished handshakes.

    Without a `listener`, the owner passes connections to `adopt`.
    """

    def __init__(
        self,
        listener: socket.socket | None,
        make_peer: Callable[[str, str], ServerConnection],
        on_error: Callable[[str], None],
        *,
        half_open_max: int = HALF_OPEN_MAX,
        handshake_s: float = HANDSHAKE_S,
        checks_user: bool = True,
    ) -> None:
        self._listener = listener
        self._make_peer = make_peer
        self._on_error = on_error
        self._handshake_s = handshake_s
        self._checks_user = checks_user
        self._half_open = HalfOpen(half_open_max, HALF_OPEN_MIN_S, _oversized_min_s(half_open_max))
        self._tasks: set[asyncio.Task[object]] = set()
        self._loop = asyncio.get_running_loop()
        self._resume: asyncio.TimerHandle | None = None
        self._full = False
        self._open = True
        self._adopted: deque[tuple[socket.socket, str]] = deque()
        if listener is not None:
            listening.defer_accept(listener, handshake_s)
            self._loop.add_reader(listener, self._accept)

    def __len__(self) -> int:
        return len(self._half_open.since)

    def finished(self, peer: ServerConnection) -> None:
        """Release the place of a connection that completed its handshake or closed."""
        if self._half_open.remove(peer) and self._full:
            self._resume_now()

    def sweep(self, now: float) -> None:
        """Close connections whose handshake has timed out."""
        while (deadline := self.next_deadline()) is not None and now >= deadline:
            peer = next(iter(self._half_open.since))
            self._half_open.remove(peer)
            peer.reject(f"no handshake within {self._handshake_s:g} s")

    def next_deadline(self) -> float | None:
        """Return when `sweep` is due."""
        since = next(iter(self._half_open.since.values()), None)
        return None if since is None else since + self._handshake_s

    def close(self) -> None:
        """Stop accepting, and close the listening socket."""
        if not self._open:
            return
        self._open = False
        if self._resume is not None:
            self._resume.cancel()
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        for connection, _ in self._adopted:
            connection.close()
        for task in self._tasks:
            task.cancel()

    def spawn(self, work: asyncio._CoroutineLike[object]) -> asyncio.Task[object]:
        """Run a task until the acceptor closes."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def adopt(self, connection: socket.socket, address: str) -> None:
        """Admit a connection that another listener accepted."""
        if not self._open or len(self._adopted) >= ADOPTED_MAX:
            connection.close()
            return
        self._adopted.append((connection, address))
        if self._resume is None:
            self._accept()

    def _next(self) -> tuple[socket.socket, str]:
        if self._adopted:
            return self._adopted.popleft()
        if self._listener is None:
            raise BlockingIOError
        connection, where = self._listener.accept()
        return connection, addresses.as_ipv4_if_mapped(str(where[0]))

    def _accept(self) -> None:
        now = self._loop.time()
        for _ in range(ACCEPTED_AT_ONCE_MAX):
            if not self._may_accept(now):
                return
            try:
                connection, address = self._next()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _GONE:
                    continue
                self._on_error(error.strerror or str(error))
                self._pause(NO_DESCRIPTOR_S)
                return
            self._add(connection, address, now)

    def _add(self, connection: socket.socket, address: str, now: float) -> None:
        connection.setblocking(False)  # noqa: FBT003 (the name says it)
        half_open = self._half_open
        try:
            here = addresses.as_ipv4_if_mapped(str(connection.getsockname()[0]))
        except OSError:
            connection.close()
            return
        is_local = addresses.is_loopback(address) or address == here
        user = user_of(connection) if is_local else None
        stranger = None if is_own_user(user) else user
        silent = _is_silent(connection)
        if silent and half_open.rejects(address, stranger):
            connection.close()  # Cheap, since a flood may open thousands per second.
            return
        if half_open.is_full:
            other, _ = half_open.next_to_close()
            half_open.remove(other)
            other.reject("unfinished handshake while other clients wait")
        peer = self._make_peer(address, here)
        if self._checks_user:
            peer.user = user if is_local else user_of(connection)
        half_open.add(peer, address, now, silent=silent, user=stranger)
        task = self.spawn(self._connect(peer, connection))
        task.add_done_callback(partial(_close_if_cancelled, connection))

    async def _connect(self, peer: ServerConnection, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: peer, connection)
        except BaseException as error:
            connection.close()
            self.finished(peer)
            if not isinstance(
                error, OSError
            ):  # An `OSError` means that the client has disconnected.
                raise

    def _may_accept(self, now: float) -> bool:
        """Whether another connection may be accepted; if all places are taken, `_add` frees one."""
        if not self._half_open.is_full:
            return True
        _, at = self._half_open.next_to_close()
        if now < at:
            self._full = True
            self._pause(at - now)
            return False
        return True

    def _pause(self, delay_s: float) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
        self._resume = self._loop.call_later(delay_s, self._resume_now)

    def _resume_now(self) -> None:
        if self._resume is not None:
            self._resume.cancel()
        self._resume = None
        self._full = False
        if self._open and self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)
        elif self._open:
            self._accept()


def _oversized_min_s(places: int) -> float:
    return max(OVERSIZED_MIN_S, HALF_OPEN_MIN_S * places / listening.BACKLOG)


def _close_if_cancelled(connection: socket.socket, task: asyncio.Task[object]) -> None:
    """Close the connection of a task that was cancelled before it started."""
    if task.cancelled():
        connection.close()


def _is_silent(connection: socket.socket) -> bool:
    """Whether a connection has not sent a first message yet, although `defer_accept` waited for it."""
    try:
        return len(connection.recv(FIRST_BYTES, socket.MSG_PEEK)) < FIRST_BYTES
    except OSError:
        return True
