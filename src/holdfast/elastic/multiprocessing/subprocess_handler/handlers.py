"""The choice of the subprocess handler under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.processes.workers.group import get_subprocess_handler

__all__ = ["get_subprocess_handler"]
