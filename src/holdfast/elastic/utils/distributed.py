"""Free ports and stores, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.scripting.free_ports import get_free_port, get_socket_with_port
from holdfast.store.connecting import create_c10d_store

__all__ = ["create_c10d_store", "get_free_port", "get_socket_with_port"]
