"""Where etcd is and how to get in, as the person wrote it.

The one thing to know: nothing is resolved, opened or connected here but the files of certificates,
and those only by `tls_context`.
"""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import UsageError

if TYPE_CHECKING:
    import ssl

DEFAULT_PORT = 2379
PORT_MAX = 65_535
ENDPOINTS_MAX = 16
"""A cluster of etcd has three, five or seven members; more endpoints are a slip."""
NAMES = ("cert", "key", "cacert")
"""What `--rdzv-conf` calls the files of certificate, key and authority."""

_HOST = re.compile(r"[\w.-]+")
_PORT = re.compile(r"[0-9]{1,5}")
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
        return ",".join(written(host, port) for host, port in self.endpoints)

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


def written(host: str, port: int) -> str:
    """Return an endpoint as a person writes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
        found.append(_parse_endpoint(source, one))
    if len(with_tls) > 1:
        raise UsageError(
            f"{source}: some endpoints of etcd have https:// and some have not",
            hint="write it before all or none",
        )
    if len(found) > ENDPOINTS_MAX:
        raise UsageError(f"{source}: {len(found)} endpoints, where {ENDPOINTS_MAX} are allowed")
    return tuple(dict.fromkeys(found)), with_tls == {True}


def _parse_endpoint(source: str, text: str) -> tuple[str, int]:
    if not text:
        raise _refusal(source, text, "is empty")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not _is_ipv6(host) or (rest and not rest.startswith(":")):
            raise _refusal(source, text, "has brackets, but no IPv6 address in them")
        return host, _port(source, text, rest[1:]) if rest else DEFAULT_PORT
    if _is_ipv6(text):
        return text, DEFAULT_PORT
    host, colon, port = text.rpartition(":")
    if not colon:
        host, number = text, DEFAULT_PORT
    else:
        number = _port(source, text, port)
    if not _HOST.fullmatch(host):
        raise _refusal(source, text, f"has {host!r} for a host" if host else "has no host")
    return host, number


def _is_ipv6(text: str) -> bool:
    address, percent, zone = text.partition("%")
    if percent and not _HOST.fullmatch(zone):
        return False
    try:
        socket.inet_pton(socket.AF_INET6, address)
    except (OSError, ValueError):  # ValueError: a null character.
        return False
    return True


def _port(source: str, endpoint: str, text: str) -> int:
    if not _PORT.fullmatch(text) or not 0 < int(text) <= PORT_MAX:
        raise _refusal(source, endpoint, f"has {text!r} for a port")
    return int(text)


def _refusal(source: str, endpoint: str, what: str) -> UsageError:
    return UsageError(
        f"{source}: the endpoint {endpoint!r} of etcd {what}; accepted: host, host:port and "
        "[address]:port for IPv6, with http:// or https:// before, several with commas"
    )
