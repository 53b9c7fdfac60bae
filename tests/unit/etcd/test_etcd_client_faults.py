"""The client while members of etcd die, hang, restart and have no leader."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from etcd_clients import (
    LOCAL,
    SHORT_S,
    Watched,
    client_of,
    done,
    freeze,
    get,
    http,
    problem,
    put,
    saying,
    server,
)

from holdfast.core.etcd.calls import (
    Change,
    Grant,
    Granted,
    KeepAlive,
    Problem,
    ProblemKind,
    TxnDone,
)
from real_etcd import Etcd, EtcdCluster, running_cluster, running_etcd

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.core.etcd.calls import Answer, Request
    from holdfast.etcd.async_client import AsyncEtcdClient
    from holdfast.etcd.failover import Attempts
    from holdfast.etcd.transport import HttpConnection

PATIENCE_S = 30.0


async def sooner_or_later(client: AsyncEtcdClient, request: Request) -> TxnDone:
    """Ask until there is an answer, as whoever uses the client would."""
    async with asyncio.timeout(PATIENCE_S):
        while isinstance(answer := await client.call(request), Problem):
            assert answer.kind is ProblemKind.UNREACHABLE
            await asyncio.sleep(0.02)
    assert isinstance(answer, TxnDone)
    return answer


def test_etcd_is_killed_and_restarted_under_a_client(tmp_path: Path) -> None:
    async def talk(etcd: Etcd) -> None:
        async with client_of(etcd.port) as client:
            before = (await done(client, put(b"a", b"1"))).revision
            watched = Watched(client, b"a", b"", before)
            await watched.changes()
            etcd.kill()
            ended = await watched.problem()
            assert ended == Problem(ProblemKind.UNREACHABLE, "it closed the connection")
            away = await problem(client, put(b"a", b"2"))
            assert away == Problem(ProblemKind.UNREACHABLE, "connection refused")
            assert client.tried == {etcd.endpoint: "connection refused"}
            etcd.start()
            after = (await done(client, put(b"a", b"3"))).revision
            assert client.tried == {}
            resumed = Watched(client, b"a", b"", before + 1)
            assert await resumed.changes() == (Change(b"a", b"3", after, before),)

    with running_etcd(tmp_path) as etcd:
        asyncio.run(talk(etcd))


def test_an_etcd_that_hangs_is_noticed_by_a_call_and_its_watches_end(tmp_path: Path) -> None:
    async def talk(etcd: Etcd) -> None:
        async with client_of(etcd.port) as client:
            now = (await done(client, put(b"a"))).revision
            watched = Watched(client, b"a", b"", now)
            await watched.changes()
            await asyncio.gather(*(done(client, get(b"a")) for _ in range(3)))
            idle = tuple(client._idle)
            assert len(idle) == 3
            freeze(etcd)
            hung = await problem(client, put(b"a"), SHORT_S)
            assert hung.kind is ProblemKind.UNREACHABLE
            assert "no answer within" in hung.why
            assert (await watched.problem()).why == hung.why
            await asyncio.gather(*(one.ended for one in idle))
            etcd.resume()
            await done(client, put(b"a"))

    with running_etcd(tmp_path) as etcd:
        asyncio.run(talk(etcd))


def test_a_dead_and_a_hanging_member_are_left_for_one_that_answers(tmp_path: Path) -> None:
    async def talk(etcd: Etcd, dead: int, hanging: int) -> None:
        async with client_of(dead, hanging, etcd.port, call_s=3 * SHORT_S) as client:
            # What does no harm twice goes on to the last one within its limit.
            assert isinstance(await client.call(Grant(60)), Granted)
            assert client.endpoint == etcd.endpoint
            assert client.tried.keys() == {f"{LOCAL}:{dead}", f"{LOCAL}:{hanging}"}
            await done(client, put(b"a"))
        async with client_of(dead, hanging, etcd.port) as client:
            # A write that was sent is not sent again; the next one goes elsewhere.
            unknown = await problem(client, put(b"a"), SHORT_S)
            assert unknown.kind is ProblemKind.UNREACHABLE
            assert "no answer" in unknown.why
            await done(client, put(b"a"))
        async with client_of(dead, hanging, etcd.port, call_s=3 * SHORT_S) as client:
            now = etcd.put(b"b", b"1")
            assert len(await Watched(client, b"b", b"", now).changes()) == 1

    with (
        running_etcd(tmp_path) as etcd,
        socket.socket() as bound,
        socket.create_server((LOCAL, 0)) as silent,
    ):
        bound.bind((LOCAL, 0))  # And does not listen.
        asyncio.run(talk(etcd, bound.getsockname()[1], silent.getsockname()[1]))


def test_who_finds_out_later_does_not_disturb_those_who_have_gone_on(tmp_path: Path) -> None:
    async def talk(etcd: Etcd) -> None:
        async with saying(b"") as hanging, client_of(hanging, etcd.port) as client:
            slow = asyncio.ensure_future(client.call(put(b"a"), limit_s=2 * SHORT_S))
            await problem(client, put(b"a"), SHORT_S)
            assert client.endpoint == etcd.endpoint
            watched = Watched(client, b"a", b"", (await done(client, put(b"a", b"1"))).revision)
            assert len(await watched.changes()) == 1
            assert isinstance(await slow, Problem)
            assert client.endpoint == etcd.endpoint
            await done(client, put(b"a", b"2"))
            assert (await watched.changes())[0].value == b"2"

    with running_etcd(tmp_path) as etcd:
        asyncio.run(talk(etcd))


def test_a_late_answer_is_taken_and_its_endpoint_is_not_gone_back_to(tmp_path: Path) -> None:
    async def talk(etcd: Etcd) -> None:
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def answer_late(_: bytes) -> bytes:
            asked.set()
            await go_on.wait()
            return http(
                b'{"header":{"revision":"1"},"succeeded":true,"responses":[{"response_put":{}}]}'
            )

        async with server(answer_late) as slow, client_of(slow, etcd.port) as client:
            late = asyncio.ensure_future(client.call(put(b"a"), limit_s=PATIENCE_S))
            await asked.wait()
            await problem(client, put(b"a"), SHORT_S)
            watched = Watched(client, b"a", b"", (await done(client, put(b"a", b"1"))).revision)
            assert len(await watched.changes()) == 1
            go_on.set()
            assert isinstance(await late, TxnDone)
            assert client.endpoint == etcd.endpoint
            assert client.tried == {}
            assert watched.is_silent

    with running_etcd(tmp_path) as etcd:
        asyncio.run(talk(etcd))


def test_a_watch_follows_where_all_else_has_gone_while_it_was_connecting(tmp_path: Path) -> None:
    async def talk(etcd: Etcd) -> None:
        async with saying(b"") as left, client_of(left, etcd.port) as client:
            connect = client._connect

            async def connect_slowly(at: int, tries: Attempts) -> HttpConnection:
                connection = await connect(at, tries)
                if at == 0:
                    client._leave(0, "no answer within 1 s")  # As a call would find.
                return connection

            client._connect = connect_slowly  # type: ignore[method-assign]
            watched = Watched(client, b"a", b"", etcd.put(b"a", b"1"))
            assert len(await watched.changes()) == 1
            assert client.endpoint == etcd.endpoint
            assert client.tried == {f"{LOCAL}:{left}": "no answer within 1 s"}

    with running_etcd(tmp_path) as etcd:
        asyncio.run(talk(etcd))


def test_a_server_that_is_no_etcd_is_left_too(tmp_path: Path) -> None:
    async def talk(etcd: Etcd) -> None:
        not_found = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
        async with saying(not_found) as other, client_of(other, etcd.port) as client:
            await done(client, put(b"a"))
            assert f"{LOCAL}:{other}" in client.tried

    with running_etcd(tmp_path) as etcd:
        asyncio.run(talk(etcd))


def test_members_of_a_cluster_die_one_after_the_other(tmp_path: Path) -> None:
    async def talk(cluster: EtcdCluster) -> None:
        first, second, third = cluster.members
        ports = [one.port for one in cluster.members]
        async with client_of(*ports) as client:
            lease = await client.call(Grant(60))
            assert isinstance(lease, Granted)
            now = (await done(client, put(b"a", b"1", lease.lease))).revision
            watched = Watched(client, b"a", b"", now)
            await watched.changes()
            assert client.endpoint == first.endpoint
            first.kill()
            await watched.problem()
            await sooner_or_later(client, get(b"a"))
            assert client.endpoint != first.endpoint
            again = Watched(client, b"a", b"", now + 1)
            changed = (await sooner_or_later(client, put(b"a", b"2"))).revision
            assert (await again.changes())[-1].value == b"2"
            # Without a majority nothing goes, and says why; with it, calls that wait go through.
            second.kill()
            assert (await again.problem()).kind is ProblemKind.UNREACHABLE
            alone = await problem(client, get(b"a"), SHORT_S)
            assert (alone.kind, client.tried[first.endpoint]) == (
                ProblemKind.UNREACHABLE,
                "connection refused",
            )
            second.begin()
            read = await sooner_or_later(client, get(b"a"))
            assert read.results[0][0].mod_revision >= changed
            kept: Answer = await client.call(KeepAlive(lease.lease))
            assert not isinstance(kept, Problem)
            second.ready()
            third.kill()
            first.start()
            await sooner_or_later(client, put(b"a", b"3"))

    with running_cluster(tmp_path) as cluster:
        cluster.leader()
        asyncio.run(talk(cluster))


def test_a_member_without_a_leader_says_so_and_ends_its_watches(tmp_path: Path) -> None:
    async def talk(cluster: EtcdCluster) -> None:
        alone, *others = [*cluster.followers(), cluster.leader()]
        async with client_of(alone.port) as client:
            now = (await done(client, put(b"a"))).revision
            watched = Watched(client, b"a", b"", now)
            await watched.changes()
            for one in others:
                one.pause()
            ended = await watched.problem()
            assert ended.kind is ProblemKind.UNREACHABLE
            leaderless = await problem(client, put(b"a"), SHORT_S)
            assert leaderless == Problem(ProblemKind.UNREACHABLE, "no leader")
            # It is asked again until the limit, so that an election is waited for.
            call = asyncio.ensure_future(client.call(put(b"a"), limit_s=PATIENCE_S))
            await asyncio.sleep(0)
            for one in others:
                one.resume()
            answer = await call
            assert isinstance(answer, TxnDone), answer

    with running_cluster(tmp_path) as cluster:
        asyncio.run(talk(cluster))
