"""Metrics under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.metrics import initialize_metrics
from holdfast.elastic._impl.submodules import bind_submodules
from holdfast.elastic.metrics import api
from holdfast.elastic.metrics.api import *  # noqa: F403

__all__ = ["initialize_metrics"]
__all__ += api.__all__

bind_submodules(__name__)
