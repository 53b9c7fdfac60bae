"""Free ports and stores, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.scripts import get_free_port, get_socket_with_port
from holdfast.store.from_env import create_c10d_store

__all__ = ["create_c10d_store", "get_free_port", "get_socket_with_port"]
