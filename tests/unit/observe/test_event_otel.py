from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from event_fakes import PATIENCE_S, event
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor

from holdfast.errors import EnvironmentProblem
from holdfast.events import Event, EventSource, NodeState, OpenTelemetryEventHandler, RdzvEvent

if TYPE_CHECKING:
    from collections.abc import Iterator


def recorded(*events: Any) -> list[Any]:
    """Return the log records that events become."""
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


def test_an_event_becomes_a_named_log_record() -> None:
    (one,) = recorded(Event("a.b", EventSource.WORKER, 1234, {"rank": 3, "x": None, "s": 0.5}))
    assert (one.event_name, one.body, one.timestamp) == ("a.b", "a.b", 1_234_000_000)
    assert dict(one.attributes) == {"source": "WORKER", "rank": 3, "s": 0.5}
    assert one.severity_text == "INFO"


def test_a_step_of_the_rendezvous_becomes_one_too() -> None:
    (one,) = recorded(RdzvEvent("join", "job", "joined", "host", 42, NodeState.RUNNING, rank=2))
    assert (one.event_name, one.body) == ("join", "joined")
    assert one.attributes["node_state"] == "RUNNING"
    assert one.attributes["rank"] == 2
    assert "local_id" not in one.attributes


def test_what_cannot_be_sent_as_it_is_becomes_text() -> None:
    odd = {"list": [1, "a"], "big": 2**80, "half": "\udce9", 3: b"x", "nan": float("nan")}
    (one,) = recorded(Event("caf\udce9", EventSource.WORKER, 1, odd))  # type: ignore[arg-type]
    assert one.event_name == "caf?"
    assert {key: value for key, value in one.attributes.items() if key != "nan"} == {
        "source": "WORKER",
        "list": "[1, 'a']",
        "big": str(2**80),
        "half": "?",
        "3": "b'x'",
    }


class Collector(HTTPServer):
    """Keeps what is sent to it by OTLP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Taking)
        self.taken: list[tuple[str, ExportLogsServiceRequest]] = []


class Taking(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        assert isinstance(self.server, Collector)
        self.server.taken.append((self.path, ExportLogsServiceRequest.FromString(data)))
        answer = ExportLogsServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


PROGRAM = """
from holdfast import events
for number in range(3):
    events.record(events.Event(f"event {number}", events.EventSource.AGENT, 7), "otel")
"""


IMPATIENT = """
from opentelemetry.exporter.otlp.common.http import _OTLPHTTPClient
_OTLPHTTPClient._compute_backoff = lambda client, retry: 0.001
"""
FLUSHING = f"events.flush({PATIENCE_S})\n"


def run(program: str = PROGRAM, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=kept | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_events_reach_a_collector_before_the_program_ends(collector: Collector) -> None:
    done = run(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{collector.server_port}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found = []
    for path, request in collector.taken:
        assert path == "/v1/logs"
        for resource in request.resource_logs:
            service = {one.key: one.value.string_value for one in resource.resource.attributes}
            assert service["service.name"] == "holdfast"
            for scope in resource.scope_logs:
                assert scope.scope.name == "holdfast.events"
                found += [(one.event_name, one.time_unix_nano) for one in scope.log_records]
    assert found == [(f"event {number}", 7_000_000) for number in range(3)]


def test_a_collector_that_is_away_is_one_line_with_its_address() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # Nobody listens there, and nobody else can.
        at = f"127.0.0.1:{nobody.getsockname()[1]}"
        endpoint = f"http://me:secret@{at}"
        done = run(IMPATIENT + PROGRAM + FLUSHING, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    assert (done.returncode, done.stdout) == (0, "")
    assert len(done.stderr.splitlines()) == 1
    assert f"http://{at}/v1/logs" in done.stderr  # Without the password.
    assert "ConnectionRefusedError" in done.stderr


def test_invalid_variables_are_a_problem_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BLRP_MAX_QUEUE_SIZE", "-3")
    with pytest.raises(EnvironmentProblem, match="ValueError"):
        OpenTelemetryEventHandler()


def test_without_opentelemetry_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(EnvironmentProblem, match="opentelemetry"):
        OpenTelemetryEventHandler()
