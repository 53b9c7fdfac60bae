"""`put_metric`, which hands a metric to the handler of its group, and `configure`.

`put_metric` calls the handler in the caller's
thread and never raises on its account: a handler that raises is reported once, and after
`FAULTS_MAX` failures in a row it gets no more metrics until it is configured again. The agent's own
metrics reach the handler in the background: `holdfast.observe.metrics.recorder`.
"""

from __future__ import annotations

import time

from holdfast import console
from holdfast.observe.metrics.handlers import MetricData, MetricHandler, NullMetricHandler

FAULTS_MAX = 3
"""A handler that failed so often, and never did well in between, is left alone."""
FAULTY_MAX = 64
"""Handlers whose faults are remembered; of more than these the oldest are forgotten."""
DEFAULT_GROUP = "torchelastic"


class _Faults:
    """How a handler that failed has been doing since. Keeps it alive, so that its id stays its."""

    __slots__ = ("handler", "in_a_row", "was_named")

    def __init__(self, handler: MetricHandler) -> None:
        self.handler = handler
        self.in_a_row = 0
        self.was_named = False


_handlers: dict[str, MetricHandler] = {}
_default: list[MetricHandler] = [NullMetricHandler()]
_faulty: dict[int, _Faults] = {}


class MetricsConfig:
    """What a launcher was told about metrics, as TorchElastic passes it on; nothing reads it."""

    __slots__ = ("params",)

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = {} if params is None else params


class MetricStream:
    """A group of metrics and the handler they go to."""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: int) -> None:
        """Hand a metric to the handler, now."""
        hand_over(self.handler, MetricData(time.time(), self.group_name, metric_name, metric_value))


def hand_over(handler: MetricHandler, metric: MetricData) -> None:
    """Give a handler a metric, unless it is left alone; bear what it raises."""
    if is_dropped(handler):
        return
    try:
        handler.emit(metric)
    except Exception as problem:  # noqa: BLE001 (a handler may be anybody's)
        _blame(handler, problem)
    else:
        faults = _faulty.get(id(handler)) if _faulty else None
        if faults is not None and faults.in_a_row < FAULTS_MAX:
            faults.in_a_row = 0


def is_dropped(handler: MetricHandler) -> bool:
    """Whether a handler gets nothing more until it is configured again."""
    faults = _faulty.get(id(handler)) if _faulty else None
    return faults is not None and faults.in_a_row >= FAULTS_MAX


def drop(handler: MetricHandler) -> None:
    """Give a handler nothing more until it is configured again."""
    _faults_of(handler).in_a_row = FAULTS_MAX


def _faults_of(handler: MetricHandler) -> _Faults:
    """Return the faults of a handler, remembered from now on if they were not yet."""
    faults = _faulty.get(id(handler))
    if faults is None:
        if len(_faulty) >= FAULTY_MAX:
            del _faulty[next(iter(_faulty))]
        faults = _faulty[id(handler)] = _Faults(handler)
    return faults


def _blame(handler: MetricHandler, problem: Exception) -> None:
    name = f"the metric handler {type(handler).__name__}"
    faults = _faults_of(handler)
    if not faults.was_named:
        faults.was_named = True
        console.warning(f"{name} failed: {console.describe(problem)}")
    faults.in_a_row += 1
    if faults.in_a_row == FAULTS_MAX:
        console.warning(f"{name} failed {FAULTS_MAX} times in a row, and gets nothing more")


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Send metrics of a group to a handler; without a group, those that no other one wants."""
    _faulty.pop(id(handler), None)
    if group is None:
        _default[0] = handler
    else:
        _handlers[group] = handler


def getStream(group: str) -> MetricStream:  # noqa: N802 (TorchElastic's name)
    """Return where a group's metrics go as configured now."""
    return MetricStream(group, _handlers.get(group, _default[0]))


def has_handler() -> bool:
    """Whether a handler that does something is configured."""
    return any(not isinstance(one, NullMetricHandler) for one in (*_default, *_handlers.values()))


def put_metric(metric_name: str, metric_value: int, metric_group: str = DEFAULT_GROUP) -> None:
    """Tell of a figure."""
    getStream(metric_group).add_value(metric_name, metric_value)


def publish_metric(metric_group: str, metric_name: str, metric_value: int) -> None:
    """Do as `put_metric` does, which is the newer name."""
    from warnings import warn

    warn("publish_metric is now called put_metric", FutureWarning, stacklevel=2)
    put_metric(metric_name, metric_value, metric_group)


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Do nothing, as in TorchElastic; a launcher calls it with what it was told about metrics."""
