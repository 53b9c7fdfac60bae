"""The handlers that start commands, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.submodules import bind_submodules
from holdfast.processes.workers.group import SubprocessHandler, get_subprocess_handler

__all__ = ["SubprocessHandler", "get_subprocess_handler"]

bind_submodules(__name__)
