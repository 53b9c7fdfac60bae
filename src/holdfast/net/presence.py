"""The presence of a process: a port at which it says who it is, so that others see when it is gone.

What is said is one line, a number that no other process has. Nothing else is ever sent, and nobody
is listened to. A connection stays until one of the two ends: the kernel closes it for a process that
is gone. Strangers who connect learn nothing and can do no more than take up places, of which there
are few; who finds none is closed upon without the line.

`PresenceWatcher` says what becomes of one connection, in the words of `Sight`; what follows from that
is decided elsewhere (`core.etcd.witness`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import socket
from enum import Enum
from typing import TYPE_CHECKING

from holdfast.net import addresses, listening

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

ID_BYTES = 16
CONNECTIONS_MAX = 64
"""At one port. So many are enough to see a leader's end; the rest learn of it from these."""
CONNECT_S = 2.0
RESOLVING_MAX = 16  # Names at a time: each takes a thread.
AGAIN_S = 1.0  # After a connection could not be accepted, for lack of descriptors.
# Only for connections that were forgotten on the way: those of a host that vanished, and behind
# routers that drop what was idle for long.
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_PROBES = 60, 15, 4


class Sight(Enum):
    """What was seen of a process."""

    SEEN = "seen"
    """It said who it is; the connection is there."""
    CLOSED = "closed"
    """Its host closed the connection, before or after the line."""
    REFUSED = "refused"
    """Its host refused the connection."""
    UNKNOWN = "unknown"
    """Anything else: no answer, no way there, somebody else, a connection that timed out."""


class PresencePort:
    """Says who this process is, from `open` until `close`; belongs to one loop."""

    def __init__(self, candidates: Iterable[tuple[int, Any]]) -> None:
        """Listen at the first candidate that works; raises `OSError`."""
        self.id = secrets.token_hex(ID_BYTES)
        self._line = self.id.encode() + b"\n"
        self._listener = listening.listen(candidates)
        self._accepted: set[socket.socket] = set()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def fileno(self) -> int:
        """Return the listening descriptor; who has a copy keeps the port from refusing."""
        return self._listener.fileno()

    def open(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Close the port and all connections; may be called more than once."""
        if self._timer is not None:
            self._timer.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        for one in [*self._accepted]:
            self._drop(one)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError:  # It would be tried again at once, for ever.
            self._loop.remove_reader(self._listener)
            self._timer = self._loop.call_later(AGAIN_S, self.open)
            return
        if len(self._accepted) >= CONNECTIONS_MAX:
            accepted.close()
            return
        self._accepted.add(accepted)
        try:
            accepted.setblocking(False)  # noqa: FBT003 (the name says it)
            _prepare(accepted)
            accepted.send(self._line)  # It has room in the buffer of a new connection.
            self._loop.add_reader(accepted, self._drop, accepted)
        except OSError:
            self._drop(accepted)

    def _drop(self, one: socket.socket) -> None:
        """Close a connection: it has ended, or somebody says something where nobody should."""
        self._accepted.discard(one)
        self._loop.remove_reader(one)
        one.close()


def _prepare(one: socket.socket) -> None:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


class PresenceWatcher:
    """Watches the presences of other processes; belongs to one loop."""

    def __init__(self) -> None:
        self._resolving = asyncio.Semaphore(RESOLVING_MAX)

    async def watch(
        self, address: str, port: int, wanted: str, report: Callable[[Sight], None]
    ) -> None:
        """Connect, and report what is seen: perhaps that it is there, and one other thing at last."""
        try:
            async with asyncio.timeout(CONNECT_S):
                async with self._resolving:
                    found = await addresses.resolve_async(address, port)
                connection = await addresses.connect_first(found, CONNECT_S, _prepare)
        except ConnectionRefusedError:
            report(Sight.REFUSED)
        except OSError as problem:
            # The port may be closed just after its kernel has accepted.
            is_closed = problem.errno in (errno.ECONNRESET, errno.ENOTCONN)
            report(Sight.CLOSED if is_closed else Sight.UNKNOWN)
        else:
            with contextlib.closing(connection):
                last = await _watch(connection, wanted.encode() + b"\n", report)
            report(last)


async def _watch(connection: socket.socket, line: bytes, report: Callable[[Sight], None]) -> Sight:
    try:
        said = b""
        while len(said) < len(line):
            some = await _receive(connection, len(line) - len(said))
            if not some:
                return Sight.CLOSED
            said += some
        if said != line:
            return Sight.UNKNOWN
        report(Sight.SEEN)
        return Sight.CLOSED if not await _receive(connection, 1) else Sight.UNKNOWN
    except ConnectionResetError:
        return Sight.CLOSED
    except OSError:
        return Sight.UNKNOWN


async def _receive(connection: socket.socket, size: int) -> bytes:
    return await asyncio.get_running_loop().sock_recv(connection, size)
