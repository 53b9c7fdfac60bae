"""Listening sockets: where to bind, who may, and who has the port otherwise.

An endpoint is this machine's if all its addresses are, which the kernel knows; nothing is guessed
from host names. A loopback endpoint is listened at on loopback alone, so that no other machine can
reach it; any other on every address, because `/etc/hosts` often maps a host's own name to
127.0.1.1, where no other node would find it.

A socket that is returned listens already. Otherwise two agents could both bind the port, and only
one of them would later learn that it is too late.
"""

from __future__ import annotations

import errno
import os
import pwd
import resource
import socket
from typing import TYPE_CHECKING

from holdfast.errors import EnvironmentProblem, shortage_hint
from holdfast.net import addresses
from holdfast.net.endpoints import format_endpoint
from holdfast.net.peer_user import NOBODY, is_own_user, listener_at

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, Self

    from holdfast.net.addresses import Address

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = (LOOPBACK, "localhost")
BACKLOG = 4096
"""Connections that wait to be accepted; the kernel has a limit of its own besides. In a queue that is
full the next is dropped, and its client tries again after 1, 2 and 4 seconds: of 1,000 agents that come
at once the last is in after 0.1 s, and with 256 after 1.1 s. A flood does not make it long, because
whoever floods is turned out at once (`half_open`)."""
COOKIES = "/proc/sys/net/ipv4/tcp_syncookies"
DESCRIPTORS_MAX = 1 << 20  # What is asked for at most; each connection needs one.


# Binding.


def everywhere(port: int) -> list[tuple[int, Any]]:
    """Return where to listen for everybody: IPv6 covers IPv4 too, where there is IPv6."""
    return [
        (socket.AF_INET6, ("::", port, 0, 0)),
        (socket.AF_INET, ("0.0.0.0", port)),  # noqa: S104 (other nodes must reach it)
    ]


def address_of(host: str) -> str:
    """Return the one address that a host's text means on this very host; nothing if it is a name.

    A name says nothing of where others who use it will arrive: see above. `localhost` does.
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
    candidates: Iterable[tuple[int, Any]], backlog: int | None = None, *, reuse: bool = True
) -> socket.socket:
    """Return a socket bound to the first candidate that works, listening if there is a `backlog`.

    Raises the last `OSError`. A port in use ends the search: elsewhere it might work, but that is
    where the others look first. With `reuse`, connections of a process that is gone do not keep the
    next from the port.
    """
    problem = OSError("it has no address here")
    for family, address in candidates:
        try:
            bound = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            problem = error
            continue
        try:
            if reuse:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                only = int(address[0] != "::")
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
            bound.bind(address)
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


def listen(candidates: Iterable[tuple[int, Any]], backlog: int = BACKLOG) -> socket.socket:
    """Return what `bind` returns, listening and without blocking."""
    listener = bind(candidates, backlog)
    listener.setblocking(False)  # noqa: FBT003 (the name says it)
    return listener


def defer_accept(listener: socket.socket, limit_s: float) -> None:
    """Have the kernel keep connections until the client has spoken, or for about `limit_s`.

    For servers whose clients speak first: whoever stays silent does not reach this process. What the
    kernel keeps fills its own queue, and without SYN cookies a full one would turn away everybody.
    """
    try:
        with open(COOKIES, "rb") as setting:
            if setting.read().strip() != b"0":
                seconds = max(1, round(limit_s))
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, seconds)
    except OSError:
        pass  # No such setting, or no such option: silent connections are accepted.


def candidates_of(host: str, port: int) -> list[tuple[int, Any]]:
    """Return where to listen for an endpoint that is this machine's, the best first."""
    return [*addresses.resolve(host, port)] if addresses.names_loopback(host) else everywhere(port)


class ReservedPort:
    """A TCP port that is ours to give away, at one `address` of this host or at all of them.

    The kernel gives a held port to nobody who asks for any free one. Unless it is listened on, a
    worker that binds it by number with `SO_REUSEADDR`, as stores do, gets it all the same, and so
    does a process of another user. `number` 0 is any free one. A port that is `listening` takes
    connections from now on, for whoever will accept them.

    An address that this host turns out not to have, as behind a router that translates, stands for
    all; but not loopback, which must not become more.
    """

    def __init__(self, number: int = 0, *, listening: bool = False, address: str = "") -> None:
        where = everywhere(number)
        if address:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            one = (family, (address, number, 0, 0) if ":" in address else (address, number))
            is_loopback = address.startswith("127.") or address == "::1"
            where = [one] if is_loopback else [one, *where]
        try:
            self._socket = bind(where, socket.SOMAXCONN if listening else None)
        except OSError as problem:
            if number and problem.errno == errno.EADDRINUSE:
                raise EnvironmentProblem(
                    f"the port {number}, at which the workers are to meet, is taken on this host",
                    hint="give another one with --master-port, or none to get a free one",
                ) from None
            what = f"port {number} cannot be bound" if number else "no TCP port can be reserved"
            raise EnvironmentProblem(
                f"{what} for the workers: {problem.strerror}",
                hint=shortage_hint(problem.errno) or "give another one with --master-port",
            ) from None
        self.number: int = self._socket.getsockname()[1]

    def listener(self) -> socket.socket:
        """Return a socket of its own that listens at this port; closing it keeps the port ours."""
        return socket.socket(fileno=os.dup(self._socket.fileno()))

    def fileno(self) -> int:
        """Return the descriptor that is readable once somebody has connected."""
        return self._socket.fileno()

    def release(self) -> None:
        """Give the port back to the kernel."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


# Who coordinates: whoever can bind the endpoint.


def try_bind(host: str, port: int, is_host: bool | None) -> socket.socket | None:
    """Return a listening socket if this process is to coordinate, else None: be a client.

    `is_host` is the user's setting: True coordinates here or raises `EnvironmentProblem`, False
    never does, None does if the endpoint is this machine's and nobody else here was quicker. This
    may wait for a name server, if that has anything to say about where to listen.
    """
    if is_host and not addresses.names_loopback(host):
        return bind_one_of(host, port, [], is_host)
    try:
        found = addresses.resolve(host, port) if is_host is not False else []
    except OSError:
        found = []  # A service's name may not be known yet; with `is_host` that does not matter.
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
    candidates = found if ours and addresses.names_loopback(host) else everywhere(port)
    try:
        return listen(candidates)
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE and not is_host:
            for one in found:
                refuse_other_user(listener_at(one.family, one.sockaddr), port)
            return None
        raise _refusal(host, port, problem) from None


def refuse_other_user(user: int | None, port: int) -> None:
    """Raise if whoever listens at a port of this machine is another user, who would decide for us."""
    if user is None or user == NOBODY or is_own_user(user):
        return
    raise EnvironmentProblem(
        f"port {port} of this host is held by another user, {_name_of(user)}",
        hint="choose another port, or set --rdzv-conf is_host=0 if that is the coordinator you mean",
    )


def _name_of(user: int) -> str:
    try:
        return f"{pwd.getpwuid(user).pw_name} (uid {user})"
    except KeyError:
        return f"uid {user}"


def is_local(address: Address) -> bool:
    """Whether an address is one of this machine's."""
    if addresses.is_loopback(address.ip) or addresses.is_unspecified(address.ip):
        return True
    where, *rest = address.sockaddr
    with socket.socket(address.family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((where, 0, *rest[1:]))
        except OSError:
            return False
    # Where `ip_nonlocal_bind` is set any address can be bound; but only to an address of its own
    # does a machine talk from that same address. Nothing is sent.
    with socket.socket(address.family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((where, 9, *rest[1:]))
        except OSError:
            return False
        return _without_zone(str(probe.getsockname()[0])) == _without_zone(address.ip)


def _without_zone(ip: str) -> str:
    return ip.partition("%")[0]


def _refusal(host: str, port: int, problem: OSError) -> EnvironmentProblem:
    where = format_endpoint(host, port)
    if problem.errno == errno.EADDRINUSE:
        owner = owner_of(port)
        return EnvironmentProblem(
            f"cannot coordinate at {where}: port {port} is in use"
            + (f" by {owner}" if owner else ""),
            hint="free it, choose another port, or port 0 for any that is free",
        )
    if problem.errno in (errno.EACCES, errno.EPERM):
        return EnvironmentProblem(
            f"cannot coordinate at {where}: port {port} is not allowed to this user",
            hint="choose a port from 1024 on, or port 0 for any that is free",
        )
    return EnvironmentProblem(f"cannot coordinate at {where}: {problem.strerror or problem}")


# Who has a port, as far as this user may know: the kernel's table of sockets has the inode of each,
# and the descriptors of a process show whose it is. Other users' processes cannot be seen.

LISTENING = "0A"
COMMAND_CHARS_MAX = 80


def owner_of(port: int) -> str:
    """Return who has the port (`pid 17, python train.py`), or nothing if that cannot be seen."""
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for name in os.listdir("/proc") if wanted else ():
        if name.isdigit() and _has_one(int(name), wanted):
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


# How many connections a process may have. The usual soft limit of descriptors is 1024, for the sake
# of programs that use `select`; the hard limit is far above it. Workers are not changed by raising
# it: they get their limits from the keeper, which has those that the agent was started with.

_before: list[int] = []  # The soft limit of this process, once that was raised.


def descriptor_limit() -> int:
    """Return how many descriptors this process may have now."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else min(soft, DESCRIPTORS_MAX)


def require_descriptors(count: int) -> None:
    """Raise `OSError` unless so many more descriptors can be opened.

    For where a lack of them would not fail but wait: a coordinator that cannot accept.
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
    """Allow as many as the machine does; return whether these are more than before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return False
    if not _before:
        _before.append(soft)  # Before any child can have the higher one.
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return False  # Something forbids it, such as a filter of system calls.
    return True


def restore_descriptor_limit(child: int) -> None:
    """Give a child of this process the limit that this process had before it raised its own."""
    if not _before:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.prlimit(child, resource.RLIMIT_NOFILE, (_before[0], hard))
    except OSError:
        pass  # It is gone, which its owner will notice.
