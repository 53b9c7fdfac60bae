"""The store of a job's workers (`MASTER_ADDR`, `MASTER_PORT`), served by the agent of the first node.

Every generation gets an empty store on a port of its own. A late worker of an earlier generation has
the old port in its environment and cannot touch the keys of the new one; a port is used again after
`PORTS` generations. All ports listen from the beginning, on every node: workers of other nodes may
be faster than the first node's agent, and then wait for it to answer instead of being refused.

With `served` False the ports are only reserved, and the worker of rank 0 serves the store itself.
The protocol is PyTorch's and has no authentication, so a store for one host's workers is `local`.
"""

from __future__ import annotations

import os

from holdfast.net.listening import ReservedPort

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.store.tcp.embedded import TcpStoreServer

WORKERS_SERVE_ENV = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
PORTS = 8
KEPT = 2
"""How many generations' stores are kept: the newest, and the one before for workers that other nodes
have yet to stop, so that they end by their agent's signal and not by a lost store."""


class WorkerStore:
    """This node's ports for the workers' store, and the stores behind them."""

    def __init__(
        self, *, ports: int = 1, number: int = 0, served: bool = True, local: bool = False
    ) -> None:
        self._served = served
        self._ports: list[ReservedPort] = []
        self._servers: dict[int, TcpStoreServer] = {}  # by generation
        self._newest = -1
        try:
            for _ in range(ports):
                self._ports.append(ReservedPort(number, listening=served, local=local))
        except BaseException:
            self.close()
            raise

    @property
    def numbers(self) -> tuple[int, ...]:
        """The ports in the order in which generations take them."""
        return tuple(port.number for port in self._ports)

    @property
    def is_serving(self) -> bool:
        """Whether the workers of the newest generation depend on this process."""
        return self._newest in self._servers

    def begin(self, generation: int, *, is_first: bool) -> None:
        """Begin a generation; serve its store if this node is the first."""
        if is_first:
            self.open(generation)
        else:
            self._newest = generation
            self._retire(KEPT - 1)

    def open(self, generation: int) -> int:
        """Serve a generation's store, once; return its port."""
        self._newest = generation
        port = self._ports[generation % len(self._ports)]
        if self._served and generation not in self._servers:
            # With one port there can be no store before this one.
            self._retire(min(KEPT, len(self._ports)) - 1)
            from holdfast.store.tcp.embedded import TcpStoreServer

            server = TcpStoreServer(port.listener())
            server.start()
            self._servers[generation] = server
        return port.number

    def close(self) -> None:
        """Close all stores and release the ports."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        for port in self._ports:
            port.release()
        self._ports.clear()

    def _retire(self, kept: int) -> None:
        """Close all stores but those of so many generations before the newest."""
        for old in [old for old in self._servers if old < self._newest - kept]:
            self._servers.pop(old).close()


def workers_serve_by_environment() -> bool:
    """Return whether TorchElastic's variable asks the worker of rank 0 to serve the store."""
    return os.environ.get(WORKERS_SERVE_ENV) == "1"
