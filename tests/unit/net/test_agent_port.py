"""An agent's port over real sockets: watchers see its presence, and control clients are passed on."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress

import pytest

from holdfast.net import agent_port, presence
from holdfast.net import listening as listening_sockets
from holdfast.net.agent_port import OFF, ON, AgentPort, ControlCredentials
from holdfast.net.presence import PRESENCE_REQUEST, PresenceObservation, PresenceWatcher
from in_loop import in_loop
from real_jobs import PATIENCE_S

HERE = "127.0.0.1"


def own_address() -> str:
    """Return the address from which this host reaches others; loopback if it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("203.0.113.66", 9))  # Sends nothing.
        return str(probe.getsockname()[0])
    return HERE


OWN_ADDRESS = own_address()
RACES, RACE_S = 300, 0.0006  # Longer than a connect takes.


class Watcher:
    """Watches one presence and records what it sees."""

    def __init__(self, port: int, wanted: str) -> None:
        self._seen: asyncio.Queue[PresenceObservation] = asyncio.Queue()
        self.task = asyncio.create_task(
            PresenceWatcher().watch(HERE, port, wanted, self._seen.put_nowait)
        )

    async def next(self) -> PresenceObservation:
        return await asyncio.wait_for(self._seen.get(), PATIENCE_S)


def opened(*, control: str = OFF, shows_presence: bool = True) -> AgentPort:
    port = AgentPort(
        HERE, ControlCredentials(run_id="job"), control=control, shows_presence=shows_presence
    )
    port.open()
    return port


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("127.0.0.1", "127.0.0.1"),
        (OWN_ADDRESS, OWN_ADDRESS),
        ("203.0.113.66", "::"),  # An address of another host, as behind NAT.
        ("node0", "::"),
        ("", "::"),
    ],
)
def test_port_listens_only_at_the_named_address_of_this_host(named: str, expected: str) -> None:
    port = AgentPort(named, ControlCredentials(run_id="job"))
    try:
        with socket.socket(fileno=os.dup(port.fileno())) as listener:
            assert listener.getsockname()[0] == expected
    finally:
        port.close()


@in_loop
async def test_presence_is_seen_until_the_port_closes_and_then_refused() -> None:
    port = opened()
    number = port.number
    watcher = Watcher(number, port.presence_id)
    assert await watcher.next() is PresenceObservation.SEEN
    port.close()
    assert await watcher.next() is PresenceObservation.CLOSED
    assert await Watcher(number, port.presence_id).next() is PresenceObservation.REFUSED


@in_loop
async def test_another_process_at_the_port_is_unknown() -> None:
    port = opened()
    try:
        other = port.presence_id[::-1]
        assert await Watcher(port.number, other).next() is PresenceObservation.UNKNOWN
        with listening() as silent:
            watcher = Watcher(silent.getsockname()[1], port.presence_id)
            accepted, _ = await asyncio.to_thread(silent.accept)
            with accepted:
                accepted.sendall(port.presence_id.encode()[:5])
            assert await watcher.next() is PresenceObservation.CLOSED
    finally:
        port.close()


@in_loop
async def test_unresponsive_host_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue is full, so the kernel does not respond."""
    monkeypatch.setattr(presence, "CONNECT_S", 0.2)
    with listening(backlog=0) as full:
        where = full.getsockname()
        with socket.create_connection(where), socket.socket() as second:
            second.settimeout(0)
            second.connect_ex(where)
            assert await Watcher(where[1], "0" * 32).next() is PresenceObservation.UNKNOWN


@in_loop
async def test_port_that_closes_during_a_connect_is_closed_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The keeper of a killed agent may exit just then; this must not be reported as unknown."""
    monkeypatch.setattr(presence, "CONNECT_S", PATIENCE_S)
    for turn in range(RACES):
        listener = listening()
        number = listener.getsockname()[1]
        delay_s = RACE_S * turn / RACES
        closing = asyncio.create_task(asyncio.to_thread(close_after, listener, delay_s))
        seen = await Watcher(number, "0" * 32).next()
        await closing
        assert seen in (PresenceObservation.CLOSED, PresenceObservation.REFUSED)


def close_after(listener: socket.socket, delay_s: float) -> None:
    time.sleep(delay_s)
    listener.close()


@in_loop
async def test_watchers_are_limited_and_may_not_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_port, "WATCHERS_MAX", 2)
    port = opened()
    try:
        reader, writer = await asyncio.open_connection(HERE, port.number)
        writer.write(PRESENCE_REQUEST)
        assert await reader.readline() == port.presence_id.encode() + b"\n"
        watcher = Watcher(port.number, port.presence_id)
        assert await watcher.next() is PresenceObservation.SEEN
        assert await Watcher(port.number, port.presence_id).next() is PresenceObservation.CLOSED
        writer.write(b"more")
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert await Watcher(port.number, port.presence_id).next() is PresenceObservation.SEEN
        assert watcher.task.done() is False
    finally:
        port.close()


@in_loop
async def test_watchers_from_one_address_leave_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_port, "WATCHERS_MAX", 4)
    port = opened()
    flood = []
    try:
        for _ in range(6):
            reader, writer = await asyncio.open_connection(
                HERE, port.number, local_addr=("127.0.0.2", 0)
            )
            flood.append(writer)
            writer.write(PRESENCE_REQUEST)
            with suppress(ConnectionResetError):
                await reader.readline()
        watcher = Watcher(port.number, port.presence_id)
        assert await watcher.next() is PresenceObservation.SEEN
        assert watcher.task.done() is False
    finally:
        port.close()
        for writer in flood:
            writer.close()


def listening(backlog: int = 8) -> socket.socket:
    """Return the listening socket of another process."""
    return socket.create_server((HERE, 0), backlog=backlog)


async def adopted(port: AgentPort, first: bytes) -> bytes:
    """Connect, send the first bytes, and return what the control side reads."""
    clients: asyncio.Queue[socket.socket] = asyncio.Queue()
    _, writer = await asyncio.open_connection(HERE, port.number)
    writer.write(first)
    await writer.drain()
    port.serve(lambda connection, _: clients.put_nowait(connection))
    with await asyncio.wait_for(clients.get(), PATIENCE_S) as connection:
        received: bytes = await asyncio.get_running_loop().sock_recv(connection, 100)
    writer.close()
    return received


@in_loop
async def test_control_client_is_passed_on_with_its_first_bytes_even_before_serve() -> None:
    port = opened(control=ON)
    try:
        assert await adopted(port, b"a hello of a client") == b"a hello of a client"
    finally:
        port.close()


@in_loop
async def test_disabled_services_are_not_served() -> None:
    port = opened(control=OFF)
    try:
        reader, writer = await asyncio.open_connection(HERE, port.number)
        writer.write(b"a hello of a client")
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        writer.close()
    finally:
        port.close()
    port = opened(control=ON, shows_presence=False)
    try:
        assert await Watcher(port.number, "0" * 32).next() is PresenceObservation.CLOSED
    finally:
        port.close()


@in_loop
async def test_silent_connections_do_not_keep_a_watcher_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_port, "UNDECIDED_MAX", 2)
    monkeypatch.setattr(listening_sockets, "defer_accept", lambda *_: None)
    port = opened()
    silent = [await asyncio.open_connection(HERE, port.number) for _ in range(8)]
    try:
        assert await Watcher(port.number, port.presence_id).next() is PresenceObservation.SEEN
        assert len(port._undecided.since) <= 2
    finally:
        port.close()
        for _, writer in silent:
            writer.close()


@in_loop
async def test_unserved_control_client_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_port, "SERVE_S", 0.0)
    port = opened(control=ON, shows_presence=False)
    try:
        reader, writer = await asyncio.open_connection(HERE, port.number)
        writer.write(b"as many bytes as a request for presence has")
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()
    finally:
        port.close()
