"""The building blocks of timers, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.local_timer import RequestQueue, TimerServer
from holdfast.timers.timer_client import TimerClient, configure, expires
from holdfast.timers.timer_requests import TimerRequest

__all__ = [
    "RequestQueue",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
]
