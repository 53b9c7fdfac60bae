"""The handlers that start commands, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic.multiprocessing.subprocess_handler import (  # noqa: F401 (as attributes)
    handlers,
    subprocess_handler,
)
from holdfast.processes.workers.group import SubprocessHandler, get_subprocess_handler

__all__ = ["SubprocessHandler", "get_subprocess_handler"]
