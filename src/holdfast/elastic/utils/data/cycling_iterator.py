"""Several epochs as one iterator, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.scripts import CyclingIterator

__all__ = ["CyclingIterator"]
