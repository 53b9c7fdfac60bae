"""Finds out why an endpoint closes connections without a response, by opening one more connection in another way.

An etcd with TLS closes a plain connection, and an etcd without TLS closes a TLS handshake; neither gives a reason.
An etcd that rejects the client's certificate reports that after the handshake, while the request is under
way; either its reason or the end of the connection arrives first. Retrying does not help in any of these cases,
so they are reported immediately.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

from holdfast.core.etcd.calls import ProblemKind
from holdfast.etcd.json_gateway import TLS_ONLY
from holdfast.etcd.transport import (
    NOT_TLS,
    ConnectionFault,
    ConnectionProblem,
    open_connection,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.etcd.transport import HttpConnection

    OnOpened = Callable[[HttpConnection], None]

VERSION = "/version"
"""Every etcd serves it; any HTTP response suffices."""


async def diagnose_silence(
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | None,
    server_name: str,
    limit_s: float,
    on_opened: OnOpened,
) -> ConnectionProblem | None:
    """Return why an endpoint sent nothing, if that can be found out within the limit.

    `on_opened` receives each connection, so that its owner can abort it.
    """
    try:
        async with asyncio.timeout(limit_s):
            if tls is None:
                return await _diagnose_plain(host, port, limit_s, on_opened)
            return await _diagnose_tls(host, port, tls, server_name, limit_s, on_opened)
    except TimeoutError:
        return None


async def _diagnose_plain(
    host: str, port: int, limit_s: float, on_opened: OnOpened
) -> ConnectionProblem | None:
    """Find out whether the endpoint uses TLS."""
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname = False
    anybody.verify_mode = ssl.CERT_NONE  # Nothing is sent; this only tests for TLS.
    try:
        connection = await open_connection(host, port, tls=anybody, limit_s=limit_s)
    except ConnectionProblem as problem:
        # It may require a certificate or another TLS version: it uses TLS.
        denied = problem.kind is ProblemKind.DENIED
        if problem.fault is ConnectionFault.NOT_TLS or not (
            denied or problem.fault is ConnectionFault.TLS_FAILED
        ):
            return None
    else:
        on_opened(connection)
        connection.abort("the diagnosis is done")
    return ConnectionProblem(TLS_ONLY, ProblemKind.DENIED)


async def _diagnose_tls(
    host: str,
    port: int,
    tls: ssl.SSLContext,
    server_name: str,
    limit_s: float,
    on_opened: OnOpened,
) -> ConnectionProblem | None:
    """Find out whether the endpoint rejects this client, or uses plain HTTP."""
    try:
        connection = await open_connection(
            host, port, tls=tls, server_name=server_name, limit_s=limit_s
        )
    except ConnectionProblem as problem:
        if problem.kind is ProblemKind.DENIED:
            return problem
        if problem.fault is not ConnectionFault.SILENT:
            return None
        return await _diagnose_handshake(host, port, limit_s, on_opened)
    on_opened(connection)
    try:
        await connection.ended
    finally:
        connection.abort("the diagnosis is done")
    reason = connection.problem
    return reason if reason is not None and reason.kind is ProblemKind.DENIED else None


async def _diagnose_handshake(
    host: str, port: int, limit_s: float, on_opened: OnOpened
) -> ConnectionProblem | None:
    try:
        connection = await open_connection(host, port, limit_s=limit_s)
    except ConnectionProblem:
        return None
    on_opened(connection)
    try:
        await connection.request(VERSION, b"", limit_s=limit_s)
    except ConnectionProblem:
        return None
    finally:
        connection.abort("the diagnosis is done")
    return ConnectionProblem(NOT_TLS, ProblemKind.DENIED, ConnectionFault.NOT_TLS)
