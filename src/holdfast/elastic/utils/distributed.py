"""Free ports and stores, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.scripts import (
    create_c10d_store,
    get_free_port,
    get_socket_with_port,
)

__all__ = ["create_c10d_store", "get_free_port", "get_socket_with_port"]
