"""Observing a run: lifecycle events, and the events, metrics and health checks derived from them.

The functions here check at every start whether the program configured a handler. The modules with the handlers add
the checks when they are imported. A program that configured a handler has imported them; a plain job never does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.observe.safe_handler import SafeHandler

configured: dict[str, SafeHandler] = {}
"""The handlers that the program configured, by event destination."""
event_checks: list[Callable[[str], bool]] = []
metric_checks: list[Callable[[], bool]] = []


def events_wanted(destination: str) -> bool:
    """Whether the program configured a handler for the events of a destination."""
    return any(check(destination) for check in event_checks)


def metrics_wanted() -> bool:
    """Whether the program configured a metric handler."""
    return any(check() for check in metric_checks)
