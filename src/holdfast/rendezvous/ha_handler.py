"""The rendezvous of `--ha`, on an etcd cluster that the job's own machines run.

Unlike with `rendezvous.etcd_handler`, the cluster may not run yet when the agent connects, and it serves this
job alone (`membership.cluster_check`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast.etcd.cluster_list import (
    Certificates,
    ClusterList,
    cluster_list,
    parse_machines,
)
from holdfast.membership.cluster_check import ClusterCheck
from holdfast.net.addresses import names_loopback
from holdfast.net.agent_port import ControlCredentials
from holdfast.net.listening import LOOPBACK
from holdfast.rendezvous import rdzv_conf
from holdfast.rendezvous.etcd_handler import EtcdHandler

if TYPE_CHECKING:
    from holdfast.rendezvous.rdzv_conf import RendezvousParameters


def create_ha_handler(params: RendezvousParameters) -> HaHandler:
    """Return the handler of `--rdzv-backend ha`, which is `--ha`."""
    return HaHandler(params)


def cluster_list_of(params: RendezvousParameters, *, make_token: bool = True) -> ClusterList:
    """Return the machines that run the cluster, and the credentials that protect it."""
    conf = rdzv_conf.parse(params)
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
    """Return the credentials that a client needs to control the job's agents: those of its cluster."""
    return ControlCredentials(run_id=of.run_id, token=of.token, pem=certificates.texts())


class HaHandler(EtcdHandler):
    """A node's rendezvous on the job's own cluster."""

    authority = "the cluster"

    def __init__(self, params: RendezvousParameters) -> None:
        self._list = of = cluster_list_of(params)
        self._certificates = Certificates(of)
        super().__init__(params, etcd=of.client_settings(self._certificates.guard))

    def shutdown(self) -> bool:
        """Leave the job and remove the certificates."""
        try:
            return super().shutdown()
        finally:
            self._certificates.close()

    def _control_access(self) -> ControlCredentials:
        return control_access(self._list, self._certificates)

    def _cluster_check(self) -> ClusterCheck:
        return ClusterCheck(self.get_run_id())

    def _first_contact_s(self) -> float:
        return self._config.join_timeout

    def _own_loopback(self) -> str:
        alone = all(names_loopback(host) for host, _ in self._etcd.endpoints)
        return LOOPBACK if alone else ""
