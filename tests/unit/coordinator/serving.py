"""A server in the test's own loop, and links to it that are talked over step by step."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from holdfast.coordinator.connect import ClientConnection, CoordinatorConnector
from holdfast.coordinator.server import CoordinatorServer
from holdfast.core.protocol import JobSettings, NodeInfo, Status
from holdfast.net.listening import try_bind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from holdfast.wire.messages import Message

LIMIT_S = 20.0


class Served:
    """A server on loopback, what it complained of, and what it told of jobs."""

    def __init__(self, **options: Any) -> None:
        listener = try_bind("127.0.0.1", 0, is_host=True)
        assert listener is not None
        self.port: int = listener.getsockname()[1]
        self.complaints: list[str] = []
        self.changes: list[tuple[str, str]] = []
        self.server = CoordinatorServer(
            listener,
            **{"silence_s": 5.0, "grace_s": 0.02} | options,
            warn=self.complaints.append,
            on_change=lambda *change: self.changes.append(change),
        )
        self.dialer = CoordinatorConnector("127.0.0.1", self.port)

    async def link(self) -> Talk:
        return Talk(await self.dialer.connect())

    def silent(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port))


class Talk:
    """A link whose messages are waited for one by one."""

    def __init__(self, link: ClientConnection) -> None:
        self.link = link
        self.said: asyncio.Queue[Message | str] = asyncio.Queue()
        link.on_message = self.said.put_nowait
        link.on_closed = self.said.put_nowait

    def say(self, message: Message) -> None:
        self.link.send(message)

    async def hear(self) -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await self.said.get()


def status(node: str, *, nodes: int = 1, seq: int = 1, **changes: Any) -> Status:
    given: dict[str, Any] = {
        "run_id": "job",
        "info": NodeInfo(node=node, incarnation=sum(node.encode())),
        "settings": JobSettings(min_nodes=nodes, max_nodes=nodes),
    }
    return Status(seq=seq, **(given | changes))


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Served]:
    served = Served(**options)
    try:
        yield served
    finally:
        await served.server.stop()
        assert served.server.connections == 0


async def soon(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 (nothing tells of what is waited for)
            await asyncio.sleep(0.001)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)
