"""All that metrics of a run go to, opened together and closed together.

A launcher calls `open_outlets` for each agent before it runs, and `close` on what comes back after
it, whatever happened. What nobody asked for is not even imported.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.agent.job_metrics import JobMetrics, Progress
    from holdfast.agent.metrics_apart import MetricsApart
    from holdfast.agent.moments import Onlookers
    from holdfast.metrics.endpoint import MetricsEndpoint
    from holdfast.metrics.otel import OtelExport

OTEL_ENV = "OTEL_METRICS_EXPORTER"


class MetricOutlets:
    """What was opened; each is None where it was not asked for."""

    def __init__(self) -> None:
        self.to_handlers: MetricsApart | None = None
        self.figures: JobMetrics | None = None
        self.endpoint: MetricsEndpoint | None = None
        self.export: OtelExport | None = None

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


def open_outlets(
    onlookers: Onlookers,
    *,
    port: int | None = None,
    host: str = "",
    progress: Callable[[], Iterable[Progress]] | None = None,
) -> MetricOutlets:
    """Let metrics go where they are wanted: to handlers, to an endpoint, to a collector.

    `port` and `host` are `--metrics-port` and `--metrics-addr`; without a port there is no
    endpoint, and without a host it is on loopback. `progress` tells how the workers get on, see
    `JobMetrics`. Raises `EnvironmentProblem` if the port cannot be had.
    """
    outlets = MetricOutlets()
    streams = sys.modules.get("holdfast.metrics.streams")
    if streams is not None and streams.has_handler():
        from holdfast.agent.metric_recorder import MetricRecorder
        from holdfast.agent.metrics_apart import MetricsApart

        outlets.to_handlers = MetricsApart()
        onlookers.add(MetricRecorder(outlets.to_handlers.put))
    if port is None and not wants_otel():
        return outlets
    from holdfast.agent.job_metrics import JobMetrics

    figures = outlets.figures = JobMetrics(progress)
    if port is not None:
        from holdfast.metrics.endpoint import MetricsEndpoint

        endpoint = MetricsEndpoint(figures.collect, host=host, port=port)
        endpoint.start()
        outlets.endpoint = endpoint
    if wants_otel():
        from holdfast.metrics.otel import start_export

        outlets.export = start_export(figures.collect)
    onlookers.add(figures)
    return outlets


def wants_otel() -> bool:
    """Whether figures are to be sent by OTLP, as OpenTelemetry's own variable says it."""
    return "otlp" in os.environ.get(OTEL_ENV, "").replace(" ", "").split(",")
