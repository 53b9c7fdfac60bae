"""The state of a job in a store, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.c10d_backend import DEFAULT_PORT, C10dRendezvousBackend, create_backend

__all__ = ["DEFAULT_PORT", "C10dRendezvousBackend", "create_backend"]
