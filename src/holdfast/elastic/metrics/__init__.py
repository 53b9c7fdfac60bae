"""Metrics under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.metrics import (
    MetricsConfig,
    get_elapsed_time_ms,
    initialize_metrics,
    prof,
    profile,
    publish_metric,
)
from holdfast.elastic.metrics import api  # noqa: F401 (also reached as an attribute)
from holdfast.observe.metrics.metric_handlers import (
    ConsoleMetricHandler,
    MetricData,
    MetricHandler,
    NullMetricHandler,
    configure,
    getStream,
    put_metric,
)

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
