"""What `--rdzv-endpoint` and `--rdzv-conf` say about etcd, as the settings of its client.

The one thing to know: whatever contradicts is refused, in one line that names the key. Certificates
that nobody would show or check, because etcd is spoken to in plain text, are a mistake that only an
attacker would like. Files of certificates are read once right here: one that is missing or no
certificate is told before anything else begins.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, UsageError
from holdfast.etcd.settings import NAMES, EtcdSettings, parse_endpoints
from holdfast.rendezvous.config import value_of

if TYPE_CHECKING:
    from holdfast.rendezvous.parameters import RendezvousParameters

USER_VARIABLE, PASSWORD_VARIABLE = "HOLDFAST_ETCD_USER", "HOLDFAST_ETCD_PASSWORD"
LOCALHOST = "localhost"


def etcd_settings_of(params: RendezvousParameters) -> EtcdSettings:
    """Return how to talk to etcd: to the one on this host, if there is no endpoint."""
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
            "give one of them"
        )
    return endpoints, protocol == "https"


def _user(params: RendezvousParameters) -> tuple[str, str]:
    """Return user and password; what `--rdzv-conf` says goes before the environment."""
    user, password = value_of(params, "user"), value_of(params, "password")
    environs_user = os.environ.get(USER_VARIABLE, "")
    # The password in the environment is that of the user in the environment, if there is one.
    if password is None and (not environs_user or user in (None, environs_user)):
        password = os.environ.get(PASSWORD_VARIABLE, "")
    if user is None:
        user = environs_user
    if bool(user) == bool(password):
        return user or "", password or ""
    there, lacking, variable = (
        ("user", "password", PASSWORD_VARIABLE) if user else ("password", "user", USER_VARIABLE)
    )
    raise UsageError(f"--rdzv-conf: {there} needs {lacking} beside it, or {variable} to be set")


def _check_certificates(params: RendezvousParameters, *, tls: bool) -> None:
    cert, key = _names(params, "cert", "ssl_cert"), _names(params, "key", "ssl_cert_key")
    every = [*cert, *key, *_names(params, "cacert", "ca_cert", "tls_server_name")]
    if every and not tls:
        raise UsageError(
            f"--rdzv-conf: {every[0]} has no effect without TLS; "
            "give protocol=https beside it, or https:// in --rdzv-endpoint"
        )
    if bool(cert) != bool(key):
        there, lacking = (cert[0], "key") if cert else (key[0], "cert")
        if there.startswith("ssl_"):
            lacking = {"key": "ssl_cert_key", "cert": "ssl_cert"}[lacking]
        raise UsageError(f"--rdzv-conf: {there} needs {lacking} beside it")


def _check_files(params: RendezvousParameters, settings: EtcdSettings) -> None:
    others = ("ssl_cert", "ssl_cert_key", "ca_cert")  # Only what was given can be complained of.
    cert, key, ca = ((_names(params, *both) or both)[0] for both in zip(NAMES, others, strict=True))
    try:
        settings.tls_context((cert, key, ca))
    except HoldfastError as error:
        raise UsageError(f"--rdzv-conf: {error.message}", hint=error.hint) from None


def _names(params: RendezvousParameters, *names: str) -> list[str]:
    """Return those of some keys that were given."""
    return [name for name in names if params.get(name) is not None]
