"""The parts that only TorchElastic's `metrics` has: the decorator `prof`, and names that have no effect here.

`prof` emits metrics about a function: its duration, and whether it raises.
"""

from __future__ import annotations

import time
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, overload
from warnings import warn

from holdfast.observe.metrics.metric_handlers import DEFAULT_GROUP, put_metric

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")


@overload
def prof(fn: F, group: str = ...) -> F: ...
@overload
def prof(fn: None = None, group: str = ...) -> Callable[[F], F]: ...


def prof(fn: Any = None, group: str = DEFAULT_GROUP) -> Any:
    """Emit metrics of every call: `<name>.success` or `<name>.failure`, and `<name>.duration.ms`.

    Use it bare (`@prof`) or with a group (`@prof(group="mine")`). The name is `Class.method`, or
    `module.function` with the last part of the module's name.
    """

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        return _reported(function, _name_of(function), group)

    return decorated if fn is None else decorated(fn)


def profile(group: str | None = None) -> Callable[[F], F]:
    """Do the same as its replacement `prof`, except that a metric has only the function's name."""
    warn("profile is now called prof", FutureWarning, stacklevel=2)
    chosen = DEFAULT_GROUP if group is None else group

    def decorated(function: Any) -> Any:
        return _reported(function, function.__name__, chosen)

    return decorated


def _reported(function: Callable[..., Any], name: str, group: str) -> Callable[..., Any]:
    """Return the function with metrics of every call, by this name."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        outcome = ""
        try:
            result = function(*args, **kwargs)
            outcome = "success"
        except Exception:
            outcome = "failure"
            raise
        finally:
            # Do this here, so that a traceback shows only the user's code.
            if outcome:
                put_metric(f"{name}.{outcome}", 1, group)
            took_ms = int((time.monotonic() - begin) * 1000)
            put_metric(f"{name}.duration.ms", took_ms, group)
        return result

    return wrapper


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Return the milliseconds since a time of day, as `time.time()` gives it."""
    return int((time.time() - start_time_in_seconds) * 1000)


def _name_of(function: Callable[..., Any]) -> str:
    qualname = function.__qualname__
    if "." in qualname or not function.__module__:
        return qualname
    return f"{function.__module__.rpartition('.')[2]}.{qualname}"


class MetricsConfig:
    """TorchElastic's settings of metrics; nothing reads them."""

    __slots__ = ("params",)

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = {} if params is None else params


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Do nothing, as in TorchElastic."""


def publish_metric(metric_group: str, metric_name: str, metric_value: int) -> None:
    """Do the same as its replacement `put_metric`."""
    warn("publish_metric is now called put_metric", FutureWarning, stacklevel=2)
    put_metric(metric_name, metric_value, metric_group)
