"""The launcher under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.launcher.config import LaunchConfig
from holdfast.launcher.launch import elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]
