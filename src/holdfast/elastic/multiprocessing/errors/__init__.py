"""Errors of workers under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.submodules import bind_submodules
from holdfast.processes.failures.error_file import ErrorHandler, get_error_handler, record
from holdfast.processes.failures.failure import ChildFailedError, ProcessFailure

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]

bind_submodules(__name__)
