"""Who coordinates: whoever can bind the endpoint.

The one thing to know: nothing is guessed from host names. An endpoint is this machine's if all its
addresses are, which the kernel knows. One that says loopback is listened at on loopback alone, so
that nobody else can reach it; any other on all addresses, because `/etc/hosts` often maps a host's
own name to 127.0.1.1, where no other node would find it.

A socket that comes back listens already. Otherwise two agents could both bind the port, and only
one of them would later learn that it is too late.
"""

from __future__ import annotations

import errno
import os
import socket

from holdfast.errors import EnvironmentProblem
from holdfast.net import addresses
from holdfast.net.addresses import Address

BACKLOG = 4096  # Connections that wait to be accepted; the kernel has a limit of its own besides.


def try_bind(host: str, port: int, is_host: bool | None) -> socket.socket | None:
    """Return a listening socket if this process is to coordinate, else None: be a client.

    `is_host` is what the person said: True coordinates here or raises `EnvironmentProblem`, False
    never does, None does if the endpoint is this machine's and nobody else here was quicker. This
    may wait for a name server, if that has anything to say about where to listen.
    """
    if is_host is False:
        return None
    if is_host and not addresses.names_loopback(host):
        return bind_one_of(host, port, [], is_host)
    try:
        found = addresses.find(host, port)
    except OSError:
        found = []  # A service's name may not be known yet; its host says that it is it.
    return bind_one_of(host, port, found, is_host)


def bind_one_of(
    host: str, port: int, found: list[Address], is_host: bool | None
) -> socket.socket | None:
    """Do as `try_bind` does, with an endpoint whose addresses are known."""
    if is_host is False:
        return None
    ours = bool(found) and all(is_local(one) for one in found)
    if not ours and not is_host:
        return None
    candidates = found if ours and addresses.names_loopback(host) else _wildcards(port)
    problem: OSError | None = None
    for one in candidates:
        try:
            return _listen_at(one)
        except OSError as error:
            problem = error
            if error.errno == errno.EADDRINUSE:
                break  # Elsewhere it might work, but that is where the others look first.
    if problem is not None and problem.errno == errno.EADDRINUSE and not is_host:
        return None
    raise _refusal(host, port, problem)


def is_local(address: Address) -> bool:
    """Whether an address is one of this machine's."""
    ip = addresses.as_ip(address.ip)
    if addresses.is_loopback(address.ip) or (ip is not None and ip.is_unspecified):
        return True
    with socket.socket(address.family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address.sockaddr[0], 0, *address.sockaddr[2:]))
        except OSError:
            return False
    # Where `ip_nonlocal_bind` is set any address can be bound; but only to an address of its own
    # does a machine talk from that same address. Nothing is sent.
    with socket.socket(address.family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address.sockaddr[0], 9, *address.sockaddr[2:]))
        except OSError:
            return False
        return _without_zone(str(probe.getsockname()[0])) == _without_zone(address.ip)


def _without_zone(ip: str) -> str:
    return ip.partition("%")[0]


def _wildcards(port: int) -> list[Address]:
    """Return where to listen for everybody, the best first."""
    ipv4 = Address(socket.AF_INET, ("0.0.0.0", port))  # noqa: S104 (all nodes must reach it)
    ipv6 = Address(socket.AF_INET6, ("::", port, 0, 0))
    return [ipv6, ipv4] if socket.has_dualstack_ipv6() else [ipv4]


def _listen_at(address: Address) -> socket.socket:
    listener = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        # Connections of a coordinator that is gone must not keep the next from the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.family == socket.AF_INET6:
            wildcard = address.ip == "::"
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if wildcard else 1)
        listener.bind(address.sockaddr)
        listener.listen(BACKLOG)
        listener.setblocking(False)  # noqa: FBT003 (the name says it)
    except BaseException:
        listener.close()
        raise
    return listener


def _refusal(host: str, port: int, problem: OSError | None) -> EnvironmentProblem:
    where = addresses.written(host, port)
    if problem is not None and problem.errno == errno.EADDRINUSE:
        owner = owner_of(port)
        return EnvironmentProblem(
            f"cannot coordinate at {where}: port {port} is in use"
            + (f" by {owner}" if owner else ""),
            hint="free it, choose another port, or port 0 for any that is free",
        )
    if problem is not None and problem.errno in (errno.EACCES, errno.EPERM):
        return EnvironmentProblem(
            f"cannot coordinate at {where}: port {port} is not allowed to this user",
            hint="choose a port from 1024 on, or port 0 for any that is free",
        )
    why = problem.strerror or str(problem) if problem is not None else "no address"
    return EnvironmentProblem(f"cannot coordinate at {where}: {why}")


# Who listens at a port of this machine, as far as this user may know.
#
# It reads `/proc`: the kernel's table of sockets has the inode of each, and the descriptors of a
# process show whose it is. Of other users' processes nothing can be seen; then nothing is said.


LISTENING = "0A"
COMMAND_CHARS_MAX = 80


def owner_of(port: int) -> str:
    """Return who has the port (`pid 17, python train.py`), or nothing if that cannot be seen."""
    inodes = _listening_inodes(port)
    if not inodes:
        return ""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for name in os.listdir("/proc"):
        if name.isdigit() and _has_one(int(name), wanted):
            command = _command(int(name))
            return f"pid {name}, {command}" if command else f"pid {name}"
    return ""


def _listening_inodes(port: int) -> set[str]:
    found: set[str] = set()
    ending = f":{port:04X}"
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
            if len(row) > 9 and row[1].endswith(ending) and row[3] == LISTENING
        }
    return found


def _has_one(pid: int, wanted: set[str]) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            try:
                if os.readlink(f"{folder}/{name}") in wanted:
                    return True
            except OSError:
                continue  # It was closed meanwhile.
    except OSError:
        pass  # Another user's, or gone.
    return False


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as words:
            text = words.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
    text = "".join(one if one.isprintable() else "?" for one in text)
    return text if len(text) <= COMMAND_CHARS_MAX else text[: COMMAND_CHARS_MAX - 3] + "..."
