"""How long a function takes and whether it raises, as metrics: the decorator `prof`."""

from __future__ import annotations

import time
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, overload

from holdfast.observe.metrics import handlers

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")


@overload
def prof(fn: F, group: str = ...) -> F: ...
@overload
def prof(fn: None = None, group: str = ...) -> Callable[[F], F]: ...


def prof(fn: Any = None, group: str = handlers.DEFAULT_GROUP) -> Any:
    """Tell of every call: `<name>.success` or `<name>.failure`, and `<name>.duration.ms`.

    Use it bare (`@prof`) or with a group (`@prof(group="mine")`). The name is `Class.method`, or
    `module.function` with the last part of the module's name.
    """

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        return _reported(function, _name_of(function), group)

    return decorated if fn is None else decorated(fn)


def profile(group: str | None = None) -> Callable[[F], F]:
    """Do as `prof` does, which is the newer name; here a metric's name is the function's alone."""
    from warnings import warn

    warn("profile is now called prof", FutureWarning, stacklevel=2)
    chosen = handlers.DEFAULT_GROUP if group is None else group

    def decorated(function: Any) -> Any:
        return _reported(function, function.__name__, chosen)

    return decorated


def _reported(function: Callable[..., Any], name: str, group: str) -> Callable[..., Any]:
    """Return a function of which every call is told by this name."""

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
            # Told of from here, so that the way an exception takes shows nothing of ours.
            if outcome:
                handlers.put_metric(f"{name}.{outcome}", 1, group)
            took_ms = int((time.monotonic() - begin) * 1000)
            handlers.put_metric(f"{name}.duration.ms", took_ms, group)
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
