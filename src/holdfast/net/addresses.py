"""Addresses as this package needs them: found for an endpoint, connected to, and written.

The one thing to know: names are only ever resolved forwards. Nobody asks who an address belongs to,
and nobody guesses from a host's own name where it can be reached.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

LOCALHOST = "localhost"

# This machine has no way to such an address, as to an IPv6 one where there is only IPv4.
_NOT_ASKED = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH)


class Address(NamedTuple):
    """One place that an endpoint may be at, as the `socket` module takes it."""

    family: int
    sockaddr: Any

    @property
    def ip(self) -> str:
        """The address alone, with its zone if it has one."""
        return str(self.sockaddr[0])


def find(host: str, port: int) -> list[Address]:
    """Return where an endpoint may be, or raise `OSError`. This may wait for a name server.

    IPv4 comes first for a loopback name: that is what most programs on this host will use.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(Address(family, where) for family, _, _, _, where in found))
    if names_loopback(host):
        addresses.sort(key=lambda one: one.family != socket.AF_INET)
    return addresses


async def find_soon(host: str, port: int) -> list[Address]:
    """Do as `find` does without making anybody wait: only names need a thread.

    It is a daemon thread, because a name server may take longer to answer than this process lives.
    """
    if as_ip(host) is not None:
        return find(host, port)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[Address]] = loop.create_future()

    def deliver(found: list[Address] | Exception) -> None:
        if answer.done():
            return
        if isinstance(found, Exception):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def look() -> None:
        try:
            found: list[Address] | Exception = find(host, port)
        except Exception as error:  # noqa: BLE001 (whatever it is belongs to whoever asked)
            found = error
        try:
            loop.call_soon_threadsafe(deliver, found)
        except RuntimeError:
            pass  # The loop is closed: nobody waits for this any more.

    threading.Thread(target=look, name="holdfast-resolve", daemon=True).start()
    return await answer


@lru_cache(maxsize=1024)
def as_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a text is, or None if it is a name.

    Remembered, because thousands of connections ask about the same few addresses.
    """
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def names_loopback(host: str) -> bool:
    """Whether an endpoint says by itself that it is for this host alone.

    A host's own name does not, although `/etc/hosts` often maps it to 127.0.1.1.
    """
    ip = as_ip(host)
    if ip is not None:
        return unmapped(ip).is_loopback
    return host.lower() == LOCALHOST or host.lower().endswith("." + LOCALHOST)


def is_loopback(address: str) -> bool:
    """Whether an address means another machine to everybody else."""
    ip = as_ip(address)
    return ip is not None and unmapped(ip).is_loopback


def plain(address: str) -> str:
    """Return an address as the other nodes use it: IPv4 as such, also where it came in as IPv6."""
    if not address.startswith("::ffff:"):
        return address
    ip = as_ip(address)
    return str(unmapped(ip)) if ip is not None else address


def unmapped(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the IPv4 address that an IPv6 address stands for, if it does."""
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip


def written(host: str, port: int) -> str:
    """Return an endpoint as a person writes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def connect_first(
    found: list[Address], limit_s: float, prepare: Callable[[socket.socket], None] | None = None
) -> socket.socket:
    """Return a connection to the first address that takes one, within a limit for all of them."""
    loop = asyncio.get_running_loop()
    share_s = limit_s / max(1, len(found))
    problems: list[OSError] = []
    for one in found:
        connection = socket.socket(one.family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)  # noqa: FBT003 (the name says it)
            if prepare is not None:
                prepare(connection)
            async with asyncio.timeout(share_s):
                await loop.sock_connect(connection, one.sockaddr)
            return connection
        except TimeoutError:
            connection.close()
            problems.append(OSError(f"no answer within {share_s:.3g} s"))
        except OSError as error:
            connection.close()
            problems.append(error)
        except BaseException:
            connection.close()
            raise
    raise _worst(problems)


def _worst(problems: list[OSError]) -> OSError:
    """Return what says most: that nobody listens only if that is true wherever one could ask."""
    asked = [one for one in problems if one.errno not in _NOT_ASKED]
    refused = [one for one in asked if isinstance(one, ConnectionRefusedError)]
    others = [one for one in asked if one not in refused]
    return next(iter(others or refused or problems), OSError("it has no address"))
