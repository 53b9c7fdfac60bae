"""Following log files, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.tail_log import TailLog, tail_logfile

__all__ = ["TailLog", "tail_logfile"]
