"""A handler that keeps what it got, and the configuration as it was before a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.observe.metrics import handlers
from holdfast.observe.metrics.handlers import MetricData, MetricHandler, NullMetricHandler

if TYPE_CHECKING:
    from collections.abc import Iterator


class Kept(MetricHandler):
    def __init__(self) -> None:
        self.metrics: list[MetricData] = []

    def emit(self, metric_data: MetricData) -> None:
        self.metrics.append(metric_data)

    def named(self) -> list[tuple[str, int]]:
        return [(one.name, one.value) for one in self.metrics]


@pytest.fixture
def nothing_configured() -> Iterator[None]:
    yield
    handlers.configure(NullMetricHandler())
    handlers._handlers.clear()
    handlers._faulty.clear()
