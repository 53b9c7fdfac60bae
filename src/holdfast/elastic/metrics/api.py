"""Handlers, streams and the decorator under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.metrics import (
    MetricsConfig,
    get_elapsed_time_ms,
    prof,
    profile,
    publish_metric,
)
from holdfast.observe.metrics.metric_handlers import (
    ConsoleMetricHandler,
    MetricData,
    MetricHandler,
    MetricStream,
    NullMetricHandler,
    configure,
    getStream,
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
