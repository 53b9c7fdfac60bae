"""A real server with real sockets: its responses, and its limits for clients."""

from __future__ import annotations

import http.client
import socket
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import EnvironmentProblem
from holdfast.net import http_server
from holdfast.net.http_server import HttpRequest, HttpResponse, HttpServer, listen_tcp

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = b"x" * 8_000_000  # More than any socket buffer holds.
PATIENCE_S = 20.0
PIECES = (b"GET", b"HEAD", b" ", b"/", b"a", b"?", b"HTTP/1.1", b"\r", b"\n", b"\xff", b"\t")


def respond(request: HttpRequest) -> HttpResponse:
    match request.path:
        case "/figures":
            return HttpResponse(200, "text/plain", b"one 1\n")
        case "/long":
            return HttpResponse(200, "text/plain", LONG)
        case "/broken":
            raise ValueError("no figures today")
    return HttpResponse(404, "text/plain", b"not here\n")


def serve(host: str = "127.0.0.1", port: int = 0, **limits: Any) -> HttpServer:
    return HttpServer(listen_tcp(host, port, name="test"), respond, name="test", **limits)


@pytest.fixture
def server() -> Iterator[HttpServer]:
    serving = serve()
    yield serving
    serving.close()


def connect(server: HttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def reply_to(peer: socket.socket, request: bytes) -> bytes:
    """Send a request; return everything until the server closes the connection."""
    with peer:
        peer.sendall(request)
        return rest(peer)


def rest(peer: socket.socket) -> bytes:
    got = bytearray()
    while data := peer.recv(65536):
        got += data
    return bytes(got)


def ask(server: HttpServer, path: str, method: str = "GET") -> tuple[int, bytes]:
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    try:
        client.request(method, path)
        got = client.getresponse()
        return got.status, got.read()
    finally:
        client.close()


def test_request_gets_a_response_and_the_connection_closes(server: HttpServer) -> None:
    got = reply_to(connect(server), b"GET /figures?name=all HTTP/1.1\r\nHost: localhost\r\n\r\n")
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.splitlines()[0] == b"HTTP/1.1 200 OK"
    assert {b"Content-Length: 6", b"Content-Type: text/plain", b"Connection: close"} <= {
        *head.splitlines()
    }
    assert body == b"one 1\n"
    assert ask(server, "/figures", "HEAD") == (200, b"")
    assert ask(server, "/secret") == (404, b"not here\n")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST /figures HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /figures HTTP/2\r\n\r\n", b"505"),
        (b"GET /figures\r\n\r\n", b"400"),
        (b"GET figures HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /fig\x00ures HTTP/1.1\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\n\n", b"400"),
        (b"GET /figures HTTP/1.0\n\n", b"200"),
        (b"GET /" + b"a" * http_server.HEAD_BYTES_MAX, b"431"),
    ],
)
def test_invalid_request_is_refused(
    server: HttpServer, request_bytes: bytes, status: bytes
) -> None:
    assert reply_to(connect(server), request_bytes).split()[1] == status
    assert ask(server, "/figures") == (200, b"one 1\n")


words = st.lists(st.sampled_from(PIECES)).map(b"".join)


@given(st.binary(max_size=60) | words | words.map(lambda path: b"GET /%s HTTP/1.1\r\n\r\n" % path))
def test_any_head_is_a_request_or_refused(head: bytes) -> None:
    request, length, status = http_server.parse_head(head, ("GET", "HEAD"))
    assert length >= 0
    if status:
        assert status in http_server.REASONS
    else:
        assert request.method in ("GET", "HEAD")
        assert request.path.startswith("/")
        assert request.path.isascii()
        assert request.path.isprintable()


def test_exception_in_respond_is_reported_once(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert ask(server, "/broken")[0] == 500
    assert ask(server, "/figures") == (200, b"one 1\n")
    assert caplog.text.count("no figures today") == 1


def test_request_may_arrive_in_pieces(server: HttpServer) -> None:
    with connect(server) as slow:
        for piece in (b"GET /fig", b"ures HTTP/1.1\r", b"\n\r"):
            slow.sendall(piece)
            assert ask(server, "/figures")[0] == 200  # Other clients are served meanwhile.
        slow.sendall(b"\n")
        assert rest(slow).endswith(b"one 1\n")


def test_misbehaving_clients_do_not_affect_others(server: HttpServer) -> None:
    with connect(server) as lazy:
        lazy.sendall(b"GET /long HTTP/1.1\r\n\r\n")
        assert ask(server, "/figures")[0] == 200
        assert rest(lazy).endswith(LONG)
    with connect(server) as chatty:  # It still receives its response.
        chatty.sendall(b"GET /long HTTP/1.1\r\nContent-Length: 999999\r\n\r\n" + b"z" * 50_000)
        assert rest(chatty).endswith(LONG)
    with connect(server) as rude:
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        rude.sendall(b"GET /long HTTP/1.1\r\n\r\n")
        rude.recv(1)
    assert ask(server, "/figures")[0] == 200


def test_oldest_silent_client_is_closed_for_a_new_one(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "EXCHANGE_S", 1000.0)
    silent = [connect(server) for _ in range(http_server.CONNECTIONS_MAX + 5)]
    assert ask(server, "/figures")[0] == 200
    assert silent[0].recv(1) == b""  # The oldest was closed.
    for one in silent:
        one.close()


def test_many_clients_of_one_address_do_not_displace_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "EXCHANGE_S", 1000.0)
    server = serve("127.0.0.1", 0, connections_max=4)
    where = ("127.0.0.1", server.port)
    with ExitStack() as clients:
        slow = clients.enter_context(connect(server))
        slow.sendall(b"GET /figures HTTP/1.1\r\n")
        crowd = [
            clients.enter_context(
                socket.create_connection(where, PATIENCE_S, source_address=("127.0.0.2", 0))
            )
            for _ in range(12)
        ]
        assert crowd[8].recv(1) == b""  # Three of the last connections are left.
        slow.sendall(b"\r\n")
        assert rest(slow).startswith(b"HTTP/1.1 200")
    server.close()


def test_exchange_times_out(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "EXCHANGE_S", 0.05)
    with connect(server) as silent:
        assert silent.recv(1) == b""


def test_close_ends_open_connections_and_frees_the_port(port: int) -> None:
    server = serve(port=port)
    with connect(server) as waiting:
        assert ask(server, "/figures")[0] == 200  # So the earlier connection has been accepted too.
        server.close()
        assert waiting.recv(1) == b""
    server.close()
    again = serve("", port)  # On every address.
    assert ask(again, "/figures")[0] == 200
    again.close()


def test_port_in_use_is_reported_in_one_line_with_a_hint(server: HttpServer) -> None:
    with pytest.raises(EnvironmentProblem, match="--metrics-port") as caught:
        listen_tcp("127.0.0.1", server.port, name="--metrics-port")
    assert caught.value.hint
    with pytest.raises(EnvironmentProblem, match=r"--metrics-addr.*203\.0\.113\.7"):
        listen_tcp("203.0.113.7", 0, name="--metrics-port", host_name="--metrics-addr")


def test_hanging_response_does_not_block_close_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "STOP_S", 0.05)
    asked, go_on = threading.Event(), threading.Event()

    def hangs(_request: HttpRequest) -> HttpResponse:
        asked.set()
        go_on.wait(PATIENCE_S)
        return HttpResponse(200, "text/plain", b"")

    serving = HttpServer(listen_tcp("127.0.0.1", 0, name="test"), hangs)
    with connect(serving) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert asked.wait(PATIENCE_S)
        serving.close()
        go_on.set()


def test_concurrent_responses_are_limited() -> None:
    under_way, ended = threading.Semaphore(0), threading.Event()

    def wait(_request: HttpRequest) -> HttpResponse:
        under_way.release()
        ended.wait(PATIENCE_S)
        return HttpResponse(200, "text/plain", b"")

    listener = listen_tcp("127.0.0.1", 0, name="test")
    server = HttpServer(listener, wait, connections_max=1, in_threads=True)
    request = b"GET / HTTP/1.1\r\n\r\n"
    with ExitStack() as clients:
        first = clients.enter_context(connect(server))
        first.sendall(request)
        assert under_way.acquire(timeout=PATIENCE_S)
        for _ in range(3):
            other = clients.enter_context(connect(server))
            other.sendall(request)
            assert other.recv(12) == b"HTTP/1.1 503"
        ended.set()
        assert rest(first).startswith(b"HTTP/1.1 200")
    server.close()


def test_server_recovers_when_no_descriptor_is_left(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.socket.accept
    refusals = iter([OSError(24, "Too many open files")])

    def accept(listener: socket.socket) -> tuple[socket.socket, object]:
        for refusal in refusals:
            raise refusal
        return real(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    assert ask(server, "/figures")[0] == 200


REBOUND = ("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example")
OWN = ("localhost", "LocalHost.:80", "127.0.0.1:80", "10.0.0.1", "[::1]:80", "figures.lan:80", "")


@pytest.mark.parametrize("host", [*REBOUND, *OWN])
@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_request_for_a_foreign_name_on_loopback_is_refused(address: str, host: str) -> None:
    """A page of evil.example, which now resolves to 127.0.0.1, runs in a browser on this host."""
    server = serve(address, host_name="Figures.lan")
    try:
        got = reply_to(connect(server), f"GET /figures HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    finally:
        server.close()
    assert got.split()[1] == (b"421" if address and host in REBOUND else b"200")


def test_request_with_two_hosts_is_refused(server: HttpServer) -> None:
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    assert reply_to(connect(server), request).split()[1] == b"400"
