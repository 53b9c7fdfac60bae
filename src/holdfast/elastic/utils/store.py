"""Collectives over a store, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.store.collectives import barrier, get_all, store_timeout, synchronize
from holdfast.store.store_errors import DistStoreError

__all__ = ["DistStoreError", "barrier", "get_all", "store_timeout", "synchronize"]
