from __future__ import annotations

import asyncio
import socket
import struct
from typing import TYPE_CHECKING

from serving import Talk, run, serving, soon, status

from certificates import make_ca, make_certificate
from holdfast.coordinator import server
from holdfast.coordinator import server_connection as module
from holdfast.coordinator.connect import CoordinatorConnector
from holdfast.core.protocol import View
from holdfast.net.tls import TlsFiles
from holdfast.wire.frames import FrameReader, encode_frame
from holdfast.wire.handshake import ClientHandshake
from holdfast.wire.messages import Goodbye, StatusRequest, StoreCall, StoreResult, Welcome, decode

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_what_is_told_at_one_moment_goes_out_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with serving() as served:
            talk = await served.link()
            (peer,) = served.server._peers
            written: list[bytes] = []
            assert peer._transport is not None
            monkeypatch.setattr(peer._transport, "write", written.append)
            both = encode_frame(status("a")) + encode_frame(
                StoreCall(id=1, run_id="job", op="num_keys")
            )
            talk.link.send_bytes(both)
            await soon(lambda: bool(written))
            assert len(written) == 1

    run(work())


def test_a_bug_costs_one_connection() -> None:
    async def work() -> None:
        async with serving() as served:

            def broken(*_: object) -> None:
                raise ZeroDivisionError

            whole = served.server.hosting.handle
            served.server.hosting.handle = broken  # type: ignore[assignment]
            talk = await served.link()
            talk.say(status("a"))
            assert isinstance(await talk.hear(), str)
            served.server.hosting.handle = whole  # type: ignore[method-assign]
            assert "a bug of the coordinator's: ZeroDivisionError()" in served.complaints[0]
            other = await served.link()
            other.say(status("a"))
            assert isinstance(await other.hear(), View)

    run(work())


def test_what_only_a_server_says_is_a_fault() -> None:
    async def work() -> None:
        async with serving() as served:
            talk = await served.link()
            talk.say(Welcome(version=1))
            assert isinstance(await talk.hear(), str)
            assert "a Welcome is nothing to say" in served.complaints[0]

    run(work())


def test_the_last_word_of_a_handshake_may_come_with_the_first_messages() -> None:
    async def work() -> None:
        async with serving() as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            handshake, frames = ClientHandshake(None), FrameReader()
            writer.write(handshake.start())
            (challenge,) = frames.feed(await reader.read(4096))
            large = encode_frame(status("a", report=b"r" * 5000))  # Too large for a handshake.
            writer.write(handshake.receive(decode(challenge)) + large)
            bodies: list[bytes] = []
            while len(bodies) < 2:
                bodies += frames.feed(await reader.read(4096))
            welcome, view = map(decode, bodies)
            assert isinstance(welcome, Welcome)
            assert isinstance(view, View)
            writer.close()
            await writer.wait_closed()

    run(work())


def test_a_frame_too_large_for_a_handshake_is_not_waited_for() -> None:
    async def work() -> None:
        async with serving() as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write((4096).to_bytes(4, "big") + b"x" * 10)
            await writer.drain()
            await soon(lambda: served.server.connections == 1)
            writer.write(b"x" * 4086 + (4097).to_bytes(4, "big"))
            assert await reader.read() == b""
            assert "no message of the handshake" in served.complaints[0]
            writer.close()

    run(work())


def test_who_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_BYTES_MAX", 1000)

    async def work() -> None:
        async with serving() as served:
            talk = await served.link()
            other = await served.link()
            assert talk.link._transport is not None
            talk.link._transport.pause_reading()
            (peer, *_) = [one for one in served.server._peers if one.is_open]
            # More than the kernel takes for a reader that is not there.
            peer.post(b"x" * 50_000_000)
            await soon(lambda: served.server.connections == 1)
            assert "does not read what it is sent" in served.complaints[0]
            assert served.server.connections == 1
            talk.link.abort()
            other.link.abort()

    run(work())


def test_what_is_posted_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_BYTES_MAX", 1000)

    async def work() -> None:
        async with serving() as served:
            talk = await served.link()
            (peer,) = served.server._peers
            for number in range(3):  # More than the limit, but the system takes it.
                peer.post(encode_frame(StoreResult(id=number, ok=True, value=b"v" * 600)))
            assert [(await talk.hear()).id for _ in range(3)] == [0, 1, 2]
            frames = 0
            while not peer.closed and frames < 100:  # Nobody reads meanwhile.
                peer.post(b"x" * 1_000_000)
                frames += 1
            assert frames < 100
            assert "does not read what it is sent" in served.complaints[0]
            talk.link.abort()

    run(work())


def test_who_goes_in_the_middle_of_tls_is_forgotten(tmp_path: Path) -> None:
    ca = make_ca(tmp_path)
    head = make_certificate(ca, "head")
    files = TlsFiles(cert=head.cert, key=head.key)

    async def work() -> None:
        async with serving(tls=files.for_server()) as served:
            client = served.silent()
            await soon(lambda: served.server.connections == 1)
            reset = struct.pack("ii", 1, 0)  # Without a last word.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            client.close()
            await soon(lambda: served.server.connections == 0)
            assert len(served.complaints) == 1
            trusting = TlsFiles(ca=ca.cert).for_client()
            dialer = CoordinatorConnector(
                "127.0.0.1", served.port, tls=trusting, server_name="localhost"
            )
            talk = Talk(await dialer.connect())
            for number in range(3):
                talk.say(StatusRequest(id=number))
                assert (await talk.hear()).id == number

    run(work())


def test_a_server_that_stops_does_not_wait_for_tls(tmp_path: Path) -> None:
    head = make_certificate(make_ca(tmp_path), "head")
    files = TlsFiles(cert=head.cert, key=head.key)

    async def work() -> None:
        async with serving(tls=files.for_server()) as served:
            with served.silent():
                await soon(lambda: served.server.connections == 1)
                (peer,) = served.server._peers
                # From then on asyncio tells its own part of TLS what happens, and not the peer.
                await soon(lambda: peer._raw.get_protocol() is not peer)  # type: ignore[union-attr]
                await served.server.stop()
                assert served.server.connections == 0

    run(work())


def test_who_does_not_take_the_last_words_is_dropped_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "SWEEP_S", 0.01)
    monkeypatch.setattr(module, "WRITE_BYTES_MAX", 100_000_000)

    async def work() -> None:
        async with serving() as served:
            talk = await served.link()
            assert talk.link._transport is not None
            talk.link._transport.pause_reading()
            (peer,) = served.server._peers
            peer.post(b"x" * 50_000_000)
            peer.close()
            assert not peer.is_open
            monkeypatch.setattr(server, "IDLE_S", 0.05)
            await soon(lambda: served.server.connections == 0)
            talk.link.abort()

    run(work())


def test_whoever_says_goodbye_is_closed_without_a_word() -> None:
    async def work() -> None:
        async with serving() as served:
            talk = Talk(await served.dialer.connect())
            talk.say(Goodbye(why="done"))
            assert isinstance(await talk.hear(), str)
            assert served.complaints == []

    run(work())
