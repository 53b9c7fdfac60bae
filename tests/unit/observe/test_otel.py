"""Events and metrics sent by OTLP over HTTP to a fake collector."""

from __future__ import annotations

import gzip
import logging
import os
import socket
import subprocess
import sys
import threading
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor

from event_fakes import PATIENCE_S, event
from holdfast.events import Event, EventSource, NodeState, OpenTelemetryEventHandler, RdzvEvent
from holdfast.observe.metrics import metric_otel
from holdfast.observe.metrics.families import Family, Histogram
from holdfast.observe.metrics.metric_otel import OtelMetricExporter
from holdfast.observe.otlp import EXPORT_S, OneLineExporter

if TYPE_CHECKING:
    from collections.abc import Iterator


class Collector(ThreadingHTTPServer):
    """Keeps every request, and responds with the status that the test sets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Accepting)
        self.status = 200
        self.requests: list[tuple[str, bytes]] = []
        self.came = threading.Semaphore(0)
        self.daemon_threads = False
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Accepting(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.requests.append((self.path, body))
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


def recorded(*events: Any) -> list[Any]:
    """Return the log records of events."""
    exporter = InMemoryLogRecordExporter()  # type: ignore[no-untyped-call]
    provider = LoggerProvider(shutdown_on_exit=False)
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    handler = OpenTelemetryEventHandler(provider)
    for one in events:
        handler.record(one)
    handler.close()
    handler.record(event("the provider is not ours, and goes on"))
    found = [one.log_record for one in exporter.get_finished_logs()]
    provider.shutdown()
    return found[:-1]


def test_event_becomes_a_named_log_record() -> None:
    odd: dict[Any, Any] = {"list": [1, "a"], "big": 2**80, "half": "\udce9", 3: b"x", "x": None}
    one, step = recorded(
        Event("caf\udce9", EventSource.WORKER, 1234, odd),
        RdzvEvent("join", "job", "joined", "host", 42, NodeState.RUNNING, rank=2),
    )
    assert (one.event_name, one.timestamp, one.severity_text) == ("caf?", 1_234_000_000, "INFO")
    assert dict(one.attributes) == {
        "source": "WORKER", "list": "[1, 'a']", "big": str(2**80), "half": "?", "3": "b'x'",
    }  # fmt: skip
    assert (step.event_name, step.body, step.attributes["rank"]) == ("join", "joined", 2)
    assert "local_id" not in step.attributes


PROGRAM = """
from opentelemetry.exporter.otlp.common.http import _OTLPHTTPClient
_OTLPHTTPClient._compute_backoff = lambda client, retry: 0.001
from holdfast import events
for number in range(3):
    events.record(events.Event(f"event {number}", events.EventSource.AGENT, 7), "otel")
events.flush(20.0)
"""


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    return subprocess.run(
        [sys.executable, "-c", program], env=kept | variables,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_events_reach_a_collector_before_the_program_ends(collector: Collector) -> None:
    done = run(PROGRAM, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found = []
    for path, body in collector.requests:
        assert path == "/v1/logs"
        for resource in ExportLogsServiceRequest.FromString(body).resource_logs:
            service = {one.key: one.value.string_value for one in resource.resource.attributes}
            assert service["service.name"] == "holdfast"
            for scope in resource.scope_logs:
                assert scope.scope.name == "holdfast.events"
                found += [(one.event_name, one.time_unix_nano) for one in scope.log_records]
    assert found == [(f"event {number}", 7_000_000) for number in range(3)]


def test_unreachable_collector_is_reported_in_one_line_with_its_address() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # No process listens on this port, and none can.
        at = f"127.0.0.1:{nobody.getsockname()[1]}"
        done = run(PROGRAM, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://me:secret@{at}")
    assert (done.returncode, done.stdout) == (0, "")
    assert len(done.stderr.splitlines()) == 1
    assert f"http://{at}/v1/logs" in done.stderr  # Without the password.


def collect() -> list[Family]:
    times = Histogram((1.0, 2.0))
    times.observe(1.5)
    return [
        Family("up", "gauge", "Up").add(0.5, run_id="a", rank=3),
        Family("seen_total", "counter", "Seen").add(7),
        Family("took_seconds", "histogram", "Took").add(times, stage="stop"),
        Family("empty", "gauge", "Nothing yet"),
    ]


def test_metrics_arrive_unchanged(collector: Collector) -> None:
    export = metric_otel.start_export(collect)
    assert export is not None
    export.close()
    [(path, body)] = collector.requests
    [resource] = ExportMetricsServiceRequest.FromString(body).resource_metrics
    [scope] = resource.scope_metrics
    metrics = {one.name: one for one in scope.metrics}
    assert (path, scope.scope.name) == ("/v1/metrics", f"{metric_otel.SERVICE}.metrics")
    assert metrics.keys() == {"up", "seen_total", "took_seconds"}
    [up] = metrics["up"].gauge.data_points
    labels = {one.key: one.value.string_value for one in up.attributes}
    assert (up.as_double, labels) == (0.5, {"run_id": "a", "rank": "3"})
    seen = metrics["seen_total"].sum
    assert (seen.is_monotonic, [one.as_int for one in seen.data_points]) == (True, [7])
    [took] = metrics["took_seconds"].histogram.data_points
    assert ([*took.explicit_bounds], [*took.bucket_counts]) == ([1.0, 2.0], [0, 1, 0])
    assert (took.count, took.sum, metrics["took_seconds"].unit) == (1, 1.5, "s")
    assert 0 < took.start_time_unix_nano <= took.time_unix_nano


def test_metrics_are_sent_periodically_and_a_refusal_is_reported_once(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    collector.status = 400
    export = OtelMetricExporter(collect)
    export.start()
    for _ in range(3):
        assert collector.came.acquire(timeout=PATIENCE_S)
    export.close()
    assert len(collector.requests) >= 4  # The last one is sent at the end.
    [line] = caplog.messages
    assert f"{collector.url}/v1/metrics" in line


def test_unreachable_collector_does_not_delay_the_end(
    monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    monkeypatch.setattr(metric_otel, "CLOSE_S", 0.05)
    collector.status = 503  # The exporter would retry for `EXPORT_S`.
    export = OtelMetricExporter(collect, interval_s=0.01)
    export.start()
    assert collector.came.acquire(timeout=PATIENCE_S)
    export.close()
    export._thread.join(EXPORT_S / 2)
    assert not export._thread.is_alive()


LIBRARY = "a_library_for_tests"


class Result(Enum):
    SUCCESS = 0
    FAILURE = 1


class Exporter:
    """Logs, and returns what the test sets, like an exporter of OpenTelemetry."""

    def __init__(self, endpoint: str = "http://me:secret@collector:4318/v1/logs") -> None:
        self._endpoint = endpoint
        self.answers: list[Result | Exception] = []

    def export(self, batch: object, **options: Any) -> Result:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer is Result.FAILURE:
            try:
                raise ConnectionError from OSError(111, "Connection refused")
            except ConnectionError as problem:
                logging.getLogger(LIBRARY).warning("Transient error %s, retrying", problem)
            logging.getLogger(LIBRARY).error("Failed for good")
        return answer

    def shutdown(self) -> None:
        logging.getLogger(LIBRARY).warning("already shutdown")


Exporter.__module__ = LIBRARY
sys.modules.setdefault(LIBRARY, ModuleType(LIBRARY))


def test_failure_is_reported_once_until_a_success(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Exporter()
    one_line = OneLineExporter(exporter, "events")
    bad, good = Result.FAILURE, Result.SUCCESS
    exporter.answers = [bad, bad, good, good, bad, good, ValueError("two\nlines"), bad]
    assert [one_line.export([]) for _ in range(7)] == [False, False, True, True, False, True, False]
    one_line.shutdown()
    first, second, third = caplog.records
    assert {one.name for one in caplog.records} == {"holdfast"}
    assert "http://collector:4318/v1/logs" in first.message
    assert "ConnectionRefusedError" in first.message
    assert second.message == first.message
    assert "ValueError: two lines" in third.message
    exporter.export([])  # The program's own exports are still logged.
    assert [one.name for one in caplog.records[3:]] == [LIBRARY, LIBRARY]
