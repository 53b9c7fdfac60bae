"""What the client says to a server, byte by byte, and what it makes of the answers.

Real servers, torch's and ours, are in tests/peers and tests/contract.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from scripted_tcp_store import LONG_S, Peer, ScriptedStore, blob, i64, u64

from holdfast.store.errors import (
    DistNetworkError,
    DistStoreError,
    QueueEmptyError,
    StoreTimeoutError,
)
from holdfast.store.tcp import channel, client
from holdfast.store.tcp.client import TCPStore

if TYPE_CHECKING:
    from collections.abc import Callable

SHORT = timedelta(milliseconds=50)
LONG = timedelta(seconds=LONG_S)

K, L = blob(b"/k"), blob(b"/l")
ONE_K, K_AND_L = u64(1) + K, u64(2) + K + L


def client_of(server: ScriptedStore, timeout: timedelta = LONG, **more: Any) -> TCPStore:
    return TCPStore("127.0.0.1", server.port, timeout=timeout, **more)


def await_news(store: TCPStore) -> None:
    """Wait until something that the client has not read has reached it, be it the end."""
    connection = store._link._connection
    assert connection is not None
    assert select.select([connection._socket], [], [], LONG_S)[0]


@pytest.fixture
def _time_to_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reaching a server take no time but that of pauses, however busy the machine is."""

    class Pauses:
        now = time.monotonic()

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds

    monkeypatch.setattr(channel, "time", Pauses())


@pytest.fixture
def _time_to_end_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the end of a wait take as long as the server's thread may take to get its turn."""
    monkeypatch.setattr(client, "GRACE_S_MAX", LONG_S)


def nothing(peer: Peer) -> None:
    peer.expect_end()


def silence(request: bytes) -> Callable[[Peer], None]:
    """Hear a request, say nothing, and see that the client gives the connection up."""

    def script(peer: Peer) -> None:
        peer.expect(request)
        peer.expect_end()

    return script


def exchanges(*pairs: tuple[bytes, bytes]) -> Callable[[Peer], None]:
    def script(peer: Peer) -> None:
        for request, answer in pairs:
            peer.exchange(request, answer)
        peer.expect_end()

    return script


CALLS: list[tuple[str, Callable[[TCPStore], Any], list[tuple[bytes, bytes]], Any]] = [
    ("set", lambda s: s.set("k", "é"), [(b"\x01" + K + blob("é".encode()), b"")], None),
    ("set bytes", lambda s: s.set("k", b"\xff"), [(b"\x01" + K + blob(b"\xff"), b"")], None),
    (
        "compare_set",
        lambda s: s.compare_set("k", "a", "b"),
        [(b"\x02" + K + blob(b"a") + blob(b"b"), blob(b"c"))],
        b"c",
    ),
    (
        "get",
        lambda s: s.get("k"),
        [(b"\x06" + ONE_K, b"\x00"), (b"\x03" + K, blob(b"v"))],
        b"v",
    ),
    (
        "get of an empty value",
        lambda s: s.get("k"),
        [
            (b"\x06" + ONE_K, b"\x00"),
            (b"\x03" + K, blob(b"")),
            (b"\x05" + ONE_K, b"\x00"),
            (b"\x03" + K, blob(b"")),
        ],
        b"",
    ),
    (
        "get of a value that comes after a wait that ended for nothing",
        lambda s: s.get("k"),
        [
            (b"\x06" + ONE_K, b"\x00"),
            (b"\x03" + K, blob(b"")),
            (b"\x05" + ONE_K, b"\x00"),
            (b"\x03" + K, blob(b"v")),
        ],
        b"v",
    ),
    ("add", lambda s: s.add("k", -3), [(b"\x04" + K + i64(-3), i64(-2))], -2),
    ("check", lambda s: s.check(["k", "l"]), [(b"\x05" + K_AND_L, b"\x00")], True),
    ("check: no", lambda s: s.check(["k", "l"]), [(b"\x05" + K_AND_L, b"\x01")], False),
    ("wait", lambda s: s.wait(["k", "l"]), [(b"\x06" + K_AND_L, b"\x00")], None),
    ("num_keys", lambda s: s.num_keys(), [(b"\x07", i64(7))], 7),
    ("delete_key", lambda s: s.delete_key("k"), [(b"\x08" + K, i64(1))], True),
    ("delete_key: no", lambda s: s.delete_key("k"), [(b"\x08" + K, i64(0))], False),
    ("append", lambda s: s.append("k", "v"), [(b"\x09" + K + blob(b"v"), b"")], None),
    (
        "multi_get",
        lambda s: s.multi_get(["k", "l"]),
        [(b"\x06" + K_AND_L, b"\x00"), (b"\x0a" + K_AND_L, blob(b"1") + blob(b"2"))],
        [b"1", b"2"],
    ),
    (
        "multi_get of a key that is deleted while another comes",
        lambda s: s.multi_get(["k", "l"]),
        [
            (b"\x06" + K_AND_L, b"\x00"),
            (b"\x0a" + K_AND_L, blob(b"1") + blob(b"")),
            (b"\x05" + u64(1) + L, b"\x00"),
            (b"\x0a" + K_AND_L, blob(b"") + blob(b"2")),
            (b"\x06" + K_AND_L, b"\x00"),
            (b"\x0a" + K_AND_L, blob(b"3") + blob(b"2")),
        ],
        [b"3", b"2"],
    ),
    (
        "multi_set",
        lambda s: s.multi_set(["k", "l"], ["1", b"2"]),
        [(b"\x0b" + u64(2) + K + blob(b"1") + L + blob(b"2"), b"")],
        None,
    ),
    ("queue_push", lambda s: s.queue_push("k", "v"), [(b"\x0e" + K + blob(b"v"), b"")], None),
    (
        "queue_pop",
        lambda s: s.queue_pop("k"),
        [(b"\x06" + ONE_K, b"\x00"), (b"\x0f" + K, i64(2) + blob(b"v"))],
        b"v",
    ),
    (
        "queue_pop at once",
        lambda s: s.queue_pop("k", block=False),
        [(b"\x0f" + K, i64(1) + blob(b""))],
        b"",
    ),
    ("queue_len", lambda s: s.queue_len("k"), [(b"\x10" + K, i64(3))], 3),
    (
        "list_keys",
        lambda s: s.list_keys(),
        [(b"\x11", i64(3) + blob(b"/a") + blob(b"init/") + blob("/é/".encode()))],
        ["a", "é/"],
    ),
    ("barrier", lambda s: s.barrier("k", 2), [(b"\x12" + K + i64(2), b"\x00")], None),
    ("the counter", lambda s: s.add("init/", 1), [(b"\x04" + blob(b"init/") + i64(1), i64(1))], 1),
]


@pytest.mark.parametrize(
    ("call", "said", "result"), [one[1:] for one in CALLS], ids=[one[0] for one in CALLS]
)
def test_the_words_of_each_call(
    call: Callable[[TCPStore], Any], said: list[tuple[bytes, bytes]], result: Any
) -> None:
    with ScriptedStore(exchanges(*said)) as server, client_of(server) as store:
        assert call(store) == result


def test_answers_may_come_in_small_pieces() -> None:
    def script(peer: Peer) -> None:
        peer.expect(b"\x11")
        for byte in i64(2) + blob(b"/a") + blob(b"/b"):
            peer.say(bytes([byte]))
        peer.expect_end()

    with ScriptedStore(script) as server, client_of(server) as store:
        assert store.list_keys() == ["a", "b"]


def test_a_large_value_goes_both_ways() -> None:
    value = bytes(range(256)) * 32_768
    said = [
        (b"\x01" + K + blob(value), b""),
        (b"\x06" + ONE_K, b"\x00"),
        (b"\x03" + K, blob(value)),
    ]
    with ScriptedStore(exchanges(*said)) as server, client_of(server) as store:
        store.set("k", value)
        assert store.get("k") == value


def test_clients_are_counted_if_their_number_is_known() -> None:
    count = (b"\x04" + blob(b"init/") + i64(1), i64(1))
    with ScriptedStore(exchanges(count), nothing, nothing) as server:
        client_of(server, world_size=2).close()
        client_of(server, world_size=2, wait_for_workers=False).close()
        client_of(server, world_size=-1).close()
    with pytest.raises(ValueError, match="world_size: 0 clients never come"):
        client_of(server, world_size=0)


@pytest.mark.parametrize(
    ("call", "request_", "about"),
    [
        (lambda s: s.add("k", 1), b"\x04" + K + i64(1), "add of k"),
        (lambda s: s.check(["k", "l"]), b"\x05" + K_AND_L, "check of k, l"),
        (lambda s: s.compare_set("k", "", ""), b"\x02" + K + blob(b"") * 2, "compare_set of k"),
        (lambda s: s.num_keys(), b"\x07", "num_keys"),
        (lambda s: s.get("k"), b"\x06" + ONE_K + b"\x0c", "get of k"),
        (lambda s: s.wait(["k"]), b"\x06" + ONE_K + b"\x0c", "wait of k"),
        (lambda s: s.barrier("k", 2), b"\x12" + K + i64(2) + b"\x0c", "barrier of k"),
        (lambda s: s.queue_pop("k"), b"\x06" + ONE_K + b"\x0c", "queue_pop of k"),
    ],
)
def test_a_frozen_server_is_given_up_in_time(
    call: Callable[[TCPStore], Any], request_: bytes, about: str
) -> None:
    with ScriptedStore(silence(request_)) as server, client_of(server) as store:
        store.set_timeout(SHORT)
        with pytest.raises(
            StoreTimeoutError,
            match=rf"the store at 127.0.0.1:{server.port}: {about}: no answer within 0.05 s$",
        ):
            call(store)


@pytest.mark.usefixtures("_time_to_dial")
def test_a_frozen_server_does_not_hold_the_constructor() -> None:
    with (
        ScriptedStore(Peer.expect_all, greets=False) as server,
        pytest.raises(StoreTimeoutError, match="took the connection, but did not answer within"),
    ):
        client_of(server, SHORT)


def fill_up(store: TCPStore) -> None:
    """Set values until all buffers on the way are full."""
    for _ in range(1000):
        store.set("k", bytes(8 * 1024 * 1024))


def test_a_server_that_does_not_read_is_given_up_in_time() -> None:
    over = threading.Event()

    def script(_: Peer) -> None:
        over.wait(LONG_S)

    with ScriptedStore(script) as server, client_of(server) as store:
        store.set_timeout(SHORT)
        with pytest.raises(StoreTimeoutError, match=r"set of k: no answer within 0.05 s"):
            fill_up(store)
        over.set()


def test_a_late_answer_is_not_taken_for_that_of_the_next_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given_up = threading.Event()

    def late(peer: Peer) -> None:
        peer.expect(b"\x04" + K + i64(1))
        assert given_up.wait(LONG_S)
        peer.say(i64(1))

    again = exchanges((b"\x04" + L + i64(1), i64(20)))
    with ScriptedStore(late, again) as server, client_of(server) as store:
        store.set_timeout(SHORT)
        with pytest.raises(StoreTimeoutError):
            store.add("k", 1)
        given_up.set()
        store.set_timeout(LONG)
        with caplog.at_level(logging.INFO, "holdfast"):
            assert store.add("l", 1) == 20
    assert caplog.messages == [
        f"connecting to the store at 127.0.0.1:{server.port} again: it did not answer within 0.05 s"
    ]


@pytest.mark.usefixtures("_time_to_end_waits")
@pytest.mark.parametrize("late", [b"", b"\x00"])
def test_a_wait_that_is_over_is_ended_in_order(late: bytes) -> None:
    """The answer of the wait may come just when it is cancelled."""

    def script(peer: Peer) -> None:
        peer.expect(b"\x06" + ONE_K + b"\x0c")
        peer.say(late + b"\x01")
        peer.exchange(b"\x07", i64(5))
        peer.expect_end()

    with ScriptedStore(script) as server, client_of(server) as store:
        with pytest.raises(
            StoreTimeoutError,
            match=rf"127.0.0.1:{server.port}: wait: within 0.05 s no value came for: k$",
        ):
            store.wait(["k"], SHORT)
        assert store.num_keys() == 5


@pytest.mark.usefixtures("_time_to_end_waits")
def test_the_keys_that_are_missing_are_named() -> None:
    def script(peer: Peer) -> None:
        peer.exchange(b"\x06" + K_AND_L + b"\x0c", b"\x01")
        peer.exchange(b"\x05" + ONE_K + b"\x05" + u64(1) + L, b"\x00\x01")
        peer.expect_end()

    with (
        ScriptedStore(script) as server,
        client_of(server) as store,
        pytest.raises(StoreTimeoutError, match=r"no value came for: l$"),
    ):
        store.wait(["k", "l"], SHORT)


@pytest.mark.usefixtures("_time_to_end_waits")
def test_a_barrier_that_is_over() -> None:
    script = exchanges((b"\x12" + K + i64(2) + b"\x0c", b"\x01"))
    with (
        ScriptedStore(script) as server,
        client_of(server) as store,
        pytest.raises(StoreTimeoutError, match=r"barrier: within 0.05 s fewer than 2 came to: k"),
    ):
        store.barrier("k", 2, SHORT)


def test_a_key_that_is_not_there_is_waited_for_on() -> None:
    """torch's server ends a wait when somebody merely compares the key."""
    said = [
        (b"\x06" + K_AND_L, b"\x00"),
        (b"\x0a" + K_AND_L, blob(b"") + blob(b"2")),
        (b"\x05" + ONE_K, b"\x01"),
        (b"\x06" + K_AND_L, b"\x00"),
        (b"\x0a" + K_AND_L, blob(b"1") + blob(b"2")),
    ]
    with ScriptedStore(exchanges(*said)) as server, client_of(server) as store:
        assert store.multi_get(["k", "l"]) == [b"1", b"2"]


def test_a_value_that_another_popped_is_waited_for_on() -> None:
    said = [
        (b"\x06" + ONE_K, b"\x00"),
        (b"\x0f" + K, i64(0)),
        (b"\x06" + ONE_K, b"\x00"),
        (b"\x0f" + K, i64(1) + blob(b"v")),
    ]
    with ScriptedStore(exchanges(*said)) as server, client_of(server) as store:
        assert store.queue_pop("k") == b"v"


def test_an_empty_queue_at_once() -> None:
    with (
        ScriptedStore(exchanges((b"\x0f" + K, i64(0)))) as server,
        client_of(server) as store,
        pytest.raises(QueueEmptyError, match="the queue k is empty"),
    ):
        store.queue_pop("k", block=False)


@pytest.mark.parametrize("begun", [b"", i64(3)[:4], i64(9) + b"only"])
def test_a_connection_lost_in_an_answer(begun: bytes) -> None:
    def script(peer: Peer) -> None:
        peer.exchange(b"\x02" + K + blob(b"") * 2, begun)

    again = exchanges((b"\x07", i64(0)))
    with ScriptedStore(script, again) as server, client_of(server) as store:
        with pytest.raises(
            DistNetworkError, match=r"compare_set of k: the server closed the connection$"
        ):
            store.compare_set("k", "", "")
        assert store.num_keys() == 0


@pytest.mark.usefixtures("_time_to_dial")
def test_a_server_that_does_not_come_back_is_told_of_with_the_call() -> None:
    with ScriptedStore(lambda _: None) as server, client_of(server) as store:
        await_news(store)
        with pytest.raises(DistNetworkError, match="set of k: the server closed the connection"):
            store.set("k", "v")
        server.__exit__()
        store.set_timeout(SHORT)
        with pytest.raises(
            DistNetworkError,
            match=rf"^the store at 127.0.0.1:{server.port}: add of k: the server could not be "
            rf"reached within 0.05 s \(127.0.0.1:{server.port}: Connection refused\)$",
        ):
            store.add("k", 1)


def test_a_loss_is_noticed_by_what_has_no_answer() -> None:
    """With torch's, the first `set` after the server died succeeds."""

    def leave(peer: Peer) -> None:
        peer.exchange(b"\x07", i64(0))

    with ScriptedStore(leave) as server, client_of(server) as store:
        assert store.num_keys() == 0
        await_news(store)
        with pytest.raises(DistNetworkError, match="set of k: the server closed the connection"):
            store.set("k", "v")


@pytest.mark.parametrize(
    ("call", "request_", "answer", "said"),
    [
        (lambda s: s.check(["k"]), b"\x05" + ONE_K, b"\x07", "CHECK with 7"),
        (lambda s: s.wait(["k"]), b"\x06" + ONE_K, b"\x01", "WAIT with 1"),
        (lambda s: s.num_keys(), b"\x07", i64(1) + b"x", "1 bytes that nobody asked for"),
        (lambda s: s.list_keys(), b"\x11", i64(-1), "the number -1"),
        (
            lambda s: s.compare_set("k", "", ""),
            b"\x02" + K + blob(b"") * 2,
            b"HTTP/1.1 400",
            r"a value of \d+ bytes",
        ),
    ],
)
def test_an_answer_that_is_none(
    call: Callable[[TCPStore], Any], request_: bytes, answer: bytes, said: str
) -> None:
    again = exchanges((b"\x07", i64(3)))
    with ScriptedStore(exchanges((request_, answer)), again) as server, client_of(server) as store:
        with pytest.raises(DistStoreError, match=f"the answer was none: .*{said}"):
            call(store)
        assert store.num_keys() == 3


def test_what_nobody_asked_for_is_not_taken_for_an_answer() -> None:
    taken = threading.Event()

    def script(peer: Peer) -> None:
        peer.exchange(b"\x07", i64(1))
        assert taken.wait(LONG_S)
        peer.say(i64(7))
        peer.expect_end()

    with ScriptedStore(script) as server, client_of(server) as store:
        assert store.num_keys() == 1
        taken.set()
        await_news(store)
        with pytest.raises(DistStoreError, match="8 bytes that nobody asked for"):
            store.num_keys()


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda s: s.set("k" * 8192, ""), "a key of 8193 bytes is too long"),
        (lambda s: s.get("k" * 8192), "too long"),
        (lambda s: s.queue_pop("k" * 8192), "too long"),
        (lambda s: s.barrier("k" * 8192, 1), "too long"),
        (lambda s: s.set("k", bytes(8 * 1024 * 1024 + 1)), "k: a value of 8388609 bytes is too"),
        (lambda s: s.compare_set("k", "", bytes(8 * 1024 * 1024 + 1)), "too large"),
        (lambda s: s.wait(["k"] * 131_073), "131073 keys at once are too many"),
        (lambda s: s.check(["k"] * 131_073), "too many"),
        (lambda s: s.multi_get(["k"] * 131_073), "too many"),
        (lambda s: s.multi_set(["k"] * 131_073, ["v"] * 131_073), "too many"),
        (lambda s: s.multi_set(["k"], []), "1 keys and 0 values"),
        (lambda s: s.add("k", 2**63), "does not fit into the 64 bits"),
    ],
)
def test_what_a_server_would_hang_up_on_is_not_said(
    call: Callable[[TCPStore], Any], problem: str
) -> None:
    with ScriptedStore(exchanges((b"\x07", i64(0)))) as server, client_of(server) as store:
        with pytest.raises(ValueError, match=problem):
            call(store)
        assert store.num_keys() == 0


def test_one_text_is_not_a_list_of_keys() -> None:
    with (
        ScriptedStore(nothing) as server,
        client_of(server) as store,
        pytest.raises(TypeError, match="not one: 'key'"),
    ):
        store.wait("key")


def test_messages_do_not_show_thousands_of_keys() -> None:
    with ScriptedStore(lambda _: None) as server, client_of(server) as store:
        await_news(store)
        with pytest.raises(DistNetworkError) as caught:
            store.check([f"{number}" + "k" * 1000 for number in range(1000)])
        assert len(str(caught.value)) < 1200
        assert str(caught.value).count("...") == 8
        assert "and 992 more" in str(caught.value)


def test_an_interrupted_call_leaves_no_answer_behind() -> None:
    main, raised = threading.get_ident(), threading.Event()

    def interrupt(peer: Peer) -> None:
        peer.expect(b"\x06" + ONE_K)
        # Again and again: a signal in the moment before Python goes to sleep does not wake it.
        while not raised.wait(0.01):
            signal.pthread_kill(main, signal.SIGUSR1)
        peer.expect_end()

    def raise_it(*_: object) -> None:
        if not raised.is_set():
            raised.set()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, raise_it)
    try:
        again = exchanges((b"\x07", i64(3)))
        with ScriptedStore(interrupt, again) as server, client_of(server) as store:
            with pytest.raises(KeyboardInterrupt):
                store.wait(["k"])
            assert store.num_keys() == 3
    finally:
        signal.signal(signal.SIGUSR1, before)


def waiting(store: TCPStore) -> tuple[threading.Thread, list[Exception]]:
    """Wait for a key in another thread, and collect what is raised there."""
    raised: list[Exception] = []

    def wait() -> None:
        try:
            store.wait(["k"])
        except DistStoreError as problem:
            raised.append(problem)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, raised


def test_closing_ends_the_call_of_another_thread() -> None:
    heard = threading.Event()

    def script(peer: Peer) -> None:
        peer.expect(b"\x06" + ONE_K)
        heard.set()
        peer.expect_end()

    with ScriptedStore(script) as server:
        store = client_of(server)
        thread, raised = waiting(store)
        assert heard.wait(LONG_S)
        store.close()
        thread.join()
    assert "is closed here" in str(raised[0])
    with pytest.raises(DistStoreError, match=f"127.0.0.1:{server.port} is closed here"):
        store.set("k", "v")
    store.close()


def test_a_store_in_use_is_not_waited_for_for_ever() -> None:
    heard, over = threading.Event(), threading.Event()

    def script(peer: Peer) -> None:
        peer.expect(b"\x06" + ONE_K)
        heard.set()
        assert over.wait(LONG_S)
        peer.say(b"\x00")
        peer.expect_end()

    with ScriptedStore(script) as server, client_of(server) as store:
        thread, raised = waiting(store)
        assert heard.wait(LONG_S)
        store.set_timeout(SHORT)
        with pytest.raises(StoreTimeoutError, match="set of l: another thread used it"):
            store.set("l", "v")
        over.set()
        thread.join()
        assert not raised


def test_a_forked_child_has_a_connection_of_its_own() -> None:
    """Also when another thread was in a call while it was forked."""
    heard, over = threading.Event(), threading.Event()

    def parents(peer: Peer) -> None:
        peer.expect(b"\x06" + ONE_K)
        heard.set()
        assert over.wait(LONG_S)
        peer.say(b"\x00")
        peer.exchange(b"\x07", i64(1))
        peer.expect_end()

    def childs(peer: Peer) -> None:
        assert peer.socket.recv(100)[:6] == b"\x00\xce\xf7\x85\x3c\x0d"
        peer.say(os.getpid().to_bytes(4, "little"))

    with ScriptedStore(parents) as server, client_of(server) as store:
        thread, raised = waiting(store)
        assert heard.wait(LONG_S)
        with ScriptedStore(childs, greets=False) as other:
            store._link._port = other.port  # The scripts of one server are not for two at once.
            pid = os.fork()
            if pid == 0:
                try:
                    store.num_keys()
                except DistNetworkError:  # The nonce is not this process's, so it did connect.
                    os._exit(7)
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        over.set()
        thread.join()
        assert not raised
        assert store.num_keys() == 1


def test_a_clone_has_a_connection_of_its_own() -> None:
    with ScriptedStore(nothing, exchanges((b"\x07", i64(1)))) as server:
        its_own = LONG / 2
        store = client_of(server, its_own)
        other = store.clone()
        store.close()
        assert (other.host, other.port, other.timeout) == ("127.0.0.1", server.port, its_own)
        assert other.num_keys() == 1
        other.close()


def test_what_a_store_says_of_itself() -> None:
    with ScriptedStore(nothing) as server, client_of(server, use_libuv=False) as store:
        assert store.has_extended_api()
        assert not store.libuvBackend
        assert repr(store) == f"<TCPStore client of 127.0.0.1:{server.port}>"
        store.set_timeout(SHORT)
        assert store.timeout == SHORT


def test_a_forgotten_store_is_closed() -> None:
    with ScriptedStore(nothing) as server:
        client_of(server)


def test_a_very_long_timeout_is_one() -> None:
    script = exchanges((b"\x06" + ONE_K, b"\x00"))
    with ScriptedStore(script) as server, client_of(server, timedelta.max) as store:
        store.wait(["k"])
