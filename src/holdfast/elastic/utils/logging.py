"""Loggers, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.scripts import get_log_level, get_logger

__all__ = ["get_log_level", "get_logger"]
