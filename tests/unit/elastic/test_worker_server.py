"""The control server of a worker: its responses, its access control, and its cleanup."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.elastic._impl import worker_handlers, worker_server
from holdfast.elastic._impl.worker_handlers import (
    Request,
    Response,
    register_handler,
    stacks_of_this_process,
)
from holdfast.elastic._impl.worker_server import WorkerServer
from holdfast.errors import EnvironmentProblem
from holdfast.processes import worker_socket
from holdfast.processes.worker_socket import identity, listen_on_private_socket, peer_of, remove

if TYPE_CHECKING:
    from collections.abc import Iterator


class UnixConnection(http.client.HTTPConnection):
    """An HTTP connection to the path of a socket."""

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


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_handlers, "_handlers", dict(worker_handlers._handlers))


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "control.sock")


@pytest.fixture
def place(path: str) -> Iterator[str]:
    serving = WorkerServer(path)
    yield serving.path
    serving.shutdown()


def nothing(request: Request, response: Response) -> None: ...


def test_users_handler_gets_the_request_and_sets_the_response(place: str) -> None:
    def own(request: Request, response: Response) -> None:
        found = [request.body(), request.get_param("a"), request.get_param("none")]
        found += [str(request.has_param(name)) for name in ("b", "c")]
        response.set_content(json.dumps(found), "application/x-own")
        response.set_status(201)

    register_handler("own", own)
    register_handler("quiet", nothing)
    status, kind, text = asked(place, "POST", "/handler/own?a=1%202+3&a=4&b", b"\xc3\xa9\xff")
    assert (status, kind) == (201, "application/x-own")
    assert json.loads(text) == ["é\ufffd", "1 2 3", "", "True", "False"]
    assert asked(place, "POST", "/handler/quiet") == (200, "text/plain", "")


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(3), KeyboardInterrupt()])
def test_a_handler_that_raises_is_a_500_and_the_next_is_served(
    place: str, error: BaseException, capfd: pytest.CaptureFixture[str]
) -> None:
    def bad(request: Request, response: Response) -> None:
        raise error

    register_handler("bad", bad)
    status, _, text = asked(place, "POST", "/handler/bad")
    assert (status, type(error).__name__ in text) == (500, True)
    query = "&".join(f"p{number}" for number in range(worker_server.PARAMS_MAX + 1))
    assert asked(place, "POST", f"/handler/ping?{query}")[0] == 500
    assert asked(place, "POST", "/handler/ping")[0] == 200
    assert capfd.readouterr() == ("", "")


class Waiting:
    """Several waiting threads with call stacks of a given depth."""

    def __init__(self, depth: int, count: int = 1) -> None:
        self.go_on = threading.Event()
        self.barrier = threading.Barrier(count + 1)
        self.threads = [
            threading.Thread(target=self.deep, args=(depth,), name=f"deep {number}")
            for number in range(count)
        ]

    def deep(self, left: int) -> None:
        if left:
            self.deep(left - 1)
        else:
            self.barrier.wait()
            self.go_on.wait()

    def __enter__(self) -> None:
        for thread in self.threads:
            thread.start()
        self.barrier.wait()

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        for thread in self.threads:
            thread.join()


def test_the_stacks_of_all_other_threads_are_shown(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Waiting(2):
        status, _, text = asked(place, "POST", "/handler/dump_traceback")
    names = re.findall(
        r'^Thread 0x[0-9a-f]+ "(.*)" \(most recent call last\):$', text, re.MULTILINE
    )
    assert (status, names[0], "deep 0" in names) == (200, "MainThread", True)
    assert text.count("self.deep(left - 1)") == 2
    assert "_dump_traceback" not in text  # The thread of the handler itself is omitted.
    monkeypatch.setattr(worker_handlers, "FRAMES_MAX", 5)
    with Waiting(20):
        text = stacks_of_this_process()
    assert "in wait" in text
    assert text.count("self.deep(left - 1)") <= 4
    monkeypatch.setattr(worker_handlers, "THREADS_MAX", 2)
    with Waiting(0, count=6):
        assert stacks_of_this_process().count("Thread 0x") == 2


def test_other_users_are_refused(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_server, "is_owner", lambda uid: uid == -1)
    with pytest.raises((ConnectionError, http.client.BadStatusLine)):
        asked(place, "POST", "/handler/ping")


def test_too_long_body_is_rejected(place: str) -> None:
    most = b"x" * worker_server.BODY_BYTES_MAX
    assert asked(place, "POST", "/handler/ping", most)[0] == 200
    assert asked(place, "POST", "/handler/ping", most + b"x")[0] == 413


def test_shutdown_removes_the_socket(path: str) -> None:
    for _ in range(20):
        WorkerServer(path).shutdown()
    serving = WorkerServer(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.sendall(b"POST /han")
        serving.shutdown()
        serving.shutdown()
    assert not os.path.exists(path)


@pytest.mark.parametrize("hangs", [True, False])
def test_shutdown_waits_for_a_response_in_progress_up_to_a_limit(
    path: str, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    monkeypatch.setattr(worker_server, "FINISH_S", 0.05 if hangs else 60.0)
    began, go_on = threading.Event(), threading.Event()

    def own(request: Request, response: Response) -> None:
        began.set()
        while os.path.exists(path):  # `shutdown` removes it first.
            pass
        if hangs:
            go_on.wait()
        response.set_content("x" * 1_000_000, "text/plain")

    register_handler("own", own)
    serving = WorkerServer(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.sendall(b"POST /handler/own HTTP/1.0\r\n\r\n")
        began.wait()
        ending = threading.Thread(target=serving.shutdown)
        ending.start()
        received = client.makefile("rb").read()
        ending.join()
    assert received.endswith(b"x" * 1_000_000) is not hangs
    go_on.set()


FORKING = """
import os, sys
from holdfast.elastic._impl.worker_server import WorkerServer
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


def test_forked_child_of_a_dead_worker_is_not_taken_for_the_worker(path: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORKING, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        output = {parent.stdout.readline(), parent.stdout.readline()}
        assert output == {b"child True\n", b"parent\n"}
        assert parent.wait() == -9
        assert os.path.exists(path)
        WorkerServer(path).shutdown()  # The child still runs.
        parent.stdin.close()
        assert parent.stdout.read() == b""


def mode(path: str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_socket_is_private_from_its_creation(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "chmod", lambda *_: None)
    old = os.umask(0)
    try:
        with listen_on_private_socket(path) as listener, socket.socket(socket.AF_UNIX) as client:
            assert mode(path) == 0o600
            client.connect(path)
            connection, _ = listener.accept()
            with connection:
                assert peer_of(connection) == (os.getpid(), os.geteuid())
    finally:
        os.umask(old)
    with listen_on_private_socket(str(tmp_path / "new" / "a.sock")):
        assert mode(str(tmp_path / "new")) == 0o700


@pytest.mark.parametrize("open_to", [0o720, 0o702, 0o777])
def test_folder_where_others_can_replace_the_socket_is_refused(
    tmp_path: Path, open_to: int
) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(open_to)
    with pytest.raises(EnvironmentProblem, match=str(folder)):
        listen_on_private_socket(str(folder / "a.sock"))
    folder.chmod(open_to | stat.S_ISVTX)  # As in /tmp, a user can only remove their own files.
    listen_on_private_socket(str(folder / "a.sock")).close()


def test_stale_socket_is_replaced_and_live_one_is_kept(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import socket,sys; s=socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()"
    subprocess.run([sys.executable, "-c", program, path], check=True)
    monkeypatch.setattr(worker_socket, "CONNECT_S", 0.05)
    monkeypatch.setattr(worker_socket, "BACKLOG", 0)
    with listen_on_private_socket(path):
        before = identity(path)
        with pytest.raises(EnvironmentProblem, match=f"process {os.getpid()}"):
            listen_on_private_socket(path)
        with pytest.raises(EnvironmentProblem):  # Its queue is full now, but it is alive.
            listen_on_private_socket(path)
        assert identity(path) == before


def test_invalid_socket_path_is_rejected(tmp_path: Path, path: str) -> None:
    Path(path).write_text("precious")
    for wrong in (path, str(tmp_path / ("x" * 108)), str(tmp_path / "a" / "b" / "c.sock"), ""):
        with pytest.raises(EnvironmentProblem):
            listen_on_private_socket(wrong)
    assert Path(path).read_text() == "precious"


def test_server_removes_only_its_own_file(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_socket, "LOCK_S", 0.05)
    holder = worker_socket._lock(os.path.dirname(path))  # A locked folder can still be used.
    with listen_on_private_socket(path):
        device, inode = identity(path)
        remove(path, (device, inode + 10_000_000))
        assert Path(path).exists()
        remove(path, (device, inode))
        assert not Path(path).exists()
        remove(path, (device, inode))
    os.close(holder)
