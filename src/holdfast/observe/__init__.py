"""Observing a run: lifecycle events, and the events, metrics and health checks derived from them.

The functions here check at every start whether the program configured a handler. They import nothing: a program
that configured a handler has imported the module with the configuration.
"""

from __future__ import annotations

import sys


def events_wanted(destination: str) -> bool:
    """Whether the program configured a handler for the events of a destination."""
    destinations = sys.modules.get("holdfast.observe.events.destinations")
    return destinations is not None and bool(destinations.is_recorded(destination))


def metrics_wanted() -> bool:
    """Whether the program configured a metric handler."""
    handlers = sys.modules.get("holdfast.observe.metrics.metric_handlers")
    return handlers is not None and bool(handlers.has_handler())
