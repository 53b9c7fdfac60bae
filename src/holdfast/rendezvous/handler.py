"""What an agent needs of a rendezvous: two interfaces, and what a round brings.

`RendezvousHandler` is TorchElastic's: the agent asks for a round, and polls whether it must ask for
another. A handler written for TorchElastic serves an agent here. `CoordinatedRendezvousHandler` is
what our own backends offer beside it: somebody (a coordinator, an etcd leader, or rules applied to
a shared state) decides for all nodes, and the agent is sent each decision over a `Membership`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from holdfast.lazy_dataclass import lazy_dataclass

if TYPE_CHECKING:
    from typing import ClassVar

    from holdfast.core.coordinated_supervision import CoordinatorLost
    from holdfast.core.protocol import RefusalReason, View
    from holdfast.membership.interface import Membership
    from holdfast.store.interface import RoundStore


@lazy_dataclass
class RendezvousStoreInfo:
    """Where the workers of a round find their store."""

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"
    master_addr: str
    master_port: int

    @staticmethod
    def build(
        rank: int, store: RoundStore, local_addr: str | None, server_port: int | None = None
    ) -> RendezvousStoreInfo:
        """Agree through the store of a round where the workers' store is: at the first node.

        Every node of the round calls this. The first one publishes its address, `local_addr`, and
        `server_port` or a free port, which nobody reserves until a worker binds it. Without
        `local_addr` the address is this host's own name, which the others may or may not resolve.
        """
        if rank == 0:
            import os

            from holdfast import console
            from holdfast.net.listening import ReservedPort

            address = local_addr or os.uname().nodename
            if not local_addr:
                console.info(
                    f"MASTER_ADDR is the name of this host, {address}; use --local-addr to set an "
                    "address"
                )
            if not server_port:
                with ReservedPort() as reserved:
                    server_port = reserved.number
            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, address)
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(server_port))
        address = store.get(RendezvousStoreInfo.MASTER_ADDR_KEY).decode()
        return RendezvousStoreInfo(address, int(store.get(RendezvousStoreInfo.MASTER_PORT_KEY)))


class RendezvousInfo:
    """A round as one node sees it: its rank among the nodes, and their store."""

    def __init__(
        self,
        store: RoundStore,
        rank: int,
        world_size: int,
        bootstrap_store_info: RendezvousStoreInfo,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._bootstrap_store_info = bootstrap_store_info

    @property
    def store(self) -> RoundStore:
        """The key-value store the agents of the round share."""
        return self._store

    @property
    def rank(self) -> int:
        """This node's number in the round."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of nodes in the round."""
        return self._world_size

    @property
    def bootstrap_store_info(self) -> RendezvousStoreInfo:
        """Where the workers' own store is."""
        return self._bootstrap_store_info


class RendezvousHandler(ABC):
    """How a node finds the others of its job."""

    @abstractmethod
    def get_backend(self) -> str:
        """Return the name of the backend, as in `--rdzv-backend`."""

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent serves the workers' store, so that no worker has to."""
        return False

    @property
    def polls_membership(self) -> bool:
        """Whether the agent must ask `num_nodes_waiting` every `monitor_interval`.

        A handler that pushes changes, or whose membership never changes, returns False and spares
        the agent the wake-ups.
        """
        return True

    is_attended = False
    """Whether the agent looks after `store_alarm`: then a store may wait for its first client."""

    @property
    def store_alarm(self) -> int:
        """A descriptor that is readable when `take_store_failure` is due; -1 without one."""
        return -1

    def take_store_failure(self) -> str:
        """Return why the workers' store of this generation failed here, once, or nothing."""
        return ""

    def serve_now(self) -> None:
        """Serve the workers' store even if it waits for its first client; nobody attends it."""
        self.is_attended = False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node is in a round that has formed, and return it."""

    @abstractmethod
    def is_closed(self) -> bool:
        """Return whether the job is over for all nodes."""

    @abstractmethod
    def set_closed(self) -> None:
        """End the job for all nodes."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """Return how many nodes outside the round want in."""

    @abstractmethod
    def get_run_id(self) -> str:
        """Return the job's id."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Release what the handler holds; True if that went well."""


class CoordinatedRendezvousHandler(RendezvousHandler):
    """A rendezvous in which somebody decides for all nodes.

    Whoever decides forms rounds, counts restarts and ends the job. The agent calls `enter` once and
    follows the views that the connection delivers. It must not ask for rounds then: the methods of
    `RendezvousHandler` are for agents that know nothing of this interface.
    """

    node_id: str
    """This node's name in the job."""

    @property
    def polls_membership(self) -> bool:
        """Changes are pushed."""
        return False

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """The endpoint, as a user writes it."""

    @property
    @abstractmethod
    def join_timeout_s(self) -> float:
        """How long a node waits for a round with enough nodes."""

    @property
    @abstractmethod
    def serves_workers(self) -> bool:
        """Whether workers of the job depend on this process, which serves their store."""

    @abstractmethod
    def enter(
        self, *, role: str = "default", local_world_size: int = 1, max_restarts: int = 0
    ) -> Membership:
        """Join the job as a node of this shape; called again, return the same connection."""

    @abstractmethod
    def serve_workers(self, view: View) -> None:
        """Serve the store of the workers of a member's view, if this node is the first."""

    @abstractmethod
    def info_of(self, view: View) -> RendezvousInfo:
        """Return a member's view as TorchElastic's agents know rounds; serves the workers too."""

    @abstractmethod
    def describe_timeout(self, connection: Membership) -> str:
        """Return in one line what was missing when `join_timeout_s` was over."""

    @abstractmethod
    def describe_loss(self, lost: CoordinatorLost) -> str:
        """Return in one line what cannot be reached, since when and why."""

    @abstractmethod
    def describe_refusal(self, why: str, reason: RefusalReason | None = None) -> str:
        """Return in one line that this node cannot be in the job, and why."""
