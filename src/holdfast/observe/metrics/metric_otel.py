"""Sends metrics to an OpenTelemetry collector, by OTLP over HTTP. Needs the extra `otel`.

It converts the metric families into OpenTelemetry's values. The histograms already have their counts, so no meter
is needed. OpenTelemetry's own variables configure it: `OTEL_EXPORTER_OTLP_ENDPOINT`,
`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_METRIC_EXPORT_INTERVAL` (in ms), `OTEL_SERVICE_NAME`, ...

An unreachable collector is reported once. Only the sending thread waits for it; `close` waits up to `CLOSE_S`.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

from holdfast import console
from holdfast.errors import EnvironmentProblem
from holdfast.observe.metrics.families import Histogram
from holdfast.observe.otlp import EXPORT_S, OneLineExporter, resource, sendable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.observe.metrics.families import Family, Sample

INTERVAL_S = 15.0
INTERVAL_ENV = "OTEL_METRIC_EXPORT_INTERVAL"
INTERVAL_S_MIN = 0.1
"""The minimum of `OTEL_METRIC_EXPORT_INTERVAL`."""
CLOSE_S = 5.0
"""How long the end of a job waits for the last metrics to be sent."""
SERVICE = "holdfast"


class OtelMetricExporter:
    """Sends the families from `collect` every `interval_s` after `start`, and once more at `close`."""

    def __init__(
        self,
        collect: Callable[[], Iterable[Family]],
        *,
        interval_s: float | None = None,
        exporter: Any = None,
    ) -> None:
        self._collect = collect
        self._interval_s = _interval() if interval_s is None else interval_s
        self._exporter = OneLineExporter(_exporter() if exporter is None else exporter, "metrics")
        self._resource = resource()
        self._began_ns = time.time_ns()
        self._over = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="holdfast-otel", daemon=True)

    def start(self) -> None:
        """Start sending."""
        self._thread.start()

    def finish(self) -> None:
        """Start sending the last metrics, without waiting."""
        self._over.set()

    def close(self) -> None:
        """Send the last metrics and end; wait for the collector for at most `CLOSE_S`."""
        self.finish()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)
        # This also ends an attempt in progress.
        self._exporter.shutdown(timeout_millis=0)

    def _run(self) -> None:
        while not self._over.wait(self._interval_s):
            self._send()
        self._send()

    def _send(self) -> None:
        try:
            data = self._as_data(time.time_ns())
        except Exception as problem:  # noqa: BLE001 (the job continues)
            if not self._warned:
                self._warned = True
                console.warning(f"metrics: cannot collect them: {console.describe(problem)}")
            return
        if data is not None:
            self._exporter.export(data, timeout_millis=EXPORT_S * 1000)

    def _as_data(self, now_ns: int) -> Any:
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        found = [
            _as_metric(family, self._began_ns, now_ns)
            for family in self._collect()
            if family.samples
        ]
        if not found:
            return None
        scope = ScopeMetrics(InstrumentationScope(f"{SERVICE}.metrics"), found, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])


def start_export(collect: Callable[[], Iterable[Family]]) -> OtelMetricExporter | None:
    """Start sending; without OpenTelemetry, warn and continue."""
    try:
        export = OtelMetricExporter(collect)
    except EnvironmentProblem as problem:
        console.warning(str(problem))
        return None
    except Exception as problem:  # noqa: BLE001 (the variables may have any value)
        console.warning(f"metrics: cannot set up OpenTelemetry: {console.describe(problem)}")
        return None
    export.start()
    return export


def _as_metric(family: Family, began_ns: int, now_ns: int) -> Any:
    from opentelemetry.sdk.metrics import export

    points = [_as_point(sample, began_ns, now_ns) for sample in family.samples]
    cumulative = export.AggregationTemporality.CUMULATIVE
    data: Any
    if family.kind == "histogram":
        data = export.Histogram(points, cumulative)
    elif family.kind == "counter":
        data = export.Sum(points, cumulative, is_monotonic=True)
    else:
        data = export.Gauge(points)
    unit = "s" if "_seconds" in family.name else "1"
    return export.Metric(family.name, family.help_text, unit, data)


def _as_point(sample: Sample, began_ns: int, now_ns: int) -> Any:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint, NumberDataPoint

    labels = {name: sendable(str(value)) for name, value in sample.labels.items()}
    value = sample.value
    if not isinstance(value, Histogram):
        return NumberDataPoint(labels, began_ns, now_ns, value)
    unknown: Any = None  # Minimum and maximum are optional, and not recorded.
    return HistogramDataPoint(
        labels,
        began_ns,
        now_ns,
        count=value.count,
        sum=value.sum,
        bucket_counts=value.counts,
        explicit_bounds=value.bounds,
        min=unknown,
        max=unknown,
    )


def _interval() -> float:
    given = os.environ.get(INTERVAL_ENV, "")
    try:
        return max(INTERVAL_S_MIN, float(given) / 1000) if given else INTERVAL_S
    except ValueError:
        console.warning(
            f"{INTERVAL_ENV}={given!r} is not a number of milliseconds; using {INTERVAL_S * 1000:.0f}"
        )
        return INTERVAL_S


def _exporter() -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    except ImportError as problem:
        raise EnvironmentProblem(
            f"metrics: OpenTelemetry is not installed: {problem}",
            hint="pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
        ) from problem
    return OTLPMetricExporter(timeout=EXPORT_S)
