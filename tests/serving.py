"""A server in the test's own loop, and connections to it for use step by step."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from holdfast.coordinator.connect import CoordinatorConnector
from holdfast.coordinator.server import CoordinatorServer
from holdfast.core.job_settings import JobSettings
from holdfast.core.protocol import NodeInfo, Status
from holdfast.net.listening import try_bind
from holdfast.wire import messages
from holdfast.wire.messages import JobSummary, Reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from holdfast.coordinator.connections import ClientConnection
    from holdfast.wire.messages import Message

LIMIT_S = 20.0


def jobs_in(reply: object) -> list[JobSummary]:
    """Return the jobs in the reply to a status query."""
    assert isinstance(reply, Reply)
    return messages.unpack(messages.JobSummaries, reply.body).jobs


class Served:
    """A server on loopback, with its warnings and the changes of jobs that it reported."""

    def __init__(self, port: int = 0, **options: Any) -> None:
        listener = try_bind("127.0.0.1", port, is_host=True)
        assert listener is not None
        self.port: int = listener.getsockname()[1]
        self.warnings: list[str] = []
        self.changes: list[tuple[str, str]] = []
        self.server = CoordinatorServer(
            listener,
            **{"silence_s": 5.0, "grace_s": 0.02} | options,
            warn=self.warnings.append,
            on_change=lambda *change: self.changes.append(change),
        )
        self._token = options.get("token")

    def connector(self, run_id: str = "job", **options: Any) -> CoordinatorConnector:
        given: dict[str, Any] = {"token": self._token} | options
        return CoordinatorConnector("127.0.0.1", self.port, run_id=run_id, **given)

    async def client(self, run_id: str = "job", **options: Any) -> Client:
        return Client(await self.connector(run_id, **options).connect())

    def stranger(self, source: str = "127.0.0.1") -> socket.socket:
        """Return a connection that has sent one byte; the server does not notice a silent one."""
        connected = socket.create_connection(
            ("127.0.0.1", self.port), LIMIT_S, source_address=(source, 0)
        )
        connected.sendall(b"\0")
        return connected


class Client:
    """A connection whose messages are awaited one by one; its end is a text."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.received: asyncio.Queue[Message | str] = asyncio.Queue()
        connection.on_message = self.received.put_nowait
        connection.on_closed = self.received.put_nowait

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.connection.send(message)

    async def next(self) -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await self.received.get()

    async def until(self, wanted: Callable[[Any], bool]) -> Any:
        while not wanted(message := await self.next()):
            pass
        return message

    def stop_reading(self, peer: asyncio.Transport | None = None) -> None:
        """Receive nothing more; given the server's side, also keep the kernel's buffers between the two small."""
        transport = self.connection._transport
        assert transport is not None
        transport.pause_reading()
        if peer is not None:
            receiver, sender = (one.get_extra_info("socket") for one in (transport, peer))
            receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)


def status(node: str, *, nodes: int = 1, seq: int = 1, **changes: Any) -> Status:
    given: dict[str, Any] = {
        "run_id": "job",
        "info": NodeInfo(node=node, incarnation=sum(node.encode())),
        "settings": JobSettings(min_nodes=nodes, max_nodes=nodes),
    }
    return Status(seq=seq, **(given | changes))


@asynccontextmanager
async def flood(served: Served, connections: int, addresses: int = 1) -> AsyncIterator[None]:
    """Keep this many connections open from other addresses, each of which sends only one byte."""
    opened = 0

    async def keep_up(number: int) -> None:
        nonlocal opened
        source = f"127.0.0.{2 + number % addresses}"
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", served.port, local_addr=(source, 0)
                )
                opened += 1
                try:
                    writer.write(b"\0")
                    await reader.read()
                finally:
                    writer.close()

    strangers = [asyncio.create_task(keep_up(one)) for one in range(connections)]
    try:
        await soon(lambda: opened >= connections)
        yield
    finally:
        for stranger in strangers:
            stranger.cancel()
        await asyncio.wait(strangers)


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
        while not condition():  # noqa: ASYNC110 (no event reports the condition)
            await asyncio.sleep(0.001)
