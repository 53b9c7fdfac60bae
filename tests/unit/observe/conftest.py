"""Resets the configuration after each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast import console, observe
from holdfast.observe.events import destinations
from holdfast.observe.metrics import metric_handlers, metric_recorder

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def nothing_configured() -> Iterator[None]:
    yield
    tables = (observe.configured, destinations._found)
    added = [safe for _, safe in destinations._added.values()]
    for safe in [one for table in tables for one in table.values()] + added:
        safe.close(5.0)
    for table in (*tables, destinations._added):
        table.clear()
    metric_handlers.configure(metric_handlers.NullMetricHandler())
    metric_handlers._handlers.clear()
    metric_handlers._faulty.clear()
    for queue in metric_recorder._unfinished.values():
        queue.close(20.0)
    metric_recorder._unfinished.clear()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Return the console's messages as `log.messages`."""
    caplog.set_level(console.NOTICE, "holdfast")
    return caplog
