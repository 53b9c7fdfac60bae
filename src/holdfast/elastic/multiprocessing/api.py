"""Groups of workers and their logs under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.processes.calls import MultiprocessContext
from holdfast.processes.commands import SubprocessContext
from holdfast.processes.contexts import PContext
from holdfast.processes.endings import RunProcsResult
from holdfast.processes.logs import DefaultLogsSpecs, LogsDest, LogsSpecs
from holdfast.processes.redirects import get_std_cm
from holdfast.processes.signals import SignalException
from holdfast.processes.std import Std, to_map

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "get_std_cm",
    "to_map",
]
