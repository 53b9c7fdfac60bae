"""Worker processes under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.processes import (
    MultiprocessContext,
    PContext,
    SubprocessContext,
    start_processes,
)
from holdfast.elastic.multiprocessing import (  # noqa: F401 (also reached as attributes)
    api,
    errors,
    redirects,
    subprocess_handler,
    tail_log,
)
from holdfast.processes.failures.failure import ProcessFailure
from holdfast.processes.logs.specs import DefaultLogsSpecs, LogsDest, LogsSpecs
from holdfast.processes.logs.std import Std, to_map
from holdfast.processes.signals import SignalException
from holdfast.processes.workers.group import RunProcsResult

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "ProcessFailure",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "start_processes",
    "to_map",
]
