"""Where Prometheus fetches the figures: `GET /metrics`, on this host alone unless told otherwise.

Who may connect may read: there is neither a password nor encryption. That is why another address
than loopback must be asked for, with `--metrics-addr`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import console
from holdfast.net.endpoints import format_endpoint
from holdfast.net.http_server import PLAIN, HttpRequest, HttpResponse, HttpServer, listen_tcp
from holdfast.observe.metrics.families import CONTENT_TYPE, render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.observe.metrics.families import Family

LOOPBACK = "127.0.0.1"
PATH = "/metrics"


class MetricsEndpoint:
    """Serves what `collect` returns from `start` until `close`.

    `collect` is called in another thread for each request. Port 0 is any that is free; `url` tells
    which, and so does a line to the person.
    """

    def __init__(
        self, collect: Callable[[], Iterable[Family]], *, host: str = LOOPBACK, port: int = 0
    ) -> None:
        self._collect = collect
        self._host = host or LOOPBACK
        self._port = port
        self._server: HttpServer | None = None

    @property
    def port(self) -> int:
        """Where it listens, once started."""
        return self._server.port if self._server is not None else self._port

    @property
    def url(self) -> str:
        """What to fetch."""
        return f"http://{format_endpoint(self._host, self.port)}{PATH}"

    def start(self) -> None:
        """Serve from now on; raise `EnvironmentProblem` if the port cannot be had."""
        name = "--metrics-port"
        listener = listen_tcp(self._host, self._port, name=name, host_name="--metrics-addr")
        self._server = HttpServer(listener, self._respond, name=name)
        console.notice(f"metrics: {self.url}")

    def close(self) -> None:
        """Free the port."""
        if self._server is not None:
            self._port = self._server.port
            self._server.close()
            self._server = None

    def _respond(self, request: HttpRequest) -> HttpResponse:
        if request.path != PATH:
            return HttpResponse(404, PLAIN, f"only {PATH} is here\n".encode())
        return HttpResponse(200, CONTENT_TYPE, render(self._collect()))
