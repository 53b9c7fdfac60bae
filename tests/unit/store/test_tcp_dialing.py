"""Reaching a server that comes late, is elsewhere, is frozen, or is none."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from scripted_tcp_store import LONG_S, Peer, ScriptedStore

from holdfast.net import addresses
from holdfast.net.addresses import Address
from holdfast.store.errors import DistNetworkError, StoreTimeoutError
from holdfast.store.tcp import channel
from holdfast.store.tcp.channel import connect

if TYPE_CHECKING:
    from collections.abc import Iterator


def reach(port: int, seconds: float = LONG_S, host: str = "127.0.0.1") -> None:
    connect(host, port, time.monotonic() + seconds, seconds, "about it").close()


@pytest.fixture
def nobodys() -> Iterator[int]:
    """A port at which nobody listens, and that nobody else gets meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])


class Clock:
    """Time that passes only by sleeping, and by what is told to take some."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Make attempts take no time, so that there is some for each, however busy the machine is."""
    clock = Clock()
    monkeypatch.setattr(channel, "time", clock)
    return clock


def found_at(monkeypatch: pytest.MonkeyPatch, *hosts: tuple[str, int]) -> None:
    """Make any name mean these places."""

    def look_up(*_: object) -> list[Address]:
        return [Address(socket.AF_INET, place) for place in hosts]

    monkeypatch.setattr(addresses, "resolve", look_up)


@pytest.mark.usefixtures("clock")
def test_all_addresses_that_were_tried_are_named(
    nobodys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_at(monkeypatch, ("127.0.0.1", nobodys), ("127.0.0.2", nobodys))
    with pytest.raises(
        DistNetworkError,
        match=r"^about it: the server could not be reached within 0.1 s "
        rf"\(127.0.0.1:{nobodys}: Connection refused; 127.0.0.2:{nobodys}: Connection refused\)$",
    ):
        reach(nobodys, 0.1, "there")


def test_what_was_wrong_is_told_although_the_last_attempts_had_no_time(
    nobodys: int, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    tried: list[str] = []

    def refuse(address: Any, _: float) -> socket.socket:
        tried.append(address[1][0])
        if len(tried) == 3:
            clock.now += 100  # As if this process had been stopped just then.
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(channel, "_connect", refuse)
    found_at(monkeypatch, ("127.0.0.1", nobodys), ("127.0.0.2", nobodys))
    with pytest.raises(
        DistNetworkError,
        match=r"\(127.0.0.1:\d+: Connection refused; 127.0.0.2:\d+: Connection refused\)$",
    ):
        connect("there", nobodys, clock.now + 60, 60, "")
    assert tried == ["127.0.0.1", "127.0.0.2", "127.0.0.1"]


def test_any_of_the_addresses_will_do(nobodys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedStore(Peer.expect_end) as server:
        found_at(monkeypatch, ("127.0.0.1", nobodys), ("127.0.0.1", server.port))
        reach(nobodys, host="there")


def test_a_server_may_come_later() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        tried = threading.Event()
        problems: list[Exception] = []

        def come() -> None:
            try:
                assert tried.wait(LONG_S)
                listener.listen()
                listener.settimeout(LONG_S)
                connection, _ = listener.accept()
                with connection:
                    Peer(connection).greet()
            except (OSError, AssertionError) as problem:
                problems.append(problem)

        original = channel._open_socket
        server = threading.Thread(target=come)
        server.start()

        def connect(*args: Any) -> socket.socket:
            try:
                return original(*args)
            finally:
                tried.set()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(channel, "_connect", connect)
            reach(port)
        server.join()
        assert not problems


def test_one_that_hangs_up_at_once_is_tried_again() -> None:
    """A server that is just starting, or ending."""

    def hang_up(peer: Peer) -> None:
        peer.socket.recv(1)

    def greet(peer: Peer) -> None:
        peer.greet()
        peer.expect_end()

    with ScriptedStore(hang_up, hang_up, greet, greets=False) as server:
        reach(server.port)


@pytest.mark.usefixtures("clock")
def test_a_frozen_one_is_told_of_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # The kernel takes connections for it.
        port = listener.getsockname()[1]
        with pytest.raises(
            StoreTimeoutError,
            match=r"^about it: the server took the connection, but did not answer within 0.05 s;",
        ):
            reach(port, 0.05)


def test_another_program_is_told_of_at_once() -> None:
    def other(peer: Peer) -> None:
        peer.say(b"220 mail.example.org ESMTP\r\n")
        peer.expect_all()

    with (
        ScriptedStore(other, greets=False) as server,
        pytest.raises(
            DistNetworkError, match="about it: what listens there is no TCPStore: it answered "
        ),
    ):
        reach(server.port)


@pytest.mark.parametrize("seconds", [0.03, 1.0, 7.0, 100.0])
def test_pauses_grow_and_never_go_beyond_the_deadline(
    seconds: float, nobodys: int, clock: Clock
) -> None:
    deadline = clock.now + seconds
    with pytest.raises(DistNetworkError, match="Connection refused"):
        connect("127.0.0.1", nobodys, deadline, seconds, "")
    assert clock.now == pytest.approx(deadline, rel=0, abs=1e-6)
    assert max(clock.slept) <= 1.5 * channel.PAUSE_S_MAX
    assert len(clock.slept) <= 20 + 2 * seconds
    assert len(clock.slept) >= seconds / 1.5


def test_an_address_that_swallows_everything_leaves_time_for_the_others(
    nobodys: int, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    clock.now = 1000.0
    allowed: list[float] = []

    def swallow(_: object, timeout_s: float) -> socket.socket:
        allowed.append(timeout_s)
        clock.now += timeout_s
        raise TimeoutError("timed out")

    monkeypatch.setattr(channel, "_connect", swallow)
    found_at(monkeypatch, ("127.0.0.1", nobodys), ("127.0.0.2", nobodys))
    with pytest.raises(DistNetworkError, match=r"127.0.0.1:\d+: timed out; 127.0.0.2:\d+: timed"):
        connect("there", nobodys, clock.now + 8.0, 8.0, "")
    assert allowed[:2] == [4.0, 4.0]
    assert clock.now == pytest.approx(1008.0)
    allowed.clear()
    with pytest.raises(DistNetworkError):
        connect("there", nobodys, clock.now + 60.0, 60.0, "")
    assert max(allowed) == channel.ATTEMPT_S_MAX


@pytest.mark.usefixtures("clock")
def test_a_name_that_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(addresses, "resolve", look_up)
    with pytest.raises(DistNetworkError, match=r"\(nowhere:7: Name or service not known\)"):
        reach(7, host="nowhere")


@pytest.mark.usefixtures("clock")
def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def look_up(*_: object) -> Any:
        over.wait(LONG_S)
        raise OSError("too late")

    monkeypatch.setattr(addresses, "resolve", look_up)
    with pytest.raises(DistNetworkError, match="the name server does not answer"):
        reach(7, 0.05, "somewhere")
    over.set()


@pytest.mark.usefixtures("clock")
def test_no_connection_to_oneself(nobodys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may connect a socket to itself where nobody listens at a port it hands out."""

    class Itself(socket.socket):
        def connect(self, _: Any) -> None:
            self.bind(("127.0.0.1", 0))
            super().connect(self.getsockname())

    monkeypatch.setattr(socket, "socket", Itself)
    with pytest.raises(DistNetworkError, match="nobody listens there"):
        reach(nobodys, 0.05)
