"""Metrics under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic.metrics import api  # noqa: F401 (also reached as an attribute)
from holdfast.observe.metrics.handlers import (
    ConsoleMetricHandler,
    MetricData,
    MetricHandler,
    MetricsConfig,
    NullMetricHandler,
    configure,
    getStream,
    initialize_metrics,
    publish_metric,
    put_metric,
)
from holdfast.observe.metrics.profiling import get_elapsed_time_ms, prof, profile

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricsConfig",
    "NullMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "initialize_metrics",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]
