"""The round of a job that has one node: it is always formed, needs no server and no network.

The workers still need an address to meet at. Its port is reserved, not guessed: the handler keeps
a socket bound to it without listening. The kernel then gives the port to nobody who asks for any
free one, while the worker that binds it by number, with `SO_REUSEADDR` as stores do, gets it.
"""

from __future__ import annotations

import _socket as socket  # All that is needed here; the wrapper around it costs start-up time.

from holdfast.errors import EnvironmentProblem
from holdfast.rendezvous.handler import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from holdfast.store.memory import MemoryStore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

LOOPBACK = "127.0.0.1"


class ReservedPort:
    """A TCP port that is ours to give away, on every address of this host."""

    def __init__(self) -> None:
        self._socket = self._bind()
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Give the port back to the kernel."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @staticmethod
    def _bind() -> socket.socket:
        problem: OSError | None = None
        # The dual-stack wildcard covers IPv4 too; a host without IPv6 has only the second.
        for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):  # noqa: S104
            try:
                reserved = socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:
                problem = error
                continue
            try:
                reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                reserved.bind((address, 0))
            except OSError as error:
                reserved.close()
                problem = error
            else:
                return reserved
        raise EnvironmentProblem(
            f"no TCP port could be reserved for the workers: {problem}",
            hint="name one with --master-port",
        )


class SingleNodeHandler(RendezvousHandler):
    """A rendezvous with nobody else."""

    def __init__(
        self,
        run_id: str,
        *,
        backend: str = "static",
        master_addr: str | None = None,
        master_port: int | None = None,
    ) -> None:
        self._run_id = run_id
        self._backend = backend
        self._closed = False
        self._master_addr = master_addr or LOOPBACK
        self._master_port = master_port
        self._reserved: ReservedPort | None = None

    @property
    def polls_membership(self) -> bool:
        """Nobody else can come."""
        return False

    def get_backend(self) -> str:
        """Return the name the job was started with."""
        return self._backend

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the round of this node alone, at once."""
        port = self._master_port
        if not port:
            if self._reserved is None:
                self._reserved = ReservedPort()
            port = self._reserved.number
        meeting_point = RendezvousStoreInfo(self._master_addr, port)
        return RendezvousInfo(MemoryStore(), 0, 1, meeting_point)

    def is_closed(self) -> bool:
        """Return whether `set_closed` was called."""
        return self._closed

    def set_closed(self) -> None:
        """End the job."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0: there is nobody else."""
        return 0

    def get_run_id(self) -> str:
        """Return the job's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Give back the port."""
        self._closed = True
        if self._reserved is not None:
            self._reserved.release()
            self._reserved = None
        return True
