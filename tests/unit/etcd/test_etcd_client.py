"""Calls, against a real etcd and against servers that are none."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest
from etcd_clients import LOCAL, SHORT_S, client_of, done, get, http, problem, put, saying, server

from holdfast.core.etcd.calls import (
    Delete,
    KeepAlive,
    KeptAlive,
    ProblemKind,
    Txn,
    TxnDone,
)
from holdfast.etcd import async_client as client_module
from holdfast.etcd import transport as etcd_http
from holdfast.etcd.async_client import CONNECTIONS_MAX
from real_etcd import SMALL_QUOTA, Etcd, running_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


def test_many_calls_share_a_few_connections(etcd: Etcd) -> None:
    async def talk() -> None:
        async with client_of(etcd.port) as client:
            calls = [done(client, put(b"many/%d" % n)) for n in range(10 * CONNECTIONS_MAX)]
            answers = await asyncio.gather(*calls)
            assert len({one.revision for one in answers}) == len(calls)
            assert len(client._open) == len(client._idle) == CONNECTIONS_MAX
            assert client.endpoint == etcd.endpoint
            assert client.local_address == LOCAL

    asyncio.run(talk())


def test_an_answer_that_is_too_large_is_refused(
    etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_http, "ANSWER_BYTES_MAX", 100_000)

    async def talk() -> None:
        async with client_of(etcd.port) as client:
            await done(client, put(b"big", b"x" * 100_000))
            refused = await problem(client, get(b"big"))
            assert refused.kind is ProblemKind.REFUSED
            await done(client, get(b"small"))

    asyncio.run(talk())


def test_no_space(tmp_path: Path) -> None:
    with running_etcd(tmp_path, SMALL_QUOTA) as full:
        full.fill_up()

        async def talk() -> None:
            async with client_of(full.port) as client:
                refused = await problem(client, put(b"a", b"1"))
                assert (refused.kind, refused.why) == (
                    ProblemKind.NO_SPACE,
                    "database space exceeded",
                )
                # What makes room, and what keeps a node alive, goes on.
                assert (await done(client, get(b"filling"))).results[0]
                assert (await done(client, Txn(success=(Delete(b"filling"),)))).deleted == (1,)
                assert await client.call(KeepAlive(1)) == KeptAlive(0)

        asyncio.run(talk())


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (http(b"404 page not found\n", "404 Not Found"), ProblemKind.REFUSED),
        (http(b"<html>hello</html>"), ProblemKind.REFUSED),
        (b"220 mail.example ESMTP\r\n\r\n", ProblemKind.REFUSED),
        (None, ProblemKind.UNREACHABLE),
        (b"", ProblemKind.UNREACHABLE),
    ],
)
def test_servers_that_are_not_etcd(words: bytes | None, kind: ProblemKind) -> None:
    async def talk() -> None:
        async with saying(words) as port, client_of(port) as client:
            refused = await problem(client, put(b"a"), SHORT_S)
            assert refused.kind is kind
            assert list(client.tried) in ([], [f"{LOCAL}:{port}"])

    asyncio.run(talk())


def test_calls_beyond_those_under_way_wait_for_no_longer_than_their_limit() -> None:
    async def talk() -> None:
        async with saying(b"") as port, client_of(port) as client:
            blocking = [
                asyncio.ensure_future(client.call(put(b"a"))) for _ in range(CONNECTIONS_MAX)
            ]
            await asyncio.sleep(0)
            waiting = await problem(client, put(b"a"), 0.05)
            assert waiting.kind is ProblemKind.UNREACHABLE
            await client.close()
            for answer in await asyncio.gather(*blocking):
                assert answer == client_module.CLOSED

    asyncio.run(talk())


def test_a_call_may_be_cancelled(etcd: Etcd) -> None:
    async def talk() -> None:
        async with client_of(etcd.port) as client:
            for turns in range(8):  # Wherever it is: waiting, connecting or asking.
                call = asyncio.ensure_future(client.call(put(b"cancelled")))
                for _ in range(turns):
                    await asyncio.sleep(0)
                call.cancel()
                await asyncio.wait([call])
            await done(client, get(b"cancelled"))

    asyncio.run(talk())


def test_a_closed_client_says_so() -> None:
    async def talk() -> None:
        with socket.socket() as bound:
            bound.bind((LOCAL, 0))
            async with client_of(bound.getsockname()[1]) as client:
                await client.close()
                assert await client.call(get(b"a")) == client_module.CLOSED

    asyncio.run(talk())


def test_an_idle_connection_that_etcd_closed_is_not_used() -> None:
    connections = 0

    async def answer(_: bytes) -> bytes:
        nonlocal connections
        connections += 1
        return http(b'{"header":{"revision":"%d"}}' % connections)

    async def talk() -> None:
        async with server(answer, once=True) as port, client_of(port) as client:
            for n in (1, 2, 3):
                assert await client.call(Txn()) == TxnDone(n, succeeded=False)
                await asyncio.gather(*(one.ended for one in client._open))

    asyncio.run(talk())
