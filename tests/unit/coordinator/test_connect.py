from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from holdfast.coordinator import connect
from holdfast.coordinator.connect import CoordinatorConnector
from holdfast.coordinator.connections import ClientConnection, ConnectFailed
from holdfast.net import async_addresses
from holdfast.net.addresses import Address
from holdfast.wire.handshake import refusal
from in_loop import in_loop
from other_users import STRANGER, hide_owners, listening_as
from serving import serving, soon

LOCAL = "127.0.0.1"


def connector_at(port: int, **options: Any) -> CoordinatorConnector:
    return CoordinatorConnector(LOCAL, port, run_id="job", **options)


@pytest.mark.parametrize(
    ("answer", "token", "permanent"),
    [
        (b"", None, False),
        (b"HTTP/1.1 400 Bad Request\r\n", None, True),
        (b"\x00\x00\x00\x01\xc1", None, False),
        (refusal("go away"), None, True),
        (refusal("go away"), b"the token", False),  # The server has not authenticated itself.
        (refusal("full", permanent=False), None, False),
        (b"\x00\x00", None, False),
    ],
)
@in_loop
async def test_connect_failures_are_marked_permanent_or_not(
    answer: bytes, token: bytes | None, permanent: bool
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4)
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, LOCAL, 0) as server:
        with pytest.raises(ConnectFailed) as caught:
            await connector_at(server.sockets[0].getsockname()[1], token=token).connect()
    assert caught.value.why
    assert caught.value.permanent is permanent


@in_loop
async def test_connect_to_a_silent_server_times_out_and_names_the_likely_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server((LOCAL, 0)) as silent:
        connector = connector_at(silent.getsockname()[1])
        monkeypatch.setattr(connect, "MUTE_S", 0.01)
        task = asyncio.create_task(connector.connect())
        await soon(lambda: connector.suspicion == connect.MUTE)
        task.cancel()
        await asyncio.wait([task])
        assert connector.suspicion == ""
        monkeypatch.setattr(connect, "HANDSHAKE_S", 0.02)
        with pytest.raises(ConnectFailed) as caught:
            await connector.connect()
        assert (caught.value.why, caught.value.permanent) == (connect.MUTE, False)


@in_loop
async def test_connection_ready_at_the_timeout_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class GivenUp(ClientConnection):
        """A connection that is cancelled after the handshake and before the caller receives it."""

        def buffer_updated(self, nbytes: int) -> None:
            super().buffer_updated(nbytes)
            if self.is_open:
                tasks[0].cancel()

    tasks: list[asyncio.Task[ClientConnection]] = []
    monkeypatch.setattr(connect, "ClientConnection", GivenUp)
    async with serving() as served:
        tasks.append(asyncio.create_task(served.connector().connect()))
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        await soon(lambda: served.server.connections == 0)


@in_loop
async def test_refused_connect_may_start_a_listener_and_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a listener was started, the connector retries immediately."""
    monkeypatch.setattr(connect, "HANDSHAKE_S", 0.02)
    with socket.socket() as bound:
        bound.bind((LOCAL, 0))  # Bound, but not listening.
        port = bound.getsockname()[1]
        with pytest.raises(ConnectFailed, match="refused") as caught:
            await connector_at(port).connect()
        assert not caught.value.permanent
        asked: list[list[Address]] = []

        def on_refused(found: list[Address]) -> bool:
            asked.append(found)
            bound.listen()
            return True

        with pytest.raises(ConnectFailed, match=connect.MUTE):
            await connector_at(port, on_refused=on_refused).connect()
        assert asked == [[Address(socket.AF_INET, (LOCAL, port))]]


@in_loop
async def test_connect_tries_each_resolved_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def unknown(_host: str, _port: int) -> list[Address]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(async_addresses, "resolve_async", unknown)
    with pytest.raises(ConnectFailed, match=r"nowhere.*name or service not known"):
        await CoordinatorConnector("nowhere", 1, run_id="job").connect()
    with socket.socket() as bound, socket.create_server((LOCAL, 0)) as silent:
        bound.bind((LOCAL, 0))
        found = [Address(socket.AF_INET, one.getsockname()) for one in (bound, silent)]

        async def resolve(_host: str, _port: int) -> list[Address]:
            return found

        monkeypatch.setattr(async_addresses, "resolve_async", resolve)
        monkeypatch.setattr(connect, "HANDSHAKE_S", 0.02)
        with pytest.raises(ConnectFailed, match=connect.MUTE):
            await CoordinatorConnector("both", 1, run_id="job").connect()


@in_loop
async def test_listener_of_an_unreported_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_owners(monkeypatch)
    async with serving() as served:
        with pytest.raises(ConnectFailed, match="HOLDFAST_TOKEN") as caught:
            await served.connector(own_users_only=True).connect()
        assert caught.value.permanent


@in_loop
async def test_listener_of_another_user_is_refused() -> None:
    with listening_as(STRANGER) as port:
        with pytest.raises(ConnectFailed, match=str(STRANGER)) as caught:
            await connector_at(port, own_users_only=True).connect()
        assert caught.value.permanent
    async with serving() as served:
        (await served.connector(own_users_only=True).connect()).abort()
