"""Launch a job from Python: `elastic_launch(LaunchConfig(...), function)(*args)`.

The names are fetched when they are first used, so that a program which only needs the config
does not load the agent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.launcher.config import LaunchConfig
    from holdfast.launcher.launch_job import elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

_HOMES = {
    "LaunchConfig": "holdfast.launcher.config",
    "elastic_launch": "holdfast.launcher.launch_job",
    "launch_agent": "holdfast.launcher.launch_job",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.launcher' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
