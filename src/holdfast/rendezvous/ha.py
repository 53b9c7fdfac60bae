"""The rendezvous of `--ha`: on etcd, with a cluster that the job's own machines run.

It is that of `rendezvous.etcd`, with three differences. The cluster may not be there yet, as a
coordinator may not; `launcher.cluster_member` makes it. It is for one job, and says for which. And it
lives no longer than the job: an agent that finds another one in its place does not go on in it, because
what was decided before is not known there.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import msgspec

from holdfast.coordinator.connect import ConnectFailed
from holdfast.core.etcd.calls import Get, Problem, ProblemKind, Txn, TxnDone
from holdfast.etcd.cluster_list import (
    RECORD,
    Certificates,
    ClusterList,
    ClusterRecord,
    cluster_list,
    parse_machines,
)
from holdfast.membership.etcd import EtcdConnection, EtcdConnector, EtcdMembership
from holdfast.net.agent_port import ControlCredentials
from holdfast.rendezvous import config
from holdfast.rendezvous.etcd import EtcdHandler

if TYPE_CHECKING:
    from holdfast.core.etcd.calls import Answer
    from holdfast.core.etcd.session import EtcdSession
    from holdfast.etcd.async_client import AsyncEtcdClient
    from holdfast.rendezvous.config import RendezvousParameters

READ_AGAIN_S = 0.05
OTHER_PORTS = "choose other ports: --ha HOST:PORT,..."


def create_ha_handler(params: RendezvousParameters) -> HaHandler:
    """Return the handler of `--rdzv-backend ha`, which is `--ha`."""
    return HaHandler(params)


def list_of(params: RendezvousParameters, *, make_token: bool = True) -> ClusterList:
    """Return the machines that are to run the cluster, and what guards it."""
    conf = config.parse(params)
    return cluster_list(
        parse_machines(params.endpoint),
        params.run_id,
        environ=os.environ,
        token_file=conf.token_file,
        auth=conf.auth,
        tls=(conf.tls_ca, conf.tls_cert, conf.tls_key),
        server_name=conf.tls_server_name or "",
        make_token=make_token,
    )


def control_access(of: ClusterList, certificates: Certificates) -> ControlCredentials:
    """Return what it takes to ask the job's agents: what it takes to reach its cluster."""
    return ControlCredentials(run_id=of.run_id, token=of.token, pem=certificates.texts())


class HaConnector(EtcdConnector):
    """Opens sessions at the one cluster that this job began with."""

    record: ClusterRecord | None = None
    run_id = ""

    async def connect(self) -> EtcdConnection:
        """Return the transport of a session that is up, or raise `ConnectFailed`."""
        answer = await self._read()
        if isinstance(answer, Problem):
            permanent = answer.kind in (ProblemKind.DENIED, ProblemKind.REFUSED)
            raise ConnectFailed(self._etcd.describe(answer.why), permanent=permanent)
        assert isinstance(answer, TxnDone)
        found = answer.results[0]
        if not found:
            raise ConnectFailed("the cluster has only just begun")
        try:
            record = msgspec.json.decode(found[0].value, type=ClusterRecord)
        except msgspec.MsgspecError:
            raise ConnectFailed("it is of another version of Holdfast", permanent=True) from None
        if record.run_id != self.run_id:
            why = f"it is the cluster of the job {record.run_id!r}; {OTHER_PORTS}"
            raise ConnectFailed(why, permanent=True)
        if self.record is None:
            self.record = record
            # etcd's revisions begin at 1 with each cluster, and fences must not.
            self._session.leadership.fence_base = record.at_ms
        elif self.record != record:
            why = (
                "most of its machines were lost at once, with all it had decided; it has begun anew"
            )
            raise ConnectFailed(why, permanent=True)
        return await super().connect()

    async def _read(self) -> Answer:
        """Read the record of the cluster; it is written as soon as the cluster has begun."""
        deadline = self._loop.time() + self._limit_s
        while True:
            answer = await self._etcd.call(Txn((), (Get(RECORD),)), limit_s=self._limit_s)
            found = not isinstance(answer, TxnDone) or answer.results[0]
            if found or self._loop.time() > deadline:
                return answer
            await asyncio.sleep(READ_AGAIN_S)


class HaMembership(EtcdMembership):
    """One node's connection to a job on its own cluster."""

    authority = "the cluster"

    def _make_connector(self, etcd: AsyncEtcdClient, session: EtcdSession) -> HaConnector:
        connector = HaConnector(etcd, session, self._lease_s)
        connector.run_id = self.run_id
        return connector


class HaHandler(EtcdHandler):
    """A node's rendezvous with the others on their own cluster."""

    authority = "the cluster"
    membership_type = HaMembership

    def __init__(self, params: RendezvousParameters) -> None:
        self._list = of = list_of(params)
        self._certificates = Certificates(of)
        super().__init__(params, etcd=of.client_settings(self._certificates.guard))

    def shutdown(self) -> bool:
        """Leave the job and forget the certificates."""
        try:
            return super().shutdown()
        finally:
            self._certificates.close()

    def _control_access(self) -> ControlCredentials:
        return control_access(self._list, self._certificates)

    def _first_contact_s(self) -> float:
        return self._config.join_timeout

    def _own_loopback(self) -> str:
        from holdfast.net.addresses import names_loopback
        from holdfast.net.listening import LOOPBACK

        alone = all(names_loopback(host) for host, _ in self._etcd.endpoints)
        return LOOPBACK if alone else ""
