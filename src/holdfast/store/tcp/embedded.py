"""A TCPStore server inside this process: an agent runs it for its workers, or a `TCPStore` master runs it.

Most jobs on one node never use the store, so it costs them only a sleeping thread. The thread imports
`store_server`, which does the work, when the first client connects.

The stores of this process that share a master's server own it together; the last one closes it. A server
with a loopback endpoint listens on loopback only, so other hosts cannot reach the unauthenticated store. With
any other endpoint it listens on all addresses, as torch does.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.errors import EnvironmentProblem, find_shortage
from holdfast.net.addresses import keep_alive
from holdfast.net.endpoints import format_endpoint
from holdfast.net.listening import bind, candidates_of
from holdfast.store.store_errors import DistNetworkError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from holdfast.store.tcp.store_server import ServingLoop

BACKLOG = 65_535  # Connections that wait to be accepted; the kernel has a lower limit of its own.

HOSTS, OPEN, PRIVATE = "hosts", "open", "private"

_running: set[TcpStoreServer] = set()


class HostAccess:
    """The hosts that a store serves, besides its own user on this host; see `core.job_settings.StoreAccess`."""

    __slots__ = ("generation", "key", "mode")

    def __init__(self, mode: str, key: bytes = b"", generation: int = 0) -> None:
        self.mode = mode
        self.key = key
        """The key with which agents prove that they belong to the generation; empty on a single node."""
        self.generation = generation


class TcpStoreServer:
    """A store on a bound socket, which the server owns.

    It serves the hosts of its `access`; without one, every host.
    """

    def __init__(
        self,
        listener: socket.socket,
        on_failure: Callable[[str], None] | None = None,
        access: HostAccess | None = None,
    ) -> None:
        self.port: int = listener.getsockname()[1]
        self._on_failure = on_failure
        self._access = access
        self._listener = listener
        self._lock = threading.RLock()
        self._thread = 0  # Its identifier, until `close` has waited for it.
        self._running = threading.Lock()  # Held by the thread while it runs.
        self._closes_at_end = False
        self._epoll: select.epoll | None = None
        self._wake = -1
        self._loop: ServingLoop | None = None

    def start(self) -> None:
        """Listen, and start the thread."""
        listener = self._listener
        try:
            listener.setblocking(False)  # noqa: FBT003 (the name says it)
            # Accepted connections inherit these.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(listener)
            listener.listen(BACKLOG)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._epoll = select.epoll()
            self._epoll.register(listener.fileno(), select.EPOLLIN)
            self._epoll.register(self._wake, select.EPOLLIN)
            _running.add(self)
            self._running.acquire()
            thread = threading.Thread(target=self._run, name="holdfast-store", daemon=True)
            thread.start()
            self._thread = thread.ident or 0
        except (OSError, RuntimeError) as error:
            self.close()
            shortage = find_shortage(error)
            raise EnvironmentProblem(
                f"cannot serve the workers' store on port {self.port}: {error}",
                hint=shortage.hint if shortage is not None else "",
            ) from None

    def close(self) -> None:
        """Close the server and all connections; any thread may call this, repeatedly."""
        if self._thread == threading.get_ident():
            # The garbage collector finalizes a store in any thread at any point, also in the server's.
            self._closes_at_end = True
            os.eventfd_write(self._wake, 1)
            return
        self._release()

    def _release(self) -> None:
        with self._lock:
            if self._thread:
                os.eventfd_write(self._wake, 1)
                self._running.acquire()
                self._thread = 0
            self._close_descriptors()
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    @property
    def clients(self) -> int:
        """The number of connections."""
        loop = self._loop
        return 0 if loop is None else len(loop.connections)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            assert self._epoll is not None
            if all(descriptor != self._wake for descriptor, _ in self._epoll.poll()):
                from holdfast.store.tcp.store_server import ServingLoop

                self._loop = ServingLoop(self._listener, self._epoll, self._wake, self._access)
                self._loop.run()
        except BaseException as error:  # noqa: BLE001 (the thread must not fail silently)
            console.error(
                f"the workers' store failed and closed all connections: {_with_location(error)}"
            )
            if self._on_failure is not None:  # Before its clients notice.
                self._on_failure(console.describe(error))
        finally:
            self._close_descriptors()
            self._running.release()
            if self._closes_at_end:
                self._release()

    def _close_descriptors(self) -> None:
        _running.discard(self)
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()
        if self._epoll is not None:
            self._epoll.close()
        self._listener.close()

    def _abandon(self) -> None:
        """Close a forked child's copies of the descriptors; the parent remains the server."""
        self._lock = threading.RLock()  # Another thread may have held the old one.
        self._thread = 0
        if self._loop is not None:
            self._loop.abandon()
            self._loop = None
        self.close()


def _with_location(error: BaseException) -> str:
    """Return an error with its file and line, in one line."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = "" if place is None else f" at {place.tb_frame.f_code.co_filename}:{place.tb_lineno}"
    return f"{console.describe(error)}{where}"


class SharedServer:
    """A server of this process, and the number of stores that use it."""

    def __init__(self, server: TcpStoreServer, address: str) -> None:
        self.port = server.port
        self.address = address
        """The address for this process, without resolving a name."""
        self._server = server
        self._users = 1

    def share(self) -> SharedServer:
        """Add a user; each call requires one more `release`."""
        with _shared.lock:
            self._users += 1
        return self

    def release(self) -> None:
        """Remove a user; the last one closes the server."""
        with _shared.lock:
            self._users -= 1
            if self._users:
                return
            if _shared.by_port.get(self.port) is self:
                del _shared.by_port[self.port]
        self._server.close()


class _SharedServers:
    """The servers of this process that further stores may share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # The garbage collector may release a store at any time.
        self.by_port: dict[int, SharedServer] = {}


_shared = _SharedServers()


def serve(
    name: str, port: int, *, shared: bool, listen_fd: int | None = None
) -> SharedServer | None:
    """Serve a store at an endpoint; port 0 is any free one.

    `shared` uses the server that this process already shares on that port, if there is one.
    `listen_fd` is a bound socket, which the server then owns. Returns None if the environment says that an
    agent serves the port. Raises `DistNetworkError` if the store cannot be served.
    """
    with _shared.lock:
        if shared and (existing := _shared.by_port.get(port)) is not None:
            return existing.share()
        try:
            listener = _adopt(listen_fd, port) if listen_fd is not None else _bind(name, port)
        except OSError as problem:
            if problem.errno == errno.EADDRINUSE and agent_serves(port):
                console.info(f"the agent serves port {port}; this process is a client of it")
                return None
            raise _cannot_serve(name, port, problem) from None
        address = _address_from_here(listener)
        server = TcpStoreServer(listener)
        try:
            server.start()
        except EnvironmentProblem as problem:
            raise DistNetworkError(str(problem)) from None
        mine = SharedServer(server, address)
        if shared:
            _shared.by_port[mine.port] = mine
        return mine


def agent_serves(port: int) -> bool:
    """Whether the environment says that the agent serves the store on this port, as torch checks."""
    says = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower()
    return says in ("1", "true", "y", "yes", "on", "t") and (
        os.environ.get("MASTER_PORT") == str(port)
    )


def _bind(name: str, port: int) -> socket.socket:
    """Return a listening socket: only listening reserves the port."""
    return bind(candidates_of(name, port), BACKLOG)


def _adopt(descriptor: int, port: int) -> socket.socket:
    listener = socket.socket(fileno=descriptor)
    bound = listener.getsockname()[1]
    if port not in (0, bound):
        listener.detach()
        raise ValueError(f"master_listen_fd: the socket is bound to port {bound}, not {port}")
    listener.listen(BACKLOG)
    return listener


def _address_from_here(listener: socket.socket) -> str:
    address: str = listener.getsockname()[0]
    if address == "::":
        v6_only = listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        return "::1" if v6_only else "127.0.0.1"  # IPv6 may be off for loopback; IPv4 is not.
    return "127.0.0.1" if address == "0.0.0.0" else address  # noqa: S104 (compared, not bound)


def _cannot_serve(name: str, port: int, problem: OSError) -> Exception:
    reason = problem.strerror or str(problem)
    if problem.errno == errno.EADDRINUSE:
        reason = f"port {port} is in use; free it, choose another, or 0 for any free one"
    return DistNetworkError(f"cannot serve a store at {format_endpoint(name, port)}: {reason}")


def _after_fork() -> None:
    """Reset in a forked child: the servers belong to the parent."""
    _shared.lock = threading.RLock()
    _shared.by_port.clear()
    for server in list(_running):
        server._abandon()


os.register_at_fork(after_in_child=_after_fork)
