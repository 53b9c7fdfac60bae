"""The exporters of a run's metrics, opened and closed together.

A launcher calls `open_exporters` before it runs an agent, and `close` on the result afterwards. Exporters
that are not configured are not imported.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast.observe import metrics_wanted
from holdfast.observe.metrics.job_metrics import JobMetrics
from holdfast.observe.metrics.metric_otel import start_export
from holdfast.observe.metrics.metric_recorder import MetricQueues, MetricRecorder
from holdfast.observe.metrics.prometheus import MetricsEndpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.observe.lifecycle import Observers
    from holdfast.observe.metrics.job_metrics import Progress
    from holdfast.observe.metrics.metric_otel import OtelMetricExporter
OTEL_ENV = "OTEL_METRICS_EXPORTER"


class MetricExporters:
    """The open exporters; each is None if it is not configured."""

    def __init__(self) -> None:
        self.queues: MetricQueues | None = None
        self.metrics: JobMetrics | None = None
        self.endpoint: MetricsEndpoint | None = None
        self.otel: OtelMetricExporter | None = None

    def finish(self) -> None:
        """Start sending the last metrics, without waiting."""
        if self.otel is not None:
            self.otel.finish()

    def close(self) -> None:
        """Send the remaining metrics, and free the port. May be called twice."""
        if self.queues is not None:
            self.queues.close()
        endpoint, self.endpoint = self.endpoint, None
        otel, self.otel = self.otel, None
        if otel is not None:
            otel.close()
        if endpoint is not None:
            endpoint.close()


def open_exporters(
    observers: Observers,
    *,
    port: int | None = None,
    host: str = "",
    progress: Callable[[], Iterable[tuple[int, Progress]]] | None = None,
) -> MetricExporters:
    """Export metrics to the configured handlers, to an HTTP endpoint, and to a collector.

    `port` and `host` are `--metrics-port` and `--metrics-addr`; without a port there is no
    endpoint, and without a host it is on loopback. `JobMetrics` explains `progress`. Raises
    `EnvironmentProblem` if the port cannot be bound.
    """
    exporters = MetricExporters()
    if metrics_wanted():
        exporters.queues = MetricQueues()
        observers.add(MetricRecorder(exporters.queues.put))
    if port is None and not otel_wanted():
        return exporters
    metrics = exporters.metrics = JobMetrics(progress)
    if port is not None:
        endpoint = MetricsEndpoint(metrics.collect, host=host, port=port)
        endpoint.start()
        exporters.endpoint = endpoint
    if otel_wanted():
        exporters.otel = start_export(metrics.collect)
    observers.add(metrics)
    return exporters


def otel_wanted() -> bool:
    """Whether OpenTelemetry's own variable requests metrics over OTLP."""
    return "otlp" in os.environ.get(OTEL_ENV, "").replace(" ", "").split(",")
