"""A client and a scripted server: races, losses, deadlines and invalid responses, byte by byte.

tests/peers and tests/contract test every operation against real servers, torch's and ours.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from scripted_tcp_store import LONG_S, Peer, ScriptedStore, blob, i64, u64

from holdfast.net import addresses
from holdfast.store.store_errors import DistNetworkError, DistStoreError, StoreTimeoutError
from holdfast.store.tcp import channel, store_client
from holdfast.store.tcp.channel import connect
from holdfast.store.tcp.store_client import TCPStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHORT = timedelta(milliseconds=50)
LONG = timedelta(seconds=LONG_S)

K, L = blob(b"/k"), blob(b"/l")
ONE_K, K_AND_L = u64(1) + K, u64(2) + K + L
WAIT_K, WAIT_K_AND_L, CANCEL = b"\x06" + ONE_K, b"\x06" + K_AND_L, b"\x0c"
GET_K, COUNT = b"\x03" + K, b"\x07"
GET_K_AND_L = b"\x0a" + K_AND_L


def client_of(server: ScriptedStore, timeout: timedelta = LONG, **more: Any) -> TCPStore:
    return TCPStore("127.0.0.1", server.port, timeout=timeout, **more)


def await_input(store: TCPStore) -> None:
    """Wait until the client's socket has unread data, or the other side has closed it."""
    connection = store._channel._connection
    assert connection is not None
    assert select.select([connection._socket], [], [], LONG_S)[0]


@pytest.fixture
def _long_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow a long grace, because the server's thread may be scheduled late."""
    monkeypatch.setattr(store_client, "GRACE_S_MAX", LONG_S)


def nothing(peer: Peer) -> None:
    peer.expect_end()


def exchanges(*pairs: tuple[bytes, bytes]) -> Callable[[Peer], None]:
    def script(peer: Peer) -> None:
        for request, response in pairs:
            peer.exchange(request, response)
        peer.expect_end()

    return script


@pytest.mark.parametrize(
    ("call", "script", "result"),
    [
        pytest.param(
            lambda s: s.get("k"),
            [(WAIT_K, b"\0"), (GET_K, blob(b"")), (b"\x05" + ONE_K, b"\0"), (GET_K, blob(b"v"))],
            b"v",
            id="a value that arrives after a wait ended without one",
        ),
        pytest.param(  # torch's server ends a wait when a client only compares the key
            lambda s: s.multi_get(["k", "l"]),
            [
                (WAIT_K_AND_L, b"\0"),
                (GET_K_AND_L, blob(b"") + blob(b"2")),
                (b"\x05" + ONE_K, b"\x01"),
                (WAIT_K_AND_L, b"\0"),
                (GET_K_AND_L, blob(b"1") + blob(b"2")),
            ],
            [b"1", b"2"],
            id="a key that is not there yet",
        ),
        pytest.param(
            lambda s: s.multi_get(["k", "l"]),
            [
                (WAIT_K_AND_L, b"\0"),
                (GET_K_AND_L, blob(b"1") + blob(b"")),
                (b"\x05" + u64(1) + L, b"\0"),
                (GET_K_AND_L, blob(b"") + blob(b"2")),
                (WAIT_K_AND_L, b"\0"),
                (GET_K_AND_L, blob(b"3") + blob(b"2")),
            ],
            [b"3", b"2"],
            id="a key that is deleted while another one is set",
        ),
        pytest.param(
            lambda s: s.queue_pop("k"),
            [
                (WAIT_K, b"\0"),
                (b"\x0f" + K, i64(0)),
                (WAIT_K, b"\0"),
                (b"\x0f" + K, i64(1) + blob(b"v")),
            ],
            b"v",
            id="a value that another client popped",
        ),
    ],
)
def test_calls_with_several_exchanges_send_the_expected_bytes(
    call: Callable[[TCPStore], Any], script: list[tuple[bytes, bytes]], result: Any
) -> None:
    with ScriptedStore(exchanges(*script)) as server, client_of(server) as store:
        assert call(store) == result


def test_responses_may_arrive_in_small_pieces() -> None:
    def script(peer: Peer) -> None:
        peer.expect(b"\x11")
        for byte in i64(2) + blob(b"/a") + blob(b"/b"):
            peer.send(bytes([byte]))
        peer.expect_end()

    with ScriptedStore(script) as server, client_of(server) as store:
        assert store.list_keys() == ["a", "b"]


# Deadlines


@pytest.mark.parametrize(
    ("call", "request_"),
    [
        (lambda s: s.add("k", 1), b"\x04" + K + i64(1)),
        (lambda s: s.wait(["k"]), WAIT_K + CANCEL),
        (lambda s: s.barrier("k", 2), b"\x12" + K + i64(2) + CANCEL),
        (lambda s: s.queue_pop("k"), WAIT_K + CANCEL),
    ],
)
def test_call_to_a_frozen_server_times_out(
    call: Callable[[TCPStore], Any], request_: bytes
) -> None:
    def silence(peer: Peer) -> None:
        peer.expect(request_)
        peer.expect_end()

    with ScriptedStore(silence) as server, client_of(server) as store:
        store.set_timeout(SHORT)
        with pytest.raises(StoreTimeoutError, match=rf":{server.port}: .* of k: "):
            call(store)


def test_call_to_a_server_that_does_not_read_times_out() -> None:
    over = threading.Event()

    def fill_buffers(store: TCPStore) -> None:
        for _ in range(1000):
            store.set("k", bytes(8 * 1024 * 1024))

    def script(_: Peer) -> None:
        over.wait(LONG_S)

    with ScriptedStore(script) as server, client_of(server) as store:
        store.set_timeout(SHORT)
        with pytest.raises(StoreTimeoutError):
            fill_buffers(store)
        over.set()


def test_late_response_is_not_taken_for_the_next_one() -> None:
    given_up = threading.Event()

    def late(peer: Peer) -> None:
        peer.expect(b"\x04" + K + i64(1))
        assert given_up.wait(LONG_S)
        peer.send(i64(1))

    again = exchanges((b"\x04" + L + i64(1), i64(20)))
    with ScriptedStore(late, again) as server, client_of(server) as store:
        store.set_timeout(SHORT)
        with pytest.raises(StoreTimeoutError):
            store.add("k", 1)
        given_up.set()
        store.set_timeout(LONG)
        assert store.add("l", 1) == 20


@pytest.mark.usefixtures("_long_grace")
@pytest.mark.parametrize("late", [b"", b"\0"])
def test_timed_out_wait_leaves_the_connection_usable(late: bytes) -> None:
    """The response to the wait may arrive just when the wait is cancelled."""

    def script(peer: Peer) -> None:
        peer.expect(WAIT_K_AND_L + CANCEL)
        peer.send(late + b"\x01")
        peer.exchange(b"\x05" + ONE_K + b"\x05" + u64(1) + L, b"\0\x01")
        peer.exchange(COUNT, i64(5))
        peer.expect_end()

    with ScriptedStore(script) as server, client_of(server) as store:
        with pytest.raises(StoreTimeoutError, match=r"for l within"):  # Only the missing one.
            store.wait(["k", "l"], SHORT)
        assert store.num_keys() == 5


# Losses and broken responses


@pytest.mark.parametrize("begun", [b"", i64(3)[:4], i64(9) + b"only"])
def test_connection_lost_during_a_response_is_reopened(begun: bytes) -> None:
    def script(peer: Peer) -> None:
        peer.exchange(b"\x02" + K + blob(b"") * 2, begun)

    again = exchanges((COUNT, i64(0)))
    with ScriptedStore(script, again) as server, client_of(server) as store:
        with pytest.raises(DistNetworkError, match="compare_set of k"):
            store.compare_set("k", "", "")
        assert store.num_keys() == 0


def test_requests_without_a_response_detect_a_loss() -> None:
    """With torch's client, the first `set` after the server died succeeds."""
    with ScriptedStore(lambda _: None) as server, client_of(server) as store:
        await_input(store)
        with pytest.raises(DistNetworkError, match="set of k"):
            store.set("k", "v")
        server.__exit__()
        store.set_timeout(SHORT)
        with pytest.raises(DistNetworkError, match=rf"add of k: .*127.0.0.1:{server.port}"):
            store.add("k", 1)


@pytest.mark.parametrize(
    ("call", "request_", "response"),
    [
        (lambda s: s.check(["k"]), b"\x05" + ONE_K, b"\x07"),
        (lambda s: s.wait(["k"]), WAIT_K, b"\x01"),
        (lambda s: s.num_keys(), COUNT, i64(1) + b"x"),
        (lambda s: s.list_keys(), b"\x11", i64(-1)),
        (lambda s: s.compare_set("k", "", ""), b"\x02" + K + blob(b"") * 2, b"HTTP/1.1 400"),
    ],
)
def test_invalid_response_closes_the_connection(
    call: Callable[[TCPStore], Any], request_: bytes, response: bytes
) -> None:
    again = exchanges((COUNT, i64(3)))
    script = exchanges((request_, response))
    with ScriptedStore(script, again) as server, client_of(server) as store:
        with pytest.raises(DistStoreError, match=f":{server.port}: "):
            call(store)
        assert store.num_keys() == 3


def test_unrequested_bytes_are_not_taken_for_a_response() -> None:
    taken = threading.Event()

    def script(peer: Peer) -> None:
        peer.exchange(COUNT, i64(1))
        assert taken.wait(LONG_S)
        peer.send(i64(7))
        peer.expect_end()

    with ScriptedStore(script) as server, client_of(server) as store:
        assert store.num_keys() == 1
        taken.set()
        await_input(store)
        with pytest.raises(DistStoreError):
            store.num_keys()


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.set("k" * 8192, ""),
        lambda s: s.queue_pop("k" * 8192),
        lambda s: s.compare_set("k", "", bytes(8 * 1024 * 1024 + 1)),
        lambda s: s.wait(["k"] * 131_073),
        lambda s: s.multi_set(["k"] * 131_073, ["v"] * 131_073),
        lambda s: s.multi_set(["k"], []),
        lambda s: s.add("k", 2**63),
    ],
)
def test_requests_above_a_limit_are_not_sent(call: Callable[[TCPStore], Any]) -> None:
    with ScriptedStore(exchanges((COUNT, i64(0)))) as server, client_of(server) as store:
        with pytest.raises(ValueError, match=r"\d"):
            call(store)
        with pytest.raises(TypeError):
            store.wait("key")
        assert store.num_keys() == 0


# Interrupts, threads and forks


def test_interrupted_call_leaves_no_response_behind() -> None:
    main, raised = threading.get_ident(), threading.Event()

    def interrupt(peer: Peer) -> None:
        peer.expect(WAIT_K)
        # Repeatedly, because a signal just before Python sleeps does not wake it.
        while not raised.wait(0.01):
            signal.pthread_kill(main, signal.SIGUSR1)
        peer.expect_end()

    def raise_it(*_: object) -> None:
        if not raised.is_set():
            raised.set()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, raise_it)
    try:
        again = exchanges((COUNT, i64(3)))
        with ScriptedStore(interrupt, again) as server, client_of(server) as store:
            with pytest.raises(KeyboardInterrupt):
                store.wait(["k"])
            assert store.num_keys() == 3
    finally:
        signal.signal(signal.SIGUSR1, before)


class Waiting:
    """A wait for the key k in another thread, which has reached the server."""

    def __init__(self, store: TCPStore, heard: threading.Event) -> None:
        self.raised: list[Exception] = []
        self._store = store
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()
        assert heard.wait(LONG_S)

    def _wait(self) -> None:
        try:
            self._store.wait(["k"])
        except DistStoreError as problem:
            self.raised.append(problem)

    def join(self) -> list[Exception]:
        self._thread.join()
        return self.raised


def test_close_ends_the_call_of_another_thread() -> None:
    heard = threading.Event()

    def script(peer: Peer) -> None:
        peer.expect(WAIT_K)
        heard.set()
        peer.expect_end()

    with ScriptedStore(script) as server:
        store = client_of(server)
        waiting = Waiting(store, heard)
        store.close()
        assert len(waiting.join()) == 1
    with pytest.raises(DistStoreError, match=f"127.0.0.1:{server.port} is closed"):
        store.set("k", "v")
    store.close()


def test_wait_for_a_busy_store_times_out() -> None:
    heard, over = threading.Event(), threading.Event()

    def script(peer: Peer) -> None:
        peer.expect(WAIT_K)
        heard.set()
        assert over.wait(LONG_S)
        peer.send(b"\0")
        peer.expect_end()

    with ScriptedStore(script) as server, client_of(server) as store:
        waiting = Waiting(store, heard)
        store.set_timeout(SHORT)
        with pytest.raises(StoreTimeoutError, match="set of l"):
            store.set("l", "v")
        over.set()
        assert not waiting.join()


def test_forked_child_has_its_own_connection() -> None:
    """Even if another thread was in a call during the fork."""
    heard, over = threading.Event(), threading.Event()

    def parents(peer: Peer) -> None:
        peer.expect(WAIT_K)
        heard.set()
        assert over.wait(LONG_S)
        peer.send(b"\0")
        peer.exchange(COUNT, i64(1))
        peer.expect_end()

    def childs(peer: Peer) -> None:
        assert peer.socket.recv(100)[:6] == b"\x00\xce\xf7\x85\x3c\x0d"
        peer.send(os.getpid().to_bytes(4, "little"))

    with ScriptedStore(parents) as server, client_of(server) as store:
        waiting = Waiting(store, heard)
        with ScriptedStore(childs, greets=False) as other:
            store._channel._port = other.port  # A scripted server handles one connection at a time.
            pid = os.fork()
            if pid == 0:
                try:
                    store.num_keys()
                except (
                    DistNetworkError
                ):  # The child connected, but the server has another process's nonce.
                    os._exit(7)
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        over.set()
        assert not waiting.join()
        assert store.num_keys() == 1


def test_dropped_store_is_closed() -> None:
    with ScriptedStore(nothing) as server:
        client_of(server)


# Connecting


class Clock:
    """A clock that only sleeping and explicit delays move."""

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
    clock = Clock()
    monkeypatch.setattr(channel, "time", clock)
    return clock


@pytest.fixture
def unused() -> Iterator[int]:
    """A reserved port without a listener."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])


def resolve_to(monkeypatch: pytest.MonkeyPatch, *hosts: tuple[str, int]) -> None:
    found = [addresses.Address(socket.AF_INET, place) for place in hosts]
    monkeypatch.setattr(channel, "resolve_within", lambda *_: found)


def reach(port: int, seconds: float = LONG_S, host: str = "127.0.0.1") -> None:
    connect(host, port, time.monotonic() + seconds, seconds, "about it").close()


def test_first_working_address_is_used(unused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedStore(Peer.expect_end) as server:
        resolve_to(monkeypatch, ("127.0.0.1", unused), ("127.0.0.1", server.port))
        reach(unused, host="there")


def test_server_that_starts_late_or_closes_immediately_is_retried() -> None:
    def hang_up(peer: Peer) -> None:
        peer.socket.recv(1)

    def greet(peer: Peer) -> None:
        peer.greet()
        peer.expect_end()

    with ScriptedStore(hang_up, hang_up, greet, greets=False) as server:
        reach(server.port)


def test_errors_distinguish_a_frozen_server_from_another_program() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,  # The kernel accepts for the listener.
        pytest.raises(StoreTimeoutError, match=r"^about it: "),
    ):
        reach(listener.getsockname()[1], 0.3)

    def other(peer: Peer) -> None:
        peer.send(b"220 mail.example.org ESMTP\r\n")
        peer.expect_all()

    with (
        ScriptedStore(other, greets=False) as server,
        pytest.raises(DistNetworkError, match=r"^about it: "),
    ):
        reach(server.port)


@pytest.mark.parametrize("seconds", [0.03, 7.0, 100.0])
def test_pauses_grow_and_never_exceed_the_deadline(
    seconds: float, unused: int, clock: Clock
) -> None:
    deadline = clock.now + seconds
    with pytest.raises(DistNetworkError, match=f"127.0.0.1:{unused}"):
        connect("127.0.0.1", unused, deadline, seconds, "")
    assert clock.now == pytest.approx(deadline, rel=0, abs=1e-6)
    assert max(clock.slept) <= 1.5 * channel.CONNECT_PAUSE_S_MAX
    assert seconds / 1.5 <= len(clock.slept) <= 20 + 2 * seconds


def test_silent_address_leaves_time_for_the_others(
    unused: int, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    clock.now = 1000.0
    allowed: list[float] = []

    def swallow(_: object, timeout_s: float) -> socket.socket:
        allowed.append(timeout_s)
        clock.now += timeout_s
        raise TimeoutError("timed out")

    monkeypatch.setattr(channel, "_open_socket", swallow)
    resolve_to(monkeypatch, ("127.0.0.1", unused), ("127.0.0.2", unused))
    with pytest.raises(DistNetworkError, match=rf"127.0.0.1:{unused}.*127.0.0.2:{unused}"):
        connect("there", unused, clock.now + 8.0, 8.0, "")
    assert allowed[:2] == [4.0, 4.0]
    assert clock.now == pytest.approx(1008.0)
    allowed.clear()
    with pytest.raises(DistNetworkError):
        connect("there", unused, clock.now + 60.0, 60.0, "")
    assert max(allowed) == channel.ATTEMPT_S_MAX


def test_client_does_not_connect_to_itself(
    unused: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may connect a socket to itself if nothing listens on a port that it assigns."""

    class Itself(socket.socket):
        def connect(self, _: Any) -> None:
            self.bind(("127.0.0.1", 0))
            super().connect(self.getsockname())

    monkeypatch.setattr(socket, "socket", Itself)
    with pytest.raises(DistNetworkError):
        connect("127.0.0.1", unused, clock.now + 0.05, 0.05, "")
    assert clock.slept  # It counts as refused and is retried, because a server may still start.
