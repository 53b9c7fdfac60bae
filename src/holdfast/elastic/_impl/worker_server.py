"""The control server of a worker: serves requests at a unix socket while the worker's own code runs.

============================  ===============================================================
`GET /`                       a page that describes this server
`GET /handler/`               the names of the handlers, as a JSON array
`POST /handler/NAME?a=b`      the response of a handler; 404 if there is none, 500 if it raised
============================  ===============================================================

The paths are those of torch's server, so its clients can use this one. A handler can do everything
that the worker can, so the server accepts only the owner and root: the file is private, and the kernel
reports who connects. Each call of a handler runs in its own thread.
"""

from __future__ import annotations

import json
import os
from urllib.parse import parse_qsl

from holdfast.elastic._impl.worker_handlers import Request, Response, find_handler, handler_names
from holdfast.net.http_server import HttpRequest, HttpResponse, HttpServer
from holdfast.processes.worker_socket import (
    identity,
    is_owner,
    listen_on_private_socket,
    peer_of,
    remove,
)

CONNECTIONS_MAX = 16
BODY_BYTES_MAX = 1 << 20
PARAMS_MAX = 100
FINISH_S = 1.0
"""How long `shutdown` waits for responses in progress. It does not stop a handler that hangs."""

# The same bytes as torch's server: clients recognize it by this page.
PAGE = b'<h1>torch.distributed.WorkerServer</h1>\n<a href="/handler/">Handler names</a>\n'


class WorkerServer:
    """Serves at `path` until `shutdown`."""

    def __init__(self, path: str) -> None:
        """Raise `EnvironmentProblem` if the path cannot be used."""
        self.path = os.path.abspath(path)
        listener = listen_on_private_socket(self.path)
        self._identity = identity(self.path)
        self._pid = os.getpid()
        self._server = HttpServer(
            listener,
            _respond,
            name="control",
            methods=("GET", "HEAD", "POST"),
            body_bytes_max=BODY_BYTES_MAX,
            connections_max=CONNECTIONS_MAX,
            in_threads=True,
            admit=lambda client: is_owner(peer_of(client)[1]),
        )

    def shutdown(self) -> None:
        """Accept no more requests and remove the socket. May be called at any time and repeatedly."""
        if self._pid != os.getpid():
            return  # This is a fork's copy; the socket belongs to the parent.
        remove(self.path, self._identity)
        self._server.close(FINISH_S)


def _respond(request: HttpRequest) -> HttpResponse:
    if request.method != "POST":
        match request.path:
            case "/":
                return HttpResponse(200, "text/html", PAGE)
            case "/handler/":
                names = json.dumps(handler_names(), separators=(",", ":"))
                return HttpResponse(200, "application/json", names.encode())
        return HttpResponse(404, "text/plain", b"not found; call a handler with POST\n")
    folder, _, name = request.path.rpartition("/")
    if folder != "/handler":
        return HttpResponse(404, "text/plain", b"not found\n")
    handler = find_handler(name)
    if handler is None:
        return HttpResponse(
            404, "text/plain", f"Handler {name} not found: see /handler/\n".encode()
        )
    response = Response()
    try:
        handler(Request(request.body, _params(request.query), request.query), response)
    except BaseException as problem:  # noqa: BLE001 (the caller gets the error)
        why = f"Handler {name} failed: {type(problem).__name__}: {problem}\n"
        return HttpResponse(500, "text/plain", why.encode(errors="replace"))
    return HttpResponse(response.status, response.content_type, response.content)


def _params(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=PARAMS_MAX)
    except ValueError as problem:
        raise ValueError(f"more than {PARAMS_MAX} parameters") from problem
    found: dict[str, str] = {}
    for name, value in pairs:
        found.setdefault(name, value)
    return found
