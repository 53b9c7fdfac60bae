"""The agent's port for its own workers, in front of a private store of another node."""

from __future__ import annotations

import _socket
import socket
import threading
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from holdfast import console
from holdfast.net.listening import ReservedPort
from holdfast.store.store_errors import DistNetworkError
from holdfast.store.tcp import forwarding
from holdfast.store.tcp import store_server as loop_module
from holdfast.store.tcp.embedded import Access, TcpStoreServer
from holdfast.store.tcp.forwarding import Forwarder
from holdfast.store.tcp.store_client import TCPStore
from other_users import STRANGER, as_user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY, GENERATION = bytes(range(32)), 5
US, OTHER_HOST = "127.0.0.1", "127.0.0.2"
PATIENCE_S = 30


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(console, "warning", lines.append)
    return lines


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[TcpStoreServer]:
    """A private store that takes all connections for those of other hosts."""
    monkeypatch.setattr(loop_module, "user_of", lambda _: None)
    bound = _socket.socket()
    bound.bind((US, 0))
    with TcpStoreServer(bound, None, Access("private", KEY, GENERATION)) as server:
        server.start()
        yield server


@pytest.fixture
def forward() -> Iterator[Callable[..., int]]:
    """A maker of forwarders to a port; returns that of the workers."""
    with ExitStack() as ends:

        def make(port: int, key: bytes = KEY) -> int:
            held = ends.enter_context(ReservedPort(listening=True, address=US))
            forwarder = Forwarder(held.listener(), US, port, key, GENERATION)
            ends.callback(forwarder.close)
            forwarder.start()
            return held.number

        yield make


def client(port: int, timeout_s: float = PATIENCE_S) -> TCPStore:
    return TCPStore(US, port, timeout=timedelta(seconds=timeout_s))


def test_workers_use_the_store_as_if_it_were_here(
    store: TcpStoreServer, forward: Callable[..., int], said: list[str]
) -> None:
    port = forward(store.port)
    with client(port) as one, client(port) as other:
        one.set("large", bytes(range(256)) * 30_000)
        assert other.get("large") == bytes(range(256)) * 30_000
        waiter = threading.Thread(target=other.wait, args=(["late"],))
        waiter.start()
        one.set("late", "")
        waiter.join(PATIENCE_S)
        assert not waiter.is_alive()
    assert said == []


def test_whoever_does_not_prove_the_key_is_refused(
    store: TcpStoreServer, forward: Callable[..., int], said: list[str]
) -> None:
    with pytest.raises(DistNetworkError):
        client(store.port, 1)
    with pytest.raises(DistNetworkError):
        client(forward(store.port, bytes(32)), 1)
    assert any("store=private" in line for line in said)


def test_another_user_is_refused(
    store: TcpStoreServer, forward: Callable[..., int], said: list[str]
) -> None:
    port = forward(store.port)

    def attack() -> str:
        with socket.create_connection((US, port), PATIENCE_S) as one:
            return "refused" if one.recv(1) == b"" else "served"

    assert as_user(STRANGER, attack) == "refused"
    assert str(STRANGER) in said[0]


def test_a_store_that_is_not_there_ends_the_connection_and_is_named(
    forward: Callable[..., int], said: list[str]
) -> None:
    with socket.socket() as bound:
        bound.bind((US, 0))
        port = bound.getsockname()[1]
        with socket.create_connection((US, forward(port)), PATIENCE_S) as worker:
            assert worker.recv(1) == b""
    assert f"{US}:{port}" in said[0]


def test_a_store_that_does_not_answer_is_not_waited_for_for_ever(
    forward: Callable[..., int], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "PROVE_S", 0.1)
    with socket.create_server((US, 0)) as silent:
        port = forward(silent.getsockname()[1])
        with socket.create_connection((US, port), PATIENCE_S) as worker:
            assert worker.recv(1) == b""
    assert len(said) == 1


def test_a_forwarder_that_fails_says_so_and_a_forked_child_has_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_self: Forwarder) -> None:
        raise RuntimeError("on purpose")

    failures: list[str] = []
    told = threading.Event()

    def failed(why: str) -> None:
        failures.append(why)
        told.set()

    monkeypatch.setattr(Forwarder, "_accept", fail)
    with ReservedPort(listening=True, address=US) as held:
        forwarder = Forwarder(held.listener(), US, 9, KEY, GENERATION, failed)
        forwarder.start()
        assert as_user(0, lambda: str(forwarder._listener.fileno())) == "-1"
        with socket.create_connection((US, held.number), PATIENCE_S):
            assert told.wait(PATIENCE_S)
        forwarder.close()
    assert "on purpose" in failures[0]
    assert "on purpose" in caplog.text


def test_what_was_changed_on_the_way_ends_the_connection(
    store: TcpStoreServer, forward: Callable[..., int], said: list[str]
) -> None:
    """Somebody in between passes on all but one bit of what a worker says."""

    def pass_on(reads: socket.socket, writes: socket.socket, *, tampers: bool) -> None:
        passed = 0
        while data := reads.recv(65536):
            if tampers and passed >= 42 + 32:  # The hello and the proof of the agent.
                data = data[:-1] + bytes([data[-1] ^ 1])
            passed += len(data)
            writes.sendall(data)
        with suppress(OSError):
            writes.shutdown(socket.SHUT_RDWR)

    with socket.create_server((US, 0)) as between:
        port = forward(between.getsockname()[1])
        with socket.create_connection((US, port), PATIENCE_S) as worker:
            near, _ = between.accept()
            with near, socket.create_connection((US, store.port), PATIENCE_S) as far:
                threads = [
                    threading.Thread(target=pass_on, args=(near, far), kwargs={"tampers": True}),
                    threading.Thread(target=pass_on, args=(far, near), kwargs={"tampers": False}),
                ]
                for thread in threads:
                    thread.start()
                worker.sendall(bytes.fromhex("00 ce f7 85 3c") + b"\x0dping")
                assert worker.recv(4) == b""
                for thread in threads:
                    thread.join(PATIENCE_S)
    assert said
