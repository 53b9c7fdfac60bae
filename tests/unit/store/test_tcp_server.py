"""The server of the TCPStore protocol with plain sockets: every operation, byte for byte."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import pytest

from holdfast.errors import EnvironmentProblem
from holdfast.store.tcp import server as tcp_loop
from holdfast.store.tcp.embedded import TcpStoreServer

if TYPE_CHECKING:
    from collections.abc import Iterator

HELLO = bytes.fromhex("00 ce f7 85 3c")
PATIENCE_S = 30


def u64(number: int) -> bytes:
    return number.to_bytes(8, "little", signed=number < 0)


def blob(value: bytes) -> bytes:
    return u64(len(value)) + value


def keys(*names: bytes) -> bytes:
    return u64(len(names)) + b"".join(map(blob, names))


def op(number: int, *fields: bytes) -> bytes:
    return bytes([number]) + b"".join(fields)


PING, PONG = op(13, b"ping"), b"ping"


class Client:
    """One end of a connection."""

    def __init__(self, port: int, *, greets: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        if greets:
            self.send(HELLO)

    def send(self, *requests: bytes) -> None:
        self.socket.sendall(b"".join(requests))

    def ask(self, request: bytes, answer: bytes) -> None:
        """Send a request; it has to be answered just so, and nothing may come before."""
        self.send(request, PING)
        self.hear(answer + PONG)

    def hear(self, expected: bytes) -> None:
        heard = b""
        while len(heard) < len(expected):
            piece = self.socket.recv(min(65536, len(expected) - len(heard)))
            assert piece, f"closed after {heard!r}"
            heard += piece
        assert heard == expected

    def is_closed(self) -> bool:
        """Whether nothing more comes. Waits for that."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def listener() -> socket.socket:
    bound = socket.socket(socket.AF_INET6)
    bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    bound.bind(("::", 0))
    return bound


@pytest.fixture
def server() -> Iterator[TcpStoreServer]:
    with TcpStoreServer(listener()) as running:
        running.start()
        yield running


@pytest.fixture
def client(server: TcpStoreServer) -> Iterator[Client]:
    with Client(server.port) as one:
        yield one


@pytest.fixture
def other(server: TcpStoreServer) -> Iterator[Client]:
    with Client(server.port) as one:
        yield one


def loop_of(server: TcpStoreServer) -> tcp_loop.ServingLoop:
    assert server._loop is not None
    return server._loop


def watched(server: TcpStoreServer) -> dict[int, int]:
    """Return for what the server asks the kernel to be woken: events by descriptor."""
    with open(f"/proc/self/fdinfo/{loop_of(server)._epoll.fileno()}") as info:
        lines = [line.split() for line in info if line.startswith("tfd:")]
    return {int(line[1]): int(line[3], 16) & ~(select.EPOLLERR | select.EPOLLHUP) for line in lines}


STOP_WAITING, WAIT_CANCELED = b"\0", b"\1"
CONVERSATION = [
    (op(1, blob(b"/k"), blob(b"value")), b""),
    (op(3, blob(b"/k")), blob(b"value")),
    (op(3, blob(b"/missing")), blob(b"")),
    (op(2, blob(b"/k"), blob(b"value"), blob(b"v")), blob(b"v")),
    (op(2, blob(b"/k"), blob(b"value"), blob(b"w")), blob(b"v")),
    (op(2, blob(b"/missing"), blob(b"some"), blob(b"w")), blob(b"some")),
    (op(4, blob(b"init/"), u64(3)), u64(3)),
    (op(4, blob(b"init/"), u64(-5)), u64(-2)),
    (op(5, keys(b"/k", b"init/")), b"\0"),
    (op(5, keys(b"/k", b"/missing")), b"\1"),
    (op(5, keys()), b"\0"),
    (op(6, keys(b"/k", b"init/")), STOP_WAITING),
    (op(6, keys(b"/k")), STOP_WAITING),
    (op(6, keys(b"/missing")), b""),
    (op(12), WAIT_CANCELED),
    (op(12), WAIT_CANCELED),
    (op(7), u64(2)),
    (op(8, blob(b"init/")), u64(1)),
    (op(8, blob(b"init/")), u64(0)),
    (op(9, blob(b"/k"), blob(b"alue")), b""),
    (op(9, blob(b"/l"), blob(b"")), b""),
    (op(10, keys(b"/l", b"/k", b"/missing")), blob(b"") + blob(b"value") + blob(b"")),
    (op(11, u64(2), blob(b"/k"), blob(b"1"), blob(b"/l"), blob(b"2")), b""),
    (op(17), u64(2) + blob(b"/k") + blob(b"/l")),
    (op(13, b"\x01\x02\x03\x04"), b"\x01\x02\x03\x04"),
    (op(14, blob(b"/q"), blob(b"item")), b""),
    (op(14, blob(b"/q"), blob(b"")), b""),
    (op(16, blob(b"/q")), u64(2)),
    (op(5, keys(b"/q")), b"\0"),
    (op(6, keys(b"/q")), STOP_WAITING),
    (op(15, blob(b"/q")), u64(2) + blob(b"item")),
    (op(15, blob(b"/q")), u64(1) + blob(b"")),
    (op(15, blob(b"/q")), u64(0)),
    (op(16, blob(b"/q")), u64(0)),
    (op(18, blob(b"/b"), u64(1)), STOP_WAITING),
    (op(18, blob(b"/b"), u64(2)), b""),
    (op(12), WAIT_CANCELED),
    (op(7), u64(3)),
]


def test_every_operation(client: Client) -> None:
    for request, answer in CONVERSATION:
        client.ask(request, answer)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_every_operation_in_pieces_and_all_at_once(size: int, server: TcpStoreServer) -> None:
    with Client(server.port, greets=False) as client:
        client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = HELLO + b"".join(request for request, _ in CONVERSATION)
        for at in range(0, len(stream), size):
            client.send(stream[at : at + size])
        client.hear(b"".join(answer for _, answer in CONVERSATION))


def test_both_families_and_what_connections_have(server: TcpStoreServer) -> None:
    with (
        Client(server.port) as client,
        socket.create_connection(("::1", server.port), PATIENCE_S) as six,
    ):
        six.sendall(HELLO + PING)
        assert six.recv(4) == PONG
        client.ask(b"", b"")
        assert server.clients == 2
        for connection in loop_of(server).connections.values():
            accepted = connection.socket
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
            assert not os.get_inheritable(accepted.fileno())
            assert not os.get_blocking(accepted.fileno())


def test_a_wait_is_answered_when_the_key_comes(client: Client, other: Client) -> None:
    client.ask(op(6, keys(b"/x", b"/y")), b"")
    other.ask(op(1, blob(b"/x"), blob(b"")), b"")
    other.ask(op(8, blob(b"/x")), u64(1))
    other.ask(op(1, blob(b"/y"), blob(b"")), b"")
    client.ask(b"", b"")
    other.ask(op(1, blob(b"/x"), blob(b"")), b"")
    client.hear(STOP_WAITING)


def test_answers_keep_their_order_when_a_client_wakes_itself(client: Client) -> None:
    client.send(op(6, keys(b"/x")), PING, op(1, blob(b"/x"), blob(b"")), op(7))
    client.hear(PONG + STOP_WAITING + u64(1))


def test_whoever_goes_away_is_not_counted_at_a_barrier(
    server: TcpStoreServer, client: Client, other: Client
) -> None:
    with Client(server.port) as gone:
        gone.ask(op(18, blob(b"/b"), u64(2)), b"")
    while server.clients > 2:
        client.ask(b"", b"")
    client.ask(op(3, blob(b"/b")), blob(b"0"))
    client.ask(op(18, blob(b"/b"), u64(2)), b"")
    other.ask(op(18, blob(b"/b"), u64(2)), STOP_WAITING)
    client.hear(STOP_WAITING)


def test_a_queue_passes_on_what_was_promised_to_one_who_is_gone(
    monkeypatch: pytest.MonkeyPatch, server: TcpStoreServer, client: Client, other: Client
) -> None:
    monkeypatch.setattr(tcp_loop, "PROMISE_S", PATIENCE_S)
    with Client(server.port) as gone:
        gone.ask(op(1, blob(b"/here"), blob(b"")), b"")
        gone.send(op(6, keys(b"/q")))
        client.ask(op(6, keys(b"/here")), STOP_WAITING)
        client.ask(op(6, keys(b"/q")), b"")
        other.ask(op(14, blob(b"/q"), blob(b"item")), b"")
        gone.hear(STOP_WAITING)
        other.ask(op(15, blob(b"/q")), u64(0))
    client.hear(STOP_WAITING)
    client.ask(op(15, blob(b"/q")), u64(1) + blob(b"item"))


# Clients that break the rules


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        op(1, blob(b"/evil"), blob(b"")) + HELLO,
        HELLO[:4] + b"\0" + op(1, blob(b"/evil"), blob(b"")),
        os.urandom(1000).replace(b"\0", b"\1"),
    ],
)
def test_nothing_is_done_for_whoever_does_not_introduce_itself(
    sent: bytes, server: TcpStoreServer, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(server.port, greets=False) as stranger:
        stranger.send(sent)
        assert stranger.is_closed()
    client.ask(op(7), u64(0))
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (HELLO, "introduces itself twice"),
        (op(19), "an operation that does not exist: 19"),
        (op(3, u64(2**63)), "a key of 9223372036854775808 bytes; 8192 is the most"),
        (op(1, blob(b"/k"), u64(2**23 + 1)), "a value of 8388609 bytes; 8388608 is the most"),
        (op(5, u64(131_073)), "a request of 131073 keys; 131072 is the most"),
        (op(4, blob(b"/word"), u64(1)), "a value that is no number cannot be counted"),
        (op(6, keys(b"/never")) * 2, "a client cannot wait for two things at a time"),
    ],
)
def test_a_client_that_breaks_the_rules_is_closed_alone(
    sent: bytes,
    told: str,
    server: TcpStoreServer,
    client: Client,
    other: Client,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other.ask(op(1, blob(b"/word"), blob(b"word")), b"")
    client.send(PING, sent)
    client.hear(PONG)
    assert client.is_closed()
    other.ask(op(3, blob(b"/word")), blob(b"word"))
    host, port = client.socket.getsockname()
    assert f"closed the connection of {host}:{port}: " in caplog.text
    assert told in caplog.text


def test_answers_are_sent_to_a_client_that_will_send_nothing_more(client: Client) -> None:
    client.send(op(1, blob(b"/k"), blob(b"v")), op(3, blob(b"/k")))
    client.socket.shutdown(socket.SHUT_WR)
    client.hear(blob(b"v"))
    assert client.is_closed()


def test_a_closed_connection_is_closed_even_if_another_process_has_a_copy(
    server: TcpStoreServer, client: Client, other: Client
) -> None:
    client.ask(b"", b"")
    host, port = client.socket.getsockname()
    (descriptor,) = (
        one.descriptor
        for one in list(loop_of(server).connections.values())
        if str(one) == f"{host}:{port}"
    )
    assert descriptor in watched(server)
    copy = os.dup(descriptor)
    try:
        client.send(op(19))
        assert client.is_closed()
        other.ask(b"", b"")
        assert descriptor not in watched(server)
    finally:
        os.close(copy)


# Limits


def test_who_only_looks_at_a_queue_keeps_nothing_from_others(
    monkeypatch: pytest.MonkeyPatch, client: Client, other: Client
) -> None:
    monkeypatch.setattr(tcp_loop, "PROMISE_S", 0.01)
    client.ask(op(14, blob(b"/q"), blob(b"item")), b"")
    client.send(op(6, keys(b"/q")))
    client.hear(STOP_WAITING)  # And then it asks for nothing more.
    other.send(op(6, keys(b"/q")))
    other.hear(STOP_WAITING)
    other.ask(op(15, blob(b"/q")), u64(1) + blob(b"item"))


def test_whoever_most_is_kept_for_makes_room_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mib = 1024 * 1024
    monkeypatch.setattr(tcp_loop, "BYTES_MAX", 60 * mib)
    with TcpStoreServer(listener()) as server:
        server.start()
        with Client(server.port) as good, Client(server.port) as slow, Client(server.port) as third:
            good.ask(op(1, blob(b"/k"), blob(bytes(6 * mib))), b"")
            slow.send(op(10, keys(*[b"/k"] * 10)))  # It does not read the answer.
            third.ask(b"", b"")
            while loop_of(server)._kept_bytes < 40 * mib:
                third.ask(b"", b"")
            kept = loop_of(server)._kept_bytes
            values = [blob(b"/%d" % number) + blob(bytes(6 * mib)) for number in range(6)]
            large = op(11, u64(len(values)), *values)
            few = 60 * mib - kept + mib  # Too much together, and less than what the other has.
            good.send(large[:few])
            while server.clients > 2:
                third.ask(b"", b"")
            good.send(large[few:])
            good.ask(op(7), u64(7))


def test_a_slow_reader_is_not_read_from_and_stalls_nobody(
    server: TcpStoreServer, client: Client, other: Client
) -> None:
    value = os.urandom(1024 * 1024)
    other.ask(op(1, blob(b"/k"), blob(value)), b"")
    client.send(op(3, blob(b"/k")) * 100, op(1, blob(b"/last"), blob(b"")))
    for _ in range(100):
        other.ask(op(5, keys(b"/last")), b"\1")
    assert loop_of(server)._kept_bytes <= 2 * len(value)
    (full,) = (one for one in loop_of(server).connections.values() if one.unsent)
    assert watched(server)[full.descriptor] == select.EPOLLOUT  # Or it would run in circles.
    for _ in range(100):
        client.hear(blob(value))
    client.ask(op(5, keys(b"/last")), b"\0")
    assert loop_of(server)._kept_bytes == 0
    assert watched(server)[full.descriptor] == select.EPOLLIN


def test_whoever_asks_for_much_at_once_gets_it_in_order(client: Client) -> None:
    values = [bytes([number]) * 100_000 for number in range(20)]
    for number, value in enumerate(values):
        client.send(op(1, blob(b"%d" % number), blob(value)))
    client.send(*(op(3, blob(b"%d" % number)) for number in range(20)))
    client.hear(b"".join(map(blob, values)))


def test_what_comes_after_a_turn_waits_for_what_came_before(
    monkeypatch: pytest.MonkeyPatch, client: Client
) -> None:
    monkeypatch.setattr(tcp_loop, "RECEIVE_BYTES", 64)
    monkeypatch.setattr(tcp_loop, "TURN_BYTES", 10)
    keys = [b"%d" % number for number in range(200)]
    client.send(*(op(1, blob(key), blob(key)) for key in keys))
    client.send(*(op(3, blob(key)) for key in keys))
    client.hear(b"".join(map(blob, keys)))


def test_what_is_kept_for_all_has_a_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp_loop, "BYTES_MAX", 100_000)
    with TcpStoreServer(listener()) as server:
        server.start()
        with Client(server.port) as good:
            good.ask(op(1, blob(b"/k"), blob(bytes(50_000))), b"")
            with Client(server.port) as client:
                client.send(op(1, blob(b"/l"), blob(bytes(50_000))))
                assert client.is_closed()
            with Client(server.port) as client:
                client.send(op(1, blob(b"/l"), u64(200_000), bytes(190_000)))
                assert client.is_closed()
            good.ask(op(7), u64(1))
            assert loop_of(server)._kept_bytes == 0
    assert "the store is full: it holds 100000 bytes at most" in caplog.text
    assert "requests and answers of more than 100000 bytes" in caplog.text


def test_an_answer_has_a_limit(client: Client, other: Client) -> None:
    client.ask(op(1, blob(b"/k"), blob(bytes(1024 * 1024))), b"")
    client.send(op(10, keys(*[b"/k"] * 1000)))
    assert client.is_closed()
    other.ask(op(7), u64(1))


def test_whoever_stays_silent_is_closed(monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    client.ask(b"", b"")
    port = client.socket.getpeername()[1]
    monkeypatch.setattr(tcp_loop, "VALIDATE_S", 0.05)
    with Client(port, greets=False) as silent:
        silent.send(HELLO[:3])
        assert silent.is_closed()
    client.ask(b"", b"")


@pytest.mark.parametrize("enough_s", [0.0, 0.1])
def test_the_oldest_silent_one_makes_room(
    enough_s: float, monkeypatch: pytest.MonkeyPatch, client: Client
) -> None:
    client.ask(b"", b"")
    port = client.socket.getpeername()[1]
    monkeypatch.setattr(tcp_loop, "HALF_OPEN_MAX", 2)
    monkeypatch.setattr(tcp_loop, "HALF_OPEN_MIN_S", enough_s)
    with ExitStack() as stack:
        silent = [stack.enter_context(Client(port, greets=False)) for _ in range(4)]
        late = stack.enter_context(Client(port))
        late.ask(b"", b"")
        assert all(one.is_closed() for one in silent[:3])
        silent[3].send(HELLO)
        silent[3].ask(b"", b"")


def test_the_number_of_connections_has_a_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp_loop, "CONNECTIONS_MAX", 2)
    monkeypatch.setattr(tcp_loop, "raise_descriptor_limit", bool)  # Not of the process of tests.
    with TcpStoreServer(listener()) as server:
        server.start()
        with Client(server.port) as one, Client(server.port) as two:
            one.ask(b"", b"")
            two.ask(b"", b"")
            with Client(server.port, greets=False) as more:
                assert more.is_closed()
            one.ask(b"", b"")
    assert "it has 2 connections (ulimit -Hn" in caplog.text


def test_the_stores_of_one_process_share_its_room(
    monkeypatch: pytest.MonkeyPatch, server: TcpStoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The generation before may have all its connections still, and the agent needs some too."""
    monkeypatch.setattr(tcp_loop, "CONNECTIONS_MAX", 2)
    monkeypatch.setattr(tcp_loop, "raise_descriptor_limit", bool)  # Not of the process of tests.
    with (
        TcpStoreServer(listener()) as newer,
        Client(server.port) as one,
        Client(server.port) as two,
    ):
        newer.start()
        one.ask(b"", b"")
        two.ask(b"", b"")
        with Client(newer.port) as late:
            while not caplog.messages:
                two.ask(b"", b"")
            assert newer.clients == 0
            two.socket.close()
            late.ask(b"", b"")  # It had to wait, no more.
            one.ask(b"", b"")
    assert "with those of the generation before there are 2 (ulimit" in caplog.text


def test_many_connections(server: TcpStoreServer) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(server.port)) for _ in range(300)]
        for number, one in enumerate(clients):
            one.send(op(4, blob(b"/n"), u64(1)), op(6, keys(b"/go")))
            one.hear(u64(number + 1))
        assert server.clients == 300
        clients[0].send(op(12), op(1, blob(b"/go"), blob(b"")))
        clients[0].hear(WAIT_CANCELED)
        for one in clients[1:]:
            one.hear(STOP_WAITING)


NO_DESCRIPTORS = """\
import os, resource, socket, sys
from test_tcp_server import Client, TcpStoreServer, listener
server = TcpStoreServer(listener())
server.start()
first = Client(server.port)
first.ask(b"", b"")
late = socket.socket()
late.settimeout(30)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    pass
late.connect(("127.0.0.1", server.port))
late.sendall(b"\\0\\xce\\xf7\\x85\\x3c\\x0dping")
for _ in range(1000):
    first.ask(b"", b"")
assert server.clients == 1
for one in taken:
    os.close(one)
assert late.recv(4) == b"ping"
server.close()
"""


def run(program: str, **environment: str) -> str:
    """Run a program that may use what is in this file; return what it said on standard error."""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_without_descriptors_others_are_served_and_newcomers_later() -> None:
    told = run(NO_DESCRIPTORS, LOGLEVEL="DEBUG")
    tries = told.count("cannot take another connection now: Too many open files")
    assert 1 <= tries < 500  # In a busy loop it would be more than one for each question above.


# Beginning and end


def test_closing_ends_those_who_wait(server: TcpStoreServer, client: Client) -> None:
    client.ask(op(6, keys(b"/never")), b"")
    closers = [threading.Thread(target=server.close) for _ in range(3)]
    for one in closers:
        one.start()
    assert client.is_closed()
    for one in closers:
        one.join()
    server.close()
    assert server.clients == 0
    with pytest.raises(ConnectionRefusedError):
        Client(server.port)


def test_closing_one_that_was_never_used_or_never_started() -> None:
    for starts in (False, True):
        server = TcpStoreServer(listener())
        if starts:
            server.start()
        server.close()
        server.close()
        with pytest.raises(ConnectionRefusedError):
            Client(server.port)
        with pytest.raises(EnvironmentProblem, match=f"port {server.port}"):
            server.start()


def test_a_server_may_be_closed_by_its_own_thread(
    monkeypatch: pytest.MonkeyPatch,
    server: TcpStoreServer,
    client: Client,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The garbage collector runs there too, and may find that nobody needs the server."""
    client.ask(b"", b"")

    def close_then(*_: object) -> bytes:
        server.close()
        return b""

    monkeypatch.setattr(tcp_loop, "answer", close_then)
    client.send(PING)
    assert client.is_closed()
    server.close()
    assert server._wake == -1
    assert not caplog.messages
    with pytest.raises(ConnectionRefusedError):
        Client(server.port)


def test_a_fault_of_ours_is_told_once_and_hangs_nobody(
    monkeypatch: pytest.MonkeyPatch,
    server: TcpStoreServer,
    client: Client,
    other: Client,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client.ask(b"", b"")
    other.ask(op(6, keys(b"/never")), b"")

    def broken(*_: object) -> bytes:
        raise ZeroDivisionError("what?")

    monkeypatch.setattr(tcp_loop, "answer", broken)
    client.send(PING)
    assert client.is_closed()
    assert other.is_closed()
    server.close()
    (told,) = caplog.messages
    assert told.startswith(
        "the store for the workers failed, and its connections are closed: "
        f"ZeroDivisionError: what? at {__file__}:"
    )


FORKING = """\
import os, threading
from test_tcp_server import Client, TcpStoreServer, listener
def sockets():
    names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    targets = [os.readlink(name) for name in names if os.path.islink(name)]
    return sorted(one for one in targets if one.startswith(("socket:", "anon_inode:")))
server = TcpStoreServer(listener())
server.start()
client = Client(server.port)
client.ask(b"", b"")
mine = os.fstat(client.socket.fileno()).st_ino
reads, writes = os.pipe()
its_end, our_end = os.pipe()
locked, forked = threading.Event(), threading.Event()
def closing():
    with server._lock:
        locked.set()
        forked.wait()
another = threading.Thread(target=closing)
another.start()
locked.wait()
pid = os.fork()
if pid == 0:
    server.close()  # It has nothing to close any more, and must not wait for a thread.
    assert server.clients == 0
    assert sockets() == [f"socket:[{mine}]"], sockets()
    os.write(writes, b"x")
    os.close(our_end)
    os.read(its_end, 1)  # It lives on until its parent lets it go.
    os._exit(0)
forked.set()
another.join()
os.close(writes)
assert os.read(reads, 1) == b"x"
client.ask(b"", b"")
server.close()
assert client.is_closed()
assert os.waitpid(pid, os.WNOHANG) == (0, 0)
os.close(our_end)
os.waitpid(pid, 0)
"""


def test_a_fork_keeps_nothing_open() -> None:
    assert run(FORKING) == ""


LIGHT = """\
import sys, _socket
bare = set(sys.modules)
import threading, select, holdfast.console, holdfast.errors, __future__
before = set(sys.modules)
from holdfast.store.tcp.embedded import TcpStoreServer
listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
listener.bind(("127.0.0.1", 0))
server = TcpStoreServer(listener)
server.start()
more = set(sys.modules) - before
assert more <= {"holdfast.store", "holdfast.store.tcp.embedded"}, more
one = _socket.socket()
one.connect(("127.0.0.1", server.port))
one.send(b"\\0\\xce\\xf7\\x85\\x3c\\x0dping")
assert one.recv(4) == b"ping"
assert "holdfast.store.tcp.server" in sys.modules
assert not set(sys.modules) & {"asyncio", "socket", "logging", "typing", "re"}
server.close()
"""


def test_only_the_first_client_loads_what_it_needs() -> None:
    assert run(LIGHT) == ""
