"""Handlers, streams and the decorator under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.observe.metrics.handlers import (
    ConsoleMetricHandler,
    MetricData,
    MetricHandler,
    NullMetricHandler,
)
from holdfast.observe.metrics.profiling import get_elapsed_time_ms, prof, profile
from holdfast.observe.metrics.streams import (
    MetricsConfig,
    MetricStream,
    configure,
    getStream,
    publish_metric,
    put_metric,
)

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]
