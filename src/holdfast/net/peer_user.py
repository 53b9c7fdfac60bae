"""Finds the user at the other end of a connection within this host, or the user who listens there.

Every user of a host can connect over loopback. So a server without a token asks the kernel (`sock_diag`, a
netlink socket) for the owner of the other end, and serves its own user and root. Likewise a client can
check the listener's owner before it trusts the server. A connection from another host has no owner here.

If a process has closed its socket, the kernel reports user 0 for it, even while the socket still waits for late
packets. Such a socket has no inode; this module reports no owner for it. A process can send data, close its socket, and
so hide its user. It could have connected from any address of this host, which must not count as another host then.

If the kernel supports neither `sock_diag` nor `/proc/net/tcp`, the owner is `UNKNOWN`, and servers refuse it.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from typing import TYPE_CHECKING

from holdfast.net.addresses import is_loopback, packed, without_mapping

if TYPE_CHECKING:
    from typing import Any

SOCK_DIAG_BY_FAMILY = 20
NETLINK_SOCK_DIAG = 4
NLM_F_REQUEST = 1
ALL_STATES = 0xFFFFFFFF
NO_COOKIE = b"\xff" * 8
HEADER = struct.Struct("=IHHII")
REQUEST = struct.Struct("=BBBBI")
OWNER_AT = HEADER.size + 4 + 48 + 12  # After the socket's states, addresses, timer and queues.
OWNER = struct.Struct("=II")
REPLY_BYTES_MAX = 4096
NLMSG_ERROR, RTM_NEWROUTE, RTM_GETROUTE = 2, 24, 26
RTN_LOCAL = 2
RTA_DST = 1
ROUTE = struct.Struct(
    "=BBBBBBBBI"
)  # Family, lengths, service, table, protocol, scope, type, flags.
ATTRIBUTE = struct.Struct("=HH")
ERROR = struct.Struct("=i")
NO_ROUTE = (-errno.ENETUNREACH, -errno.EHOSTUNREACH)
NO_OWNER = -1
"""The owner of a socket whose process has closed it."""
UNKNOWN = -2
"""The owner of a socket on this host if the kernel does not report owners."""
NOT_REPORTED = (
    "this host's kernel does not report who owns a connection (no sock_diag, no /proc/net/tcp)"
)
LISTENING = "0A"  # In the tables.
TCP_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def user_of(connection: socket.socket) -> int | None:
    """Return the user at the other end of a connection; `NO_OWNER` if its process has closed it.

    `UNKNOWN` if that end is on this host and the kernel does not report owners. None if it is on another host.
    """
    try:
        here, there = connection.getsockname(), connection.getpeername()
    except OSError:
        return NO_OWNER  # It closed before it was accepted.
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    user = owner_at(connection.family, there, here)
    # A process on this host can connect from any address of the host; the kernel reports its owner anyway.
    if user < 0 and not _is_within_host(connection.family, here, there):
        return None
    return user


def owner_at(family: int, local: tuple[Any, ...], remote: tuple[Any, ...]) -> int:
    """Return the user whose socket on this host is connected from `local` to `remote`.

    `NO_OWNER` if no process has such a socket, and `UNKNOWN` if the kernel does not report owners.
    """
    ends = (local[0], local[1]), (remote[0], remote[1])
    try:
        return _query_kernel(family, *ends)
    except OSError:
        return _search_tables(*ends)


def listener_of(connection: socket.socket) -> int | None:
    """Return the user who listens at the other end of a connection of this process, like `user_of`.

    Until the connection is accepted, its other end has no owner, so this finds the listener.
    """
    try:
        here, there = connection.getsockname(), connection.getpeername()
    except OSError:
        return NO_OWNER
    if not _is_within_host(connection.family, here, there):
        return None
    return listener_at(connection.family, there)


def listener_at(family: int, where: tuple[Any, ...]) -> int:
    """Return the user who listens at an address of this host, like `owner_at`."""
    return owner_at(family, where, ("::" if family == socket.AF_INET6 else "0.0.0.0", 0))  # noqa: S104 (it is not bound)


def is_own_user(user: int | None) -> bool:
    """Whether the other end belongs to another host, this user, or root; False for `UNKNOWN`."""
    return user in (None, 0, os.geteuid())


def is_local_user(user: int | None) -> bool:
    """Whether the other end is a process of this user or of root on this host."""
    return user is not None and is_own_user(user)


def _is_within_host(family: int, here: tuple[Any, ...], there: tuple[Any, ...]) -> bool:
    if family not in (socket.AF_INET, socket.AF_INET6):
        return False
    ours, theirs = here[0], there[0]
    # The kernel accepts a loopback address from no other host.
    return packed(ours) == packed(theirs) or is_loopback(theirs) or is_own_address(theirs)


def is_own_address(ip: str) -> bool:
    """Whether this host has an address, even one that another address of it hides as a source."""
    address = packed(ip)
    family = socket.AF_INET if len(address) == 4 else socket.AF_INET6
    attribute = ATTRIBUTE.pack(ATTRIBUTE.size + len(address), RTA_DST) + address
    request = ROUTE.pack(family, 8 * len(address), 0, 0, 0, 0, 0, 0, 0) + attribute
    try:
        reply = _exchange(socket.NETLINK_ROUTE, RTM_GETROUTE, request)
    except OSError:
        reply = b""
    kind = HEADER.unpack_from(reply)[1] if reply else 0
    if kind == RTM_NEWROUTE:
        return bool(ROUTE.unpack_from(reply, HEADER.size)[7] == RTN_LOCAL)
    if kind == NLMSG_ERROR and ERROR.unpack_from(reply, HEADER.size)[0] in NO_ROUTE:
        return False
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((socket.inet_ntop(family, address), 0))
        except OSError:
            return False
    return True


def _query_kernel(family: int, local: tuple[str, int], remote: tuple[str, int]) -> int:
    """Return the owner of the socket with this local and this remote end."""
    ends = struct.pack("!HH", local[1], remote[1])
    request = (
        REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, ALL_STATES)
        + ends
        + _address(family, local[0])
        + _address(family, remote[0])
        + bytes(4)
        + NO_COOKIE
    )
    reply = _exchange(NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, request)
    if HEADER.unpack_from(reply)[1] != SOCK_DIAG_BY_FAMILY:
        return NO_OWNER
    # Once the connection has closed, the kernel finds a listener at that port instead.
    if reply[HEADER.size + 4 : HEADER.size + 8] != ends:
        return NO_OWNER
    user, inode = OWNER.unpack_from(reply, OWNER_AT)
    return int(user) if inode else NO_OWNER


def _exchange(protocol: int, kind: int, request: bytes) -> bytes:
    """Send a netlink request to the kernel and return the reply."""
    kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
    try:
        kernel.send(HEADER.pack(HEADER.size + len(request), kind, NLM_F_REQUEST, 0, 0) + request)
        return kernel.recv(REPLY_BYTES_MAX)
    finally:
        kernel.close()


def _search_tables(local: tuple[str, int], remote: tuple[str, int]) -> int:
    """Return the owner as `_query_kernel` does, from the tables in `/proc`, for a host without netlink.

    `UNKNOWN` if there are no tables. A listener may be bound to all addresses.
    """
    here, there = ((packed(end[0]), end[1]) for end in (local, remote))
    seen = False
    for table in TCP_TABLES:
        try:
            with open(table) as rows:
                next(rows)
                for row in rows:
                    seen = True
                    words = row.split()
                    address, port = _from_table(words[1])
                    if words[3] == LISTENING and not any(address):
                        address = here[0]
                    is_listener = words[3] == LISTENING and there[1] == 0
                    if (address, port) == here and (is_listener or _from_table(words[2]) == there):
                        return int(words[7]) if words[9] != "0" else NO_OWNER
        except OSError:
            continue
    return NO_OWNER if seen else UNKNOWN


def _from_table(text: str) -> tuple[bytes, int]:
    address, _, port = text.partition(":")
    words = bytes.fromhex(address)  # Each word of four bytes in the order of this host.
    if sys.byteorder == "little":
        words = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    return without_mapping(words), int(port, 16)


def _address(family: int, host: str) -> bytes:
    return socket.inet_pton(family, host.partition("%")[0]).ljust(16, b"\0")
