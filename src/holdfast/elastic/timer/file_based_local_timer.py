"""Timers over a named pipe, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.timers.client import FileTimerClient
from holdfast.timers.protocol import FileTimerRequest
from holdfast.timers.server import FileTimerServer

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]
