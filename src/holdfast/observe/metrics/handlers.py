"""Where metrics go: a handler takes each of them as it comes. Derive from `MetricHandler`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import namedtuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple

    class MetricData(NamedTuple):
        """One figure: when (seconds since 1970), in which group, by which name."""

        timestamp: float
        group_name: str
        name: str
        value: int
else:
    # `typing` would cost more to import than all of this package.
    MetricData = namedtuple("MetricData", ["timestamp", "group_name", "name", "value"])  # noqa: PYI024


class MetricHandler(ABC):
    """Takes metrics; `holdfast.observe.metrics.configure` makes one known.

    The agent's metrics come in a thread of their own, one by one and in order, so it may take its
    time. Those of a program come in the thread that calls `put_metric`. One that raises does no
    harm; see `streams.FAULTS_MAX`.
    """

    @abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Take one metric."""


class ConsoleMetricHandler(MetricHandler):
    """Writes each metric as a line on standard output."""

    def emit(self, metric_data: MetricData) -> None:
        """Write the line."""
        at, group, name, value = metric_data
        print(f"[{at}][{group}]: {name}={value}", flush=True)


class NullMetricHandler(MetricHandler):
    """Wants no metrics: what there is until another is configured."""

    def emit(self, metric_data: MetricData) -> None:
        """Forget it."""
