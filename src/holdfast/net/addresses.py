"""Addresses: resolving a host and a port, and classifying addresses. `net.async_addresses` connects to them.

Only names need a name server; an address never causes a lookup. A host's own name serves as its address only for
other machines (`own_address`).
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from functools import lru_cache
from typing import TYPE_CHECKING

from holdfast.core.values import Value

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LOCALHOST = "localhost"
LOOPBACK = "127.0.0.1"
OWN_NAME_S = 2.0
"""How long a machine may take to resolve its own name."""
_PUBLIC_ADDRESS = ("192.0.2.1", 9)  # An address reserved for documentation.


class Address(Value):
    """One address of an endpoint, in the form of the `socket` module."""

    family: int
    sockaddr: Any

    @property
    def ip(self) -> str:
        """The address alone, with its zone if it has one."""
        return str(self.sockaddr[0])


# Resolving.


def resolve(host: str, port: int) -> list[Address]:
    """Return the addresses of an endpoint, or raise `OSError`. This may wait for a name server.

    For a loopback name the IPv4 addresses are first, since most programs on this host use them.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except ValueError:  # It contains a null character, or is not encodable.
        raise OSError("the name cannot be resolved") from None
    addresses = list(dict.fromkeys(Address(family, where) for family, _, _, _, where in found))
    if names_loopback(host):
        addresses.sort(key=lambda one: one.family != socket.AF_INET)
    return addresses


def resolve_within(host: str, port: int, timeout_s: float) -> list[Address]:
    """Return the addresses of an endpoint like `resolve`, but raise `TimeoutError` after `timeout_s`."""
    if is_ip(host):
        return resolve(host, port)
    answers: list[list[Address] | Exception] = []
    thread = resolve_in_thread(host, port, answers.append)
    thread.join(min(timeout_s, threading.TIMEOUT_MAX))
    if not answers:
        raise TimeoutError("the name server does not respond")
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def resolve_in_thread(
    host: str, port: int, deliver: Callable[[list[Address] | Exception], None]
) -> threading.Thread:
    """Resolve in a daemon thread: a name server may take longer than this process lives."""

    def work() -> None:
        try:
            found: list[Address] | Exception = resolve(host, port)
        except Exception as error:  # noqa: BLE001 (the caller handles it)
            found = error
        deliver(found)

    thread = threading.Thread(target=work, name="holdfast-resolve", daemon=True)
    thread.start()
    return thread


def own_address() -> str:
    """Return the name by which other machines reach this one, or its address if it has no name.

    The name must resolve here, since processes of this machine use it too. If the only name is `localhost`, return
    the loopback address.
    """
    name = os.uname().nodename
    try:
        found = resolve_within(name, 0, OWN_NAME_S)
    except OSError:
        return _outgoing_address() or LOOPBACK
    return LOOPBACK if all(one.ip in (LOOPBACK, "::1") for one in found) else name


def _outgoing_address() -> str:
    """Return the address from which this machine would connect to the internet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_PUBLIC_ADDRESS)  # Only chooses a route: nothing is sent.
        except OSError:
            return ""
        return str(probe.getsockname()[0])


# Classifying.


def names_loopback(host: str) -> bool:
    """Return whether this text is a loopback address or `localhost`.

    A host's own name is neither, although `/etc/hosts` often maps it to 127.0.1.1.
    """
    if is_ip(host):
        return is_loopback(host)
    return host.lower() == LOCALHOST or host.lower().endswith("." + LOCALHOST)


def is_ip(host: str) -> bool:
    """Whether the text is an address, not a name."""
    return _packed(host) is not None


def is_loopback(address: str) -> bool:
    """Whether an address is a loopback address, by which each machine reaches itself."""
    found = _packed(address)
    return found is not None and (found == _LOOPBACK_6 or (len(found) == 4 and found[0] == 127))


def is_unspecified(address: str) -> bool:
    """Whether an address means all addresses of this machine: `0.0.0.0` or `::`."""
    found = _packed(address)
    return found is not None and not any(found)


def as_ipv4_if_mapped(address: str) -> str:
    """Return an address as other nodes use it: IPv4-mapped IPv6 as IPv4."""
    found = _packed(address) if address.startswith("::ffff:") else None
    is_mapped = found is not None and len(found) == 4
    return socket.inet_ntop(socket.AF_INET, found) if found and is_mapped else address


_LOOPBACK_6 = bytes(15) + b"\1"
_MAPPED = bytes(10) + b"\xff\xff"


@lru_cache(maxsize=1024)
def _packed(host: str) -> bytes | None:
    """Return an address as `packed` does, or None for a name.

    Cached, because thousands of connections come from the same few addresses.
    """
    try:
        return packed(host)
    except (OSError, ValueError):  # ValueError: a null character.
        return None


def packed(address: str) -> bytes:
    """Return an address as bytes, an IPv4-mapped IPv6 address as IPv4; raise `OSError` for a name."""
    address = address.partition("%")[0]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return without_mapping(socket.inet_pton(family, address))


def without_mapping(address: bytes) -> bytes:
    """Return an IPv4-mapped IPv6 address as IPv4, and any other unchanged."""
    return address[12:] if address.startswith(_MAPPED) else address


# Connecting.


SEGMENT_BYTES_MAX = 1220
"""The size that fits every IPv6 path, tunnels included. If larger packets vanish silently (a firewall drops the
ICMP), a connection with the usual segments stalls at the first large message, and everything after it
waits."""


def use_small_segments(one: socket.socket) -> None:
    """Keep the segments of a connection, or of all connections of a listener, small in both directions."""
    try:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES_MAX)
    except OSError:
        pass  # Only paths that drop large packets need it.


KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_PROBES = 60, 15, 4
"""Detect after two minutes that the other end disappeared silently: a host that lost power, or a router that
dropped an idle connection."""


def keep_alive(
    one: socket.socket,
    idle_s: int = KEEPALIVE_IDLE_S,
    every_s: int = KEEPALIVE_EVERY_S,
    probes: int = KEEPALIVE_PROBES,
) -> None:
    """Have the kernel detect that the other end of a connection, or of a listener's connections, disappeared."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)


def check_not_itself(connection: socket.socket) -> None:
    """Raise if the kernel connected a socket to itself, because nothing listens on its port."""
    if connection.getsockname() == connection.getpeername():
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nothing listens there")
