"""Serving a TCPStore from this process, for a client that is asked to.

A server belongs to the stores of this process that were made with it, and ends with the last of
them. The one thing to know: an endpoint that says loopback is listened at on loopback alone, so
that nobody else can reach what knows no password; any other on all addresses, as torch's is.
"""

from __future__ import annotations

import errno
import os
import socket
import threading

from holdfast import console
from holdfast.errors import EnvironmentProblem
from holdfast.net.endpoints import format_endpoint
from holdfast.net.listening import candidates_of, listen
from holdfast.store.errors import DistNetworkError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.store.tcp.embedded import TcpStoreServer

BACKLOG = 4096  # Connections that wait to be accepted; the kernel has a limit of its own besides.


class SharedServer:
    """A server of this process, and how many stores there are that need it."""

    def __init__(self, server: TcpStoreServer, port: int, address: str) -> None:
        self.port = port
        self.address = address
        """Where this process itself reaches it; no name has to be resolved for that."""
        self._server = server
        self._users = 1

    def share(self) -> SharedServer:
        """Count one store more that needs it; whoever calls this calls `release` once more."""
        with _shared.lock:
            self._users += 1
        return self

    def release(self) -> None:
        """Count one store less; the last one ends the server."""
        with _shared.lock:
            self._users -= 1
            if self._users:
                return
            if _shared.by_port.get(self.port) is self:
                del _shared.by_port[self.port]
        self._server.close()


class _Shared:
    """The servers of this process that a further store of it may use."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # The garbage collector may release a store at any time.
        self.by_port: dict[int, SharedServer] = {}


_shared = _Shared()


def host(
    name: str, port: int, *, shared: bool, listen_fd: int | None = None
) -> SharedServer | None:
    """Serve a store at an endpoint; port 0 is any that is free.

    `shared` uses the server that this process has there for others that said so too. `listen_fd` is
    a bound socket, which belongs to the server from now on. None means that an agent serves it: its
    port is taken, and the environment says by whom. Else raises `DistNetworkError`.
    """
    with _shared.lock:
        if shared and (there := _shared.by_port.get(port)) is not None:
            return there.share()
        try:
            listener = (
                _adopt(listen_fd, port)
                if listen_fd is not None
                else listen(candidates_of(name, port))
            )
        except OSError as problem:
            if problem.errno == errno.EADDRINUSE and is_agents(port):
                console.info(f"port {port} is served by the agent; this process is a client of it")
                return None
            raise _refusal(name, port, problem) from None
        hosting = _serve(listener)
        if shared:
            _shared.by_port[hosting.port] = hosting
        return hosting


def is_agents(port: int) -> bool:
    """Whether the environment says that the agent serves the store at this port, as torch asks."""
    says = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower()
    return says in ("1", "true", "y", "yes", "on", "t") and (
        os.environ.get("MASTER_PORT") == str(port)
    )


def forget_after_fork() -> None:
    """In a forked child: what the parent serves is not this process's."""
    _shared.lock = threading.RLock()
    _shared.by_port.clear()


os.register_at_fork(after_in_child=forget_after_fork)


def _serve(listener: socket.socket) -> SharedServer:
    from holdfast.store.tcp.embedded import TcpStoreServer

    address, port = listener.getsockname()[:2]
    wildcards = {"::": "::1", "0.0.0.0": "127.0.0.1"}  # noqa: S104 (none is bound here)
    if address == "::" and not listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
        wildcards["::"] = "127.0.0.1"  # Where IPv6 is off for loopback, IPv4 is not.
    try:
        server = TcpStoreServer(listener)
        server.start()
    except EnvironmentProblem as problem:
        raise DistNetworkError(str(problem)) from None
    return SharedServer(server, port, wildcards.get(address, address))


def _adopt(descriptor: int, port: int) -> socket.socket:
    listener = socket.socket(fileno=descriptor)
    bound = listener.getsockname()[1]
    if port not in (0, bound):
        listener.detach()
        raise ValueError(f"the socket to serve at is bound to port {bound}, not to {port}")
    listener.listen(BACKLOG)
    return listener


def _refusal(name: str, port: int, problem: OSError) -> DistNetworkError:
    where = format_endpoint(name, port)
    if problem.errno == errno.EADDRINUSE:
        return DistNetworkError(
            f"no store can be served at {where}: port {port} is in use; free it, choose another, "
            "or port 0 for any that is free"
        )
    reason = problem.strerror or str(problem)
    return DistNetworkError(f"no store can be served at {where}: {reason}")
