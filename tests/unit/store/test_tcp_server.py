"""The server of the TCPStore protocol over plain sockets: its limits, its clients, its end.

Arbitrary bytes in arbitrary pieces are in tests/fuzz, real clients in tests/peers and tests/contract.
"""

from __future__ import annotations

import gc
import os
import random
import select
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Self

import pytest
from scripted_tcp_store import blob, u64

from holdfast.errors import EnvironmentProblem
from holdfast.store.key_space import KeySpace
from holdfast.store.store_errors import DistNetworkError
from holdfast.store.tcp import store_server as loop_module
from holdfast.store.tcp import tcp_protocol
from holdfast.store.tcp.embedded import TcpStoreServer
from holdfast.store.tcp.store_client import TCPStore
from holdfast.store.tcp.store_server import fast_responder, respond
from holdfast.store.tcp.tcp_protocol import Requests

if TYPE_CHECKING:
    from collections.abc import Iterator

HELLO = bytes.fromhex("00 ce f7 85 3c")
PATIENCE_S = 30


def keys(*names: bytes) -> bytes:
    return u64(len(names)) + b"".join(map(blob, names))


def op(number: int, *fields: bytes) -> bytes:
    return bytes([number]) + b"".join(fields)


PING, PONG = op(13, b"ping"), b"ping"


class Client:
    """One end of a connection."""

    def __init__(self, port: int, *, greets: bool = True, source: str = "127.0.0.1") -> None:
        where = ("127.0.0.1", port)
        self.socket = socket.create_connection(where, PATIENCE_S, source_address=(source, 0))
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


def loop_of(server: TcpStoreServer) -> loop_module.ServingLoop:
    assert server._loop is not None
    return server._loop


def watched(server: TcpStoreServer) -> dict[int, int]:
    """Return for what the server asks the kernel to be woken: events by descriptor."""
    with open(f"/proc/self/fdinfo/{loop_of(server)._epoll.fileno()}") as info:
        lines = [line.split() for line in info if line.startswith("tfd:")]
    return {int(line[1]): int(line[3], 16) & ~(select.EPOLLERR | select.EPOLLHUP) for line in lines}


STOP_WAITING, WAIT_CANCELED = b"\0", b"\1"


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


# Clients that break the rules


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        op(1, blob(b"/evil"), blob(b"")) + HELLO,
        HELLO[:4] + b"\0" + op(1, blob(b"/evil"), blob(b"")),
        random.Random(7).randbytes(1000).replace(b"\0", b"\1"),
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
    "sent",
    [HELLO, op(19), op(3, u64(8193)), op(3, u64(2**63)), op(1, blob(b"/k"), u64(2**23 + 1)),
     op(5, u64(131_073)), op(4, blob(b"/word"), u64(1)), op(6, keys(b"/never")) * 2],
)  # fmt: skip
def test_a_client_that_breaks_the_rules_is_closed_alone(
    sent: bytes, client: Client, other: Client, caplog: pytest.LogCaptureFixture
) -> None:
    other.ask(op(1, blob(b"/word"), blob(b"word")), b"")
    client.send(PING, sent)
    client.hear(PONG)
    assert client.is_closed()
    other.ask(op(3, blob(b"/word")), blob(b"word"))
    host, port = client.socket.getsockname()
    assert f"{host}:{port}" in caplog.text


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


def test_a_slow_reader_is_not_read_from_and_stalls_nobody(
    server: TcpStoreServer, client: Client, other: Client
) -> None:
    value = os.urandom(1024 * 1024)
    other.ask(op(1, blob(b"/k"), blob(value)), b"")
    client.send(op(3, blob(b"/k")) * 100, op(1, blob(b"/last"), blob(b"")))
    for _ in range(100):
        other.ask(op(5, keys(b"/last")), b"\1")
    assert loop_of(server)._buffered_bytes <= 2 * len(value)
    (full,) = (one for one in loop_of(server).connections.values() if one.unsent)
    assert watched(server)[full.descriptor] == select.EPOLLOUT  # Or it would run in circles.
    for _ in range(100):
        client.hear(blob(value))
    client.ask(op(5, keys(b"/last")), b"\0")
    assert loop_of(server)._buffered_bytes == 0
    assert watched(server)[full.descriptor] == select.EPOLLIN


def test_what_comes_after_a_turn_waits_for_what_came_before(
    monkeypatch: pytest.MonkeyPatch, client: Client
) -> None:
    monkeypatch.setattr(loop_module, "RECEIVE_BYTES", 64)
    monkeypatch.setattr(loop_module, "TURN_BYTES", 10)
    keys = [b"%d" % number for number in range(200)]
    client.send(*(op(1, blob(key), blob(key)) for key in keys))
    client.send(*(op(3, blob(key)) for key in keys))
    client.hear(b"".join(map(blob, keys)))


def test_what_is_kept_for_all_has_a_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_module, "BYTES_MAX", 100_000)
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
            assert loop_of(server)._buffered_bytes == 0
    assert caplog.text.count("100000 bytes") == 2


def test_an_answer_has_a_limit(client: Client, other: Client) -> None:
    client.ask(op(1, blob(b"/k"), blob(bytes(1024 * 1024))), b"")
    client.send(op(10, keys(*[b"/k"] * 1000)))
    assert client.is_closed()
    other.ask(op(7), u64(1))


def test_whoever_stays_silent_is_closed(monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    client.ask(b"", b"")
    port = client.socket.getpeername()[1]
    monkeypatch.setattr(loop_module, "VALIDATE_S", 0.05)
    with Client(port, greets=False) as silent:
        silent.send(HELLO[:3])
        assert silent.is_closed()
    client.ask(b"", b"")


@pytest.mark.parametrize("enough_s", [0.0, 0.1])
def test_the_oldest_silent_one_makes_room(
    enough_s: float, monkeypatch: pytest.MonkeyPatch, server: TcpStoreServer
) -> None:
    monkeypatch.setattr(loop_module, "HALF_OPEN_MAX", 4)
    monkeypatch.setattr(loop_module, "HALF_OPEN_MIN_S", enough_s)
    with ExitStack() as stack:
        silent = [
            stack.enter_context(Client(server.port, greets=False, source=f"127.0.0.{number}"))
            for number in range(2, 8)
        ]
        late = stack.enter_context(Client(server.port))
        late.ask(b"", b"")
        assert all(one.is_closed() for one in silent[:3])
        silent[3].send(HELLO)
        silent[3].ask(b"", b"")


def test_silent_ones_of_one_host_make_room_for_others_at_once(
    monkeypatch: pytest.MonkeyPatch, server: TcpStoreServer
) -> None:
    monkeypatch.setattr(loop_module, "HALF_OPEN_MAX", 4)
    monkeypatch.setattr(loop_module, "HALF_OPEN_MIN_S", 1000.0)
    with ExitStack() as stack:
        slow = stack.enter_context(Client(server.port, greets=False))
        silent = [
            stack.enter_context(Client(server.port, greets=False, source="127.0.0.2"))
            for _ in range(100)
        ]
        late = stack.enter_context(Client(server.port))
        late.ask(b"", b"")
        assert all(one.is_closed() for one in silent[:97])
        slow.send(HELLO)
        slow.ask(b"", b"")


def test_the_number_of_connections_has_a_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_module, "CONNECTIONS_MAX", 2)
    monkeypatch.setattr(loop_module, "raise_descriptor_limit", bool)  # Not of the process of tests.
    with TcpStoreServer(listener()) as server:
        server.start()
        with Client(server.port) as one, Client(server.port) as two:
            one.ask(b"", b"")
            two.ask(b"", b"")
            with Client(server.port, greets=False) as more:
                assert more.is_closed()
            one.ask(b"", b"")
    assert "2 connections" in caplog.text


def test_the_stores_of_one_process_share_its_room(
    monkeypatch: pytest.MonkeyPatch, server: TcpStoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The generation before may have all its connections still, and the agent needs some too."""
    monkeypatch.setattr(loop_module, "CONNECTIONS_MAX", 2)
    monkeypatch.setattr(loop_module, "raise_descriptor_limit", bool)  # Not of the process of tests.
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
    assert len(caplog.messages) >= 1


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
    tries = told.count("Too many open files")
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

    def close_then(*_: object) -> None:
        server.close()

    monkeypatch.setattr(loop_module, "respond", close_then)
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

    monkeypatch.setattr(loop_module, "respond", broken)
    client.send(PING)
    assert client.is_closed()
    assert other.is_closed()
    server.close()
    (told,) = caplog.messages
    assert f"ZeroDivisionError: what? at {__file__}:" in told


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


# The parser and the fast path


def validated() -> Requests:
    requests = Requests()
    requests.feed(HELLO)
    assert requests.next() is None
    return requests


def test_fields_are_read_once_however_the_request_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's server reads a request of many keys again with each piece of it."""
    reads = 0
    real = tcp_protocol._UNPACK[1]

    def counting(data: bytes, at: int) -> tuple[int]:
        nonlocal reads
        reads += 1
        number: tuple[int] = real(data, at)
        return number

    requests = validated()
    monkeypatch.setattr(tcp_protocol, "_UNPACK", (counting,) * 6)
    names = [b"key %d" % number for number in range(2000)]
    stream = op(5, keys(*names))
    for at in range(0, len(stream), 100):
        assert requests.next() is None
        requests.feed(stream[at : at + 100])
    assert requests.next() == (tcp_protocol.CHECK, names)
    assert reads <= len(names) + 2 * len(stream) // 100


def test_a_whole_request_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_protocol, "REQUEST_BYTES_MAX", 1000)
    requests = validated()
    requests.feed(op(11, u64(100)))
    for _ in range(20):
        assert requests.next() is None
        assert requests.unfinished_bytes < 1000
        requests.feed(blob(b"k") + blob(bytes(100)))
    assert "1000 bytes" in requests.problem


GET_KEY, WAIT_KEY = op(3, blob(b"/key")), op(6, keys(b"/key"))


@pytest.fixture
def space() -> KeySpace:
    made = KeySpace()
    made.set(b"/key", b"value")
    made.push(b"/queue", b"one")
    return made


@pytest.mark.parametrize("data", [GET_KEY, WAIT_KEY])
def test_the_fast_path_responds_as_the_slow_one(space: KeySpace, data: bytes) -> None:
    requests = validated()
    requests.feed(data)
    request = requests.next()
    assert request is not None
    assert fast_responder(space)(1, data) == respond(space, 1, *request)


@pytest.mark.parametrize(
    "data",
    [op(3, blob(b"/missing")), op(6, keys(b"/queue")), op(6, keys(b"/key", b"/key")),
     GET_KEY + GET_KEY, GET_KEY[:-1], WAIT_KEY[:-1], op(3), op(6, u64(1)),
     op(3, u64(1 << 63), b"/key"), op(5, WAIT_KEY[1:])],
)  # fmt: skip
def test_the_fast_path_leaves_all_else_to_the_slow_one(space: KeySpace, data: bytes) -> None:
    assert fast_responder(space)(1, data) is None


def test_the_fast_path_is_closed_to_whoever_waits_and_while_anything_is_promised(
    space: KeySpace,
) -> None:
    assert not space.wait(1, [b"/missing"])
    assert fast_responder(space)(1, GET_KEY) is None
    assert fast_responder(space)(2, GET_KEY) is not None
    assert space.wait(2, [b"/queue"])
    assert fast_responder(space)(3, GET_KEY) is None


# Servers of stores in this process

LONG = timedelta(seconds=PATIENCE_S)


def served(port: int = 0, host: str = "localhost", *, shared: bool = False) -> TCPStore:
    return TCPStore(host, port, is_master=True, timeout=LONG, multi_tenant=shared)


def accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), PATIENCE_S).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_server_ends_with_its_last_store() -> None:
    store = served()
    other = store.clone()
    store.close()
    other.set("key", "value")
    assert other.get("key") == b"value"
    other.close()
    assert not accepts("127.0.0.1", store.port)
    port = served().port  # One that is dropped without being closed.
    gc.collect()
    assert not accepts("127.0.0.1", port)


def test_stores_of_one_process_may_share_a_server() -> None:
    with served(shared=True) as one, served(one.port, shared=True) as other:
        one.set("key", "value")
        one.close()
        assert other.get("key") == b"value"
    with served(other.port, shared=True) as again:  # A new one: the last ended with its stores.
        assert not again.check(["key"])
    with served() as alone, pytest.raises(DistNetworkError, match=f"port {alone.port}"):
        served(alone.port, shared=True)


def test_the_agents_port_makes_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with torch: its `tcp://` groups ask for a server also where the agent has one."""
    with served() as agents:
        agents.set("key", "value")
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("MASTER_PORT", str(agents.port))
        with served(agents.port) as store:
            assert store.get("key") == b"value"
            assert "client of" in repr(store)
        # Who does not serve does not wait for the others.
        TCPStore("localhost", agents.port, 99, is_master=True, timeout=LONG).close()
        monkeypatch.setenv("MASTER_PORT", "1")
        with pytest.raises(DistNetworkError, match=f"port {agents.port}"):
            served(agents.port)


def test_loopback_is_not_for_others_and_an_unknown_name_is_for_all() -> None:
    with served() as store:
        assert not accepts("127.0.0.2", store.port)
    with served(host="store.invalid") as store:  # A name may point to its host only later.
        assert accepts("127.0.0.2", store.port)
        assert store.add("count", 1) == 1


def test_a_bound_socket_is_adopted_if_it_has_the_port() -> None:
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    with pytest.raises(ValueError, match=f"port {port}"):
        TCPStore("localhost", 7, is_master=True, master_listen_fd=bound.fileno())
    with TCPStore(
        "localhost", port, is_master=True, timeout=LONG, master_listen_fd=bound.detach()
    ) as store:
        assert store.add("count", 1) == 1
    assert not accepts("127.0.0.1", port)
    with pytest.raises(DistNetworkError, match="localhost:0"):
        TCPStore("localhost", 0, is_master=True, master_listen_fd=2**20)


def test_a_forked_child_is_a_client_of_its_parents_server() -> None:
    with served(shared=True) as store:
        store.set("key", "value")
        pid = os.fork()
        if pid == 0:
            try:
                assert store.get("key") == b"value"
                assert "client of" in repr(store)
                with served(shared=True) as own:  # Nothing of the parent's is in its way.
                    assert not own.check(["key"])
                store.close()
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert store.get("key") == b"value"
