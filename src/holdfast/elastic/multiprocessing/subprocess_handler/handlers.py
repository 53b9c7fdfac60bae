"""The choice of the subprocess handler under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.processes.workers.command_workers import get_subprocess_handler

__all__ = ["get_subprocess_handler"]
