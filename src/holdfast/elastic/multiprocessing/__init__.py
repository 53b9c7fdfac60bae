"""Worker processes under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic.multiprocessing import (  # noqa: F401 (also reached as attributes)
    api,
    errors,
    redirects,
    subprocess_handler,
    tail_log,
)
from holdfast.processes.calls import MultiprocessContext
from holdfast.processes.commands import SubprocessContext
from holdfast.processes.contexts import PContext
from holdfast.processes.endings import RunProcsResult
from holdfast.processes.failures import ProcessFailure
from holdfast.processes.logs import DefaultLogsSpecs, LogsDest, LogsSpecs
from holdfast.processes.signals import SignalException
from holdfast.processes.starting import start_processes
from holdfast.processes.std import Std, to_map

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
