"""The control socket compared with torch's own: the same requests and responses, with torch's client.

One worker with torch serves two sockets, one with torch's native server, the other with ours.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import socket
import subprocess
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.torch

WORKER = """
import os, sys, threading
from torch._C._distributed_c10d import _register_handler, _WorkerServer
from holdfast.elastic._impl.worker_server import WorkerServer

def own(request, response):
    asked = [request.body(), request.get_param("a"), request.get_param("none")]
    response.set_content("|".join(asked), "text/x-own")
    response.set_status(201)

def bad(request, response):
    raise RuntimeError("boom")

_register_handler("own", own)
_register_handler("bad", bad)
_register_handler("quiet", lambda request, response: None)
_register_handler("hang", lambda request, response: threading.Event().wait())
theirs, ours = _WorkerServer(sys.argv[1]), WorkerServer(sys.argv[2])

def where_the_worker_is():
    print(flush=True)
    input()

where_the_worker_is()
theirs.shutdown()
ours.shutdown()
print(*map(os.path.exists, sys.argv[1:]), flush=True)
"""


class Worker:
    """The worker, and requests to it."""

    def __init__(self, folder: Path) -> None:
        self.theirs, self.ours = str(folder / "theirs"), str(folder / "ours")
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, self.theirs, self.ours],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(self.temporary)},
            text=True,
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def end(self) -> str:
        """Shut both servers down; return which of the sockets still exist."""
        return self.process.communicate("\n")[0]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    one = Worker(tmp_path_factory.mktemp("control"))
    yield one
    if one.process.returncode is None:
        one.end()


def send_request(
    path: str, method: str, what: str, body: bytes = b""
) -> tuple[int, str | None, str]:
    connection = http.client.HTTPConnection("worker", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.connect(path)
        connection.request(method, what, body)
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
        return response.status, response.headers["Content-Type"], text
    finally:
        connection.close()


def test_response_of_every_handler_is_torchs(worker: Worker) -> None:
    names = set(json.loads(send_request(worker.theirs, "GET", "/handler/")[2]))
    assert names >= {"ping", "own", "fr_trace_json", "wait_counter_values"}
    # These have tests of their own, or count the requests.
    names -= {"bad", "dump_traceback", "hang", "pyspy_dump", "quiet", "wait_counter_values"}
    for what in (
        *sorted(f"{name}?a=1%202+3&a=4&includecollectives=false" for name in names),
        "fr_trace_json?backend=gloo",
        "fr_trace_json",
    ):
        theirs = send_request(worker.theirs, "POST", f"/handler/{what}", b"content")
        assert send_request(worker.ours, "POST", f"/handler/{what}", b"content") == theirs
        assert theirs[0] == 200 or "?" in what


def test_torchs_counters_are_shown(worker: Worker) -> None:
    found = [
        send_request(one, "POST", "/handler/wait_counter_values")
        for one in (worker.theirs, worker.ours)
    ]
    assert [one[:2] for one in found] == [(200, "application/json")] * 2
    theirs, ours = (set(json.loads(one[2])) for one in found)
    assert ours == theirs


@pytest.mark.parametrize(
    ("method", "what", "status", "begins"),
    [
        ("GET", "/", 200, "<h1>"),
        ("POST", "/handler/quiet", 200, ""),
        ("POST", "/handler/unknown", 404, "Handler unknown not found"),
        ("POST", "/handler/bad", 500, "Handler bad failed: RuntimeError: boom"),
        ("GET", "/handler/ping", 404, ""),
        ("GET", "/elsewhere", 404, ""),
        ("POST", "/", 404, ""),
        ("POST", "/handler/ping/more", 404, ""),
    ],
)
def test_paths_are_equal(worker: Worker, method: str, what: str, status: int, begins: str) -> None:
    for path in (worker.theirs, worker.ours):
        found = send_request(path, method, what)
        assert found[0] == status
        assert found[2].startswith(begins)


def test_all_torch_names_exist(worker: Worker) -> None:
    theirs, ours = (send_request(path, "GET", "/handler/") for path in (worker.theirs, worker.ours))
    assert ours[:2] == theirs[:2] == (200, "application/json")
    assert set(json.loads(ours[2])) == set(json.loads(theirs[2]))


def test_stack_of_the_worker_is_shown_by_both_servers(worker: Worker) -> None:
    for path in (worker.theirs, worker.ours):
        status, kind, text = send_request(path, "POST", "/handler/dump_traceback")
        assert (status, kind) == (200, "text/plain")
        assert "in where_the_worker_is" in text


class Relay:
    """Forwards a TCP port to a unix socket, because torch's client supports only TCP."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.threads: list[threading.Thread] = []
        self.start(self.accept)

    def start(self, *target: Any) -> None:
        thread = threading.Thread(target=target[0], args=target[1:])
        self.threads.append(thread)
        thread.start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                self.start(self.relay, connection)

    def relay(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server:
            server.connect(self.path)
            other = {client: server, server: client}
            while True:
                for one in select.select([client, server], [], [])[0]:
                    data = one.recv(65536)
                    if not data:
                        return
                    other[one].sendall(data)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join()


class Addresses:
    """Stands in for the store of torch's client."""

    def __init__(self, *urls: str) -> None:
        self.urls = urls

    def multi_get(self, keys: list[str]) -> list[bytes]:
        assert keys == [f"rank{rank}" for rank in range(len(self.urls))]
        return [url.encode() for url in self.urls]


def test_torchs_client_gets_its_responses(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = import_module("torch.distributed.debug._frontend")
    relays = [Relay(worker.ours), Relay(worker.ours)]
    try:
        store = Addresses(*(relay.url for relay in relays))
        monkeypatch.setattr(frontend, "tcpstore_client", lambda: store)
        monkeypatch.setenv("WORLD_SIZE", "2")
        _, stacks = frontend.fetch_all("dump_traceback", timeout=60)
        addresses, traces = frontend.fetch_all("fr_trace_json", "a=1", timeout=60)
        _, unknown = frontend.fetch_all("jump", timeout=60)
    finally:
        for relay in relays:
            relay.close()
    assert [answer.status_code for answer in stacks] == [200, 200]
    assert all("in where_the_worker_is" in answer.text for answer in stacks)
    assert frontend.format_fetch_summary(addresses, traces) is None
    assert all("pg_config" in answer.json() for answer in traces)
    assert [answer.status_code for answer in unknown] == [404, 404]


# The last test: it ends the worker.


def test_worker_ends_during_a_request_and_removes_its_sockets(worker: Worker) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(worker.ours)
        client.sendall(b"POST /handler/hang HTTP/1.1\r\nHost: worker\r\n\r\n")
        while "hang" not in send_request(worker.ours, "POST", "/handler/dump_traceback")[2]:
            pass
        assert worker.end() == "True False\n"
    assert list(worker.temporary.iterdir()) == []


FAILING = """
import sys
{imports}

@worker_main()
def main():
    raise RuntimeError("boom")

main()
"""


@pytest.mark.parametrize(
    ("imports", "is_recorded"),
    [
        ("from torch.distributed.elastic.control_plane import worker_main", False),
        ("from holdfast.elastic.control_plane import worker_main", True),
    ],
    ids=["torch", "holdfast"],
)
def test_exception_of_the_main_function_is_recorded(
    tmp_path: Path, imports: str, is_recorded: bool
) -> None:
    """Torch documents this but does not do it. Once torch does it, this test fails, and the docs can be updated."""
    error_file = tmp_path / "error.json"
    done = subprocess.run(
        [sys.executable, "-c", FAILING.format(imports=imports)],
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(error_file)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "RuntimeError: boom" in done.stderr
    assert error_file.exists() == is_recorded
