"""One connection to one endpoint: its requests, and every way in which it fails."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest
from etcd_clients import LOCAL, http, responding, server

from holdfast.core.etcd.calls import ProblemKind
from holdfast.etcd import transport
from holdfast.etcd.transport import ConnectionProblem, HttpConnection, HttpReply, open_connection
from holdfast.net import async_addresses
from holdfast.net.addresses import Address
from holdfast.net.tls import client_context
from in_loop import in_loop

S = 5.0


async def connect(port: int) -> HttpConnection:
    return await open_connection(LOCAL, port, limit_s=S)


async def ask_of(words: bytes | None, limit_s: float = S) -> HttpReply:
    async with responding(words) as port:
        connection = await connect(port)
        try:
            return await connection.request("/v3/x", b"{}", limit_s=limit_s)
        finally:
            connection.abort("the test is done")
            await connection.ended


@in_loop
async def test_request_is_one_write_and_the_connection_is_reused() -> None:
    heard: list[bytes] = []

    async def answer(data: bytes) -> bytes:
        heard.append(data)
        return http(b'{"n":%d}' % len(heard))

    async with server(answer) as port:
        connection = await connect(port)
        for n in (1, 2):
            assert connection.is_idle
            reply = await connection.request("/v3/x", b'{"a":1}', "the-token", limit_s=S)
            assert reply == HttpReply(200, b'{"n":%d}' % n)
        assert connection.local_address == LOCAL
        connection.abort("done")
        await connection.ended
        assert not connection.is_idle
    assert len(heard) == 2
    head, _, body = heard[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v3/x HTTP/1.1\r\n")
    assert body == b'{"a":1}'
    lines = {line.lower() for line in head.split(b"\r\n")}
    assert b"authorization: the-token" in lines
    assert b"grpc-metadata-hasleader: true" in lines
    assert b"content-length: 7" in lines


@in_loop
async def test_lines_are_delivered_however_the_network_splits_them() -> None:
    pieces = [b'{"a"', b":1}\n{", b'"b":2}\n', b'\n{"c":3}\n']
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in pieces) + b"0\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    lines: list[bytes] = []
    async with responding(head + chunks) as port:
        connection = await connect(port)
        reply = await connection.stream("/v3/watch", b"{}", "", lines.append)
        await connection.ended
    assert reply.status == 200
    assert lines == [b'{"a":1}', b'{"b":2}', b'{"c":3}']


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (None, ProblemKind.UNREACHABLE),
        (b"SSH-2.0-OpenSSH_9.2\r\n", ProblemKind.REFUSED),
        (b"\x15\x03\x01\x00\x02\x02\x46", ProblemKind.DENIED),
        (b"\0" * 100_000, ProblemKind.REFUSED),
        (http(b"{}").replace(b"2\r\n\r\n", b"3\r\n\r\n"), ProblemKind.UNREACHABLE),
    ],
)
def test_every_failure_becomes_a_problem(words: bytes | None, kind: ProblemKind) -> None:
    with pytest.raises(ConnectionProblem) as caught:
        asyncio.run(ask_of(words, limit_s=1.0))
    assert caught.value.kind is kind
    assert caught.value.written


@pytest.mark.parametrize(
    ("words", "reply"),
    [
        (b"HTTP/1.0 404 Not Found\r\n\r\nno", HttpReply(404, b"no")),
        (http(b"no", "404 Not Found").replace(b"\r\n", b"\r\nConnection: close\r\n", 1),
         HttpReply(404, b"no")),
    ],
)  # fmt: skip
@in_loop
async def test_response_may_end_with_the_connection(words: bytes, reply: HttpReply) -> None:
    async with responding(words, once=True) as port:
        connection = await connect(port)
        assert await connection.request("/v3/x", b"{}", limit_s=S) == reply
        assert not connection.is_idle
        await connection.ended


def test_response_size_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "ANSWER_BYTES_MAX", 1000)
    assert asyncio.run(ask_of(http(b"x" * 1000))).body == b"x" * 1000
    with pytest.raises(ConnectionProblem, match="MiB") as caught:
        asyncio.run(ask_of(http(b"x" * 1001)))
    assert caught.value.kind is ProblemKind.REFUSED


def test_missing_h11_is_reported_with_the_package_to_install() -> None:
    run = ["run", "--rdzv-backend", "etcd", "--rdzv-endpoint", "localhost", "--rdzv-id", "job"]
    ran = without_h11(
        f"from holdfast.cli.main import dispatch; sys.exit(dispatch({run} + ['-m', 'x']))"
    )
    assert ran.returncode == 78
    assert ran.stderr.splitlines()[-1].endswith("etcd needs the package h11 (pip install h11)")


def test_commands_of_jobs_on_other_backends_need_no_h11() -> None:
    ran = without_h11(
        "from importlib import import_module\n"
        "from holdfast.cli.commands import TABLE\n"
        "for command in TABLE: import_module(command.module)"
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def without_h11(program: str) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.modules['h11'] = None\n{program}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@in_loop
async def test_keepalive_detects_a_vanished_host() -> None:
    async with responding(b"") as port:
        connection = await connect(port)
        assert connection._transport is not None
        there: socket.socket = connection._transport.get_extra_info("socket")
        names = ("NODELAY", "KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT")
        found = [there.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)]
        found += [there.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{n}")) for n in names]
        connection.abort("done")
        await connection.ended
    alive, no_delay, idle, every, probes, unacknowledged = found
    assert alive
    assert no_delay
    assert idle + every * probes <= 10
    assert unacknowledged == transport.UNACKNOWLEDGED_MS_MAX


def test_unresponsive_address_leaves_time_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def connect(blocked: int) -> None:
        async with responding(b"") as port:

            async def find_two(_host: str, _port: int) -> list[Address]:
                return [Address(socket.AF_INET, (LOCAL, one)) for one in (blocked, port)]

            monkeypatch.setattr(async_addresses, "resolve_async", find_two)
            connection = await open_connection("two", 1, limit_s=1.0)
            connection.abort("done")
            await connection.ended

    with socket.create_server((LOCAL, 0), backlog=0) as full, socket.socket() as first:
        first.connect(full.getsockname())
        asyncio.run(connect(full.getsockname()[1]))


def test_unanswered_tls_handshake_times_out() -> None:
    with socket.create_server((LOCAL, 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ConnectionProblem, match=r"no TLS handshake within 0\.5 s"):
            asyncio.run(open_connection(LOCAL, port, tls=client_context(), limit_s=0.5))
