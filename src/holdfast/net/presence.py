"""Watches the presence of other processes: connections to their agent ports (`net.agent_port`).

The client sends `PRESENCE_REQUEST`. The agent responds with one line, an id that no other process has,
and neither sends anything else. The connection stays open until one of the two processes exits: the
kernel then closes it. A stranger who connects learns only the id.

`PresenceWatcher` reports each change of a connection as a `PresenceObservation`, and `core.etcd.witness` evaluates it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from enum import Enum
from typing import TYPE_CHECKING

from holdfast.net import addresses, async_addresses

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

PRESENCE_REQUEST = b"presence"
"""The first bytes of a connection that watches an agent's presence; no other client starts with them."""
CONNECT_S = 2.0
RESOLVING_MAX = 16  # Concurrent name lookups: each takes a thread.


class PresenceObservation(Enum):
    """An observation of a process over a connection."""

    SEEN = "seen"
    """It sent its id; the connection is open."""
    CLOSED = "closed"
    """Its host closed the connection, before or after the id."""
    REFUSED = "refused"
    """Its host refused the connection."""
    UNKNOWN = "unknown"
    """Anything else: no response, no route, another process, a connection that timed out."""


class PresenceWatcher:
    """Watches the presences of other processes; belongs to one loop."""

    def __init__(self) -> None:
        self._resolving = asyncio.Semaphore(RESOLVING_MAX)

    async def watch(
        self, address: str, port: int, wanted: str, report: Callable[[PresenceObservation], None]
    ) -> None:
        """Connect, and report `SEEN` at most once, then one other `PresenceObservation`."""
        try:
            async with asyncio.timeout(CONNECT_S):
                async with self._resolving:
                    found = await async_addresses.resolve_async(address, port)
                connection = await async_addresses.connect_first(
                    found, CONNECT_S, addresses.keep_alive
                )
        except ConnectionRefusedError:
            report(PresenceObservation.REFUSED)
        except OSError as problem:
            # The port may close just after the kernel accepted the connection.
            is_closed = problem.errno in (errno.ECONNRESET, errno.ENOTCONN)
            report(PresenceObservation.CLOSED if is_closed else PresenceObservation.UNKNOWN)
        else:
            with contextlib.closing(connection):
                last = await _watch(connection, wanted.encode() + b"\n", report)
            report(last)


async def _watch(
    connection: socket.socket, line: bytes, report: Callable[[PresenceObservation], None]
) -> PresenceObservation:
    try:
        await asyncio.get_running_loop().sock_sendall(connection, PRESENCE_REQUEST)
        received = b""
        while len(received) < len(line):
            some = await _receive(connection, len(line) - len(received))
            if not some:
                return PresenceObservation.CLOSED
            received += some
        if received != line:
            return PresenceObservation.UNKNOWN
        report(PresenceObservation.SEEN)
        return (
            PresenceObservation.CLOSED
            if not await _receive(connection, 1)
            else PresenceObservation.UNKNOWN
        )
    except (ConnectionResetError, BrokenPipeError):
        return PresenceObservation.CLOSED
    except OSError:
        return PresenceObservation.UNKNOWN


async def _receive(connection: socket.socket, size: int) -> bytes:
    return await asyncio.get_running_loop().sock_recv(connection, size)
