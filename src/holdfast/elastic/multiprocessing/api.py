"""Groups of workers and their logs under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.processes import MultiprocessContext, PContext, SubprocessContext
from holdfast.elastic._impl.redirects import get_std_cm
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
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "get_std_cm",
    "to_map",
]
