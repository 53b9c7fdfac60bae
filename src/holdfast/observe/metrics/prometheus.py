"""Metrics for Prometheus: the text format 0.0.4, and the endpoint `GET /metrics` that serves it.

The endpoint has neither authentication nor encryption, so it is on loopback unless `--metrics-addr` names another
address. Label values can be any text and are escaped here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.net.addresses import LOOPBACK
from holdfast.net.endpoints import format_endpoint
from holdfast.net.http_server import PLAIN, HttpRequest, HttpResponse, HttpServer, listen_tcp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from holdfast.observe.metrics.families import Family

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABEL_CHARS_MAX = 200
"""Longer label values are truncated, because Prometheus stores each of them."""


class MetricsEndpoint:
    """Serves the families from `collect`, from `start` until `close`.

    The server's thread calls `collect` for each request. Port 0 is any free port; `url` and a line on the
    console contain its number.
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
        """The port that it listens on, once started."""
        return self._server.port if self._server is not None else self._port

    @property
    def url(self) -> str:
        """The address to scrape."""
        return f"http://{format_endpoint(self._host, self.port)}{PATH}"

    def start(self) -> None:
        """Serve from now on; raise `EnvironmentProblem` if the port cannot be bound."""
        name = "--metrics-port"
        listener = listen_tcp(self._host, self._port, name=name, host_name="--metrics-addr")
        self._server = HttpServer(listener, self._respond, name=name, host_name=self._host)
        console.notice(f"metrics: {self.url}")

    def close(self) -> None:
        """Free the port."""
        if self._server is not None:
            self._port = self._server.port
            self._server.close()
            self._server = None

    def _respond(self, request: HttpRequest) -> HttpResponse:
        if request.path != PATH:
            return HttpResponse(404, PLAIN, f"not found; metrics are at {PATH}\n".encode())
        return HttpResponse(200, CONTENT_TYPE, render(self._collect()))


def render(families: Iterable[Family]) -> bytes:
    """Return the text of all families that have samples."""
    return "".join(line for family in families for line in _lines(family)).encode(errors="replace")


def _lines(family: Family) -> Iterator[str]:
    if not family.samples:
        return
    name = family.name
    help_text = family.help_text.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP {name} {help_text}\n"
    yield f"# TYPE {name} {family.kind}\n"
    for labels, value in family.samples:
        if isinstance(value, (int, float)):
            yield f"{name}{label_text(labels)} {number_text(value)}\n"
            continue
        for bound, count in value.cumulative():
            yield f"{name}_bucket{label_text({**labels, 'le': number_text(bound)})} {count}\n"
        yield f"{name}_sum{label_text(labels)} {number_text(value.sum)}\n"
        yield f"{name}_count{label_text(labels)} {value.count}\n"


def label_text(labels: Mapping[str, object]) -> str:
    """Return labels in Prometheus's format, to follow a name."""
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{escape(value)}"' for name, value in labels.items()) + "}"


def escape(value: object) -> str:
    """Return a label's value escaped for quotes and truncated to `LABEL_CHARS_MAX`."""
    text = str(value)[:LABEL_CHARS_MAX]
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def number_text(value: float) -> str:
    """Return a number as Prometheus writes it."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
