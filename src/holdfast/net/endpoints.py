"""Endpoints as text: `host`, `host:port`, and IPv6 addresses with and without brackets.

The one thing to know: an IPv6 address is full of colons, so only what is not itself such an address
is split at its last colon. Nothing is resolved here.
"""

from __future__ import annotations

import re
import socket

from holdfast.errors import UsageError

LOCALHOST = "localhost"
PORT_MAX = 65_535

_HOST = re.compile(r"[\w.-]+")
_PORT = re.compile(r"[0-9]{1,5}")


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Return host and port; a blank endpoint is this host, a missing port the default.

    `[::1]:29400`, `[::1]` and `::1` are all understood. `fe80::1:29400` can only be an address and
    a port, since a group of an address has four digits at most; with a shorter port it would be
    another address, so write the brackets.
    """
    text = (endpoint or "").strip()
    if not text:
        return LOCALHOST, default_port
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not is_ipv6(host) or (rest and not rest.startswith(":")):
            raise _refusal(endpoint, "has brackets, but no IPv6 address in them")
        return host, _port(endpoint, rest[1:]) if rest else default_port
    if is_ipv6(text):
        return text, default_port
    host, colon, port = text.rpartition(":")
    if not colon:
        host, number = text, default_port
    else:
        number = _port(endpoint, port)
    if not is_ipv6(host) and not _HOST.fullmatch(host):
        raise _refusal(endpoint, f"has {host!r} for a host" if host else "has no host")
    return host, number


def format_endpoint(host: str, port: int) -> str:
    """Return host and port as one text that `parse_rendezvous_endpoint` understands."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ipv6(text: str) -> bool:
    """Whether the text is an IPv6 address, with or without a zone such as `%eth0`."""
    address, percent, zone = text.partition("%")
    if percent and not _HOST.fullmatch(zone):
        return False
    try:
        socket.inet_pton(socket.AF_INET6, address)
    except (OSError, ValueError):  # ValueError: a null character.
        return False
    return True


def _port(endpoint: str | None, text: str) -> int:
    if not _PORT.fullmatch(text) or int(text) > PORT_MAX:
        raise _refusal(endpoint, f"has {text!r} for a port")
    return int(text)


def _refusal(endpoint: str | None, what: str) -> UsageError:
    return UsageError(
        f"--rdzv-endpoint: {endpoint!r} {what}; accepted: host, host:port, and [address]:port for "
        f"IPv6, with a port from 0 to {PORT_MAX}"
    )
