"""The rendezvous on etcd: `--rdzv-backend etcd`, and `etcd-v2` as another name for it."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.core.session import SessionTimeouts
from holdfast.errors import HoldfastError, UsageError
from holdfast.etcd.etcd_settings import NAMES, EtcdSettings, parse_endpoints
from holdfast.membership.etcd import EtcdMembership
from holdfast.net import listening
from holdfast.net.agent_port import OFF, ControlCredentials, explicit_token
from holdfast.rendezvous import rdzv_conf
from holdfast.rendezvous.coordinator_handler import CoordinatorHandler
from holdfast.rendezvous.rdzv_conf import value_of

if TYPE_CHECKING:
    from holdfast.core.job_settings import JobSettings
    from holdfast.core.protocol import NodeInfo, RefusalReason
    from holdfast.membership.cluster_check import ClusterCheck
    from holdfast.rendezvous.rdzv_conf import RendezvousParameters

USER_VARIABLE, PASSWORD_VARIABLE = "HOLDFAST_ETCD_USER", "HOLDFAST_ETCD_PASSWORD"
LOCALHOST = "localhost"
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
    others = (
        "ssl_cert",
        "ssl_cert_key",
        "ca_cert",
    )  # The messages name the keys that the user set.
    cert, key, ca = ((_names(params, *both) or both)[0] for both in zip(NAMES, others, strict=True))
    try:
        settings.tls_context((cert, key, ca))
    except HoldfastError as error:
        raise UsageError(f"--rdzv-conf: {error.message}", hint=error.hint) from None


def _names(params: RendezvousParameters, *names: str) -> list[str]:
    """Return the keys that are set, in the given order."""
    return [name for name in names if params.get(name) is not None]


def create_etcd_handler(params: RendezvousParameters) -> EtcdHandler:
    """Return the handler of `--rdzv-backend etcd`, or `etcd-v2`."""
    if params.backend == "etcd-v2":
        console.notice("--rdzv-backend etcd-v2 is the same as etcd here: etcd 3.6 has no API v2")
    return EtcdHandler(params)


class EtcdHandler(CoordinatorHandler):
    """A node's rendezvous on etcd."""

    authority = "etcd"
    on_lost = "stop"

    def __init__(self, params: RendezvousParameters, *, etcd: EtcdSettings | None = None) -> None:
        self._etcd = etcd or etcd_settings_of(params)
        super().__init__(params)
        # If there is no leader now, the next one reads only a node's last status.
        self.close_timeout_s = self._config.close_timeout

    @property
    def endpoint(self) -> str:
        """The endpoints of etcd, as a user writes them."""
        return self._etcd.where

    def describe_refusal(self, why: str, reason: RefusalReason | None = None) -> str:
        """Return one line that says why this node cannot join the job."""
        return f"{self.authority} at {super().describe_refusal(why, reason)}"

    @property
    def lease_s(self) -> float:
        """How long a node may be silent before it is lost; etcd counts whole seconds."""
        return float(max(2, math.ceil(self._config.lost_after_s)))

    def _connect(self, info: NodeInfo, settings: JobSettings) -> EtcdMembership:
        conf, lease_s = self._config, self.lease_s
        timeouts = SessionTimeouts(
            heartbeat_s=lease_s / HEARTBEATS_PER_LEASE,
            silence_s=lease_s,
            away_s=conf.coordinator_timeout,
            first_contact_s=conf.read_timeout or self._first_contact_s(),
            needs_answers=self._self_fencing,
        )
        connection = EtcdMembership(
            self._etcd,
            prefix=rdzv_conf.value_of(self._params, "etcd_prefix"),
            run_id=self._params.run_id,
            info=info,
            settings=settings,
            timeouts=timeouts,
            lease_s=lease_s,
            shows_presence=conf.presence == "on",
            cluster=self._cluster_check(),
            credentials=None if self._is_polled else self._control_access(),
            control=OFF if self._is_polled else conf.control,
        )
        if not self._is_polled:
            listening.raise_descriptor_limit()  # A leader connects to each node.
        connection.start()
        return connection

    def _control_access(self) -> ControlCredentials:
        """Return the credentials that a client needs to control the job's agents, besides their records."""
        return ControlCredentials(run_id=self._params.run_id, token=explicit_token(self.environ))

    def _cluster_check(self) -> ClusterCheck | None:
        """Return the check of the job's own cluster; None accepts any etcd."""
        return None

    def _first_contact_s(self) -> float:
        return FIRST_CONTACT_S

    def _endpoints(self) -> tuple[tuple[str, int], ...]:
        return self._etcd.endpoints[:1]  # Members of one etcd are not places of a coordinator.

    def _own_loopback(self) -> str:
        return ""  # Each host of a job may run a member or a proxy of etcd.
