"""Where etcd is and how to get in, as the person wrote it.

The one thing to know: nothing is resolved, opened or connected here but the files of certificates,
and those only by `tls_context`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import UsageError
from holdfast.net.endpoints import format_endpoint, split_endpoint

if TYPE_CHECKING:
    import ssl

DEFAULT_PORT = 2379
ENDPOINTS_MAX = 16
"""A cluster of etcd has three, five or seven members; more endpoints are a slip."""
NAMES = ("cert", "key", "cacert")
"""What `--rdzv-conf` calls the files of certificate, key and authority."""

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")


class EtcdSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to talk to one etcd, or to one cluster of it."""

    endpoints: tuple[tuple[str, int], ...]
    """Host and port of each member; the first is used as long as it answers."""
    user: str = ""
    password: str = ""
    tls: bool = False
    ca: str = ""
    """The file with the authority of etcd's certificate; without it, what the machine trusts."""
    cert: str = ""
    key: str = ""
    server_name: str = ""
    """The name to look for in etcd's certificate, where it is not the host of the endpoint."""
    call_s: float = 5.0
    """Limit of one call, over all endpoints."""

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise UsageError("etcd needs an endpoint", hint="set --rdzv-endpoint to host:port")
        if not self.call_s > 0:
            raise UsageError(f"etcd: a limit of {self.call_s:g} s for a call is too short")
        if self.password and not self.user:
            raise UsageError("etcd: there is a password and no user", hint="set both or neither")
        if not self.tls and (self.ca or self.cert or self.key or self.server_name):
            raise UsageError(
                "etcd: certificates are set and TLS is not",
                hint="write the endpoint with https://",
            )

    @property
    def where(self) -> str:
        """All endpoints as a person writes them."""
        return ",".join(format_endpoint(host, port) for host, port in self.endpoints)

    def __repr__(self) -> str:
        """All but the password: what is shown ends in logs."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        if self.password:
            shown["password"] = "..."  # noqa: S105 (instead of one)
        fields = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"{type(self).__name__}({fields})"

    def tls_context(self, names: tuple[str, str, str] = NAMES) -> ssl.SSLContext | None:
        """Return what to connect with; raise `UsageError` and the like for files of no use.

        `names` are what the person calls certificate, key and authority.
        """
        if not self.tls:
            return None
        from holdfast.net import tls

        return tls.client_context(self.ca or None, self.cert or None, self.key or None, names=names)


def parse_endpoints(
    text: str, *, source: str = "--rdzv-endpoint"
) -> tuple[tuple[tuple[str, int], ...], bool]:
    """Return the endpoints in a list with commas, and whether they are to be reached by TLS."""
    found: list[tuple[str, int]] = []
    with_tls: set[bool] = set()
    for part in text.split(","):
        one = part.strip()
        scheme = _SCHEME.match(one)
        if scheme is not None:
            if scheme[1].lower() not in ("http", "https"):
                raise _refusal(source, one, f"begins with {scheme[1]}://")
            one = one[scheme.end() :].removesuffix("/")
        with_tls.add(scheme is not None and scheme[1].lower() == "https")
        try:
            found.append(split_endpoint(one, DEFAULT_PORT, port_min=1))
        except ValueError as problem:
            raise _refusal(source, one, str(problem)) from None
    if len(with_tls) > 1:
        raise UsageError(
            f"{source}: some endpoints of etcd have https:// and some have not",
            hint="write it before all or none",
        )
    if len(found) > ENDPOINTS_MAX:
        raise UsageError(f"{source}: {len(found)} endpoints, where {ENDPOINTS_MAX} are allowed")
    return tuple(dict.fromkeys(found)), with_tls == {True}


def _refusal(source: str, endpoint: str, what: str) -> UsageError:
    return UsageError(
        f"{source}: the endpoint {endpoint!r} of etcd {what}; accepted: host, host:port and "
        "[address]:port for IPv6, with http:// or https:// before, several with commas"
    )
