"""From an endpoint to a connection, within a limit, with every failure in one line.

A name may have several addresses; they are tried one after the other, and share the limit.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl

from holdfast.coordinator import addresses
from holdfast.etcd.http import (
    NO_HANDSHAKE,
    ConnectionProblem,
    HttpConnection,
    tls_problem,
    words_of,
)

# A host that vanished is noticed after about ten seconds, whether something is on its way or not.
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_PROBES = 4, 2, 3
UNACKNOWLEDGED_MS_MAX = 10_000

# This machine has no way to such an address, as to an IPv6 one where there is only IPv4.
_NOT_ASKED = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH)


async def open_connection(
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | None = None,
    server_name: str = "",
    limit_s: float,
) -> HttpConnection:
    """Return a connection, or raise `ConnectionProblem`; both within the limit."""
    late = "no connection"
    try:
        async with asyncio.timeout(limit_s):
            try:
                found = await addresses.find_soon(host, port)
            except OSError as error:
                raise ConnectionProblem(f"it cannot be resolved: {words_of(error)}") from None
            connected = await addresses.connect_first(found, limit_s, _set_options)
            late = "it takes connections, but there was no TLS handshake"
            return await _wrap(connected, addresses.written(host, port), tls, server_name or host)
    except TimeoutError:
        raise ConnectionProblem(f"{late} within {limit_s:.3g} s") from None
    except ssl.SSLError as error:
        raise tls_problem(error) from None
    except OSError as error:
        if tls is not None and isinstance(error, ConnectionResetError | ConnectionAbortedError):
            raise ConnectionProblem(NO_HANDSHAKE, mute=True) from None
        raise ConnectionProblem(words_of(error)) from None


def _set_options(connected: socket.socket) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS_MAX)


async def _wrap(
    connected: socket.socket, host_header: str, tls: ssl.SSLContext | None, server_name: str
) -> HttpConnection:
    connection = HttpConnection(host_header)
    try:
        await asyncio.get_running_loop().create_connection(
            lambda: connection,
            sock=connected,
            ssl=tls,
            server_hostname=server_name if tls is not None else None,
        )
    except BaseException:
        connected.close()
        raise
    return connection
