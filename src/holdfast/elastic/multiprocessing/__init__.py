"""Worker processes under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.processes import start_processes
from holdfast.elastic._impl.submodules import bind_submodules
from holdfast.elastic.multiprocessing import api
from holdfast.elastic.multiprocessing.api import *  # noqa: F403
from holdfast.processes.failures.failure import ProcessFailure

__all__ = ["ProcessFailure", "start_processes"]
__all__ += api.__all__

bind_submodules(__name__)
