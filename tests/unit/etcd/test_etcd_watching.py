from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from etcd_clients import SHORT_S, Watched, client_of, done, http, put, saying

from holdfast.core.etcd.calls import (
    Change,
    ProblemKind,
)
from real_etcd import Etcd, running_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


def test_a_watch_goes_on_from_any_revision(etcd: Etcd) -> None:
    async def talk() -> None:
        async with client_of(etcd.port) as client:
            revisions = [(await done(client, put(b"resumed", b"%d" % n))).revision for n in (0, 1)]
            first = Watched(client, b"resumed", b"", revisions[0])
            seen: list[Change] = []
            while len(seen) < 2:
                seen += await first.changes()
            first.handle.cancel()
            last = (await done(client, put(b"resumed", b"2"))).revision
            again = Watched(client, b"resumed", b"", seen[-1].mod_revision + 1)
            seen += await again.changes()
            assert [one.value for one in seen] == [b"0", b"1", b"2"]
            assert [one.mod_revision for one in seen] == [*revisions, last]
            assert first.is_silent

    asyncio.run(talk())


def test_a_watch_is_told_of_nothing_after_it_was_cancelled(etcd: Etcd) -> None:
    async def talk() -> None:
        async with client_of(etcd.port) as client:
            now = (await done(client, put(b"cancelled", b"1"))).revision
            early = Watched(client, b"cancelled", b"", now)
            early.handle.cancel()  # Before it even connects.
            watched = Watched(client, b"cancelled", b"", now)
            other = Watched(client, b"cancelled", b"", now)
            await watched.changes()
            await other.changes()
            watched.handle.cancel()
            await done(client, put(b"cancelled", b"2"))
            await other.changes()
            assert early.is_silent
            assert watched.is_silent
        assert other.is_silent  # Closing the client is no end of a watch either.

    asyncio.run(talk())


def test_a_watch_may_be_cancelled_by_who_is_told_of_a_change() -> None:
    change = b'{"result":{"header":{},"events":[{"kv":{"key":"YQ==","mod_revision":"%d"}}]}}\n'

    async def talk() -> None:
        told: asyncio.Queue[int] = asyncio.Queue()

        def changed(revision: int, _: tuple[Change, ...]) -> None:
            told.put_nowait(revision)
            handle.cancel()

        async with saying(http(change % 1 + change % 2)) as port, client_of(port) as client:
            handle = client.watch(b"a", b"", 1, changed, lambda _: told.put_nowait(-1))
            assert await told.get() == 1
            assert handle.task is not None
            await asyncio.wait([handle.task])
            assert told.empty()

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("words", "kind", "why"),
    [
        (http(b"404 page not found\n", "404 Not Found"), ProblemKind.REFUSED, "/v3"),
        (http(b"<html>\n"), ProblemKind.REFUSED, "<html>"),
        (http(b""), ProblemKind.UNREACHABLE, "it ended the watch"),
        (None, ProblemKind.UNREACHABLE, "without an answer"),
        (b"", ProblemKind.UNREACHABLE, "no watch within"),
    ],
)
def test_a_watch_at_a_server_that_is_no_etcd(
    words: bytes | None, kind: ProblemKind, why: str
) -> None:
    async def talk() -> None:
        async with saying(words) as port, client_of(port, call_s=SHORT_S) as client:
            ended = await Watched(client, b"a").problem()
            assert ended.kind is kind
            assert why in ended.why

    asyncio.run(talk())
