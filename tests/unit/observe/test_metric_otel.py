"""Metrics sent to a collector: a stand-in that accepts OTLP over HTTP, as a real one does."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from holdfast.observe.metrics import otel
from holdfast.observe.metrics.families import Family, Histogram
from holdfast.observe.metrics.otel import OtelMetricExporter
from holdfast.observe.otlp import EXPORT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 20


class Collector(ThreadingHTTPServer):
    """Keeps every request that comes, and answers with the status it is told to."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Taking)
        self.status = 200
        self.paths: list[str] = []
        self.requests: list[ExportMetricsServiceRequest] = []
        self.came = threading.Semaphore(0)
        self.daemon_threads = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def metrics(self, number: int) -> dict[str, Any]:
        """Return the metrics of a request by name."""
        [resource] = self.requests[number].resource_metrics
        [scope] = resource.scope_metrics
        assert scope.scope.name == f"{otel.SERVICE}.metrics"
        return {one.name: one for one in scope.metrics}


class _Taking(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportMetricsServiceRequest()
        request.ParseFromString(body)
        self.server.paths.append(self.path)
        self.server.requests.append(request)
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()
        self.server.came.release()

    def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    serving = Collector()
    thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", serving.url)
    yield serving
    serving.shutdown()
    thread.join()
    serving.server_close()


def collect() -> list[Family]:
    times = Histogram((1.0, 2.0))
    times.observe(1.5)
    return [
        Family("up", "gauge", "Up").add(0.5, run_id="a", rank=3),
        Family("seen_total", "counter", "Seen").add(7),
        Family("took_seconds", "histogram", "Took").add(times, stage="stop"),
        Family("empty", "gauge", "Nothing yet"),
    ]


def test_the_metrics_arrive_as_they_are(collector: Collector) -> None:
    export = OtelMetricExporter(collect, interval_s=1000)
    export.start()
    export.close()
    assert collector.paths == ["/v1/metrics"]
    metrics = collector.metrics(0)
    assert metrics.keys() == {"up", "seen_total", "took_seconds"}
    [up] = metrics["up"].gauge.data_points
    assert up.as_double == 0.5
    assert {one.key: one.value.string_value for one in up.attributes} == {
        "run_id": "a",
        "rank": "3",
    }
    seen = metrics["seen_total"].sum
    assert seen.is_monotonic
    assert [one.as_int for one in seen.data_points] == [7]
    [took] = metrics["took_seconds"].histogram.data_points
    assert ([*took.explicit_bounds], [*took.bucket_counts]) == ([1.0, 2.0], [0, 1, 0])
    assert (took.count, took.sum) == (1, 1.5)
    assert not took.HasField("max")
    assert 0 < took.start_time_unix_nano <= took.time_unix_nano
    assert metrics["took_seconds"].unit == "s"
    resource = collector.requests[0].resource_metrics[0].resource
    named = {one.key: one.value.string_value for one in resource.attributes}
    assert named["service.name"] == "holdfast"


def test_they_are_sent_again_and_again(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    export = OtelMetricExporter(collect)
    export.start()
    for _ in range(3):
        assert collector.came.acquire(timeout=PATIENCE_S)
    export.close()
    assert len(collector.requests) >= 4  # The last is sent at the end.


def test_a_collector_that_refuses_is_reported_once(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 400
    export = OtelMetricExporter(collect, interval_s=0.01)
    export.start()
    for _ in range(3):
        assert collector.came.acquire(timeout=PATIENCE_S)
    export.close()
    [line] = caplog.messages
    assert f"{collector.url}/v1/metrics" in line
    assert "400" in line


def test_a_collector_that_is_away_keeps_nobody_for_long(
    monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    monkeypatch.setattr(otel, "CLOSE_S", 0.05)
    collector.status = 503  # It is to be asked again, which would go on for `EXPORT_S`.
    export = OtelMetricExporter(collect, interval_s=0.01)
    export.start()
    assert collector.came.acquire(timeout=PATIENCE_S)
    export.close()
    export._thread.join(EXPORT_S / 2)
    assert not export._thread.is_alive()


def test_nothing_is_sent_where_there_is_nothing(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> list[Family]:
        raise ValueError("no metrics today")

    export = OtelMetricExporter(broken, interval_s=1000)
    export.start()
    export.close()
    assert "no metrics today" in caplog.text
    for nothing in (OtelMetricExporter(list, interval_s=1000), OtelMetricExporter(list)):
        nothing.start()
        nothing.close()
    OtelMetricExporter(collect).close()  # Never started.
    assert collector.requests == []


@pytest.mark.parametrize(
    ("told", "expected"), [("", 15.0), ("2500", 2.5), ("0", 0.1), ("soon", 15.0)]
)
def test_the_interval_is_as_the_variable_says(
    told: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", told)
    assert otel._interval() == expected


def test_where_it_is_not_installed_one_line_says_what_to_do() -> None:
    program = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "from holdfast.observe.metrics.otel import start_export\n"
        "assert start_export(list) is None\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    [line] = done.stderr.splitlines()
    assert "opentelemetry-sdk" in line


def test_what_cannot_be_set_up_leaves_the_job_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise ValueError("no such certificate")

    monkeypatch.setattr(otel, "_exporter", refuse)
    assert otel.start_export(collect) is None
    assert "no such certificate" in caplog.text
