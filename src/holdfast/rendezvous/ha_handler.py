"""The rendezvous of `--ha`, on an etcd cluster that the job's own machines run.

Unlike with `rendezvous.etcd_handler`, the cluster may not run yet when the agent connects, and it serves only this
job (`membership.cluster_check`).
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
from holdfast.net.agent_port import ControlCredentials
from holdfast.rendezvous import rdzv_conf
from holdfast.rendezvous.etcd_handler import EtcdAccess
from holdfast.rendezvous.membership_handler import MembershipHandler

if TYPE_CHECKING:
    from holdfast.rendezvous.rdzv_conf import RendezvousParameters


def create_ha_handler(params: RendezvousParameters) -> MembershipHandler:
    """Return the handler of `--rdzv-backend ha`, which is `--ha`."""
    cluster = OwnCluster(cluster_list_of(params))
    settings = cluster.machines.client_settings(cluster.certificates.certificate_files)
    return MembershipHandler(EtcdAccess(params, settings, cluster))


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


def control_access(machines: ClusterList, certificates: Certificates) -> ControlCredentials:
    """Return the credentials of the job's cluster, which a client needs to control the job's agents."""
    return ControlCredentials(
        run_id=machines.run_id, token=machines.token, pem=certificates.texts()
    )


class OwnCluster:
    """The etcd that the job's own machines run, and the certificates that protect it."""

    def __init__(self, machines: ClusterList) -> None:
        self.machines = machines
        self.certificates = Certificates(machines)

    def credentials(self) -> ControlCredentials:
        """Return the credentials that a client needs to control the job's agents."""
        return control_access(self.machines, self.certificates)

    def close(self) -> None:
        """Remove the certificates."""
        self.certificates.close()
