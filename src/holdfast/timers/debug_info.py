"""Where the expired timers of a run are written down, for whoever looks into it later."""

from __future__ import annotations

from holdfast import messages


def log_debug_info_for_expired_timers(run_id: str, expired_timers: dict[int, list[str]]) -> None:
    """Log the expired timers of each process as they were asked for; nothing if there are none."""
    for pid, timers in expired_timers.items():
        messages.info(f"run {run_id}: expired timers of process {pid}: {', '.join(timers)}")
