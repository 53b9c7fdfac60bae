"""Timers over a named pipe, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.timers.file_client import FileTimerClient
from holdfast.timers.file_server import FileTimerServer
from holdfast.timers.requests import FileTimerRequest

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]
