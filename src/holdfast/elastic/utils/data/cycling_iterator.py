"""Several epochs as one iterator, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.scripting.cycling_iterator import CyclingIterator

__all__ = ["CyclingIterator"]
