"""The parts that timers are made of, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.timers.clients import TimerClient, configure, expires
from holdfast.timers.queue_server import RequestQueue, TimerServer
from holdfast.timers.requests import TimerRequest

__all__ = [
    "RequestQueue",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
]
