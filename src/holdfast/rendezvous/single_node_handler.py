"""The rendezvous of a job with one node: its round needs no network and forms immediately.

The workers still need a store; the handler serves one for each generation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.net.listening import LOOPBACK, address_of
from holdfast.rendezvous.handler import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from holdfast.rendezvous.worker_store import WorkerStore

if TYPE_CHECKING:
    from typing import Any


class StoreOnDemand:
    """The store of a round of one node, created at first use: the agent itself needs none."""

    def __getattr__(self, name: str) -> Any:
        from holdfast.store.memory_store import MemoryStore

        if "_store" not in self.__dict__:
            self._store = MemoryStore()
        return getattr(self._store, name)


class SingleNodeHandler(RendezvousHandler):
    """The rendezvous of a single node."""

    def __init__(
        self,
        run_id: str,
        *,
        backend: str = "static",
        master_addr: str | None = None,
        master_port: int | None = None,
        worker_store: bool = False,
        store_access: str = "open",
    ) -> None:
        self._run_id = run_id
        self._backend = backend
        self._closed = False
        is_private = store_access == "private"
        self._master_addr = LOOPBACK if is_private or not master_addr else master_addr
        self._master_port = master_port
        self._worker_store = worker_store
        self._store_access = store_access
        self._store: WorkerStore | None = None
        self._rounds = 0

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent serves the workers' store, instead of the worker of rank 0."""
        return not self._worker_store

    @property
    def polls_membership(self) -> bool:
        """Return False: no other node can join."""
        return False

    @property
    def store_alarm(self) -> int:
        """A descriptor that is readable once the workers' store has failed here, or has its first client."""
        return self._store.fileno() if self._store is not None else -1

    def take_store_failure(self) -> str:
        """Return why the workers' store of this generation failed here, once; empty if it did not fail."""
        return self._store.take_failure() if self._store is not None else ""

    def serve_now(self) -> None:
        """Serve the workers' store even if it waits for its first client."""
        super().serve_now()
        if self._store is not None:
            self._store.serve_now()

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return self._backend

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the round of this node, immediately."""
        port = self._master_port
        if not port or not self._worker_store:
            if self._store is None:
                served = not self._worker_store
                address = address_of(self._master_addr) if served else ""
                self._store = WorkerStore(
                    number=port or 0, served=served, address=address, access=self._store_access
                )
            port = self._store.open(self._rounds, on_demand=self.is_attended)
            self._rounds += 1
        meeting_point = RendezvousStoreInfo(self._master_addr, port)
        return RendezvousInfo(StoreOnDemand(), 0, 1, meeting_point)

    def is_closed(self) -> bool:
        """Return whether `set_closed` was called."""
        return self._closed

    def set_closed(self) -> None:
        """End the job."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0: there is no other node."""
        return 0

    def get_run_id(self) -> str:
        """Return the job's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the store and release its ports."""
        self._closed = True
        if self._store is not None:
            self._store.close()
            self._store = None
        return True
