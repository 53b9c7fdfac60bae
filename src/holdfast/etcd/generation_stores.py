"""The stores of one node of a job on etcd: one per generation or part of a generation."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from holdfast.etcd.etcd_store import EtcdStore

if TYPE_CHECKING:
    from holdfast.etcd.sync_client import EtcdClient

STORE_TTL_S = 600
"""How long the keys of agents remain after the agents have exited."""


class GenerationStores:
    """The stores of one node, from the first `store` until `close`.

    It keeps the stores of the newest generation. If a caller still uses an older store, that store
    stays open, with the lease and the thread that preserve its keys. The caller closes the client.
    """

    def __init__(self, client: EtcdClient, root: bytes) -> None:
        self._client = client
        self._root = root.decode()
        self._scope = ""
        self._newest: dict[str, EtcdStore] = {}
        self._every: weakref.WeakSet[EtcdStore] = weakref.WeakSet()

    def store(self, scope: str, *below: str) -> EtcdStore:
        """Return the store of a generation, or of a part of it; scopes have separate keys."""
        if scope != self._scope:
            self._scope, self._newest = scope, {}
        prefix = "/".join([self._root + scope, *below])
        store = self._newest.get(prefix)
        if store is None:
            store = self._newest[prefix] = EtcdStore(self._client, prefix, ttl_s=STORE_TTL_S)
            self._every.add(store)
        return store

    def close(self) -> None:
        """Close all stores that are still in use."""
        for store in tuple(self._every):
            store.close()
        self._newest = {}
