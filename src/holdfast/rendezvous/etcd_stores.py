"""The stores of one node in a job on etcd: one for each generation, and parts of it.

The one thing to know: only those of the newest generation are held here. An older one stays for as
long as somebody else has it, and with it the lease and the thread that keep what it wrote.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from holdfast.etcd.store import EtcdStore

if TYPE_CHECKING:
    from holdfast.etcd.blocking import EtcdClient

STORE_TTL_S = 600
"""What agents put into their store outlasts them by no more than this."""


class GenerationStores:
    """Stores below one place in etcd, until `close`. The client is the caller's to close."""

    def __init__(self, client: EtcdClient, root: bytes) -> None:
        self._client = client
        self._root = root.decode()
        self._scope = ""
        self._newest: dict[str, EtcdStore] = {}
        self._every: weakref.WeakSet[EtcdStore] = weakref.WeakSet()

    def store(self, scope: str, *below: str) -> EtcdStore:
        """Return the store of a generation, or of a part of it: the same as long as it is in use.

        Scopes know nothing of each other's keys.
        """
        if scope != self._scope:
            self._scope, self._newest = scope, {}
        prefix = "/".join([self._root + scope, *below])
        store = self._newest.get(prefix)
        if store is None:
            store = self._newest[prefix] = EtcdStore(self._client, prefix, ttl_s=STORE_TTL_S)
            self._every.add(store)
        return store

    def close(self) -> None:
        """Close all that somebody still has."""
        for store in tuple(self._every):
            store.close()
        self._newest = {}
