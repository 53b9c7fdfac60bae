"""Resolving and connecting in an event loop. Workers use `net.addresses` alone, which does not import asyncio."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import TYPE_CHECKING

from holdfast.net.addresses import check_not_itself, is_ip, resolve, resolve_in_thread
from holdfast.printable import quoted

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.net.addresses import Address

# The machine has no route to the address, for example an IPv6 address on a host with only IPv4.
_NO_ROUTE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH)


async def resolve_async(host: str, port: int) -> list[Address]:
    """Return the addresses of an endpoint like `resolve`, without blocking the loop."""
    if is_ip(host):
        return resolve(host, port)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[Address]] = loop.create_future()

    def deliver(found: list[Address] | Exception) -> None:
        if answer.done():
            return
        if isinstance(found, Exception):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def post(found: list[Address] | Exception) -> None:
        try:
            loop.call_soon_threadsafe(deliver, found)
        except RuntimeError:
            pass  # The loop is closed.

    resolve_in_thread(host, port, post)
    return await answer


async def connect_first(
    addresses: list[Address], limit_s: float, prepare: Callable[[socket.socket], None] | None = None
) -> socket.socket:
    """Return a connection to the first address that accepts one, within a limit for all of them."""
    loop = asyncio.get_running_loop()
    share_s = limit_s / max(1, len(addresses))
    problems: list[OSError] = []
    for one in addresses:
        connection = socket.socket(one.family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)  # noqa: FBT003 (the name says it)
            if prepare is not None:
                prepare(connection)
            async with asyncio.timeout(share_s):
                await loop.sock_connect(connection, one.sockaddr)
            check_not_itself(connection)
            return connection
        except TimeoutError:
            connection.close()
            problems.append(OSError(f"no response within {share_s:.3g} s"))
        except OSError as error:
            connection.close()
            problems.append(error)
        except BaseException:
            connection.close()
            raise
    raise _most_useful_error(problems)


def _most_useful_error(problems: list[OSError]) -> OSError:
    """Return the most useful error: "connection refused" only if every reachable address refused."""
    tried = [one for one in problems if one.errno not in _NO_ROUTE]
    refused = [one for one in tried if isinstance(one, ConnectionRefusedError)]
    others = [one for one in tried if one not in refused]
    return next(iter(others or refused or problems), OSError("it has no address"))


def error_text(error: Exception) -> str:
    """Return an error of the operating system as readable text."""
    number = getattr(error, "errno", None) or 0
    # For a positive number, replace asyncio's text. Negative numbers are errors of the resolver.
    text = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error)
    return quoted(text[:1].lower() + text[1:])
