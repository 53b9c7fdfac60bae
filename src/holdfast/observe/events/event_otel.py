"""Events as log records of OpenTelemetry, sent by OTLP over HTTP. Needs the extra `otel`.

If the program has set up OpenTelemetry's logs, the handler uses that provider. Otherwise it creates one, which
OpenTelemetry's own variables configure:
`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_SERVICE_NAME`, ...

An event becomes an OpenTelemetry *event*: a log record with a name. Its metadata are the attributes, without nulls.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from holdfast import console
from holdfast.errors import EnvironmentProblem
from holdfast.observe.events.event import RdzvEvent
from holdfast.observe.events.event_handlers import EventHandler
from holdfast.observe.otlp import EXPORT_S, SERVICE, OneLineExporter, resource, sendable

if TYPE_CHECKING:
    from holdfast.observe.events.event import Event

FLUSH_MS = 5000
"""How long the end of a job waits for the collector."""


class OpenTelemetryEventHandler(EventHandler):
    """Sends events to an OpenTelemetry collector, or to a given provider of loggers."""

    def __init__(self, provider: Any = None) -> None:
        try:
            from opentelemetry import _logs
            from opentelemetry.sdk._logs import LoggerProvider
        except ImportError as problem:
            raise _missing(problem) from problem
        self._logs: Any = _logs
        given = provider or _logs.get_logger_provider()
        self._is_own = not isinstance(given, LoggerProvider)
        self._provider: Any = _own_provider() if self._is_own else given
        self._logger = self._provider.get_logger(f"{SERVICE}.events")

    def record(self, event: Event) -> None:
        self._logger.emit(self._as_log_record(event))

    def flush(self) -> None:
        """Send queued events; raise `TimeoutError` if the collector does not accept them in time."""
        if not self._provider.force_flush(FLUSH_MS):
            raise TimeoutError(f"the collector has not accepted all events after {FLUSH_MS} ms")

    def close(self) -> None:
        """Send queued events, and shut down the provider if this handler created it."""
        self.flush()
        if self._is_own:
            self._provider.shutdown()

    def _as_log_record(self, event: Any) -> Any:
        now_ns = time.time_ns()
        if isinstance(event, RdzvEvent):
            fields: dict[str, Any] = {one: getattr(event, one) for one in event.__match_args__}
            name, at_ns, body = event.name, now_ns, event.message
        else:
            fields = {"source": event.source, **event.metadata}
            name, at_ns, body = event.name, event.timestamp * 1_000_000 or now_ns, event.name
        return self._logs.LogRecord(
            timestamp=at_ns,
            observed_timestamp=now_ns,
            severity_number=self._logs.SeverityNumber.INFO,
            severity_text="INFO",
            event_name=sendable(name),
            body=sendable(body),
            attributes={str(key): sendable(one) for key, one in fields.items() if one is not None},
        )


def _own_provider() -> Any:
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

    try:
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    except ImportError as problem:
        raise _missing(problem) from problem
    try:
        exporter: Any = OneLineExporter(OTLPLogExporter(timeout=EXPORT_S), "events")
        # The provider's own exit hook has no limit; `close` here has one.
        provider = LoggerProvider(resource=resource(), shutdown_on_exit=False)
        provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
    except Exception as problem:
        raise EnvironmentProblem(
            f"events: cannot set up OpenTelemetry: {console.describe(problem)}",
            hint="check its variables (OTEL_...)",
        ) from problem
    return provider


def _missing(problem: ImportError) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"events: 'otel' needs OpenTelemetry, which is not installed: {problem}",
        hint="pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
    )
