"""The launcher under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.launcher.config import LaunchConfig
from holdfast.launcher.launch_job import elastic_launch, launch_agent
from holdfast.launcher.launch_job import entrypoint_name as _get_entrypoint_name

__all__ = ["LaunchConfig", "_get_entrypoint_name", "elastic_launch", "launch_agent"]
