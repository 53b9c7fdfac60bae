"""The key-value stores that agents and workers share; `Store` is their interface.

Names are imported on first use, so that a program that needs one store does not load all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.store.collectives import barrier, get_all, store_timeout, synchronize
    from holdfast.store.file_store import FileStore
    from holdfast.store.from_env import from_environment
    from holdfast.store.memory_store import MemoryStore
    from holdfast.store.prefix_store import PrefixStore
    from holdfast.store.store_errors import (
        DistError,
        DistNetworkError,
        DistStoreError,
        QueueEmptyError,
        StoreTimeoutError,
    )
    from holdfast.store.store_interface import Store
    from holdfast.store.tcp.store_client import TCPStore

__all__ = [
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "FileStore",
    "MemoryStore",
    "PrefixStore",
    "QueueEmptyError",
    "Store",
    "StoreTimeoutError",
    "TCPStore",
    "barrier",
    "from_environment",
    "get_all",
    "store_timeout",
    "synchronize",
]

_HOMES = {
    "DistError": "holdfast.store.store_errors",
    "DistNetworkError": "holdfast.store.store_errors",
    "DistStoreError": "holdfast.store.store_errors",
    "FileStore": "holdfast.store.file_store",
    "MemoryStore": "holdfast.store.memory_store",
    "PrefixStore": "holdfast.store.prefix_store",
    "QueueEmptyError": "holdfast.store.store_errors",
    "Store": "holdfast.store.store_interface",
    "StoreTimeoutError": "holdfast.store.store_errors",
    "TCPStore": "holdfast.store.tcp.store_client",
    "barrier": "holdfast.store.collectives",
    "from_environment": "holdfast.store.from_env",
    "get_all": "holdfast.store.collectives",
    "store_timeout": "holdfast.store.collectives",
    "synchronize": "holdfast.store.collectives",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.store' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
