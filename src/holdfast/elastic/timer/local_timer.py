"""Timers over a `multiprocessing` queue, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.local_timer import (
    LocalTimerClient,
    LocalTimerServer,
    MultiprocessingRequestQueue,
)

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]
