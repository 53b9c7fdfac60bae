"""Launch a job from Python: `elastic_launch(LaunchConfig(...), function)(*args)`."""

from __future__ import annotations

from holdfast.launcher.config import LaunchConfig
from holdfast.launcher.launch_job import elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]
