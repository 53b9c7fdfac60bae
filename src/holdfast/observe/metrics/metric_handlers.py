"""Metric handlers, and `put_metric`, which sends a metric to the handler of its group.

Derive from `MetricHandler` and `configure` it. `put_metric` calls the handler in the caller's
thread, as TorchElastic's does, and catches its exceptions (`safe_handler`). A dropped handler receives metrics again
once it is configured again. A background thread sends the agent's own metrics to the handler (`metric_recorder`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import NamedTuple

from holdfast import plugins
from holdfast.observe import metric_checks
from holdfast.observe.safe_handler import Faults

FAULTY_MAX = 64
"""How many handlers' failures are remembered; above that, the oldest are forgotten."""
DEFAULT_GROUP = "torchelastic"


class MetricData(NamedTuple):
    """One value with its time (seconds since 1970), its group and its name."""

    timestamp: float
    group_name: str
    name: str
    value: int


class MetricHandler(ABC):
    """Receives metrics; register it with `configure`.

    A separate thread emits the agent's metrics, one by one and in order, so `emit` may block. A
    program's own metrics are emitted in the thread that calls `put_metric`.
    """

    @abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Handle one metric."""


class ConsoleMetricHandler(MetricHandler):
    """Writes each metric as a line on standard output."""

    def emit(self, metric_data: MetricData) -> None:
        at, group, name, value = metric_data
        print(f"[{at}][{group}]: {name}={value}", flush=True)


class NullMetricHandler(MetricHandler):
    """Ignores metrics: the default until another handler is configured."""

    def emit(self, metric_data: MetricData) -> None:
        pass


class MetricStream:
    """A group of metrics and its handler."""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: int) -> None:
        """Send a metric to the handler, in this thread."""
        deliver(self.handler, MetricData(time.time(), self.group_name, metric_name, metric_value))


class HandlerFaults(Faults):
    """The failures of a metric handler. It references the handler, so that no other object gets the same id."""

    def __init__(self, handler: MetricHandler) -> None:
        super().__init__(f"the metric handler {plugins.named(handler)}", "metric")
        self.handler = handler


_handlers: dict[str, MetricHandler] = {}
_default: list[MetricHandler] = [NullMetricHandler()]
_faulty: dict[int, HandlerFaults] = {}


def deliver(handler: MetricHandler, metric: MetricData) -> None:
    """Send a metric to a handler, unless the handler was dropped."""
    faults = _faulty.get(id(handler)) if _faulty else None
    if faults is not None and faults.is_dropped:
        return
    try:
        handler.emit(metric)
    except Exception as problem:  # noqa: BLE001 (a handler may raise anything)
        faults_of(handler).add(problem)
    else:
        if faults is not None:
            faults.reset()


def is_dropped(handler: MetricHandler) -> bool:
    """Whether a handler receives no metrics until it is configured again."""
    faults = _faulty.get(id(handler)) if _faulty else None
    return faults is not None and faults.is_dropped


def faults_of(handler: MetricHandler) -> HandlerFaults:
    """Return the record of a handler's failures; create it if necessary."""
    faults = _faulty.get(id(handler))
    if faults is None:
        if len(_faulty) >= FAULTY_MAX:
            del _faulty[next(iter(_faulty))]
        faults = _faulty[id(handler)] = HandlerFaults(handler)
    return faults


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Send the metrics of a group to a handler. Without `group`, it serves all groups without their own."""
    _faulty.pop(id(handler), None)
    if group is None:
        _default[0] = handler
    else:
        _handlers[group] = handler


def getStream(group: str) -> MetricStream:  # noqa: N802 (TorchElastic's name)
    """Return a group with its current handler."""
    return MetricStream(group, _handlers.get(group, _default[0]))


def has_handler() -> bool:
    """Whether a handler other than `NullMetricHandler` is configured."""
    return any(not isinstance(one, NullMetricHandler) for one in (*_default, *_handlers.values()))


metric_checks.append(has_handler)


def put_metric(metric_name: str, metric_value: int, metric_group: str = DEFAULT_GROUP) -> None:
    """Send a metric to the handler of its group."""
    getStream(metric_group).add_value(metric_name, metric_value)
