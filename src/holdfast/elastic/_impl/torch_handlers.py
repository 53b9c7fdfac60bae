"""torch's own handlers of a worker's control socket: flight recorder, profiler, and what the program registered.

torch's native server of the process executes them, so each response is torch's, whatever the handler reads of the
request. Our server forwards requests to it. Holdfast never imports torch for this.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.elastic._impl.worker_handlers import Request, Response

MODULE = "torch._C._distributed_c10d"


def torch_handler_names() -> list[str]:
    """Return the names of torch's handlers in this process; none if torch is not imported."""
    try:
        return [str(name) for name in sys.modules[MODULE]._get_handler_names()]
    except (KeyError, AttributeError):
        return []  # No torch, or one that has no such table.


class TorchServer:
    """torch's native server, at a socket that has no name, so that only this process can connect to it.

    It runs until the process exits: torch's `shutdown` would wait for a handler that hangs, and in a forked child
    the destructor would wait forever for a thread that only the parent has.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        folder = tempfile.mkdtemp(prefix="holdfast-")
        try:
            path = f"{folder}/s"
            _keep_forever(sys.modules[MODULE]._WorkerServer(path))
            self._socket = os.open(path, os.O_PATH | os.O_CLOEXEC)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def forward(self, name: str, request: Request, response: Response) -> None:
        """Have torch respond to a request for the handler of this name."""
        from http.client import HTTPConnection

        connection = HTTPConnection("worker")
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.connect(f"/proc/self/fd/{self._socket}")
            target = f"/handler/{name}?{request.query}" if request.query else f"/handler/{name}"
            connection.request("POST", target, request.content, {"Connection": "close"})
            reply = connection.getresponse()
            response.set_status(reply.status)
            response.set_content(reply.read(), reply.headers["Content-Type"] or "text/plain")
        finally:
            connection.close()


def _keep_forever(server: object) -> None:
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))


_server: TorchServer | None = None
_lock = threading.Lock()


def forward(name: str, request: Request, response: Response) -> None:
    """Have torch's server of this process respond; the first request starts it."""
    global _server  # noqa: PLW0603 (one for the process)
    with _lock:
        if _server is None or _server.pid != os.getpid():
            _server = TorchServer()
        server = _server
    server.forward(name, request, response)
