"""Watchdog timers, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.submodules import bind_submodules
from holdfast.elastic.timer import api
from holdfast.elastic.timer.api import *  # noqa: F403
from holdfast.elastic.timer.file_based_local_timer import (
    FileTimerClient,
    FileTimerRequest,
    FileTimerServer,
)
from holdfast.elastic.timer.local_timer import LocalTimerClient, LocalTimerServer

__all__ = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
]
__all__ += api.__all__

bind_submodules(__name__)
