"""Holdfast: an elastic, fault-tolerant launcher and supervisor for distributed jobs.

Importing this package loads nothing but this file; each public name is fetched from its module
when it is first used.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False  # `typing` would cost every worker that imports us some milliseconds.
if TYPE_CHECKING:
    from holdfast.launcher import LaunchConfig, elastic_launch, launch_agent
    from holdfast.processes.failures.error_file import record
    from holdfast.processes.failures.failure import ChildFailedError, ProcessFailure

__all__ = [
    "ChildFailedError",
    "LaunchConfig",
    "ProcessFailure",
    "__version__",
    "elastic_launch",
    "launch_agent",
    "record",
]

_HOMES = {
    "ChildFailedError": "holdfast.processes.failures.failure",
    "LaunchConfig": "holdfast.launcher",
    "ProcessFailure": "holdfast.processes.failures.failure",
    "elastic_launch": "holdfast.launcher",
    "launch_agent": "holdfast.launcher",
    "record": "holdfast.processes.failures.error_file",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
