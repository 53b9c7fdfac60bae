"""The history of a job: its lifecycle events, folded into what people see."""

from __future__ import annotations

STALL_STEPS, STALL_S = 5.0, 2.0
"""If no step was made for this many times the usual time of one, and for this long, before a failure,
the failure began with the last step."""
