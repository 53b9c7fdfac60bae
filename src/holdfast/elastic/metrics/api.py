"""Handlers, streams and the decorator under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.observe.metrics.handlers import (
    ConsoleMetricHandler,
    MetricData,
    MetricHandler,
    MetricsConfig,
    MetricStream,
    NullMetricHandler,
    configure,
    getStream,
    publish_metric,
    put_metric,
)
from holdfast.observe.metrics.profiling import get_elapsed_time_ms, prof, profile

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
