from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from etcd_clients import LOCAL, http, saying, server

from holdfast.core.etcd.calls import ProblemKind
from holdfast.etcd import transport as etcd_http
from holdfast.etcd.transport import ConnectionProblem, HttpConnection, Reply, open_connection

S = 5.0


async def connect(port: int) -> HttpConnection:
    return await open_connection(LOCAL, port, limit_s=S)


async def ask_of(words: bytes | None, limit_s: float = S) -> Reply:
    async with saying(words) as port:
        connection = await connect(port)
        try:
            return await connection.ask("/v3/x", b"{}", limit_s=limit_s)
        finally:
            connection.abort("the test is done")
            await connection.ended


def test_a_request_is_one_write_and_the_connection_is_kept() -> None:
    heard: list[bytes] = []

    async def answer(data: bytes) -> bytes:
        heard.append(data)
        return http(b'{"n":%d}' % len(heard))

    async def talk() -> None:
        async with server(answer) as port:
            connection = await connect(port)
            for n in (1, 2):
                assert connection.is_idle
                reply = await connection.ask("/v3/x", b'{"a":1}', "the-token", limit_s=S)
                assert reply == Reply(200, b'{"n":%d}' % n)
            assert connection.local_address == LOCAL
            connection.abort("done")
            await connection.ended
            assert not connection.is_idle

    asyncio.run(talk())
    assert len(heard) == 2
    head, _, body = heard[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v3/x HTTP/1.1\r\n")
    assert body == b'{"a":1}'
    lines = {line.lower() for line in head.split(b"\r\n")}
    assert b"authorization: the-token" in lines
    assert b"grpc-metadata-hasleader: true" in lines
    assert b"content-length: 7" in lines


def test_lines_are_delivered_as_they_come_however_they_are_cut() -> None:
    pieces = [b'{"a"', b":1}\n{", b'"b":2}\n', b'\n{"c":3}\n']
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in pieces) + b"0\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    lines: list[bytes] = []

    async def talk() -> Reply:
        async with saying(head + chunks) as port:
            connection = await connect(port)
            reply = await connection.stream("/v3/watch", b"{}", "", lines.append)
            await connection.ended
            return reply

    assert asyncio.run(talk()).status == 200
    assert lines == [b'{"a":1}', b'{"b":2}', b'{"c":3}']


def test_a_stream_that_is_refused_is_an_answer() -> None:
    async def talk() -> Reply:
        async with saying(http(b'{"a":1}\n', "400 Bad Request")) as port:
            connection = await connect(port)
            reply = await connection.stream("/v3/watch", b"{}", "", lambda _: pytest.fail("line"))
            await connection.ended
            return reply

    assert asyncio.run(talk()) == Reply(400, b'{"a":1}\n')


@pytest.mark.parametrize(
    ("words", "kind", "why"),
    [
        (None, ProblemKind.UNREACHABLE, "closed the connection without an answer"),
        (
            b"SSH-2.0-OpenSSH_9.2\r\n",
            ProblemKind.REFUSED,
            "SSH-2.0-OpenSSH",
        ),
        (b"\x15\x03\x01\x00\x02\x02\x46", ProblemKind.DENIED, "TLS"),
        (b"\0" * 100_000, ProblemKind.REFUSED, "does not speak HTTP"),
        (
            http(b"{}").replace(b"2\r\n\r\n", b"3\r\n\r\n"),
            ProblemKind.UNREACHABLE,
            "no answer within",
        ),
    ],
)
def test_every_failure_says_why(words: bytes | None, kind: ProblemKind, why: str) -> None:
    with pytest.raises(ConnectionProblem, match=why) as caught:
        asyncio.run(ask_of(words, limit_s=1.0))
    assert caught.value.kind is kind
    assert caught.value.written


@pytest.mark.parametrize(
    ("words", "reply"),
    [
        (b"HTTP/1.0 404 Not Found\r\n\r\nno", Reply(404, b"no")),
        (http(b"no", "404 Not Found").replace(b"\r\n", b"\r\nConnection: close\r\n", 1),
         Reply(404, b"no")),
    ],
)  # fmt: skip
def test_an_answer_may_end_with_the_connection(words: bytes, reply: Reply) -> None:
    async def talk() -> None:
        async with saying(words, once=True) as port:
            connection = await connect(port)
            assert await connection.ask("/v3/x", b"{}", limit_s=S) == reply
            assert not connection.is_idle
            await connection.ended

    asyncio.run(talk())


def test_an_answer_that_is_cut_short_is_none() -> None:
    async def talk() -> None:
        async with saying(http(b"{}")[:-1], once=True) as port:
            connection = await connect(port)
            with pytest.raises(ConnectionProblem, match=r"^it closed the connection$"):
                await connection.ask("/v3/x", b"{}", limit_s=S)
            await connection.ended

    asyncio.run(talk())


def test_an_answer_is_taken_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_http, "ANSWER_BYTES_MAX", 1000)
    assert asyncio.run(ask_of(http(b"x" * 1000))).body == b"x" * 1000
    with pytest.raises(ConnectionProblem, match="MiB") as caught:
        asyncio.run(ask_of(http(b"x" * 1001)))
    assert caught.value.kind is ProblemKind.REFUSED


def test_what_comes_unasked_ends_the_connection() -> None:
    async def talk() -> None:
        async with saying(http(b"1") + http(b"2")) as port:
            connection = await connect(port)
            assert await connection.ask("/v3/x", b"{}", limit_s=S) == Reply(200, b"1")
            await connection.ended
            assert not connection.is_idle
            with pytest.raises(ConnectionProblem) as caught:
                await connection.ask("/v3/x", b"{}", limit_s=S)
            assert not caught.value.written

    asyncio.run(talk())


def test_a_call_that_is_cancelled_takes_its_connection_along() -> None:
    async def talk() -> None:
        async with saying(b"") as port:
            connection = await connect(port)
            asking = asyncio.ensure_future(connection.ask("/v3/x", b"{}", limit_s=S))
            await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await connection.ended

    asyncio.run(talk())


def test_without_h11_there_is_one_line_about_what_to_install() -> None:
    program = (
        "import sys; sys.modules['h11'] = None\n"
        "from holdfast.errors import EnvironmentProblem\n"
        "try:\n    import holdfast.etcd.async_client\n"
        "except EnvironmentProblem as error:\n    print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "etcd needs the package h11 (pip install h11)\n", ran.stderr
