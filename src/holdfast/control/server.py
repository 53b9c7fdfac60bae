"""The server of a worker: answers at a unix socket while the worker's own code runs.

============================  ===============================================================
`GET /`                       a page that says what this is
`GET /handler/`               the names of the handlers, as a JSON array
`POST /handler/NAME?a=b`      what a handler answers; 404 if there is none, 500 if it raised
============================  ===============================================================

The paths are those of torch's server, so that what asks that one can ask this one. The one thing
to know: a handler can do all that the worker can, so only its owner (or root) is served: the file
is theirs alone, and the kernel is asked who connects.

Each connection has a thread and carries one exchange; `CONNECTIONS_MAX` and `READ_S` bound them.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import weakref
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qsl

from holdfast.control.handlers import Request, Response, find_handler, handler_names
from holdfast.control.socket_file import identity, is_owner, listen_privately, peer_of, remove

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CONNECTIONS_MAX = 16
READ_S = 5.0
"""How long a client may take for the next piece of its request."""
BODY_BYTES_MAX = 1 << 20
LENGTH_DIGITS_MAX = 20
PARAMS_MAX = 100
UNREAD_BYTES_MAX = 4 * BODY_BYTES_MAX
"""So much of a request that was refused is thrown away, for the answer to arrive."""
FINISH_S = 1.0
"""How long `shutdown` waits for answers that are on their way; a handler that hangs is left."""

PAGE = b'<h1>The control server of a worker</h1>\n<a href="/handler/">What it can be asked</a>\n'
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

_servers: weakref.WeakSet[WorkerServer] = weakref.WeakSet()


class WorkerServer:
    """Serves at `path` from now on, until `shutdown`."""

    def __init__(self, path: str) -> None:
        """Raise `EnvironmentProblem` if the path cannot be had."""
        self.path = os.path.abspath(path)
        self._listener = listen_privately(self.path)
        self._identity = identity(self.path)
        self._pid = os.getpid()
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._exchanges: dict[socket.socket, threading.Thread] = {}
        self._thread = threading.Thread(target=self._accept, name="holdfast-control", daemon=True)
        _servers.add(self)
        self._thread.start()

    def shutdown(self) -> None:
        """Take no more requests and remove the socket. May be called at any time, also twice."""
        if self._pid != os.getpid():
            return  # A fork's copy: the socket is its parent's.
        _servers.discard(self)
        remove(self.path, self._identity)
        _shut(self._listener, socket.SHUT_RDWR)
        deadline = time.monotonic() + FINISH_S
        self._thread.join(FINISH_S)
        self._listener.close()
        exchanges = dict(self._exchanges)
        for connection in exchanges:
            _shut(connection, socket.SHUT_RD)  # Who has not asked yet is not waited for.
        for thread in exchanges.values():
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def leave_to_parent(self) -> None:
        """Let go of the socket in a forked child, or a dead parent would seem to live."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0 or not self._is_listening():
                    return
                # No descriptor is left for this one; it stays where it is until one is.
                threading.Event().wait(0.2)
                continue
            if not is_owner(peer_of(connection)[1]):
                connection.close()
            elif not self._room.acquire(blocking=False):
                _send(connection, BUSY)
                connection.close()
            else:
                thread = threading.Thread(
                    target=self._serve, args=(connection,), name="holdfast-control", daemon=True
                )
                self._exchanges[connection] = thread
                try:
                    thread.start()
                except RuntimeError:  # There are no more threads to be had: not now.
                    self._end(connection)

    def _is_listening(self) -> bool:
        return self in _servers

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                _Exchange(connection, "", self)
                _drain(connection)
        except OSError:
            pass  # The client is gone, or too slow.
        finally:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        connection.close()
        self._exchanges.pop(connection, None)
        self._room.release()


class _Exchange(BaseHTTPRequestHandler):
    """One request and its answer."""

    protocol_version = "HTTP/1.1"
    server_version = "holdfast"
    sys_version = ""
    timeout = READ_S

    def __init__(self, connection: socket.socket, address: str, server: WorkerServer) -> None:
        super().__init__(connection, address, server)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        if self.path == "/":
            self._answer(200, "text/html", PAGE)
        elif self.path == "/handler/":
            names = json.dumps(handler_names(), separators=(",", ":"))
            self._answer(200, "application/json", names.encode())
        else:
            self._answer(404, "text/plain", b"not found; a handler is called by POST\n")

    do_HEAD = do_GET  # noqa: N815 (as above)

    def do_POST(self) -> None:
        place, _, query = self.path.partition("?")
        folder, _, name = place.rpartition("/")
        if folder != "/handler":
            self._answer(404, "text/plain", b"not found\n")
            return
        body = self._body()
        if body is None:
            return
        handler = find_handler(name)
        if handler is None:
            self._answer(404, "text/plain", f"Handler {name} not found\n".encode())
            return
        response = Response()
        try:
            handler(Request(body, _params(query)), response)
        except BaseException as problem:  # noqa: BLE001 (a handler's trouble is told who asked)
            told = f"Handler {name} failed: {type(problem).__name__}: {problem}\n"
            self._answer(500, "text/plain", told.encode(errors="replace"))
        else:
            self._answer(response.status, response.content_type, response.content)

    def _body(self) -> bytes | None:
        """Return what comes with the request; None if it was refused."""
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            self._answer(411, "text/plain", b"a body needs a Content-Length\n")
            return None
        if len(length) > LENGTH_DIGITS_MAX or int(length) > BODY_BYTES_MAX:
            self._answer(413, "text/plain", f"more than {BODY_BYTES_MAX} bytes\n".encode())
            return None
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self._answer(400, "text/plain", f"{len(body)} bytes came of {length}\n".encode())
            return None
        return body

    def _answer(self, status: int, content_type: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (as it is named there)
        """Say nothing: standard error is the person's."""


def _params(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=PARAMS_MAX)
    except ValueError as problem:
        raise ValueError(f"more than {PARAMS_MAX} parameters") from problem
    found: dict[str, str] = {}
    for name, value in pairs:
        found.setdefault(name, value)
    return found


def _send(connection: socket.socket, data: bytes) -> None:
    try:
        connection.setblocking(False)  # noqa: FBT003 (the name says it)
        connection.send(data)
    except OSError:
        pass  # It is gone.


def _drain(connection: socket.socket) -> None:
    """Let the client be done as well: to close before it is throws away what it has not read."""
    connection.shutdown(socket.SHUT_WR)
    deadline, unread = time.monotonic() + READ_S, UNREAD_BYTES_MAX
    while unread > 0 and (left := deadline - time.monotonic()) > 0:
        connection.settimeout(left)
        data = connection.recv(1 << 16)
        if not data:
            return
        unread -= len(data)


def _shut(connection: socket.socket, how: int) -> None:
    try:
        connection.shutdown(how)
    except OSError:
        pass  # The other side was first.


def _leave_all_to_parent() -> None:
    for server in [*_servers]:
        server.leave_to_parent()
    _servers.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)
