"""The log of expired timers under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.timers.worker_timers import log_debug_info_for_expired_timers

__all__ = ["log_debug_info_for_expired_timers"]
