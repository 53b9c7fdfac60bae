"""The diagnosis of endpoints that close connections without a response."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading

import pytest
from etcd_clients import LOCAL, client_of, http, problem, put, responding, server

from holdfast.core.etcd.calls import Problem, ProblemKind
from holdfast.etcd.diagnose import diagnose_silence
from holdfast.etcd.json_gateway import TLS_ONLY
from holdfast.etcd.transport import NOT_TLS, HttpConnection
from holdfast.net.tls import client_context
from in_loop import in_loop
from real_etcd import Tls, make_tls

LIMIT_S = 30.0  # Only a failing test waits this long.


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return make_tls(tmp_path_factory.mktemp("certificates"))


async def why(port: int, context: ssl.SSLContext | None, limit_s: float = LIMIT_S) -> object:
    opened: list[HttpConnection] = []
    found = await diagnose_silence(
        LOCAL, port, tls=context, server_name="", limit_s=limit_s, on_opened=opened.append
    )
    for connection in opened:
        await connection.ended
    return None if found is None else Problem(found.kind, found.why)


def asked_over_tls(
    tls: Tls, context: ssl.SSLContext | None, *, wants_certificate: bool, newest: bool = True
) -> object:
    """Diagnose a server that speaks TLS and never responds."""
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(*tls.server)
    if not newest:
        ours.maximum_version = ssl.TLSVersion.TLSv1_2
    if wants_certificate:
        ours.load_verify_locations(tls.ca)
        ours.verify_mode = ssl.CERT_REQUIRED

    def serve(listening: socket.socket) -> None:
        # Without asyncio's server, which does not report why a handshake fails.
        taken, _ = listening.accept()
        with taken, contextlib.suppress(OSError), ours.wrap_socket(taken, server_side=True):
            pass

    with socket.create_server((LOCAL, 0)) as listening:
        serving = threading.Thread(target=serve, args=(listening,))
        serving.start()
        try:
            return asyncio.run(why(listening.getsockname()[1], context))
        finally:
            serving.join()


@pytest.mark.parametrize("wants_certificate", [False, True])
@pytest.mark.parametrize("newest", [False, True])
def test_plain_client_of_a_tls_server_is_explained(
    tls: Tls, *, wants_certificate: bool, newest: bool
) -> None:
    found = asked_over_tls(tls, None, wants_certificate=wants_certificate, newest=newest)
    assert found == Problem(ProblemKind.DENIED, TLS_ONLY)


def test_certificate_rejected_after_the_handshake_is_explained(tls: Tls) -> None:
    found = asked_over_tls(tls, client_context(tls.ca), wants_certificate=True)
    assert isinstance(found, Problem)
    assert found.kind is ProblemKind.DENIED
    assert "cert" in found.why


@in_loop
async def test_tls_client_of_a_plain_server_is_explained() -> None:
    async def answer(data: bytes) -> bytes | None:
        return http(b"no such method", "405 Method Not Allowed") if b"/version" in data else None

    async with server(answer) as port:
        found = await why(port, client_context())
    assert found == Problem(ProblemKind.DENIED, NOT_TLS)


@in_loop
async def test_plain_server_that_closes_is_not_mistaken_for_tls() -> None:
    """The server closes plain connections and responds to a TLS handshake in plain text, so it has no TLS."""

    async def answer(data: bytes) -> bytes | None:
        return http(b"", "400 Bad Request") if data.startswith(b"\x16\x03") else None

    async with server(answer) as port:
        found = await why(port, None)
    assert found is None


@pytest.mark.parametrize("is_tls", [False, True])
@in_loop
async def test_server_that_closes_every_connection_is_explained(*, is_tls: bool) -> None:
    async with responding(None) as port:
        assert await why(port, client_context() if is_tls else None) is None
        async with client_of(port, tls=is_tls) as client:
            found = await problem(client, put(b"a"))
            assert found.kind is ProblemKind.UNREACHABLE


@pytest.mark.parametrize("is_tls", [False, True])
def test_silent_server_is_diagnosed_within_the_limit(*, is_tls: bool) -> None:
    with socket.create_server((LOCAL, 0)) as silent:
        port = silent.getsockname()[1]
        assert asyncio.run(why(port, client_context() if is_tls else None, 0.05)) is None


@in_loop
async def test_endpoint_that_responded_before_is_not_diagnosed() -> None:
    """An endpoint that responded before and now closes connections is an etcd that is exiting."""
    asked: list[bytes] = []

    async def answer(data: bytes) -> bytes | None:
        asked.append(data)
        return http(b'{"header":{"revision":"1"}}') if len(asked) == 1 else None

    async with server(answer, once=True) as port, client_of(port) as client:
        await client.call(put(b"a"))
        await problem(client, put(b"a"))
    assert all(data.startswith(b"POST /v3/") for data in asked)


@in_loop
async def test_closed_client_stops_its_diagnosis(tls: Tls) -> None:
    """The client is closed while it waits for a silent endpoint, which may take long."""
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(*tls.server)

    came: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.put_nowait(writer)

    async with await asyncio.start_server(serve, LOCAL, 0, ssl=ours) as listening:
        port = listening.sockets[0].getsockname()[1]
        async with client_of(port, tls=True, ca=tls.ca) as client:
            call = asyncio.ensure_future(problem(client, put(b"a")))
            first = await came.get()
            first.transport.abort()
            second = await came.get()
            while not client._open:
                assert not call.done()
                await asyncio.sleep(0)
            await client.close()
            assert not client._open
            assert (await call).kind in (ProblemKind.UNREACHABLE, ProblemKind.CLOSED)
        second.transport.abort()
