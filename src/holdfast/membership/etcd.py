"""The membership in a job on etcd: `--rdzv-backend etcd` and `--ha`.

The leases of the nodes show which nodes are alive. One of the nodes leads; if it is lost, another one
leads after its lease expires. No other node depends on this process, so it may exit at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.etcd.etcd_session import EtcdSession
from holdfast.core.etcd.keys import Presence
from holdfast.core.etcd.witness import WATCHED_MAX
from holdfast.etcd.async_client import AsyncEtcdClient
from holdfast.etcd.generation_stores import GenerationStores
from holdfast.etcd.job_records import read_job, read_ports
from holdfast.etcd.sync_client import EtcdClient
from holdfast.membership.etcd_connection import EtcdConnector
from holdfast.membership.interface import ControlAccess
from holdfast.membership.threaded import ThreadedMembership
from holdfast.net import listening
from holdfast.net.agent_port import OFF, AgentPort, ControlCredentials, open_agent_port

if TYPE_CHECKING:
    from holdfast.core.job_settings import JobSettings
    from holdfast.core.protocol import NodeInfo, Request
    from holdfast.core.session import SessionTimeouts
    from holdfast.etcd.etcd_settings import EtcdSettings
    from holdfast.etcd.etcd_store import EtcdStore
    from holdfast.membership.cluster_check import ClusterCheck
    from holdfast.membership.threaded import SessionDriver
    from holdfast.wire.control import Contacts
    from holdfast.wire.messages import JobSummary

LEAVE_S = 2.0
WATCHED_SHARE = 4
"""Connections to other agents use at most one in this many of the available descriptors."""


class EtcdControl(ControlAccess):
    """Control of a job through the records that its agents keep in etcd."""

    def __init__(self, membership: EtcdMembership) -> None:
        self._membership = membership

    def request(self, request: Request) -> None:
        """Submit an operator's request in this node's status."""
        self._membership.request(request)

    def summary(self) -> JobSummary | None:
        """Return the job as the leader stored it, with the newer status of each node."""
        one = self._membership
        with EtcdClient(one.etcd) as client:
            return read_job(client, one.run_id, one.prefix)[0]

    def contacts(self) -> Contacts:
        """Return how clients reach the agents, from the agents' records."""
        one = self._membership
        with EtcdClient(one.etcd) as client:
            return one.credentials.contacts(read_ports(client, one.run_id, one.prefix))


class EtcdMembership(ThreadedMembership):
    """One node's membership in a job on etcd; with `cluster` only on the cluster that it accepts."""

    def __init__(
        self,
        etcd: EtcdSettings,
        *,
        prefix: str,
        run_id: str,
        info: NodeInfo,
        settings: JobSettings,
        timeouts: SessionTimeouts,
        lease_s: float,
        shows_presence: bool = True,
        cluster: ClusterCheck | None = None,
        credentials: ControlCredentials | None = None,
        control: str = OFF,
    ) -> None:
        super().__init__(run_id=run_id, info=info, settings=settings)
        self.authority = "etcd" if cluster is None else "the cluster"
        self.etcd, self.prefix = etcd, prefix
        self.credentials = credentials or ControlCredentials(run_id=run_id)
        self.control = EtcdControl(self)
        self._control_setting = control
        self._shows_presence = shows_presence
        self._port: AgentPort | None = None
        self._timeouts, self._lease_s, self._cluster = timeouts, lease_s, cluster
        self._client: AsyncEtcdClient | None = None
        self._connector: EtcdConnector | None = None
        self._store_client: EtcdClient | None = None
        self._stores: GenerationStores | None = None

    @property
    def where(self) -> str:
        return self.etcd.where

    @property
    def presence_fd(self) -> int:
        if self._port is None or not self._port.presence_id:
            return -1
        return self._port.fileno()

    def store(self, scope: str) -> EtcdStore:
        if self._stores is None:
            assert self._connector is not None
            self._store_client = EtcdClient(self.etcd)
            self._stores = GenerationStores(self._store_client, self._connector.keys.store)
        return self._stores.store(scope)

    def close(self, drain_s: float = LEAVE_S) -> None:
        super().close(drain_s)
        if self._stores is not None:
            self._stores.close()
            self._stores = None
        if self._store_client is not None:
            self._store_client.close()
            self._store_client = None

    # In the thread.

    async def _open(self) -> SessionDriver:
        port = self._port = open_agent_port(
            self._info.address,
            self.credentials,
            control=self._control_setting,
            shows_presence=self._shows_presence,
        )
        self.control.port = port if port is not None and port.control is not None else None
        session = EtcdSession(
            run_id=self.run_id,
            info=self._info,
            prefix=self.prefix,
            lease_s=self._lease_s,
            presence=Presence("", port.number, port.presence_id)
            if port is not None and port.presence_id
            else None,
            control=port.control if port is not None else None,
        )
        at_most = listening.descriptor_limit() // WATCHED_SHARE
        session.witness.watched_max = min(WATCHED_MAX, at_most)
        self._client = AsyncEtcdClient(self.etcd)
        self._connector = EtcdConnector(self._client, session, self._lease_s, self._cluster)
        return self._drive(self._connector, self._timeouts)

    async def _shut(self, drain_s: float) -> None:
        if self._connector is not None:
            await self._connector.leave(drain_s)
        if self._driver is not None:
            await self._driver.close()
        if self._connector is not None:
            await self._connector.close()
        if self._client is not None:
            await self._client.close()
        if self._port is not None:
            self._port.close()  # Last: a node that sees it close finds no keys of this one.
