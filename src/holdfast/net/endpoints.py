"""Endpoints as text: `host`, `host:port`, and IPv6 addresses with and without brackets.

An IPv6 address contains colons, so only text that is not such an address is split at its last colon. Nothing
is resolved here.
"""

from __future__ import annotations

import socket

from holdfast.core.limits import PORT_MAX
from holdfast.errors import UsageError
from holdfast.net.addresses import LOCALHOST, names_loopback


def parse_rendezvous_endpoint(
    endpoint: str | None, default_port: int, *, flag: str = "--rdzv-endpoint"
) -> tuple[str, int]:
    """Return host and port. A blank endpoint means this host; a missing port means the default."""
    text = (endpoint or "").strip()
    if not text:
        return LOCALHOST, default_port
    try:
        return split_endpoint(text, default_port)
    except ValueError as problem:
        raise UsageError(
            f"{flag}: {endpoint!r} {problem}; accepted: host, host:port, and [address]:port for "
            f"IPv6, with a port from 0 to {PORT_MAX}"
        ) from None


def parse_rendezvous_endpoints(
    endpoints: str | None,
    default_port: int,
    places_max: int,
    *,
    flag: str = "--rdzv-endpoint",
) -> tuple[tuple[str, int], ...]:
    """Return host and port of each endpoint in a comma-separated list."""
    parts = (endpoints or "").split(",")
    if len(parts) == 1:
        return (parse_rendezvous_endpoint(endpoints, default_port, flag=flag),)
    accepted = f"HOST[:PORT] of up to {places_max} machines, separated by commas, each once"
    places: list[tuple[str, int]] = []
    for part in parts:
        try:
            host, port = split_endpoint(part.strip(), default_port, port_min=1)
        except ValueError as problem:
            raise UsageError(f"{flag}: {part.strip()!r} {problem}; accepted: {accepted}") from None
        if any((host.lower(), port) == (one.lower(), other) for one, other in places):
            raise UsageError(
                f"{flag}: {endpoints!r} names {format_endpoint(host, port)} twice; accepted: {accepted}"
            )
        places.append((host, port))
    if len(places) > places_max:
        raise UsageError(f"{flag}: {len(places)} endpoints; accepted: {accepted}")
    own = [host for host, _ in places if names_loopback(host)]
    if own and len(own) < len(places):
        raise UsageError(
            f"{flag}: {own[0]!r} in {endpoints!r} means a different machine on each node; accepted: names or "
            "addresses that all nodes can resolve, or loopback alone"
        )
    return tuple(places)


def split_endpoint(text: str, default_port: int, *, port_min: int = 0) -> tuple[str, int]:
    """Return host and port, or raise `ValueError` with a phrase such as "is empty".

    `[::1]:29400`, `[::1]` and `::1` are valid. `fe80::1:29400` is an address and a port, since a group of an
    address has at most four digits. With a port of four digits it would be another address, so brackets are
    needed.
    """
    if not text:
        raise ValueError("is empty")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not is_ipv6(host) or (rest and not rest.startswith(":")):
            raise ValueError("has brackets without an IPv6 address")
        return host, _port(rest[1:], port_min) if rest else default_port
    if is_ipv6(text):
        return text, default_port
    host, colon, port = text.rpartition(":")
    if not colon:
        host, number = text, default_port
    else:
        number = _port(port, port_min)
    if not is_ipv6(host) and not _is_name(host):
        raise ValueError(f"has the invalid host {host!r}" if host else "has no host")
    return host, number


def format_endpoint(host: str, port: int) -> str:
    """Return host and port as the text that `split_endpoint` parses."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ipv6(text: str) -> bool:
    """Whether the text is an IPv6 address, with or without a zone such as `%eth0`."""
    address, percent, zone = text.partition("%")
    if percent and not _is_name(zone):
        return False
    try:
        socket.inet_pton(socket.AF_INET6, address)
    except (OSError, ValueError):  # ValueError: a null character.
        return False
    return True


def _is_name(text: str) -> bool:
    return bool(text) and all(one.isalnum() or one in "._-" for one in text)


def _port(text: str, port_min: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        raise ValueError(f"has the invalid port {text!r}")
    if not port_min <= int(text) <= PORT_MAX:
        raise ValueError(f"has the invalid port {text!r}")
    return int(text)
