"""A server that speaks PyTorch's TCPStore protocol, for the workers of a job.

Most jobs on one node never use it, so it costs them next to nothing: one thread that sleeps. Only
the first client that connects brings in the rest, which is in `tcp_loop` and what that imports.
"""

from __future__ import annotations

import _socket as socket  # The wrapper around it costs start-up time.
import os
import select
import threading

from holdfast import console
from holdfast.errors import EnvironmentProblem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

    from holdfast.store.tcp.server import ServingLoop

BACKLOG = 65_535  # How many may wait to be accepted; the kernel has a limit of its own below that.
# A client whose host is gone without a word is found out after about two minutes.
KEEPALIVE_IDLE_S = 60
KEEPALIVE_INTERVAL_S = 15
KEEPALIVE_PROBES = 4

_running: set[TcpStoreServer] = set()


class TcpStoreServer:
    """A store at a socket that is bound already. It belongs to the server from now on."""

    def __init__(self, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._epoll: select.epoll | None = None
        self._wake = -1
        self._loop: ServingLoop | None = None

    def start(self) -> None:
        """Listen, and serve in the background from now on."""
        listener = self._listener
        try:
            listener.setblocking(False)  # noqa: FBT003 (the name says it)
            # What is accepted from it has these too.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
            listener.listen(BACKLOG)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._epoll = select.epoll()
            self._epoll.register(listener.fileno(), select.EPOLLIN)
            self._epoll.register(self._wake, select.EPOLLIN)
            _running.add(self)
            self._thread = threading.Thread(target=self._run, name="holdfast-store", daemon=True)
            self._thread.start()
        except (OSError, RuntimeError) as error:
            self._thread = None
            self.close()
            raise EnvironmentProblem(
                f"the store for the workers cannot be served at port {self.port}: {error}"
            ) from None

    def close(self) -> None:
        """Close it and all connections. From any thread, and as often as you like."""
        if self._thread is threading.current_thread():
            # The garbage collector does that: it ends a store wherever it happens to run.
            threading.Thread(target=self.close, name="holdfast-store-end", daemon=True).start()
            return
        with self._lock:
            if self._thread is not None:
                os.eventfd_write(self._wake, 1)
                self._thread.join()
                self._thread = None
            self._let_go()
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    @property
    def clients(self) -> int:
        """How many connections there are now."""
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
                from holdfast.store.tcp.server import ServingLoop

                self._loop = ServingLoop(self._listener, self._epoll, self._wake)
                self._loop.run()
        except BaseException as error:  # noqa: BLE001 (whatever it is, nobody else would hear of it)
            console.error(
                f"the store for the workers failed, and its connections are closed: {_told(error)}"
            )
        finally:
            self._let_go()

    def _let_go(self) -> None:
        _running.discard(self)
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()
        if self._epoll is not None:
            self._epoll.close()
        self._listener.close()

    def _abandon(self) -> None:
        """Close this process's copy of everything: it was forked, and is not the server."""
        self._lock = threading.RLock()  # Somebody may have had the old one.
        self._thread = None
        if self._loop is not None:
            self._loop.abandon()
            self._loop = None
        self.close()


def _told(error: BaseException) -> str:
    """Say what an error is and where it came from, in one line."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = "" if place is None else f" at {place.tb_frame.f_code.co_filename}:{place.tb_lineno}"
    return " ".join(f"{type(error).__name__}: {error}{where}".split())


def _abandon_all() -> None:
    for server in list(_running):
        server._abandon()


os.register_at_fork(after_in_child=_abandon_all)
