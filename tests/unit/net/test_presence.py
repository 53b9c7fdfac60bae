"""A process's presence, over real sockets: who sees what, and what strangers can do."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.net import presence
from holdfast.net.presence import PresencePort, PresenceWatcher, Sight
from in_loop import in_loop
from real_jobs import PATIENCE_S

if TYPE_CHECKING:
    import pytest

HERE = "127.0.0.1"
RACES, RACE_S = 300, 0.0006  # More than a connection takes.
LOOPBACK = [(socket.AF_INET, (HERE, 0))]


class Watcher:
    """Watches one presence and notes what it sees."""

    def __init__(self, port: int, wanted: str) -> None:
        self._seen: asyncio.Queue[Sight] = asyncio.Queue()
        self.task = asyncio.create_task(
            PresenceWatcher().watch(HERE, port, wanted, self._seen.put_nowait)
        )

    async def next(self) -> Sight:
        return await asyncio.wait_for(self._seen.get(), PATIENCE_S)


def shown() -> PresencePort:
    port = PresencePort(LOOPBACK)
    port.open()
    return port


@in_loop
async def test_a_process_is_seen_until_it_is_gone_and_then_refuses() -> None:
    port = shown()
    number = port.port
    watcher = Watcher(number, port.id)
    assert await watcher.next() is Sight.SEEN
    port.close()
    assert await watcher.next() is Sight.CLOSED
    assert await Watcher(number, port.id).next() is Sight.REFUSED


@in_loop
async def test_who_else_is_there_is_nobody() -> None:
    port = shown()
    try:
        other = port.id[::-1]
        assert await Watcher(port.port, other).next() is Sight.UNKNOWN
        with listening() as silent:
            watcher = Watcher(silent.getsockname()[1], port.id)
            accepted, _ = await asyncio.to_thread(silent.accept)
            with accepted:
                accepted.sendall(port.id.encode()[:5])
            assert await watcher.next() is Sight.CLOSED
    finally:
        port.close()


@in_loop
async def test_nobody_there_for_want_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue is full, so that the kernel answers to nothing."""
    monkeypatch.setattr(presence, "CONNECT_S", 0.2)
    with listening(backlog=0) as full:
        where = full.getsockname()
        with socket.create_connection(where), socket.socket() as second:
            second.settimeout(0)
            second.connect_ex(where)
            assert await Watcher(where[1], "0" * 32).next() is Sight.UNKNOWN


@in_loop
async def test_a_port_that_closes_while_others_connect_is_closed_or_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the keeper of a killed agent ends: that must not count as no answer."""
    monkeypatch.setattr(presence, "CONNECT_S", PATIENCE_S)
    for turn in range(RACES):
        listener = listening()
        number = listener.getsockname()[1]
        delay_s = RACE_S * turn / RACES
        closing = asyncio.create_task(asyncio.to_thread(close_after, listener, delay_s))
        seen = await Watcher(number, "0" * 32).next()
        await closing
        assert seen in (Sight.CLOSED, Sight.REFUSED)


def close_after(listener: socket.socket, delay_s: float) -> None:
    time.sleep(delay_s)
    listener.close()


@in_loop
async def test_strangers_learn_nothing_and_take_up_few_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(presence, "CONNECTIONS_MAX", 2)
    port = shown()
    try:
        reader, writer = await asyncio.open_connection(HERE, port.port)
        assert await reader.readline() == port.id.encode() + b"\n"
        watcher = Watcher(port.port, port.id)
        assert await watcher.next() is Sight.SEEN
        assert await Watcher(port.port, port.id).next() is Sight.CLOSED
        writer.write(b"GET / HTTP/1.1\r\n\r\n")  # Nobody is listened to.
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert await Watcher(port.port, port.id).next() is Sight.SEEN
        assert watcher.task.done() is False
    finally:
        port.close()


def listening(backlog: int = 8) -> socket.socket:
    """Return a socket of somebody else."""
    return socket.create_server((HERE, 0), backlog=backlog)
