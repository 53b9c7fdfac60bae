"""Worker processes under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.processes import start_processes
from holdfast.elastic.multiprocessing import (  # noqa: F401 (also reached as attributes)
    api,
    errors,
    redirects,
    subprocess_handler,
    tail_log,
)
from holdfast.elastic.multiprocessing.api import *  # noqa: F403
from holdfast.processes.failures.failure import ProcessFailure

__all__ = ["ProcessFailure", "start_processes"]
__all__ += api.__all__
