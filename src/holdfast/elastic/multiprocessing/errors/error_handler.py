"""The writer of error files under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.processes.failures.error_file import ErrorHandler

__all__ = ["ErrorHandler"]
