"""Requests for the tests of the etcd client, and servers that stand in for etcd."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from holdfast.core.etcd.calls import Change, Get, Problem, Put, Txn, TxnDone
from holdfast.etcd.async_client import AsyncEtcdClient
from holdfast.etcd.etcd_settings import EtcdSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from holdfast.core.etcd.calls import Request
    from holdfast.etcd.async_client import WatchHandle

LOCAL = "127.0.0.1"
SHORT_S = 0.3  # For calls that are expected to time out.


def put(key: bytes, value: bytes = b"", lease: int = 0) -> Txn:
    return Txn(success=(Put(key, value, lease),))


def get(key: bytes) -> Txn:
    return Txn(success=(Get(key),))


@contextlib.asynccontextmanager
async def client_of(*ports: int, **settings: Any) -> AsyncIterator[AsyncEtcdClient]:
    """Use a client; afterwards none of its tasks may remain in the loop."""
    client = AsyncEtcdClient(
        EtcdSettings(endpoints=tuple((LOCAL, one) for one in ports), **settings)
    )
    try:
        yield client
    finally:
        await client.close()
        assert not client._open
        assert not [one for one in asyncio.all_tasks() if AsyncEtcdClient.__name__ in repr(one)]


async def done(client: AsyncEtcdClient, request: Request) -> TxnDone:
    answer = await client.call(request)
    assert isinstance(answer, TxnDone), answer
    return answer


async def problem(
    client: AsyncEtcdClient, request: Request, limit_s: float | None = None
) -> Problem:
    answer = await client.call(request, limit_s=limit_s)
    assert isinstance(answer, Problem), answer
    return answer


class Watched:
    """A watch that keeps its changes in order of arrival."""

    def __init__(
        self, client: AsyncEtcdClient, key: bytes, end: bytes = b"", start: int = 1
    ) -> None:
        self._changes: asyncio.Queue[tuple[Change, ...] | Problem] = asyncio.Queue()
        self.revisions: list[int] = []
        self.handle: WatchHandle = client.watch(
            key, end, start, self._changed, self._changes.put_nowait
        )

    def _changed(self, revision: int, changes: tuple[Change, ...]) -> None:
        self.revisions.append(revision)
        self._changes.put_nowait(changes)

    async def changes(self) -> tuple[Change, ...]:
        change = await self._changes.get()
        assert not isinstance(change, Problem), change
        return change

    async def problem(self) -> Problem:
        """Wait until the watch ends; check that the end is reported once, and return the problem."""
        while not isinstance(change := await self._changes.get(), Problem):
            pass
        assert self.handle.task is not None
        await self.handle.task
        assert self._changes.empty()
        return change

    @property
    def is_silent(self) -> bool:
        return self._changes.empty()


@contextlib.asynccontextmanager
async def server(
    answer: Callable[[bytes], Awaitable[bytes | None]], *, once: bool = False
) -> AsyncIterator[int]:
    """Listen; pass each connection's bytes to `answer`, until it returns None."""
    handlers: set[asyncio.Task[Any]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            while data := await reader.read(65536):
                response = await answer(data)
                if response is None:
                    break
                writer.write(response)
                if once:
                    break
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            handlers.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    listening = await asyncio.start_server(handle, LOCAL, 0)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()
        for task in tuple(handlers):
            task.cancel()
        await asyncio.gather(*handlers)


@contextlib.asynccontextmanager
async def responding(response: bytes | None, *, once: bool = False) -> AsyncIterator[int]:
    """Listen, and respond to everything with the same bytes, or by closing the connection."""

    async def answer(_: bytes) -> bytes | None:
        return response

    async with server(answer, once=once) as port:
        yield port


def http(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)
