"""Where Prometheus fetches the figures: `GET /metrics`, on this host alone unless told otherwise.

Who may connect may read: there is neither a password nor encryption. That is why another address
than loopback must be asked for, with `--metrics-addr`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import console
from holdfast.net.http_server import PLAIN, HttpServer
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
        self._server = HttpServer(
            host or LOOPBACK,
            port,
            self._answer,
            name="--metrics-port",
            host_name="--metrics-addr",
        )

    @property
    def port(self) -> int:
        """Where it listens, once started."""
        return self._server.port

    @property
    def url(self) -> str:
        """What to fetch."""
        host = self._server.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}{PATH}"

    def start(self) -> None:
        """Serve from now on; raise `EnvironmentProblem` if the port cannot be had."""
        self._server.start()
        console.notice(f"metrics: {self.url}")

    def close(self) -> None:
        """Free the port."""
        self._server.close()

    def _answer(self, path: str) -> tuple[int, str, bytes]:
        if path != PATH:
            return 404, PLAIN, f"only {PATH} is here\n".encode()
        return 200, CONTENT_TYPE, render(self._collect())
