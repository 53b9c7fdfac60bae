"""Figures about a run: for handlers of one's own, for Prometheus, and for OpenTelemetry.

Importing this loads nothing else; each name is fetched from its module when it is first used.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.metrics.handlers import (
        ConsoleMetricHandler,
        MetricData,
        MetricHandler,
        NullMetricHandler,
    )
    from holdfast.metrics.profiling import get_elapsed_time_ms, prof, profile
    from holdfast.metrics.streams import (
        MetricsConfig,
        MetricStream,
        configure,
        getStream,
        initialize_metrics,
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
    "initialize_metrics",
    "is_configured",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
    "wants_otel",
]

OTEL_ENV = "OTEL_METRICS_EXPORTER"

_HOMES = {
    "holdfast.metrics.handlers": (
        "ConsoleMetricHandler",
        "MetricData",
        "MetricHandler",
        "NullMetricHandler",
    ),
    "holdfast.metrics.profiling": ("get_elapsed_time_ms", "prof", "profile"),
    "holdfast.metrics.streams": (
        "MetricStream",
        "MetricsConfig",
        "configure",
        "getStream",
        "initialize_metrics",
        "publish_metric",
        "put_metric",
    ),
}


def is_configured() -> bool:
    """Whether anybody wants metrics; costs next to nothing if nobody does."""
    streams = sys.modules.get("holdfast.metrics.streams")
    return streams is not None and streams.has_handler()


def wants_otel() -> bool:
    """Whether figures are to be sent by OTLP, as OpenTelemetry's own variable says it."""
    return "otlp" in os.environ.get(OTEL_ENV, "").replace(" ", "").split(",")


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            value = getattr(import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'holdfast.metrics' has no attribute {name!r}")
