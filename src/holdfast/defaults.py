"""Figures that several parts share; all are TorchElastic's."""

from __future__ import annotations

START_METHODS = ("spawn", "fork", "forkserver")

SHUTDOWN_S = 30
"""How long workers have between the stop signal and SIGKILL."""

EXIT_BARRIER_S = 300
"""How long an agent whose workers are done waits for the other agents of the job."""
