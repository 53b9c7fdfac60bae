"""Timers over a named pipe, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.file_timer import FileTimerServer
from holdfast.timers.timer_client import FileTimerClient
from holdfast.timers.timer_requests import FileTimerRequest

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]
