"""How a group of workers is, by TorchElastic's names."""

from __future__ import annotations

from enum import Enum


class WorkerState(str, Enum):  # noqa: UP042 (StrEnum's text differs from TorchElastic's)
    """How a group of workers is."""

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Return whether workers in this state have processes."""
        return state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)
