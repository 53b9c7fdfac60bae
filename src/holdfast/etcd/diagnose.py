"""Why an endpoint closes connections without a word: it is asked once more, in another way.

An etcd with TLS closes a connection in plain text, and one without TLS a handshake; neither says
why. And one that does not like the client's certificate says so after the handshake, when the
request is on its way already: whether its words or the end of the connection come first is chance.
Nobody has to wait to be told any of that, since no time helps.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

from holdfast.core.etcd.calls import ProblemKind
from holdfast.etcd.protocol import TLS_ONLY
from holdfast.etcd.transport import NO_TLS, TLS_FAILED, ConnectionProblem, open_connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.etcd.transport import HttpConnection

    Opened = Callable[[HttpConnection], None]

NO_WORD = "(it is no etcd, or a proxy that cannot reach one)"
"""What may be behind an endpoint that closes connections whatever it is asked."""
VERSION = "/version"
"""All etcds know it; any answer in HTTP will do."""


async def diagnose_silence(
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | None,
    server_name: str,
    limit_s: float,
    opened: Opened,
) -> ConnectionProblem | None:
    """Return why an endpoint said nothing, if that can be found out within the limit.

    Each connection that is made is given to `opened`, and may be aborted by whoever has it.
    """
    try:
        async with asyncio.timeout(limit_s):
            if tls is None:
                return await _speaks_tls(host, port, limit_s, opened)
            return await _dislikes_us(host, port, tls, server_name, limit_s, opened)
    except TimeoutError:
        return None


async def _speaks_tls(
    host: str, port: int, limit_s: float, opened: Opened
) -> ConnectionProblem | None:
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname = False
    anybody.verify_mode = ssl.CERT_NONE  # Nothing is said there: it only matters that it is TLS.
    try:
        connection = await open_connection(host, port, tls=anybody, limit_s=limit_s)
    except ConnectionProblem as problem:
        # It may want a certificate, or a newer version, and that is TLS too.
        refuses = problem.kind is ProblemKind.DENIED and problem.why != NO_TLS
        if not refuses and not problem.why.startswith(TLS_FAILED):
            return None
    else:
        opened(connection)
        connection.abort("it was only to be seen")
    return ConnectionProblem(TLS_ONLY, ProblemKind.DENIED)


async def _dislikes_us(
    host: str, port: int, tls: ssl.SSLContext, server_name: str, limit_s: float, opened: Opened
) -> ConnectionProblem | None:
    try:
        connection = await open_connection(
            host, port, tls=tls, server_name=server_name, limit_s=limit_s
        )
    except ConnectionProblem as problem:
        if problem.kind is ProblemKind.DENIED:
            return problem
        return await _speaks_plainly(host, port, limit_s, opened) if problem.mute else None
    opened(connection)
    try:
        await connection.ended
    finally:
        connection.abort("it was only to be listened to")
    said = connection.problem
    return said if said is not None and said.kind is ProblemKind.DENIED else None


async def _speaks_plainly(
    host: str, port: int, limit_s: float, opened: Opened
) -> ConnectionProblem | None:
    try:
        connection = await open_connection(host, port, limit_s=limit_s)
    except ConnectionProblem:
        return None
    opened(connection)
    try:
        await connection.ask(VERSION, b"", limit_s=limit_s)
    except ConnectionProblem:
        return None
    finally:
        connection.abort("it was only to be seen")
    return ConnectionProblem(NO_TLS, ProblemKind.DENIED)
