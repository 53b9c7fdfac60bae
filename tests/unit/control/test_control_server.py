"""The server of a worker: what it answers, to whom, and that nothing of it stays."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from holdfast.control import handlers, server
from holdfast.control.handlers import Request, Response, register_handler
from holdfast.control.server import WorkerServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class UnixConnection(http.client.HTTPConnection):
    """HTTP, to a socket's path."""

    def __init__(self, path: str) -> None:
        super().__init__("worker", timeout=30)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(self.path)


def asked(path: str, method: str, what: str, body: bytes = b"") -> tuple[int, str, str]:
    connection = UnixConnection(path)
    try:
        connection.request(method, what, body)
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], response.read().decode()
    finally:
        connection.close()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(handlers, "_handlers", dict(handlers._handlers))
    serving = WorkerServer(str(tmp_path / "control.sock"))
    yield serving.path
    serving.shutdown()


def test_the_page_and_the_names(place: str) -> None:
    status, kind, page = asked(place, "GET", "/")
    assert (status, kind) == (200, "text/html")
    assert 'href="/handler/"' in page
    status, kind, names = asked(place, "GET", "/handler/")
    assert (status, kind) == (200, "application/json")
    assert {"ping", "dump_traceback", "pyspy_dump"} <= set(json.loads(names))
    assert asked(place, "HEAD", "/") == (200, "text/html", "")


def test_ping_and_unknown_ones(place: str) -> None:
    assert asked(place, "POST", "/handler/ping") == (200, "text/plain", "pong")
    assert asked(place, "POST", "/handler/jump") == (
        404,
        "text/plain",
        "Handler jump not found\n",
    )
    for method, what in [
        ("GET", "/handler/ping"),
        ("GET", "/other"),
        ("POST", "/"),
        ("POST", "/handler/ping/x"),
    ]:
        assert asked(place, method, what)[0] == 404
    assert asked(place, "PUT", "/handler/ping")[0] == 405


def test_the_stacks_of_all_threads(place: str) -> None:
    there, go_on = threading.Event(), threading.Event()

    def waiting_here() -> None:
        there.set()
        go_on.wait()

    waiting = threading.Thread(target=waiting_here, name="the one that waits")
    waiting.start()
    there.wait()
    try:
        status, kind, text = asked(place, "POST", "/handler/dump_traceback")
    finally:
        go_on.set()
        waiting.join()
    assert (status, kind) == (200, "text/plain")
    assert '"the one that waits" (most recent call last):' in text
    assert "waiting_here" in text
    assert "test_the_stacks_of_all_threads" in text
    assert "_dump_traceback" not in text


def test_an_own_handler_gets_all_and_says_what_it_likes(place: str) -> None:
    def own(request: Request, response: Response) -> None:
        said = [request.body(), request.get_param("a"), request.get_param("none")]
        response.set_content(json.dumps(said), "application/x-own")
        response.set_status(201)

    register_handler("own", own)
    answer = asked(place, "POST", "/handler/own?a=1%202+3&a=4&b", b"content")
    assert answer == (201, "application/x-own", '["content", "1 2 3", ""]')


def test_one_that_says_nothing_is_well(place: str) -> None:
    register_handler("quiet", lambda _request, _response: None)
    assert asked(place, "POST", "/handler/quiet") == (200, "text/plain", "")


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(3), KeyboardInterrupt()])
def test_one_that_raises_is_told_and_the_next_is_served(
    place: str, error: BaseException, capfd: pytest.CaptureFixture[str]
) -> None:
    def bad(request: Request, response: Response) -> None:
        raise error

    register_handler("bad", bad)
    status, _, text = asked(place, "POST", "/handler/bad")
    assert status == 500
    assert text == f"Handler bad failed: {type(error).__name__}: {error}\n"
    assert asked(place, "POST", "/handler/ping")[0] == 200
    assert capfd.readouterr() == ("", "")


def test_a_body_has_a_length_and_a_limit(place: str) -> None:
    most = b"x" * server.BODY_BYTES_MAX
    assert asked(place, "POST", "/handler/ping", most)[0] == 200
    assert asked(place, "POST", "/handler/ping", most + b"x")[0] == 413
    head = b"POST /handler/ping HTTP/1.1\r\nHost: x\r\n"
    for header, status in (
        (b"Transfer-Encoding: chunked", 411),
        (b"Content-Length: -1", 411),
        (b"Content-Length: %b" % (b"9" * 5000), 413),
    ):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(place)
            client.sendall(head + header + b"\r\n\r\n")
            assert client.recv(100).startswith(f"HTTP/1.1 {status} ".encode())


def test_a_body_that_breaks_off_is_not_taken_for_a_whole_one(place: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(place)
        client.sendall(b"POST /handler/ping HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhal")
        client.shutdown(socket.SHUT_WR)
        assert client.makefile("rb").read().endswith(b"3 bytes came of 10\n")


def test_without_a_thread_for_it_a_client_is_sent_away(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(server.CONNECTIONS_MAX + 1):
            assert asked(place, "POST", "/handler/ping")[0] == 503
    assert asked(place, "POST", "/handler/ping")[0] == 200


def test_too_many_parameters_are_a_failure(place: str) -> None:
    query = "&".join(f"p{number}" for number in range(server.PARAMS_MAX + 1))
    status, _, text = asked(place, "POST", f"/handler/ping?{query}")
    assert status == 500
    assert "more than 100 parameters" in text


def test_nobody_but_the_owner_is_served(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "is_owner", lambda uid: uid == -1)
    with pytest.raises((ConnectionError, http.client.BadStatusLine)):
        asked(place, "POST", "/handler/ping")


def test_the_oldest_silent_client_makes_room(place: str) -> None:
    clients = []
    try:
        for _ in range(server.CONNECTIONS_MAX):
            clients.append(client := socket.socket(socket.AF_UNIX))
            client.connect(place)
        assert asked(place, "POST", "/handler/ping")[0] == 200
        assert clients[0].recv(1) == b""
    finally:
        for client in clients:
            client.close()


def test_when_every_client_is_being_answered_one_more_is_sent_away(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    began = threading.Semaphore(0)

    def slow(request: Request, response: Response) -> None:
        began.release()
        go_on.wait()

    register_handler("slow", slow)
    clients = []
    try:
        for _ in range(server.CONNECTIONS_MAX):
            clients.append(client := socket.socket(socket.AF_UNIX))
            client.connect(place)
            client.sendall(b"POST /handler/slow HTTP/1.0\r\n\r\n")
            assert began.acquire(timeout=30)
        assert asked(place, "POST", "/handler/ping")[0] == 503
        go_on.set()
        assert all(client.recv(100).startswith(b"HTTP/1.1 200 ") for client in clients)
    finally:
        go_on.set()
        for client in clients:
            client.close()


def test_after_the_end_nothing_is_there(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    serving = WorkerServer(str(path))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"POST /han")
        serving.shutdown()
        serving.shutdown()
    assert not path.exists()
    again = WorkerServer(str(path))
    again.shutdown()


def test_an_answer_on_its_way_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_handlers", dict(handlers._handlers))
    monkeypatch.setattr(server, "FINISH_S", 60.0)
    began = threading.Event()

    def own(request: Request, response: Response) -> None:
        began.set()
        while os.path.exists(path):  # It is removed first of all.
            pass
        response.set_content("x" * 1_000_000, "text/plain")

    register_handler("own", own)
    path = str(tmp_path / "a.sock")
    serving = WorkerServer(path)

    def end() -> None:
        began.wait()
        serving.shutdown()

    ending = threading.Thread(target=end)
    ending.start()
    assert asked(path, "POST", "/handler/own")[2] == "x" * 1_000_000
    ending.join()


def test_a_handler_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_handlers", dict(handlers._handlers))
    monkeypatch.setattr(server, "FINISH_S", 0.05)
    began, go_on = threading.Event(), threading.Event()

    def own(request: Request, response: Response) -> None:
        began.set()
        go_on.wait()

    register_handler("own", own)
    serving = WorkerServer(str(tmp_path / "a.sock"))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(serving.path)
        client.sendall(b"POST /handler/own HTTP/1.0\r\n\r\n")
        began.wait()
        serving.shutdown()
        assert client.recv(100) == b""
        go_on.set()


def test_it_can_end_at_once_after_its_beginning(tmp_path: Path) -> None:
    for _ in range(20):
        WorkerServer(str(tmp_path / "a.sock")).shutdown()


FORKING = """
import os, sys
from holdfast.control import WorkerServer
server = WorkerServer(sys.argv[1])
child = os.fork()
if child == 0:
    server.shutdown()
    os.write(1, b"child %r\\n" % os.path.exists(sys.argv[1]))
    sys.stdin.read()
    os._exit(0)
os.write(1, b"parent\\n")
os.kill(os.getpid(), 9)
"""


def test_a_fork_of_a_dead_worker_does_not_pass_for_it(tmp_path: Path) -> None:
    path = str(tmp_path / "a.sock")
    with subprocess.Popen(
        [sys.executable, "-c", FORKING, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        said = {parent.stdout.readline(), parent.stdout.readline()}
        assert said == {b"child True\n", b"parent\n"}
        assert parent.wait() == -9
        assert os.path.exists(path)
        WorkerServer(path).shutdown()  # The child still runs.
        parent.stdin.close()
        assert parent.stdout.read() == b""
