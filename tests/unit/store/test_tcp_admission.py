"""Whom a workers' store serves: other hosts, which are addresses of this one's loopback here.

Real hosts and real users are in tests/integration/test_store_access.py.
"""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from scripted_tcp_store import blob

from holdfast import console
from holdfast.store.tcp import attestation
from holdfast.store.tcp import host_admission as admission
from holdfast.store.tcp import store_server as loop_module
from holdfast.store.tcp.attestation import HostAttestation
from holdfast.store.tcp.embedded import Access, TcpStoreServer
from holdfast.wire.errors import ProofRefused
from holdfast.wire.store_proof import AgentProof

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY = bytes(range(32))
GENERATION = 5
US, B, C = "127.0.0.1", "127.0.0.2", "127.0.0.3"
PATIENCE_S = 30
HELLO = bytes.fromhex("00 ce f7 85 3c")
PING, PONG = b"\x0dping", b"ping"
Said = list[str]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    """What the store and agents warn of."""
    lines: Said = []
    monkeypatch.setattr(console, "warning", lines.append)
    return lines


@pytest.fixture(autouse=True)
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections from other addresses than 127.0.0.1 are those of other hosts."""

    def user_of(peer: socket.socket) -> int | None:
        return 0 if peer.getpeername()[0].removeprefix("::ffff:") == US else None

    monkeypatch.setattr(loop_module, "user_of", user_of)


@pytest.fixture
def serve() -> Iterator[Callable[..., TcpStoreServer]]:
    """A maker of stores, which listen on all addresses: IPv4 comes in as IPv6."""
    with ExitStack() as ends:

        def make(mode: str, key: bytes = KEY) -> TcpStoreServer:
            bound = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
            server = TcpStoreServer(bound, None, Access(mode, key, GENERATION))
            ends.enter_context(server)
            server.start()
            return server

        yield make


def connect(server: TcpStoreServer, host: str) -> socket.socket:
    return socket.create_connection((US, server.port), PATIENCE_S, source_address=(host, 0))


def is_served(client: socket.socket) -> bool:
    """Whether the store answers, rather than closing the connection. Waits for either."""
    try:
        client.sendall(HELLO + PING)
        return client.recv(4) == PONG
    except (ConnectionResetError, BrokenPipeError):
        return False


def prove(
    server: TcpStoreServer, host: str, key: bytes = KEY, generation: int = GENERATION
) -> bool:
    """Attest a host as its agent does; return whether the store accepted that."""
    proof = AgentProof(key, generation)
    with connect(server, host) as agent:
        agent.sendall(proof.start())
        try:
            while not proof.done and (data := agent.recv(256)):
                agent.sendall(proof.receive(data))
        except ProofRefused:
            return False
    return proof.done


def is_cut_off(client: socket.socket, *pieces: bytes) -> bool:
    """Whether the store closes the connection while all this is sent to it."""
    try:
        for piece in pieces:
            client.sendall(piece)
        client.sendall(PING)
        return client.recv(4) != PONG
    except (ConnectionResetError, BrokenPipeError):
        return True


def values(prefix: str) -> list[bytes]:
    """Return requests that set a hundred keys to 64 KiB each."""
    names = (f"{prefix} {number}".encode() for number in range(100))
    return [b"\x01" + blob(name) + blob(bytes(64 << 10)) for name in names]


def test_a_worker_that_is_faster_than_its_agent_is_held_and_then_served(
    serve: Callable[..., TcpStoreServer], said: Said
) -> None:
    server = serve("hosts")
    with connect(server, B) as early, connect(server, C) as stranger:
        for one in (early, stranger):
            one.sendall(HELLO + PING)
        with connect(server, US) as own:
            assert is_served(own)
        assert prove(server, B)
        assert early.recv(4) == PONG
        with connect(server, B) as late:
            assert is_served(late)
        stranger.settimeout(0)
        with pytest.raises(BlockingIOError):
            stranger.recv(1)
    assert said == []


@pytest.mark.parametrize(
    ("key", "generation"), [(bytes(32), GENERATION), (KEY, GENERATION - 1), (b"", GENERATION)]
)
def test_a_word_that_is_not_of_this_generation_is_refused(
    serve: Callable[..., TcpStoreServer], key: bytes, generation: int
) -> None:
    server = serve("hosts")
    with connect(server, B) as held:
        held.sendall(HELLO + PING)
        assert not prove(server, B, key, generation)
        with connect(server, US) as own:
            assert is_served(own)
        held.settimeout(0)
        with pytest.raises(BlockingIOError):
            held.recv(1)


def test_host_without_attestation_in_time_is_refused_and_named_once(
    serve: Callable[..., TcpStoreServer], said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "HELD_S", 0.05)
    server = serve("hosts")
    for _ in range(3):
        with connect(server, B) as stranger:
            assert not is_served(stranger)
    (line,) = said
    assert B in line
    assert "store=open" in line


@pytest.mark.parametrize("mode", ["hosts", "private"])
def test_a_store_without_a_key_serves_its_own_host_alone_and_at_once(
    serve: Callable[..., TcpStoreServer], said: Said, mode: str
) -> None:
    server = serve(mode, b"")
    with connect(server, B) as other, connect(server, US) as own:
        assert not is_served(other)
        assert is_served(own)


def test_an_open_store_serves_everybody_and_takes_the_word_of_agents(
    serve: Callable[..., TcpStoreServer], said: Said
) -> None:
    server = serve("open")
    with connect(server, B) as early, connect(server, C) as stranger:
        assert is_served(early)
        assert is_served(stranger)
        assert prove(server, B)
        assert server._loop is not None
        clients = server._loop.connections.values()
        whose = {one.host_name: one.share.whose for one in clients if one.share is not None}
    assert whose == {B: B, C: "hosts outside of this job"}


def test_a_stranger_cannot_fill_an_open_store(
    serve: Callable[..., TcpStoreServer], said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (admission, loop_module):
        monkeypatch.setattr(module, "BYTES_MAX", 4 << 20)
    server = serve("open")
    with connect(server, US) as own:
        assert is_served(own)
        for host in (B, C):  # They have one share together.
            with connect(server, host) as stranger:
                assert is_served(stranger)
                assert is_cut_off(stranger, *values(host))
        assert server._loop is not None
        assert server._loop._space.bytes_held <= 1 << 20
        own.sendall(b"\x01" + blob(b"mine") + blob(bytes(2 << 20)) + PING)
        assert own.recv(4) == PONG
    assert "hosts outside of this job" in said[0]


def test_what_a_stranger_leaves_unfinished_counts_for_its_share(
    serve: Callable[..., TcpStoreServer], said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (admission, loop_module):
        monkeypatch.setattr(module, "BYTES_MAX", 4 << 20)
    server = serve("open")
    with connect(server, B) as stranger:
        assert is_served(stranger)
        begun = b"\x01" + blob(b"key") + (6 << 20).to_bytes(8, "little")
        assert is_cut_off(stranger, begun, *[bytes(64 << 10)] * 90)
    with connect(server, C) as other:
        assert is_served(other)


def test_attested_host_cannot_fill_the_store_alone(
    serve: Callable[..., TcpStoreServer], said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (admission, loop_module):
        monkeypatch.setattr(module, "BYTES_MAX", 4 << 20)
    server = serve("hosts")
    assert prove(server, B)
    with connect(server, B) as greedy:
        assert is_served(greedy)
        assert is_cut_off(greedy, *values(B))
    assert server._loop is not None
    assert 1 << 20 < server._loop._space.bytes_held <= 2 << 20


@pytest.mark.parametrize("speaks", [True, False])
def test_a_stranger_with_very_many_connections_keeps_nobody_out(
    serve: Callable[..., TcpStoreServer], said: Said, monkeypatch: pytest.MonkeyPatch, speaks: bool
) -> None:
    monkeypatch.setattr(loop_module, "HALF_OPEN_MAX", 20)
    monkeypatch.setattr(loop_module, "_connections_possible", lambda: 60)
    server = serve("hosts")
    with ExitStack() as ends:
        waits = ends.enter_context(connect(server, B))
        waits.sendall(HELLO + PING)
        for _ in range(80):
            one = ends.enter_context(connect(server, C))
            if speaks:
                one.sendall(HELLO)
        assert prove(server, B)
        assert waits.recv(4) == PONG


# The agent's side.


def ended(one: HostAttestation) -> None:
    """Wait until all threads of this are gone."""
    for thread in threading.enumerate():
        if thread.name == "holdfast-attestation":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    assert not one._connections


def test_an_agent_tries_again_where_nobody_listens_yet(
    serve: Callable[..., TcpStoreServer], said: Said
) -> None:
    with socket.socket(socket.AF_INET6) as held:
        held.bind(("::", 0))
        word = HostAttestation(US, held.getsockname()[1], KEY, GENERATION)
        word.start()
        held.listen()
        peer, _ = held.accept()
        peer.close()  # As a store would that is closed for another.
        server = TcpStoreServer(held, None, Access("hosts", KEY, GENERATION))
        server.start()
        ended(word)
        assert word._succeeded
        server.close()
    assert said == []


@pytest.mark.parametrize(
    ("host", "optional"), [(US, False), ("no such host.invalid", False), (US, True)]
)
def test_failed_attestation_is_reported_in_one_line(
    said: Said, monkeypatch: pytest.MonkeyPatch, host: str, optional: bool
) -> None:
    monkeypatch.setattr(attestation, "ATTEST_S", 0.1)
    with socket.socket() as bound:
        bound.bind((US, 0))
        port = bound.getsockname()[1]
        word = HostAttestation(host, port, KEY, GENERATION, optional=optional)
        word.start()
        ended(word)
    assert len(said) == (0 if optional else 1)
    assert all(f"{host}:{port}" in line for line in said)


def test_an_agent_that_is_told_to_stop_says_nothing(said: Said) -> None:
    with socket.create_server((US, 0)) as silent:
        word = HostAttestation(US, silent.getsockname()[1], KEY, GENERATION)
        word.start()
        peer, _ = silent.accept()
        with peer:
            assert peer.recv(1000)
            word.cancel()
            ended(word)
    assert said == []
