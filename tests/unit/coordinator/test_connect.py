from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest
from serving import run, serving, soon

from holdfast.coordinator import connect
from holdfast.coordinator.connect import ClientConnection, ConnectFailed, CoordinatorConnector
from holdfast.net import addresses
from holdfast.net.addresses import Address
from holdfast.wire.handshake import refusal

if TYPE_CHECKING:
    from collections.abc import Callable

LOCAL = "127.0.0.1"


async def problem_with(answer: Callable[[asyncio.StreamWriter], None]) -> ConnectFailed:
    """Return why no link comes about with a server that does this to every client."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4)
        answer(writer)
        writer.close()

    server = await asyncio.start_server(serve, LOCAL, 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectFailed) as caught:
            await CoordinatorConnector(LOCAL, port).connect()
        return caught.value


@pytest.mark.parametrize(
    ("answer", "said", "permanent"),
    [
        (b"", "closed the connection without an answer", False),
        (b"HTTP/1.1 400 Bad Request\r\n", "an HTTP server is at this endpoint", True),
        (b"\x00\x00\x00\x01\xc1", "something else than messages", False),
        (refusal("go away"), "the coordinator refused: go away", True),
        (refusal("full", permanent=False), "the coordinator refused: full", False),
        (b"\x00\x00", "closed during the handshake", False),
    ],
)
def test_every_failure_says_why_and_whether_it_is_for_good(
    answer: bytes, said: str, permanent: bool
) -> None:
    problem = asyncio.run(problem_with(lambda writer: writer.write(answer)))
    assert said in problem.why
    assert problem.permanent is permanent


def test_a_server_that_says_nothing_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connect, "HANDSHAKE_S", 0.02)
    with socket.create_server((LOCAL, 0)) as silent:
        dialer = silent.getsockname()[1]

        async def dial() -> ClientConnection:
            return await CoordinatorConnector(LOCAL, dialer).connect()

        with pytest.raises(ConnectFailed, match="takes the connection but does not answer"):
            asyncio.run(dial())


def test_while_a_server_says_nothing_the_likely_reason_can_be_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by an agent that gives up before the handshake's time is over."""
    monkeypatch.setattr(connect, "MUTE_S", 0.01)

    async def work() -> None:
        with socket.create_server((LOCAL, 0)) as silent:
            dialer = CoordinatorConnector(LOCAL, silent.getsockname()[1])
            task = asyncio.create_task(dialer.connect())
            await soon(lambda: dialer.suspicion == connect.MUTE)
            task.cancel()
            await asyncio.wait([task])
            assert dialer.suspicion == ""

    run(work())


def test_a_link_that_opens_just_when_it_is_given_up_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class GivenUp(ClientConnection):
        """A link whose dialing is cancelled after its last word and before it is handed over."""

        def buffer_updated(self, nbytes: int) -> None:
            super().buffer_updated(nbytes)
            if self.is_open:
                dialing_tasks[0].cancel()

    dialing_tasks: list[asyncio.Task[ClientConnection]] = []
    monkeypatch.setattr(connect, "ClientConnection", GivenUp)

    async def work() -> None:
        async with serving() as served:
            dialing_tasks.append(asyncio.create_task(served.dialer.connect()))
            with pytest.raises(asyncio.CancelledError):
                await dialing_tasks[0]
            await soon(lambda: served.server.connections == 0)

    run(work())


def test_nobody_there() -> None:
    with socket.socket() as bound:
        bound.bind((LOCAL, 0))  # And does not listen.

        async def dial() -> ClientConnection:
            return await CoordinatorConnector(LOCAL, bound.getsockname()[1]).connect()

        with pytest.raises(ConnectFailed, match=r"^connection refused$") as caught:
            asyncio.run(dial())
        assert not caught.value.permanent


def test_who_is_refused_may_make_somebody_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """If that is done, it is tried again at once."""
    monkeypatch.setattr(connect, "HANDSHAKE_S", 0.02)
    with socket.socket() as bound:
        bound.bind((LOCAL, 0))
        asked: list[list[Address]] = []

        def when_refused(found: list[Address]) -> bool:
            asked.append(found)
            bound.listen()
            return True

        async def dial() -> ClientConnection:
            return await CoordinatorConnector(
                LOCAL, bound.getsockname()[1], when_refused=when_refused
            ).connect()

        with pytest.raises(ConnectFailed, match="does not answer"):
            asyncio.run(dial())
        assert asked == [[Address(socket.AF_INET, bound.getsockname())]]


def test_a_name_that_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(_host: str, _port: int) -> list[Address]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(addresses, "resolve_async", unknown)

    async def dial() -> ClientConnection:
        return await CoordinatorConnector("nowhere", 1).connect()

    with pytest.raises(
        ConnectFailed, match="nowhere cannot be resolved: name or service not known"
    ):
        asyncio.run(dial())


def test_the_next_address_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a name that has an IPv6 address at which nobody listens."""
    with socket.socket() as bound, socket.create_server((LOCAL, 0)) as silent:
        bound.bind((LOCAL, 0))
        found = [Address(socket.AF_INET, one.getsockname()) for one in (bound, silent)]

        async def find(_host: str, _port: int) -> list[Address]:
            return found

        monkeypatch.setattr(addresses, "resolve_async", find)
        monkeypatch.setattr(connect, "HANDSHAKE_S", 0.02)

        async def dial() -> ClientConnection:
            return await CoordinatorConnector("both", 1).connect()

        with pytest.raises(ConnectFailed, match="does not answer"):
            asyncio.run(dial())
