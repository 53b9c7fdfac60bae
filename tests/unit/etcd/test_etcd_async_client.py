"""The client for asyncio: calls, watches, users and TLS, with members that die, hang and restart."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest
from etcd_clients import (
    LOCAL,
    SHORT_S,
    Watched,
    client_of,
    done,
    get,
    http,
    problem,
    put,
    responding,
    server,
)

from holdfast.core.etcd.calls import Grant, Granted, ProblemKind, Txn, TxnDone
from holdfast.etcd import async_client as client_module
from holdfast.etcd.async_client import CONNECTIONS_MAX
from in_loop import in_loop
from real_etcd import Etcd, running_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.etcd.async_client import Attempts
    from holdfast.etcd.transport import HttpConnection


@in_loop
async def test_many_calls_share_a_few_connections(etcd: Etcd) -> None:
    async with client_of(etcd.port) as client:
        calls = [done(client, put(b"many/%d" % n)) for n in range(10 * CONNECTIONS_MAX)]
        answers = await asyncio.gather(*calls)
        assert len({one.revision for one in answers}) == len(calls)
        assert len(client._open) == len(client._idle) == CONNECTIONS_MAX
        assert client.endpoint == etcd.endpoint
        assert client.local_address == LOCAL


@in_loop
async def test_queued_calls_wait_no_longer_than_their_limit() -> None:
    async with responding(b"") as port, client_of(port) as client:
        blocking = [asyncio.ensure_future(client.call(put(b"a"))) for _ in range(CONNECTIONS_MAX)]
        await asyncio.sleep(0)
        waiting = await problem(client, put(b"a"), 0.05)
        assert waiting.kind is ProblemKind.UNREACHABLE
        await client.close()
        for answer in await asyncio.gather(*blocking):
            assert answer == client_module.CLOSED


@in_loop
async def test_call_can_be_cancelled_at_any_point(etcd: Etcd) -> None:
    async with client_of(etcd.port) as client:
        for turns in range(8):  # At any point: while it waits, connects or sends.
            call = asyncio.ensure_future(client.call(put(b"cancelled")))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
        await done(client, get(b"cancelled"))


@in_loop
async def test_idle_connection_closed_by_etcd_is_not_reused() -> None:
    connections = 0

    async def answer(_: bytes) -> bytes:
        nonlocal connections
        connections += 1
        return http(b'{"header":{"revision":"%d"}}' % connections)

    async with server(answer, once=True) as port, client_of(port) as client:
        for n in (1, 2, 3):
            assert await client.call(Txn()) == TxnDone(n, succeeded=False)
            await asyncio.gather(*(one.ended for one in client._open))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """An etcd that requires passwords; `user` has all rights below `u/`."""
    with running_etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        etcd.enable_auth("user", "secret", b"u/")
        yield etcd


@in_loop
async def test_concurrent_calls_request_one_token() -> None:
    requests: list[bytes] = []

    async def answer(data: bytes) -> bytes:
        requests.append(data.split(b" ", 2)[1])
        await asyncio.sleep(0)
        is_token = requests[-1] == b"/v3/auth/authenticate"
        return http(b'{"token":"t"}' if is_token else b'{"header":{"revision":"1"}}')

    async with server(answer) as port, client_of(port, user="u", password="p") as client:
        await asyncio.gather(*(done(client, Txn()) for _ in range(8)))
    assert len(requests) == 9
    assert requests.count(b"/v3/auth/authenticate") == 1


@in_loop
async def test_expired_token_is_replaced(plain: Etcd) -> None:
    async with client_of(plain.port, user="user", password="secret") as client:
        now = (await done(client, put(b"u/a"))).revision
        good = client._token
        for request in (get(b"u/a"), put(b"u/a")):
            client._token = "no-token.1"
            await done(client, request)
            assert client._token not in (good, "no-token.1")
        client._token = "no-token.2"
        await Watched(client, b"u/a", b"", now).changes()


PATIENCE_S = 30.0


@in_loop
async def test_call_detects_a_hanging_etcd_and_its_watches_end(tmp_path: Path) -> None:
    with running_etcd(tmp_path) as etcd:
        async with client_of(etcd.port) as client:
            now = (await done(client, put(b"a"))).revision
            watched = Watched(client, b"a", b"", now)
            await watched.changes()
            await asyncio.gather(*(done(client, get(b"a")) for _ in range(3)))
            idle = tuple(client._idle)
            assert len(idle) == 3
            etcd.pause()
            hung = await problem(client, put(b"a"), SHORT_S)
            assert hung.kind is ProblemKind.UNREACHABLE
            assert "no response within" in hung.why
            assert (await watched.problem()).why == hung.why
            await asyncio.gather(*(one.ended for one in idle))
            etcd.resume()
            await done(client, put(b"a"))


def test_client_switches_from_dead_and_hanging_members_to_one_that_responds(tmp_path: Path) -> None:
    async def make_calls(etcd: Etcd, dead: int, hanging: int) -> None:
        async with client_of(dead, hanging, etcd.port, call_s=3 * SHORT_S) as client:
            # An idempotent call is retried at the last member within its limit.
            assert isinstance(await client.call(Grant(60)), Granted)
            assert client.endpoint == etcd.endpoint
            assert client.tried.keys() == {f"{LOCAL}:{dead}", f"{LOCAL}:{hanging}"}
            await done(client, put(b"a"))
        async with client_of(dead, hanging, etcd.port) as client:
            # A write that was sent is not sent again; the next one uses another member.
            unknown = await problem(client, put(b"a"), SHORT_S)
            assert unknown.kind is ProblemKind.UNREACHABLE
            assert "no response" in unknown.why
            await done(client, put(b"a"))
        async with client_of(dead, hanging, etcd.port, call_s=3 * SHORT_S) as client:
            now = etcd.put(b"b", b"1")
            assert len(await Watched(client, b"b", b"", now).changes()) == 1

    with (
        running_etcd(tmp_path) as etcd,
        socket.socket() as bound,
        socket.create_server((LOCAL, 0)) as silent,
    ):
        bound.bind((LOCAL, 0))  # Bound, but not listening.
        asyncio.run(make_calls(etcd, bound.getsockname()[1], silent.getsockname()[1]))


@in_loop
async def test_late_response_is_used_but_its_endpoint_is_not_preferred_again(
    tmp_path: Path,
) -> None:
    with running_etcd(tmp_path) as etcd:
        received, released = asyncio.Event(), asyncio.Event()

        async def answer_late(_: bytes) -> bytes:
            received.set()
            await released.wait()
            return http(
                b'{"header":{"revision":"1"},"succeeded":true,"responses":[{"response_put":{}}]}'
            )

        async with server(answer_late) as slow, client_of(slow, etcd.port) as client:
            late = asyncio.ensure_future(client.call(put(b"a"), limit_s=PATIENCE_S))
            await received.wait()
            await problem(client, put(b"a"), SHORT_S)
            watched = Watched(client, b"a", b"", (await done(client, put(b"a", b"1"))).revision)
            assert len(await watched.changes()) == 1
            released.set()
            assert isinstance(await late, TxnDone)
            assert client.endpoint == etcd.endpoint
            assert client.tried == {}
            assert watched.is_silent


@in_loop
async def test_watch_follows_the_client_to_another_endpoint_while_connecting(
    tmp_path: Path,
) -> None:
    with running_etcd(tmp_path) as etcd:
        async with responding(b"") as left, client_of(left, etcd.port) as client:
            connect = client._connect

            async def connect_slowly(at: int, attempts: Attempts) -> HttpConnection:
                connection = await connect(at, attempts)
                if at == 0:
                    client._leave(0, "no response within 1 s")  # As after a failed call.
                return connection

            client._connect = connect_slowly  # type: ignore[method-assign]
            watched = Watched(client, b"a", b"", etcd.put(b"a", b"1"))
            assert len(await watched.changes()) == 1
            assert client.endpoint == etcd.endpoint
            assert client.tried == {f"{LOCAL}:{left}": "no response within 1 s"}


@in_loop
async def test_cancelled_watch_calls_no_callback(etcd: Etcd) -> None:
    async with client_of(etcd.port) as client:
        now = (await done(client, put(b"cancelled", b"1"))).revision
        early = Watched(client, b"cancelled", b"", now)
        early.handle.cancel()  # Before it connects.
        watched = Watched(client, b"cancelled", b"", now)
        other = Watched(client, b"cancelled", b"", now)
        await watched.changes()
        await other.changes()
        watched.handle.cancel()
        await done(client, put(b"cancelled", b"2"))
        await other.changes()
        assert early.is_silent
        assert watched.is_silent
    assert other.is_silent  # Closing the client does not report an end of the watch.
