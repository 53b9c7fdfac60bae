"""The choice of the error handler under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.processes.failures.error_file import get_error_handler

__all__ = ["get_error_handler"]
