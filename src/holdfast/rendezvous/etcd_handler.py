"""The rendezvous on etcd: `--rdzv-backend etcd`, and `etcd-v2` as another name for it."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.core.session import SessionTimeouts
from holdfast.errors import HoldfastError, UsageError
from holdfast.etcd.etcd_settings import NAMES, EtcdSettings, parse_endpoints
from holdfast.etcd.optional_h11 import require_h11
from holdfast.membership.cluster_check import ClusterCheck
from holdfast.membership.etcd import EtcdMembership
from holdfast.net import listening
from holdfast.net.addresses import LOCALHOST, LOOPBACK, names_loopback
from holdfast.net.agent_port import OFF, ControlCredentials, explicit_token
from holdfast.net.listening import address_of
from holdfast.rendezvous import rdzv_conf
from holdfast.rendezvous.backends import ETCD_V2
from holdfast.rendezvous.job_access import JobAccess, JoinRequest, node_info
from holdfast.rendezvous.membership_handler import MembershipHandler
from holdfast.rendezvous.rdzv_conf import value_of

if TYPE_CHECKING:
    from holdfast.rendezvous.ha_handler import OwnCluster
    from holdfast.rendezvous.rdzv_conf import RendezvousParameters

USER_VARIABLE, PASSWORD_VARIABLE = "HOLDFAST_ETCD_USER", "HOLDFAST_ETCD_PASSWORD"
FIRST_CONTACT_S = 30.0
"""How long a node retries an etcd that it has never reached, unless `read_timeout` is set. Unlike a coordinator,
etcd should run before the job starts."""
HEARTBEATS_PER_LEASE = 3


# Settings. If two settings contradict each other, an error names the key. For example, certificates without TLS
# would be neither sent nor checked, which would help only an attacker. Certificate files are read here, so that a
# missing or invalid file is reported first.


def etcd_settings_of(params: RendezvousParameters) -> EtcdSettings:
    """Return the settings of the etcd client; without an endpoint, etcd is on this host."""
    endpoints, tls = _endpoints(params)
    user, password = _user(params)
    chosen = {
        "ca": value_of(params, "cacert"),
        "cert": value_of(params, "cert"),
        "key": value_of(params, "key"),
        "server_name": value_of(params, "tls_server_name"),
        "call_s": value_of(params, "read_timeout"),
    }
    _check_certificates(params, tls=tls)
    settings = EtcdSettings(
        endpoints=endpoints,
        user=user,
        password=password,
        tls=tls,
        **{name: value for name, value in chosen.items() if value is not None},
    )
    _check_files(params, settings)
    return settings


def _endpoints(params: RendezvousParameters) -> tuple[tuple[tuple[str, int], ...], bool]:
    endpoints, tls = parse_endpoints(params.endpoint.strip() or LOCALHOST)
    if params.get("protocol") is None:
        return endpoints, tls
    protocol = value_of(params, "protocol")
    other = "https" if protocol == "http" else "http"
    if f"{other}://" in params.endpoint.lower():
        raise UsageError(
            f"--rdzv-conf: protocol={protocol} contradicts --rdzv-endpoint {params.endpoint!r}; "
            "set one of them"
        )
    return endpoints, protocol == "https"


def _user(params: RendezvousParameters) -> tuple[str, str]:
    """Return user and password; `--rdzv-conf` takes precedence over the environment."""
    user, password = value_of(params, "user"), value_of(params, "password")
    default_user = os.environ.get(USER_VARIABLE, "")
    # The password in the environment belongs to the user in the environment, if one is set.
    if password is None and (not default_user or user in (None, default_user)):
        password = os.environ.get(PASSWORD_VARIABLE, "")
    if user is None:
        user = default_user
    if bool(user) == bool(password):
        return user or "", password or ""
    present, missing, variable = (
        ("user", "password", PASSWORD_VARIABLE) if user else ("password", "user", USER_VARIABLE)
    )
    raise UsageError(f"--rdzv-conf: {present} requires {missing}", hint=f"or set {variable}")


def _check_certificates(params: RendezvousParameters, *, tls: bool) -> None:
    cert, key = _names(params, "cert", "ssl_cert"), _names(params, "key", "ssl_cert_key")
    every = [*cert, *key, *_names(params, "cacert", "ca_cert", "tls_server_name")]
    if every and not tls:
        raise UsageError(
            f"--rdzv-conf: {every[0]} has no effect without TLS; "
            "set protocol=https too, or write https:// in --rdzv-endpoint"
        )
    if bool(cert) != bool(key):
        present, missing = (cert[0], "key") if cert else (key[0], "cert")
        if present.startswith("ssl_"):
            missing = {"key": "ssl_cert_key", "cert": "ssl_cert"}[missing]
        raise UsageError(f"--rdzv-conf: {present} requires {missing}")


def _check_files(params: RendezvousParameters, settings: EtcdSettings) -> None:
    # The messages name the keys that the user set.
    others = (
        "ssl_cert",
        "ssl_cert_key",
        "ca_cert",
    )
    cert, key, ca = ((_names(params, *both) or both)[0] for both in zip(NAMES, others, strict=True))
    try:
        settings.tls_context((cert, key, ca))
    except HoldfastError as error:
        raise UsageError(f"--rdzv-conf: {error.message}", hint=error.hint) from None


def _names(params: RendezvousParameters, *names: str) -> list[str]:
    """Return the keys that are set, in the given order."""
    return [name for name in names if params.get(name) is not None]


def create_etcd_handler(params: RendezvousParameters) -> MembershipHandler:
    """Return the handler of `--rdzv-backend etcd`, or `etcd-v2`."""
    if params.backend == ETCD_V2:
        console.notice(f"--rdzv-backend {ETCD_V2} is the same as etcd here: etcd 3.6 has no API v2")
    return MembershipHandler(EtcdAccess(params, etcd_settings_of(params)))


class EtcdAccess(JobAccess):
    """A job on etcd; with `cluster`, on the etcd that the job's own machines run."""

    authority = "etcd"

    def __init__(
        self,
        params: RendezvousParameters,
        etcd: EtcdSettings,
        cluster: OwnCluster | None = None,
    ) -> None:
        require_h11()
        self._params, self._etcd, self._cluster = params, etcd, cluster
        self._config = conf = rdzv_conf.parse(params)
        # With any other etcd, loopback does not imply a single host: each host may run a member or a proxy.
        is_alone = cluster is not None and all(names_loopback(host) for host, _ in etcd.endpoints)
        loopback = LOOPBACK if is_alone else ""
        prefix = rdzv_conf.value_of(params, "etcd_prefix")
        # Other agents here may write other host names in the endpoints, but not other ports.
        scope = (params.run_id, prefix, *sorted({port for _, port in etcd.endpoints}))
        super().__init__(
            backend=params.backend,
            run_id=params.run_id,
            node_id=conf.node_id,
            name_scope=scope,
            join_timeout_s=conf.join_timeout,
            workers_serve=conf.worker_store,
            store_address=address_of(params.local_addr) if params.local_addr else loopback,
            job_settings=conf.job_settings,
        )
        if conf.node_id:
            self.given_id = f"node_id={conf.node_id}"
        if cluster is not None:
            self.authority = "the cluster"
        # `set_closed` waits until the job is closed: a later leader would read only this node's last status.
        self.close_timeout_s = conf.close_timeout

    @property
    def endpoint(self) -> str:
        """The endpoints of etcd, as a user writes them."""
        return self._etcd.where

    @property
    def refused_by(self) -> str:
        """The name in messages for the side that refuses a node."""
        return self.authority_at

    @property
    def lease_s(self) -> float:
        """How long a node may be silent before it is lost; etcd counts whole seconds."""
        return float(max(2, math.ceil(self._config.lost_after_s)))

    def connect(self, node: JoinRequest) -> EtcdMembership:
        """Return a started membership."""
        conf, params, cluster, lease_s = self._config, self._params, self._cluster, self.lease_s
        self_fencing = conf.on_lost != "run" and not self.is_polled
        first_contact_s = FIRST_CONTACT_S if cluster is None else conf.join_timeout
        credentials = None
        if not self.is_polled:
            listening.raise_descriptor_limit()  # A leader connects to each node.
            credentials = (
                ControlCredentials(run_id=self.run_id, token=explicit_token(os.environ))
                if cluster is None
                else cluster.credentials()
            )
        membership = EtcdMembership(
            self._etcd,
            prefix=rdzv_conf.value_of(params, "etcd_prefix"),
            run_id=self.run_id,
            info=node_info(self, params, node, self_fencing=self_fencing),
            settings=node.settings,
            timeouts=SessionTimeouts(
                heartbeat_s=lease_s / HEARTBEATS_PER_LEASE,
                silence_s=lease_s,
                unreachable_s=conf.coordinator_timeout,
                first_contact_s=conf.read_timeout or first_contact_s,
                needs_answers=self_fencing,
            ),
            lease_s=lease_s,
            shows_presence=conf.presence == "on",
            cluster=None if cluster is None else ClusterCheck(self.run_id),
            credentials=credentials,
            control=OFF if self.is_polled else conf.control,
        )
        membership.start()
        return membership

    def close(self) -> None:
        """Remove the certificates of the job's own cluster."""
        if self._cluster is not None:
            self._cluster.close()
