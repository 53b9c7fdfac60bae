"""The TCP store's server over plain sockets: limits, clients, admission of hosts, forwarding.

Arbitrary bytes in arbitrary pieces are in tests/fuzz, real clients in tests/peers and tests/contract, real
hosts and users in tests/integration/test_store_access.py.
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
from contextlib import ExitStack, suppress
from datetime import timedelta
from queue import Queue
from typing import TYPE_CHECKING, Any, Self

import pytest
from scripted_tcp_store import blob, u64

from holdfast import console
from holdfast.errors import EnvironmentProblem
from holdfast.net.addresses import Address
from holdfast.net.listening import ReservedPort
from holdfast.store.key_space import KeySpace
from holdfast.store.store_errors import DistNetworkError
from holdfast.store.tcp import attestation, forwarding, host_admission, tcp_protocol
from holdfast.store.tcp import store_server as loop_module
from holdfast.store.tcp.attestation import HostAttestation
from holdfast.store.tcp.embedded import HostAccess, TcpStoreServer
from holdfast.store.tcp.forwarding import Forwarder
from holdfast.store.tcp.store_client import TCPStore
from holdfast.store.tcp.store_connector import StoreConnector
from holdfast.store.tcp.store_server import fast_responder, respond
from holdfast.store.tcp.tcp_protocol import Requests
from holdfast.wire.store_proof import (
    NOT_FOUND,
    NOT_REPORTED,
    OTHER,
    OWN,
    QUERIES_MAX,
    AgentProof,
    OwnerAnswer,
    OwnerAnswers,
)
from holdfast.wire.wire_errors import ProofRefused
from other_users import STRANGER, as_user, hide_owners

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.wire.store_proof import OwnerQuery

HELLO = bytes.fromhex("00 ce f7 85 3c")
PATIENCE_S = 30


def keys(*names: bytes) -> bytes:
    return u64(len(names)) + b"".join(map(blob, names))


def op(number: int, *fields: bytes) -> bytes:
    return bytes([number]) + b"".join(fields)


PING, PONG = op(13, b"ping"), b"ping"


class Client:
    """One end of a connection."""

    def __init__(self, port: int, *, sends_hello: bool = True, source: str = "127.0.0.1") -> None:
        where = ("127.0.0.1", port)
        self.socket = socket.create_connection(where, PATIENCE_S, source_address=(source, 0))
        if sends_hello:
            self.send(HELLO)

    def send(self, *requests: bytes) -> None:
        self.socket.sendall(b"".join(requests))

    def expect_reply(self, request: bytes, answer: bytes) -> None:
        """Send a request; the next bytes must be exactly this response."""
        self.send(request, PING)
        self.expect(answer + PONG)

    def expect(self, expected: bytes) -> None:
        data = b""
        while len(data) < len(expected):
            piece = self.socket.recv(min(65536, len(expected) - len(data)))
            assert piece, f"closed after {data!r}"
            data += piece
        assert data == expected

    def is_closed(self) -> bool:
        """Wait for the end of the connection; return whether it ended without further data."""
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
    """Return the epoll events of the server, by descriptor."""
    with open(f"/proc/self/fdinfo/{loop_of(server)._epoll.fileno()}") as info:
        lines = [line.split() for line in info if line.startswith("tfd:")]
    return {int(line[1]): int(line[3], 16) & ~(select.EPOLLERR | select.EPOLLHUP) for line in lines}


STOP_WAITING, WAIT_CANCELED = b"\0", b"\1"


def test_disconnected_client_is_not_counted_at_a_barrier(
    server: TcpStoreServer, client: Client, other: Client
) -> None:
    with Client(server.port) as gone:
        gone.expect_reply(op(18, blob(b"/b"), u64(2)), b"")
    while server.clients > 2:
        client.expect_reply(b"", b"")
    client.expect_reply(op(3, blob(b"/b")), blob(b"0"))
    client.expect_reply(op(18, blob(b"/b"), u64(2)), b"")
    other.expect_reply(op(18, blob(b"/b"), u64(2)), STOP_WAITING)
    client.expect(STOP_WAITING)


def test_value_promised_to_a_disconnected_client_wakes_the_next(
    monkeypatch: pytest.MonkeyPatch, server: TcpStoreServer, client: Client, other: Client
) -> None:
    # The end of the promise would wake it too.
    monkeypatch.setattr(loop_module, "PROMISE_S", 3600.0)
    with Client(server.port) as gone:
        for one in (gone, other):
            one.expect_reply(op(6, keys(b"/queue")), b"")
        client.expect_reply(op(14, blob(b"/queue"), blob(b"value")), b"")
        gone.expect(STOP_WAITING)
    other.expect(STOP_WAITING)


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
def test_requests_before_validate_are_not_executed(
    sent: bytes, server: TcpStoreServer, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(server.port, sends_hello=False) as stranger:
        stranger.send(sent)
        assert stranger.is_closed()
    client.expect_reply(op(7), u64(0))
    assert caplog.text == ""


@pytest.mark.parametrize(
    "sent",
    [HELLO, op(19), op(3, u64(8193)), op(3, u64(2**63)), op(1, blob(b"/k"), u64(2**23 + 1)),
     op(5, u64(131_073)), op(4, blob(b"/word"), u64(1)), op(6, keys(b"/never")) * 2],
)  # fmt: skip
def test_protocol_violation_closes_only_its_client(
    sent: bytes, client: Client, other: Client, caplog: pytest.LogCaptureFixture
) -> None:
    other.expect_reply(op(1, blob(b"/word"), blob(b"word")), b"")
    client.send(PING, sent)
    client.expect(PONG)
    assert client.is_closed()
    other.expect_reply(op(3, blob(b"/word")), blob(b"word"))
    host, port = client.socket.getsockname()
    assert f"{host}:{port}" in caplog.text


def test_connection_is_closed_even_if_another_process_has_a_copy(
    server: TcpStoreServer, client: Client, other: Client
) -> None:
    client.expect_reply(b"", b"")
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
        other.expect_reply(b"", b"")
        assert descriptor not in watched(server)
    finally:
        os.close(copy)


# Limits


def test_slow_reader_is_not_read_and_does_not_stall_others(
    server: TcpStoreServer, client: Client, other: Client
) -> None:
    value = os.urandom(1024 * 1024)
    other.expect_reply(op(1, blob(b"/k"), blob(value)), b"")
    client.send(op(3, blob(b"/k")) * 100, op(1, blob(b"/last"), blob(b"")))
    for _ in range(100):
        other.expect_reply(op(5, keys(b"/last")), b"\1")
    assert loop_of(server)._buffered_bytes <= 2 * len(value)
    (full,) = (one for one in loop_of(server).connections.values() if one.unsent)
    assert watched(server)[full.descriptor] == select.EPOLLOUT  # Otherwise the loop would be busy.
    for _ in range(100):
        client.expect(blob(value))
    client.expect_reply(op(5, keys(b"/last")), b"\0")
    assert loop_of(server)._buffered_bytes == 0
    assert watched(server)[full.descriptor] == select.EPOLLIN


def test_requests_after_a_turn_are_executed_in_order(
    monkeypatch: pytest.MonkeyPatch, client: Client
) -> None:
    monkeypatch.setattr(loop_module, "RECEIVE_BYTES", 64)
    monkeypatch.setattr(loop_module, "TURN_BYTES", 10)
    keys = [b"%d" % number for number in range(200)]
    client.send(*(op(1, blob(key), blob(key)) for key in keys))
    client.send(*(op(3, blob(key)) for key in keys))
    client.expect(b"".join(map(blob, keys)))


def test_buffers_of_all_clients_are_limited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_module, "BYTES_MAX", 100_000)
    with TcpStoreServer(listener()) as server:
        server.start()
        with Client(server.port) as good:
            good.expect_reply(op(1, blob(b"/k"), blob(bytes(50_000))), b"")
            with Client(server.port) as client:
                client.send(op(1, blob(b"/l"), blob(bytes(50_000))))
                assert client.is_closed()
            with Client(server.port) as client:
                client.send(op(1, blob(b"/l"), u64(200_000), bytes(190_000)))
                assert client.is_closed()
            good.expect_reply(op(7), u64(1))
            assert loop_of(server)._buffered_bytes == 0
    assert caplog.text.count("100000 bytes") == 2


def test_response_is_limited(client: Client, other: Client) -> None:
    client.expect_reply(op(1, blob(b"/k"), blob(bytes(1024 * 1024))), b"")
    client.send(op(10, keys(*[b"/k"] * 1000)))
    assert client.is_closed()
    other.expect_reply(op(7), u64(1))


def test_silent_client_is_closed(monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    client.expect_reply(b"", b"")
    port = client.socket.getpeername()[1]
    monkeypatch.setattr(loop_module, "VALIDATE_S", 0.05)
    with Client(port, sends_hello=False) as silent:
        silent.send(HELLO[:3])
        assert silent.is_closed()
    client.expect_reply(b"", b"")


@pytest.mark.parametrize("enough_s", [0.0, 0.1])
def test_oldest_silent_client_is_closed_for_another(
    enough_s: float, monkeypatch: pytest.MonkeyPatch, server: TcpStoreServer
) -> None:
    monkeypatch.setattr(loop_module, "HALF_OPEN_MAX", 4)
    monkeypatch.setattr(loop_module, "HALF_OPEN_MIN_S", enough_s)
    with ExitStack() as stack:
        silent = [
            stack.enter_context(Client(server.port, sends_hello=False, source=f"127.0.0.{number}"))
            for number in range(2, 8)
        ]
        late = stack.enter_context(Client(server.port))
        late.expect_reply(b"", b"")
        assert all(one.is_closed() for one in silent[:3])
        silent[3].send(HELLO)
        silent[3].expect_reply(b"", b"")


def test_silent_clients_of_one_host_are_closed_immediately_for_others(
    monkeypatch: pytest.MonkeyPatch, server: TcpStoreServer
) -> None:
    monkeypatch.setattr(loop_module, "HALF_OPEN_MAX", 4)
    monkeypatch.setattr(loop_module, "HALF_OPEN_MIN_S", 1000.0)
    with ExitStack() as stack:
        slow = stack.enter_context(Client(server.port, sends_hello=False))
        silent = [
            stack.enter_context(Client(server.port, sends_hello=False, source="127.0.0.2"))
            for _ in range(100)
        ]
        late = stack.enter_context(Client(server.port))
        late.expect_reply(b"", b"")
        assert all(one.is_closed() for one in silent[:97])
        slow.send(HELLO)
        slow.expect_reply(b"", b"")


def test_connections_of_a_store_are_limited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_module, "CONNECTIONS_MAX", 2)
    # Keep the test process's limit unchanged.
    monkeypatch.setattr(loop_module, "raise_descriptor_limit", bool)
    with TcpStoreServer(listener()) as server:
        server.start()
        with Client(server.port) as one, Client(server.port) as two:
            one.expect_reply(b"", b"")
            two.expect_reply(b"", b"")
            with Client(server.port, sends_hello=False) as more:
                assert more.is_closed()
            one.expect_reply(b"", b"")
    assert "2 connections" in caplog.text


def test_stores_of_one_process_share_the_limit_of_connections(
    monkeypatch: pytest.MonkeyPatch, server: TcpStoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The previous generation may still have all its connections, and the agent needs descriptors too."""
    monkeypatch.setattr(loop_module, "CONNECTIONS_MAX", 2)
    # Keep the test process's limit unchanged.
    monkeypatch.setattr(loop_module, "raise_descriptor_limit", bool)
    with (
        TcpStoreServer(listener()) as newer,
        Client(server.port) as one,
        Client(server.port) as two,
    ):
        newer.start()
        one.expect_reply(b"", b"")
        two.expect_reply(b"", b"")
        with Client(newer.port) as late:
            while not caplog.messages:
                two.expect_reply(b"", b"")
            assert newer.clients == 0
            two.socket.close()
            late.expect_reply(b"", b"")  # The client was not refused; it only had to wait.
            one.expect_reply(b"", b"")
    assert len(caplog.messages) >= 1


NO_DESCRIPTORS = """\
import os, resource, socket, sys
from test_tcp_server import Client, TcpStoreServer, listener
server = TcpStoreServer(listener())
server.start()
first = Client(server.port)
first.expect_reply(b"", b"")
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
    first.expect_reply(b"", b"")
assert server.clients == 1
for one in taken:
    os.close(one)
assert late.recv(4) == b"ping"
server.close()
"""


def run(program: str, **environment: str) -> str:
    """Run a program that may use the functions of this file; return its standard error."""
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


def test_without_descriptors_new_clients_wait_and_others_are_served() -> None:
    received = run(NO_DESCRIPTORS, LOGLEVEL="DEBUG")
    tries = received.count("Too many open files")
    assert 1 <= tries < 500  # A busy loop would try more often than the clients send requests.


# Beginning and end


def test_close_disconnects_waiting_clients(server: TcpStoreServer, client: Client) -> None:
    client.expect_reply(op(6, keys(b"/never")), b"")
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


def test_unused_or_unstarted_server_can_be_closed() -> None:
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


def test_server_can_be_closed_by_its_own_thread(
    monkeypatch: pytest.MonkeyPatch,
    server: TcpStoreServer,
    client: Client,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The garbage collector runs there too, and may finalize the server."""
    client.expect_reply(b"", b"")

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


def test_internal_error_is_reported_once_and_closes_all_connections(
    monkeypatch: pytest.MonkeyPatch,
    server: TcpStoreServer,
    client: Client,
    other: Client,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client.expect_reply(b"", b"")
    other.expect_reply(op(6, keys(b"/never")), b"")

    def broken(*_: object) -> bytes:
        raise ZeroDivisionError("what?")

    monkeypatch.setattr(loop_module, "respond", broken)
    client.send(PING)
    assert client.is_closed()
    assert other.is_closed()
    server.close()
    (received,) = caplog.messages
    assert f"ZeroDivisionError: what? at {__file__}:" in received


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
client.expect_reply(b"", b"")
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
    server.close()  # It has nothing left to close, and must not wait for a thread.
    assert server.clients == 0
    assert sockets() == [f"socket:[{mine}]"], sockets()
    os.write(writes, b"x")
    os.close(our_end)
    os.read(its_end, 1)  # It runs until its parent closes the pipe.
    os._exit(0)
forked.set()
another.join()
os.close(writes)
assert os.read(reads, 1) == b"x"
client.expect_reply(b"", b"")
server.close()
assert client.is_closed()
assert os.waitpid(pid, os.WNOHANG) == (0, 0)
os.close(our_end)
os.waitpid(pid, 0)
"""


def test_forked_child_keeps_nothing_open() -> None:
    assert run(FORKING) == ""


# The parser and the fast path


def validated() -> Requests:
    requests = Requests()
    requests.feed(HELLO)
    assert requests.next() is None
    return requests


def test_fields_are_parsed_once_however_the_request_is_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch's server parses a request with many keys again with each piece of it."""
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


def test_request_size_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_fast_path_equals_the_slow_path(space: KeySpace, data: bytes) -> None:
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
def test_fast_path_leaves_other_requests_to_the_slow_path(space: KeySpace, data: bytes) -> None:
    assert fast_responder(space)(1, data) is None


def test_fast_path_is_off_for_waiting_clients_and_during_promises(
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


def test_server_closes_with_its_last_store() -> None:
    store = served()
    other = store.clone()
    store.close()
    other.set("key", "value")
    assert other.get("key") == b"value"
    other.close()
    assert not accepts("127.0.0.1", store.port)
    port = served().port  # A store that is dropped without `close`.
    gc.collect()
    assert not accepts("127.0.0.1", port)


def test_stores_of_one_process_may_share_a_server(port: int) -> None:
    with served(port, shared=True) as one, served(port, shared=True) as other:
        one.set("key", "value")
        one.close()
        assert other.get("key") == b"value"
    with served(port, shared=True) as again:  # A new server: the last closed with its stores.
        assert not again.check(["key"])
    with served() as alone, pytest.raises(DistNetworkError, match=f"port {alone.port}"):
        served(alone.port, shared=True)


def test_master_at_the_agents_port_becomes_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with torch, whose `tcp://` groups request a server even if the agent has one."""
    with served() as agents:
        agents.set("key", "value")
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("MASTER_PORT", str(agents.port))
        with served(agents.port) as store:
            assert store.get("key") == b"value"
            assert "client of" in repr(store)
        # A process that does not serve does not wait for the others.
        TCPStore("localhost", agents.port, 99, is_master=True, timeout=LONG).close()
        monkeypatch.setenv("MASTER_PORT", "1")
        with pytest.raises(DistNetworkError, match=f"port {agents.port}"):
            served(agents.port)


def test_loopback_store_is_local_and_an_unresolvable_name_listens_everywhere() -> None:
    with served() as store:
        assert not accepts("127.0.0.2", store.port)
    with served(host="store.invalid") as store:  # A name may resolve only later.
        assert accepts("127.0.0.2", store.port)
        assert store.add("count", 1) == 1


def test_bound_socket_is_adopted_if_it_has_the_port() -> None:
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


def test_forked_child_is_a_client_of_its_parents_server() -> None:
    with served(shared=True) as store:
        store.set("key", "value")
        pid = os.fork()
        if pid == 0:
            try:
                assert store.get("key") == b"value"
                assert "client of" in repr(store)
                with served(shared=True) as own:  # The parent's servers do not interfere.
                    assert not own.check(["key"])
                store.close()
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert store.get("key") == b"value"


# Admission. Other loopback addresses of this host simulate other hosts.

KEY = bytes(range(32))
GENERATION = 5
US, B, C = "127.0.0.1", "127.0.0.2", "127.0.0.3"


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of the store and of agents."""
    lines: list[str] = []
    monkeypatch.setattr(console, "warning", lines.append)
    return lines


@pytest.fixture
def _hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat connections from other addresses than 127.0.0.1 as those of other hosts."""

    def user_of(peer: socket.socket) -> int | None:
        return 0 if peer.getpeername()[0].removeprefix("::ffff:") == US else None

    monkeypatch.setattr(loop_module, "user_of", user_of)


@pytest.fixture
def serve(_hosts: None) -> Iterator[Callable[..., TcpStoreServer]]:
    """A factory of stores that listen on all addresses, so IPv4 arrives as IPv6."""
    with ExitStack() as ends:

        def make(mode: str, key: bytes = KEY) -> TcpStoreServer:
            bound = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
            server = TcpStoreServer(bound, None, HostAccess(mode, key, GENERATION))
            ends.enter_context(server)
            server.start()
            return server

        yield make


def connect(server: TcpStoreServer, host: str) -> socket.socket:
    return socket.create_connection((US, server.port), PATIENCE_S, source_address=(host, 0))


def is_served(client: socket.socket) -> bool:
    """Wait until the store responds or closes the connection; return whether it responded."""
    try:
        client.sendall(HELLO + PING)
        return client.recv(4) == PONG
    except (ConnectionResetError, BrokenPipeError):
        return False


class ScriptedAgent:
    """Attests a host as its agent does, and gives the same answer to every query, or none."""

    def __init__(
        self,
        server: TcpStoreServer,
        host: str,
        whose: int | None = OWN,
        key: bytes = KEY,
        generation: int = GENERATION,
    ) -> None:
        self._whose = whose
        self.socket = connect(server, host)
        self.queries: Queue[OwnerQuery] = Queue()
        self.is_accepted = self._prove(AgentProof(key, generation))

    def _prove(self, proof: AgentProof) -> bool:
        self.socket.sendall(proof.start())
        try:
            while not proof.done and (data := self.socket.recv(256)):
                self.socket.sendall(proof.receive(data))
        except ProofRefused:
            return False
        if proof.done:
            self._answers = OwnerAnswers(proof.stream())
            self.socket.sendall(self._answers.start())
            self._thread = threading.Thread(target=self._serve)
            self._thread.start()
        return proof.done

    def _serve(self) -> None:
        with suppress(ConnectionResetError):
            while data := self.socket.recv(4096):
                for query in self._answers.receive(data):
                    if self._whose is not None:
                        self.answer(query, self._whose)
                    self.queries.put(query)

    def answer(self, query: OwnerQuery, whose: int) -> None:
        self.socket.sendall(
            self._answers.answer(OwnerAnswer(query.number, whose, whose and STRANGER))
        )

    def close(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        if self.is_accepted:
            self._thread.join(PATIENCE_S)
        self.socket.close()


@pytest.fixture
def attest() -> Iterator[Callable[..., ScriptedAgent]]:
    """A factory of agents, which stay connected."""
    with ExitStack() as ends:

        def make(*args: Any) -> ScriptedAgent:
            agent = ScriptedAgent(*args)
            ends.callback(agent.close)
            return agent

        yield make


def is_cut_off(client: socket.socket, *pieces: bytes) -> bool:
    """Send all this data; return whether the store closes the connection meanwhile."""
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


def test_early_worker_is_held_until_its_agent_attests(
    serve: Callable[..., TcpStoreServer], attest: Callable[..., ScriptedAgent], warned: list[str]
) -> None:
    server = serve("hosts")
    with connect(server, B) as early, connect(server, C) as stranger:
        for one in (early, stranger):
            one.sendall(HELLO + PING)
        with connect(server, US) as own:
            assert is_served(own)
        assert attest(server, B).is_accepted
        assert early.recv(4) == PONG
        with connect(server, B) as late:
            assert is_served(late)
        stranger.settimeout(0)
        with pytest.raises(BlockingIOError):
            stranger.recv(1)
    assert warned == []


@pytest.mark.parametrize(
    ("key", "generation"), [(bytes(32), GENERATION), (KEY, GENERATION - 1), (b"", GENERATION)]
)
def test_proof_for_another_generation_is_refused(
    serve: Callable[..., TcpStoreServer],
    attest: Callable[..., ScriptedAgent],
    key: bytes,
    generation: int,
) -> None:
    server = serve("hosts")
    with connect(server, B) as held:
        held.sendall(HELLO + PING)
        assert not attest(server, B, OWN, key, generation).is_accepted
        with connect(server, US) as own:
            assert is_served(own)
        held.settimeout(0)
        with pytest.raises(BlockingIOError):
            held.recv(1)


def test_host_without_attestation_in_time_is_refused_and_named_once(
    serve: Callable[..., TcpStoreServer], warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "HELD_S", 0.05)
    server = serve("hosts")
    for _ in range(3):
        with connect(server, B) as stranger:
            assert not is_served(stranger)
    (line,) = warned
    assert B in line
    assert "store=open" in line


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        (OTHER, f"uid {STRANGER}"),
        (NOT_FOUND, "store=private"),
        (NOT_FOUND, "store=open"),
        (NOT_REPORTED, "store=open"),
    ],
)
def test_connection_of_another_user_or_an_unknown_one_is_refused(
    serve: Callable[..., TcpStoreServer],
    attest: Callable[..., ScriptedAgent],
    warned: list[str],
    answer: int,
    names: str,
) -> None:
    server = serve("hosts")
    with connect(server, B) as early:
        early.sendall(HELLO + PING)
        agent = attest(server, B, answer)
        assert early.recv(1) == b""
        query = agent.queries.get(timeout=PATIENCE_S)
        assert (query.host, query.port) == (bytes([127, 0, 0, 2]), early.getsockname()[1])
    for _ in range(2):
        with connect(server, B) as late:
            assert not is_served(late)
    (line,) = warned
    assert names in line


def test_one_of_several_agents_of_a_host_must_own_a_connection(
    serve: Callable[..., TcpStoreServer],
    attest: Callable[..., ScriptedAgent],
    warned: list[str],
) -> None:
    server = serve("hosts")
    silent = attest(server, B, None)
    other, missing = attest(server, B, OTHER), attest(server, B, NOT_FOUND)
    with connect(server, B) as client:
        client.sendall(HELLO + PING)
        for agent in (other, missing):
            agent.queries.get(timeout=PATIENCE_S)
        silent.answer(silent.queries.get(timeout=PATIENCE_S), OWN)
        assert client.recv(4) == PONG
    with connect(server, B) as client:
        client.sendall(HELLO + PING)
        for agent in (other, missing, silent):
            agent.queries.get(timeout=PATIENCE_S)
        silent.close()  # The others have refused it.
        assert not is_served(client)
    assert str(STRANGER) in warned[0]


def test_connection_waits_while_the_agent_connects_again(
    serve: Callable[..., TcpStoreServer],
    attest: Callable[..., ScriptedAgent],
    warned: list[str],
) -> None:
    server = serve("hosts")
    first = attest(server, B, None)
    with connect(server, B) as client:
        client.sendall(HELLO + PING)
        first.queries.get(timeout=PATIENCE_S)
        first.close()
        attest(server, B)
        assert client.recv(4) == PONG
    assert warned == []


def test_queries_to_an_unresponsive_agent_are_limited(
    serve: Callable[..., TcpStoreServer],
    attest: Callable[..., ScriptedAgent],
    warned: list[str],
) -> None:
    server = serve("hosts")
    agent = attest(server, B, None)
    with ExitStack() as ends:
        clients = [ends.enter_context(connect(server, B)) for _ in range(QUERIES_MAX + 40)]
        for one in clients:
            one.sendall(HELLO + PING)
        queries = [agent.queries.get(timeout=PATIENCE_S) for _ in range(QUERIES_MAX)]
        assert server._loop is not None
        state = next(one.agent for one in server._loop.connections.values() if one.agent)
        assert not state.queries.has_room
        with connect(server, US) as own:
            assert is_served(own)
        clients[-1].close()  # Its query was not sent, and is dropped.
        while server.clients > len(clients):
            with connect(server, US) as own:
                assert is_served(own)
        assert agent.queries.empty()
        for query in queries:
            agent.answer(query, OWN)
        for _ in clients[QUERIES_MAX:-1]:
            agent.answer(agent.queries.get(timeout=PATIENCE_S), OWN)
        for one in clients[:-1]:
            assert one.recv(4) == PONG


def test_unresponsive_agent_is_named(
    serve: Callable[..., TcpStoreServer],
    attest: Callable[..., ScriptedAgent],
    warned: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_module, "HELD_S", 0.05)
    server = serve("hosts")
    attest(server, B, None)
    with connect(server, B) as client:
        assert not is_served(client)
    assert "agent did not respond" in warned[0]


@pytest.mark.parametrize("sent", [b"\0" * 64, "an answer without a query", "half an answer"])
def test_agent_that_violates_the_protocol_is_disconnected(
    serve: Callable[..., TcpStoreServer],
    attest: Callable[..., ScriptedAgent],
    warned: list[str],
    sent: bytes | str,
) -> None:
    server = serve("hosts")
    agent = attest(server, B)
    stream = agent._answers._stream
    if sent == "half an answer":
        sent = stream.seal(bytes(5))
    elif isinstance(sent, str):
        sent = agent._answers.answer(OwnerAnswer(7, OWN))
    agent.socket.sendall(sent)
    agent._thread.join(PATIENCE_S)
    assert not agent._thread.is_alive()
    with connect(server, US) as own:
        assert is_served(own)
    assert B in warned[0]


@pytest.mark.parametrize("mode", ["hosts", "private"])
def test_store_without_a_key_serves_only_its_own_host(
    serve: Callable[..., TcpStoreServer], warned: list[str], mode: str
) -> None:
    server = serve(mode, b"")
    with connect(server, B) as other, connect(server, US) as own:
        assert not is_served(other)
        assert is_served(own)


def test_open_store_serves_every_host_and_accepts_attestations(
    serve: Callable[..., TcpStoreServer], attest: Callable[..., ScriptedAgent], warned: list[str]
) -> None:
    server = serve("open")
    with connect(server, B) as early, connect(server, C) as stranger:
        assert is_served(early)
        assert is_served(stranger)
        assert attest(server, B).is_accepted
        assert server._loop is not None
        clients = server._loop.connections.values()
        whose = {one.host_name: one.share.whose for one in clients if one.share is not None}
    assert whose == {B: B, C: "hosts outside of this job"}


def test_unattested_host_cannot_fill_an_open_store(
    serve: Callable[..., TcpStoreServer], warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (host_admission, loop_module):
        monkeypatch.setattr(module, "BYTES_MAX", 4 << 20)
    server = serve("open")
    with connect(server, US) as own:
        assert is_served(own)
        for host in (B, C):  # Both hosts have one common share.
            with connect(server, host) as stranger:
                assert is_served(stranger)
                assert is_cut_off(stranger, *values(host))
        assert server._loop is not None
        assert server._loop._space.bytes_held <= 1 << 20
        own.sendall(b"\x01" + blob(b"mine") + blob(bytes(2 << 20)) + PING)
        assert own.recv(4) == PONG
    assert "hosts outside of this job" in warned[0]


def test_incomplete_requests_count_against_a_share(
    serve: Callable[..., TcpStoreServer], warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (host_admission, loop_module):
        monkeypatch.setattr(module, "BYTES_MAX", 4 << 20)
    server = serve("open")
    with connect(server, B) as stranger:
        assert is_served(stranger)
        begun = b"\x01" + blob(b"key") + (6 << 20).to_bytes(8, "little")
        assert is_cut_off(stranger, begun, *[bytes(64 << 10)] * 90)
    with connect(server, C) as other:
        assert is_served(other)


def test_attested_host_cannot_fill_the_store_alone(
    serve: Callable[..., TcpStoreServer],
    attest: Callable[..., ScriptedAgent],
    warned: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (host_admission, loop_module):
        monkeypatch.setattr(module, "BYTES_MAX", 4 << 20)
    server = serve("hosts")
    assert attest(server, B).is_accepted
    with connect(server, B) as greedy:
        assert is_served(greedy)
        assert is_cut_off(greedy, *values(B))
    assert server._loop is not None
    assert 1 << 20 < server._loop._space.bytes_held <= 2 << 20


@pytest.mark.parametrize("speaks", [True, False])
def test_host_with_many_connections_does_not_block_others(
    serve: Callable[..., TcpStoreServer],
    attest: Callable[..., ScriptedAgent],
    warned: list[str],
    monkeypatch: pytest.MonkeyPatch,
    speaks: bool,
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
        assert attest(server, B).is_accepted
        assert waits.recv(4) == PONG


@pytest.mark.parametrize("mode", ["hosts", "open", "private"])
def test_local_client_is_refused_if_the_kernel_does_not_report_its_user(
    warned: list[str], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    hide_owners(monkeypatch)
    with TcpStoreServer(listener(), None, HostAccess(mode, KEY, GENERATION)) as server:
        server.start()
        with connect(server, US) as client:
            assert not is_served(client)
    (line,) = warned
    assert "--worker-store" in line


# The agent's side.


def ended(one: HostAttestation) -> None:
    """Wait until all threads of an attestation have ended."""
    for thread in threading.enumerate():
        if thread.name == "holdfast-attestation":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    assert not one._connections


@pytest.fixture
def _remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stores treat all connections as those of other hosts."""
    monkeypatch.setattr(loop_module, "user_of", lambda _: None)
    monkeypatch.setattr(attestation, "PAUSE_S", (0.01, 0.01))


@pytest.fixture
def attested(_remote: None, request: pytest.FixtureRequest) -> Iterator[TcpStoreServer]:
    """A store to which an agent attests this host, at 127.0.0.1 or the parameter."""
    with TcpStoreServer(listener(), None, HostAccess("hosts", KEY, GENERATION)) as server:
        server.start()
        host = getattr(request, "param", US)
        agent = HostAttestation(host, server.port, KEY, GENERATION)
        agent.start()
        yield server
        agent.cancel()
        ended(agent)


@pytest.mark.parametrize(
    ("attested", "host"), [(US, US), ("::1", "::1")], indirect=["attested"], ids=["IPv4", "IPv6"]
)
def test_agent_distinguishes_the_users_of_its_host(
    attested: TcpStoreServer, host: str, warned: list[str]
) -> None:
    def use() -> str:
        with socket.create_connection((host, attested.port), PATIENCE_S) as client:
            return "served" if is_served(client) else "refused"

    assert use() == "served"
    assert as_user(STRANGER, use) == "refused"
    (line,) = warned
    assert str(STRANGER) in line


@pytest.fixture
def _no_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_owners(monkeypatch)


@pytest.mark.usefixtures("_no_owners")
def test_agent_whose_kernel_does_not_report_users_says_so(
    warned: list[str], attested: TcpStoreServer
) -> None:
    with connect(attested, US) as own:
        assert not is_served(own)
    assert sum("the store will refuse" in line for line in warned) == 1
    assert all("store=open" in line for line in warned)


def test_agent_attests_again_after_its_connection_broke(
    attested: TcpStoreServer, warned: list[str]
) -> None:
    for _ in range(3):
        with connect(attested, US) as own:
            assert is_served(own)
        (agent,) = (one for one in loop_of(attested).connections.values() if one.agent)
        agent.socket.shutdown(socket.SHUT_RDWR)
    assert warned == []


@pytest.mark.usefixtures("_remote")
def test_attestation_is_retried_until_the_store_listens(warned: list[str]) -> None:
    with socket.socket(socket.AF_INET6) as held:
        held.bind(("::", 0))
        word = HostAttestation(US, held.getsockname()[1], KEY, GENERATION)
        word.start()
        held.listen()
        peer, _ = held.accept()
        peer.close()  # Like a store that is being replaced.
        server = TcpStoreServer(held, None, HostAccess("hosts", KEY, GENERATION))
        server.start()
        with connect(server, US) as worker:
            assert is_served(worker)
        word.cancel()
        ended(word)
        server.close()
    assert warned == []


@pytest.mark.parametrize(
    ("host", "optional"), [(US, False), ("no such host.invalid", False), (US, True)]
)
def test_failed_attestation_is_reported_in_one_line(
    warned: list[str], monkeypatch: pytest.MonkeyPatch, host: str, optional: bool
) -> None:
    monkeypatch.setattr(attestation, "ATTEST_S", 0.1)
    with socket.socket() as bound:
        bound.bind((US, 0))
        port = bound.getsockname()[1]
        word = HostAttestation(host, port, KEY, GENERATION, optional=optional)
        word.start()
        ended(word)
    assert len(warned) == (0 if optional else 1)
    assert all(f"{host}:{port}" in line for line in warned)


def test_cancelled_attestation_prints_nothing(warned: list[str]) -> None:
    with socket.create_server((US, 0)) as silent:
        word = HostAttestation(US, silent.getsockname()[1], KEY, GENERATION)
        word.start()
        peer, _ = silent.accept()
        with peer:
            assert peer.recv(1000)
            word.cancel()
            ended(word)
    assert warned == []


# Forwarding: the agent's port for its own workers, in front of a private store of another node.


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[TcpStoreServer]:
    """A private store that treats all connections as those of other hosts."""
    monkeypatch.setattr(loop_module, "user_of", lambda _: None)
    bound = socket.socket()
    bound.bind((US, 0))
    with TcpStoreServer(bound, None, HostAccess("private", KEY, GENERATION)) as server:
        server.start()
        yield server


@pytest.fixture
def forward() -> Iterator[Callable[..., int]]:
    """A factory of forwarders to a port; it returns the port for the workers."""
    with ExitStack() as ends:

        def make(port: int, key: bytes = KEY) -> int:
            held = ends.enter_context(ReservedPort(listening=True, address=US))
            forwarder = Forwarder(held.listener(), US, port, key, GENERATION)
            ends.callback(forwarder.close)
            forwarder.start()
            return held.number

        yield make


def worker_store(port: int, timeout_s: float = PATIENCE_S) -> TCPStore:
    return TCPStore(US, port, timeout=timedelta(seconds=timeout_s))


def test_workers_use_the_store_through_the_forwarder(
    store: TcpStoreServer, forward: Callable[..., int], warned: list[str]
) -> None:
    port = forward(store.port)
    with worker_store(port) as one, worker_store(port) as other:
        one.set("large", bytes(range(256)) * 30_000)
        assert other.get("large") == bytes(range(256)) * 30_000
        waiter = threading.Thread(target=other.wait, args=(["late"],))
        waiter.start()
        one.set("late", "")
        waiter.join(PATIENCE_S)
        assert not waiter.is_alive()
    assert warned == []


def test_forwarder_without_the_key_is_refused(
    store: TcpStoreServer, forward: Callable[..., int], warned: list[str]
) -> None:
    with pytest.raises(DistNetworkError):
        worker_store(store.port, 1)
    with pytest.raises(DistNetworkError):
        worker_store(forward(store.port, bytes(32)), 1)
    assert any("store=private" in line for line in warned)


def test_forwarder_refuses_another_user(
    store: TcpStoreServer, forward: Callable[..., int], warned: list[str]
) -> None:
    port = forward(store.port)

    def attack() -> str:
        with socket.create_connection((US, port), PATIENCE_S) as one:
            return "refused" if one.recv(1) == b"" else "served"

    assert as_user(STRANGER, attack) == "refused"
    assert str(STRANGER) in warned[0]


def test_unreachable_store_closes_the_connection_and_is_named(
    forward: Callable[..., int], warned: list[str]
) -> None:
    with socket.socket() as bound:
        bound.bind((US, 0))
        port = bound.getsockname()[1]
        with socket.create_connection((US, forward(port)), PATIENCE_S) as worker:
            assert worker.recv(1) == b""
    assert f"{US}:{port}" in warned[0]


def test_unresponsive_store_times_out(
    forward: Callable[..., int], warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "PROVE_S", 0.1)
    with socket.create_server((US, 0)) as silent:
        port = forward(silent.getsockname()[1])
        with socket.create_connection((US, port), PATIENCE_S) as worker:
            assert worker.recv(1) == b""
    assert len(warned) == 1


def test_failed_forwarder_is_reported_and_a_forked_child_has_no_copy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_self: Forwarder) -> None:
        raise RuntimeError("on purpose")

    failures: list[str] = []
    received = threading.Event()

    def failed(why: str) -> None:
        failures.append(why)
        received.set()

    monkeypatch.setattr(Forwarder, "_accept", fail)
    with ReservedPort(listening=True, address=US) as held:
        forwarder = Forwarder(held.listener(), US, 9, KEY, GENERATION, failed)
        forwarder.start()
        assert as_user(0, lambda: str(forwarder._listener.fileno())) == "-1"
        with socket.create_connection((US, held.number), PATIENCE_S):
            assert received.wait(PATIENCE_S)
        forwarder.close()
    assert "on purpose" in failures[0]
    assert "on purpose" in caplog.text


def test_forwarder_tries_the_next_address_of_the_store_after_a_failure(
    store: TcpStoreServer,
    forward: Callable[..., int],
    warned: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ReservedPort(address=US) as closed:
        found = [Address(socket.AF_INET, (US, one)) for one in (closed.number, store.port)]
        monkeypatch.setattr(StoreConnector, "resolve", lambda *_: found)
        port = forward(store.port)
        with worker_store(port) as one:
            one.set("key", "value")
    assert "refused" in warned[0]


def test_tampering_closes_a_forwarded_connection(
    store: TcpStoreServer, forward: Callable[..., int], warned: list[str]
) -> None:
    """An attacker in the middle changes one bit of a worker's data."""

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
    assert warned
