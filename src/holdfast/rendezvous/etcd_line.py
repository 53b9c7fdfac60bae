"""An agent's connection to a job that lies on etcd: `EtcdLine`.

Nobody coordinates here but the nodes themselves: one of them leads, any may, and etcd says which.
So no other node depends on this process, and it may go at any time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from holdfast.coordinator.node_line import NodeLine
from holdfast.core.etcd_session import EtcdSession
from holdfast.rendezvous.etcd_link import EtcdDialer

if TYPE_CHECKING:
    from holdfast.core.membership import Times
    from holdfast.core.news import JobSettings, NodeInfo
    from holdfast.etcd.blocking import EtcdClient
    from holdfast.etcd.client import AsyncEtcd
    from holdfast.etcd.settings import EtcdSettings
    from holdfast.etcd.store import EtcdStore
    from holdfast.rendezvous.etcd_stores import GenerationStores

LEAVE_S = 2.0


class EtcdLine(NodeLine):
    """One node's connection, from `start` until `close`."""

    decider = "etcd"

    def __init__(
        self,
        etcd: EtcdSettings,
        *,
        prefix: str,
        run_id: str,
        info: NodeInfo,
        settings: JobSettings,
        times: Times,
        lease_s: float,
    ) -> None:
        super().__init__(run_id=run_id, info=info, settings=settings, times=times)
        self._etcd_settings = etcd
        self._prefix = prefix
        self._lease_s = lease_s
        self._etcd: AsyncEtcd | None = None
        self._dialer: EtcdDialer | None = None
        self._session: EtcdSession | None = None
        self._store_client: EtcdClient | None = None
        self._stores: GenerationStores | None = None

    @property
    def where(self) -> str:
        """The endpoints as a person writes them."""
        return self._etcd_settings.where

    def start(self) -> None:
        """Connect; raises `UsageError` or `EnvironmentProblem` for what cannot work."""
        self._check()
        self._launch(self._begin())

    def store(self, scope: str) -> EtcdStore:
        """Return the store of this job's nodes; scopes know nothing of each other's keys."""
        from holdfast.etcd.blocking import EtcdClient
        from holdfast.rendezvous.etcd_stores import GenerationStores

        assert self._session is not None
        if self._store_client is None or self._stores is None:
            self._store_client = EtcdClient(self._etcd_settings)
            self._stores = GenerationStores(self._store_client, self._session.places.store)
        return self._stores.store(scope)

    def close(self, drain_s: float = LEAVE_S) -> None:
        """Close the connection and what was made of it."""
        super().close(drain_s)
        if self._stores is not None:
            self._stores.close()
            self._stores = None
        if self._store_client is not None:
            self._store_client.close()
            self._store_client = None

    # In the thread.

    async def _begin(self) -> None:
        from holdfast.etcd.client import AsyncEtcd

        loop = asyncio.get_running_loop()
        self._etcd = etcd = AsyncEtcd(self._etcd_settings)
        self._session = EtcdSession(
            run_id=self.run_id, info=self._info, prefix=self._prefix, lease_s=self._lease_s
        )
        self._dialer = EtcdDialer(etcd, self._session, self._lease_s)
        self._connect(loop.time(), self._dialer)

    async def _end(self, drain_s: float) -> None:
        if self._dialer is not None:
            await self._dialer.leave(drain_s)
        if self._client is not None:
            await self._client.close()
        if self._dialer is not None:
            await self._dialer.close()
        if self._etcd is not None:
            await self._etcd.close()
