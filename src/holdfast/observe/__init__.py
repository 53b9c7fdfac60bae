"""What is known of a run from outside: lifecycle events, and events, metrics and health made of them.

Whether a program configured a handler is asked at every start; so the answer imports nothing: a
program that configured one has imported the module that took it.
"""

from __future__ import annotations

import sys


def events_wanted(destination: str) -> bool:
    """Whether a program configured a handler that gets the events of a destination."""
    destinations = sys.modules.get("holdfast.observe.events.destinations")
    return destinations is not None and bool(destinations.is_recorded(destination))


def metrics_wanted() -> bool:
    """Whether a program configured a metric handler."""
    handlers = sys.modules.get("holdfast.observe.metrics.metric_handlers")
    return handlers is not None and bool(handlers.has_handler())
