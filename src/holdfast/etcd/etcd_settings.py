"""The endpoints of etcd and the means to authenticate, as the user wrote them.

Only `tls_context` opens files; nothing is resolved or connected here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import UsageError
from holdfast.net import tls
from holdfast.net.endpoints import format_endpoint, split_endpoint

if TYPE_CHECKING:
    import ssl

DEFAULT_PORT = 2379
ENDPOINTS_MAX = 16
"""A cluster of etcd has three, five or seven members; more endpoints are a mistake."""
NAMES = ("cert", "key", "cacert")
"""The settings in `--rdzv-conf` for the files of the certificate, the key and the CA."""


class EtcdSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings to reach one etcd, or one cluster of etcd."""

    endpoints: tuple[tuple[str, int], ...]
    """Host and port of each member; the first is used as long as it responds."""
    user: str = ""
    password: str = ""
    tls: bool = False
    ca: str = ""
    """The file with the CA of etcd's certificate; without it, the machine's CAs."""
    cert: str = ""
    key: str = ""
    server_name: str = ""
    """The name to expect in etcd's certificate, if it is not the host of the endpoint."""
    call_s: float = 5.0
    """Limit of one call, over all endpoints."""

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise UsageError("etcd needs an endpoint", hint="set --rdzv-endpoint to host:port")
        if not self.call_s > 0:
            raise UsageError(f"etcd: a call limit of {self.call_s:g} s is too short")
        if self.password and not self.user:
            raise UsageError("etcd: a password is set, but no user", hint="set both or neither")
        if not self.tls and (self.ca or self.cert or self.key or self.server_name):
            raise UsageError(
                "etcd: certificates are set, but TLS is not",
                hint="write the endpoint with https://",
            )

    @property
    def where(self) -> str:
        """All endpoints, as text."""
        return ",".join(format_endpoint(host, port) for host, port in self.endpoints)

    def __repr__(self) -> str:
        """Show everything except the password, because logs contain this text."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        if self.password:
            shown["password"] = "..."  # noqa: S105 (instead of one)
        fields = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"{type(self).__name__}({fields})"

    def tls_context(self, names: tuple[str, str, str] = NAMES) -> ssl.SSLContext | None:
        """Return the TLS context; raise `UsageError` or `EnvironmentProblem` for unusable files.

        `names` are the user's names of certificate, key and CA, for messages.
        """
        if not self.tls:
            return None
        return tls.client_context(self.ca or None, self.cert or None, self.key or None, names=names)


def parse_endpoints(
    text: str, *, source: str = "--rdzv-endpoint"
) -> tuple[tuple[tuple[str, int], ...], bool]:
    """Return the endpoints in a comma-separated list, and whether they use TLS."""
    endpoints: list[tuple[str, int]] = []
    schemes: set[str] = set()
    for part in text.split(","):
        scheme, separator, rest = part.strip().rpartition("://")
        try:
            if separator and scheme.lower() not in ("http", "https"):
                raise ValueError(f"begins with {scheme}://")
            one = rest.removesuffix("/") if separator else rest
            if not one:
                raise ValueError("is empty")
            endpoints.append(split_endpoint(one, DEFAULT_PORT, port_min=1))
        except ValueError as problem:
            raise UsageError(
                f"{source}: the etcd endpoint {part.strip()!r} {problem}; accepted: host, host:port "
                "and [address]:port for IPv6, after http:// or https:// or neither, several "
                "separated by commas"
            ) from None
        schemes.add(scheme.lower() or "http")
    if len(schemes) > 1:
        raise UsageError(
            f"{source}: only some etcd endpoints have https://",
            hint="write https:// before all of them or none",
        )
    if len(endpoints) > ENDPOINTS_MAX:
        raise UsageError(f"{source}: {len(endpoints)} etcd endpoints; at most {ENDPOINTS_MAX}")
    return tuple(dict.fromkeys(endpoints)), schemes == {"https"}
