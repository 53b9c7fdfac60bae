"""All that metrics of a run go to, opened together and closed together.

A launcher calls `open_exporters` for each agent before it runs, and `close` on what comes back after
it, whatever happened. What nobody asked for is not even imported.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.observe.lifecycle import Observers
    from holdfast.observe.metrics.job_metrics import JobMetrics, Progress
    from holdfast.observe.metrics.otel import OtelMetricExporter
    from holdfast.observe.metrics.prometheus import MetricsEndpoint
    from holdfast.observe.metrics.recorder import MetricQueues

OTEL_ENV = "OTEL_METRICS_EXPORTER"


class MetricExporters:
    """What was opened; each is None where it was not asked for."""

    def __init__(self) -> None:
        self.to_handlers: MetricQueues | None = None
        self.figures: JobMetrics | None = None
        self.endpoint: MetricsEndpoint | None = None
        self.export: OtelMetricExporter | None = None

    def finish(self) -> None:
        """Begin to send the last figures, while others are waited for."""
        if self.export is not None:
            self.export.finish()

    def close(self) -> None:
        """Hand over and send what is left, and free the port. May be called twice."""
        if self.to_handlers is not None:
            self.to_handlers.close()
        endpoint, self.endpoint = self.endpoint, None
        export, self.export = self.export, None
        if export is not None:
            export.close()
        if endpoint is not None:
            endpoint.close()


def open_exporters(
    observers: Observers,
    *,
    port: int | None = None,
    host: str = "",
    progress: Callable[[], Iterable[Progress]] | None = None,
) -> MetricExporters:
    """Let metrics go where they are wanted: to handlers, to an endpoint, to a collector.

    `port` and `host` are `--metrics-port` and `--metrics-addr`; without a port there is no
    endpoint, and without a host it is on loopback. `progress` tells how the workers get on, see
    `JobMetrics`. Raises `EnvironmentProblem` if the port cannot be had.
    """
    outlets = MetricExporters()
    handlers = sys.modules.get("holdfast.observe.metrics.handlers")
    if handlers is not None and handlers.has_handler():
        from holdfast.observe.metrics.recorder import MetricQueues, MetricRecorder

        outlets.to_handlers = MetricQueues()
        observers.add(MetricRecorder(outlets.to_handlers.put))
    if port is None and not wants_otel():
        return outlets
    from holdfast.observe.metrics.job_metrics import JobMetrics

    figures = outlets.figures = JobMetrics(progress)
    if port is not None:
        from holdfast.observe.metrics.prometheus import MetricsEndpoint

        endpoint = MetricsEndpoint(figures.collect, host=host, port=port)
        endpoint.start()
        outlets.endpoint = endpoint
    if wants_otel():
        from holdfast.observe.metrics.otel import start_export

        outlets.export = start_export(figures.collect)
    observers.add(figures)
    return outlets


def wants_otel() -> bool:
    """Whether figures are to be sent by OTLP, as OpenTelemetry's own variable says it."""
    return "otlp" in os.environ.get(OTEL_ENV, "").replace(" ", "").split(",")
