"""Listening sockets: where to bind, which process may bind, and which process holds a port.

An endpoint belongs to this machine if all its addresses do; the host name does not matter. A server on
a loopback endpoint listens on loopback only, so no other machine can reach it. Any other server listens on every
address, because `/etc/hosts` often maps a host's own name to 127.0.1.1, where no other node would reach it.

The functions here return sockets that already listen. Otherwise two agents could both bind the port, and one of
them would fail only later.
"""

from __future__ import annotations

import errno
import os
import pwd
import resource
import socket
from typing import TYPE_CHECKING

from holdfast.errors import EnvironmentProblem, shortage_hint
from holdfast.net import addresses, peer_user
from holdfast.net.addresses import LOCALHOST, LOOPBACK, Address
from holdfast.net.endpoints import format_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self


LOOPBACK_NAMES = (LOOPBACK, LOCALHOST)
BACKLOG = 4096
"""Connections that wait to be accepted; the kernel also has its own limit. If the queue is full, the kernel drops
the next connection, and its client retries after 1, 2 and 4 seconds. If 1,000 agents connect at once, the last is
accepted after 0.1 s; with a queue of 256, after 1.1 s. A flood does not fill the queue for long, because the
server closes its connections immediately (`half_open`)."""
COOKIES = "/proc/sys/net/ipv4/tcp_syncookies"
DESCRIPTORS_MAX = 1 << 20
"""The highest limit that is requested; each connection needs one descriptor."""


# Binding.


def wildcard_addresses(port: int) -> list[Address]:
    """Return the addresses for listening everywhere: IPv6, which accepts IPv4 too, or IPv4 if there is no IPv6."""
    return [
        Address(socket.AF_INET6, ("::", port, 0, 0)),
        Address(socket.AF_INET, ("0.0.0.0", port)),  # noqa: S104 (other nodes must reach it)
    ]


def node_addresses(address: str, port: int) -> list[Address]:
    """Return the addresses on which a server listens that other nodes reach at `address` of this node.

    That address alone if this host has it, so that networks of other addresses do not reach the server. If not, for
    example behind NAT, or if `address` is empty: all addresses. A server on loopback never listens elsewhere.
    """
    if not address:
        return wildcard_addresses(port)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    one = Address(family, (address, port, 0, 0) if ":" in address else (address, port))
    return [one] if addresses.is_loopback(address) else [one, *wildcard_addresses(port)]


def address_of(host: str) -> str:
    """Return an address or `localhost` as an address; empty for any other host name.

    A name does not determine the address that other machines connect to (see above).
    """
    if host.lower() in LOOPBACK_NAMES:
        return LOOPBACK
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except (OSError, ValueError):  # ValueError: a null character.
            continue
        return host
    return ""


def bind(
    candidates: Iterable[Address], backlog: int | None = None, *, reuse: bool = True
) -> socket.socket:
    """Return a socket bound to the first candidate that works, listening if there is a `backlog`.

    Raises the last `OSError`. A port in use ends the search: another candidate might work, but clients try
    this one first. With `reuse`, connections of an exited process do not block the port.
    """
    problem = OSError("it has no address on this host")
    for one in candidates:
        try:
            bound = socket.socket(one.family, socket.SOCK_STREAM)
        except OSError as error:
            problem = error
            continue
        try:
            if reuse:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if one.family == socket.AF_INET6:
                only = int(one.ip != "::")
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
            bound.bind(one.sockaddr)
            if backlog is not None:
                bound.listen(backlog)
        except OSError as error:
            bound.close()
            problem = error
            if error.errno == errno.EADDRINUSE:
                break
        else:
            return bound
    raise problem


def listen(candidates: Iterable[Address], backlog: int = BACKLOG) -> socket.socket:
    """Return a nonblocking, listening socket from `bind`."""
    listener = bind(candidates, backlog)
    listener.setblocking(False)  # noqa: FBT003 (the name says it)
    return listener


def defer_accept(listener: socket.socket, limit_s: float) -> None:
    """Have the kernel hold connections until the client has sent something, or for about `limit_s`.

    For servers whose clients send first: silent connections do not reach this process. Held connections
    fill the kernel's queue, and without SYN cookies a full queue rejects every client; so this requires SYN
    cookies.
    """
    try:
        with open(COOKIES, "rb") as setting:
            if setting.read().strip() != b"0":
                seconds = max(1, round(limit_s))
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, seconds)
    except OSError:
        pass  # No such setting, or no such option: silent connections are accepted.


def candidates_of(host: str, port: int) -> list[Address]:
    """Return the addresses on which to listen for an endpoint of this machine, the best first."""
    return (
        addresses.resolve(host, port)
        if addresses.names_loopback(host)
        else wildcard_addresses(port)
    )


class ReservedPort:
    """A reserved TCP port, at one `address` of this host or at all of them.

    The kernel never assigns a reserved port as a free one. Unless it is `listening`, a worker can still bind it by
    number with `SO_REUSEADDR`, as stores do, and so can a process of another user.
    `number` 0 is any free port. A `listening` port queues connections until a process accepts them. If this host does
    not have the address, the port is reserved on all addresses (`node_addresses`).
    """

    def __init__(self, number: int = 0, *, listening: bool = False, address: str = "") -> None:
        where = node_addresses(address, number)
        try:
            self._socket = bind(where, socket.SOMAXCONN if listening else None)
        except OSError as problem:
            if number and problem.errno == errno.EADDRINUSE:
                raise EnvironmentProblem(
                    f"the master port {number} is in use on this host",
                    hint="choose another with --master-port, or omit it to use a free port",
                ) from None
            what = f"cannot bind port {number}" if number else "cannot reserve a TCP port"
            raise EnvironmentProblem(
                f"{what} for the workers: {problem.strerror}",
                hint=shortage_hint(problem.errno) or "choose another with --master-port",
            ) from None
        self.number: int = self._socket.getsockname()[1]

    def listener(self) -> socket.socket:
        """Return a separate socket that listens on this port; closing it keeps the port reserved."""
        return socket.socket(fileno=os.dup(self._socket.fileno()))

    def fileno(self) -> int:
        """Return the descriptor that is readable once a client has connected."""
        return self._socket.fileno()

    def release(self) -> None:
        """Release the port."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


# The process that can bind the endpoint becomes the coordinator.


def try_bind(host: str, port: int, is_host: bool | None) -> socket.socket | None:
    """Return a listening socket if this process becomes the coordinator; None if it is a client.

    `is_host` is the user's setting. True: this process becomes the coordinator or raises `EnvironmentProblem`.
    False: it never does. None: it does if the endpoint belongs to this machine and no other process listens there.
    This may wait for a name server.
    """
    if is_host and not addresses.names_loopback(host):
        return bind_one_of(host, port, [], is_host)
    try:
        found = addresses.resolve(host, port) if is_host is not False else []
    except OSError:
        found = []  # The name of a service may not resolve yet; with `is_host` that does not matter.
    return bind_one_of(host, port, found, is_host)


def bind_one_of(
    host: str, port: int, found: list[Address], is_host: bool | None
) -> socket.socket | None:
    """Return a listening socket or None, like `try_bind`, for an endpoint with known addresses."""
    if is_host is False:
        return None
    ours = bool(found) and all(is_local(one) for one in found)
    if not ours and not is_host:
        return None
    candidates = found if ours and addresses.names_loopback(host) else wildcard_addresses(port)
    try:
        return listen(candidates)
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE and not is_host:
            for one in found:
                refuse_other_user(peer_user.listener_at(one.family, one.sockaddr), port)
            return None
        raise _bind_error(host, port, problem) from None


def refuse_other_user(user: int | None, port: int) -> None:
    """Raise if another user listens on a port of this machine: that user would control the job.

    A user that the kernel does not report causes no error here: `coordinator.connect` refuses such a coordinator,
    unless there is a token.
    """
    if (
        user is None
        or user in (peer_user.NO_OWNER, peer_user.UNKNOWN)
        or peer_user.is_own_user(user)
    ):
        return
    raise EnvironmentProblem(
        f"another user holds port {port} of this host: {_name_of(user)}",
        hint="choose another port, or set --rdzv-conf is_host=0 to use that coordinator",
    )


def _name_of(user: int) -> str:
    try:
        return f"{pwd.getpwuid(user).pw_name} (uid {user})"
    except KeyError:
        return f"uid {user}"


def is_local(address: Address) -> bool:
    """Whether an address belongs to this machine."""
    if addresses.is_loopback(address.ip) or addresses.is_unspecified(address.ip):
        return True
    return peer_user.is_own_address(address.ip)


def _bind_error(host: str, port: int, problem: OSError) -> EnvironmentProblem:
    where = format_endpoint(host, port)
    if problem.errno == errno.EADDRINUSE:
        owner = owner_of(port)
        return EnvironmentProblem(
            f"cannot coordinate at {where}: port {port} is in use"
            + (f" by {owner}" if owner else ""),
            hint="free it, choose another port, or 0 for any free port",
        )
    if problem.errno in (errno.EACCES, errno.EPERM):
        return EnvironmentProblem(
            f"cannot coordinate at {where}: this user may not use port {port}",
            hint="choose a port of 1024 or above, or 0 for any free port",
        )
    return EnvironmentProblem(f"cannot coordinate at {where}: {problem.strerror or problem}")


# The process that holds a port. The kernel's table has the inode of each socket, and the descriptors of a process
# refer to inodes. Processes of other users are invisible.

LISTENING = "0A"
COMMAND_CHARS_MAX = 80


def owner_of(port: int) -> str:
    """Return the process that holds the port, as `pid 17, python train.py`; empty if it is invisible."""
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for name in os.listdir("/proc") if wanted else ():
        if name.isdigit() and _has_open_socket(int(name), wanted):
            command = _command(int(name))
            return f"pid {name}, {command}" if command else f"pid {name}"
    return ""


def _listening_inodes(port: int) -> set[str]:
    found: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as lines:
                rows = [line.split() for line in lines]
        except OSError:
            continue  # No IPv6 here, or no `/proc`.
        # Columns: number, local address, remote address, state, ..., inode.
        found |= {
            row[9]
            for row in rows
            if len(row) > 9 and row[1].endswith(f":{port:04X}") and row[3] == LISTENING
        }
    return found


def _has_open_socket(pid: int, wanted: set[str]) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            try:
                if os.readlink(f"{folder}/{name}") in wanted:
                    return True
            except OSError:
                continue  # It was closed meanwhile.
    except OSError:
        pass  # It belongs to another user, or has exited.
    return False


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as words:
            text = words.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
    text = "".join(one if one.isprintable() else "?" for one in text)
    return text if len(text) <= COMMAND_CHARS_MAX else text[: COMMAND_CHARS_MAX - 3] + "..."


# The descriptor limit. The usual soft limit is 1024, for programs that use `select`; the hard limit is far
# higher. Raising the soft limit does not affect workers: the keeper gives them the limits that the agent started
# with.

_soft_limit_before: list[int] = []  # The original soft limit of this process, once raised.


def descriptor_limit() -> int:
    """Return how many descriptors this process may have now."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else min(soft, DESCRIPTORS_MAX)


def require_descriptors(count: int) -> None:
    """Raise `OSError` unless this many more descriptors can be opened.

    Without free descriptors, a coordinator would not fail, but could not accept connections.
    """
    opened: list[int] = []
    try:
        opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        while len(opened) < count:
            opened.append(os.dup(opened[0]))
    finally:
        for fd in opened:
            os.close(fd)


def raise_descriptor_limit() -> bool:
    """Raise the soft limit to the hard limit; return whether that is more than before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return False
    if not _soft_limit_before:
        _soft_limit_before.append(soft)  # Record it before a child inherits the higher limit.
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return False  # For example a system call filter forbids it.
    return True


def restore_descriptor_limit(child: int) -> None:
    """Give a child of this process the soft limit that this process started with."""
    if not _soft_limit_before:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.prlimit(child, resource.RLIMIT_NOFILE, (_soft_limit_before[0], hard))
    except OSError:
        pass  # It has exited; its owner notices.
