"""TorchElastic's interface of a rendezvous, and the description of a round.

The agent requests a round from a `RendezvousHandler`, and polls whether it must request another. A handler
written for TorchElastic works here. Holdfast's backends have a `MembershipHandler` instead: a coordinator or a leader
on etcd decides for all nodes (on a `RendezvousBackend`, the node that writes the shared state), and each agent
receives the decision over its `Membership`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.lazy_dataclass import lazy_dataclass
from holdfast.net.listening import ReservedPort

if TYPE_CHECKING:
    from typing import ClassVar, TypeGuard

    from holdfast.rendezvous.membership_handler import MembershipHandler
    from holdfast.store.store_interface import RoundStore


@lazy_dataclass
class RendezvousStoreInfo:
    """The address of the workers' store in a round."""

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"
    master_addr: str
    master_port: int

    @staticmethod
    def build(
        rank: int, store: RoundStore, local_addr: str | None, server_port: int | None = None
    ) -> RendezvousStoreInfo:
        """Agree, through the store of a round, on the address of the workers' store on the first node.

        Every node of the round calls this. The first one publishes its address, `local_addr`, and
        `server_port` or a free port, which stays unreserved until a worker binds it. Without
        `local_addr` it publishes this host's name, which the other nodes must be able to resolve.
        """
        if rank == 0:
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
    """A round from one node's view: its rank among the nodes, and their store."""

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
        """The key-value store that the agents of the round share."""
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
        """The address of the workers' own store."""
        return self._bootstrap_store_info


class RendezvousHandler(ABC):
    """TorchElastic's interface, through which a node joins the rounds of its job."""

    @abstractmethod
    def get_backend(self) -> str:
        """Return the name of the backend, as in `--rdzv-backend`."""

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent serves the workers' store, instead of a worker."""
        return False

    @property
    def polls_membership(self) -> bool:
        """Whether the agent must call `num_nodes_waiting` every `monitor_interval`.

        A handler that pushes changes, or whose nodes never change, returns False; then the agent
        does not wake up for it.
        """
        return True

    has_membership = False
    """True for a `MembershipHandler`: the agent follows the views of its `Membership`."""
    defers_threads = False
    """Whether the agent polls `store_alarm`. If so, the store may start its thread only at its first client."""

    @property
    def store_alarm(self) -> int:
        """A descriptor that becomes readable when the agent must call `take_store_failure`; -1 if there is none."""
        return -1

    def take_store_failure(self) -> str:
        """Return why this node's workers' store failed; empty if it did not, or if this was already returned."""
        return ""

    def serve_now(self) -> None:
        """Start the store's thread now. An agent that does not poll `store_alarm` calls this."""
        self.defers_threads = False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node is in a round that has formed, and return it."""

    @abstractmethod
    def is_closed(self) -> bool:
        """Return whether the job has ended for all nodes."""

    @abstractmethod
    def set_closed(self) -> None:
        """End the job for all nodes."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """Return how many nodes outside the round are waiting to join."""

    @abstractmethod
    def get_run_id(self) -> str:
        """Return the job's id."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Release all resources; return whether that succeeded."""


def follows_views(handler: object) -> TypeGuard[MembershipHandler]:
    """Return whether the agent follows the views of a membership, instead of polling the handler."""
    return getattr(handler, "has_membership", False) is True


def host_label(host: str = "") -> str:
    """Return the short name of a host (this one), as part of a node id: without its domain and odd characters."""
    host = host or os.uname().nodename
    is_address = not host.strip("0123456789.") or ":" in host
    name = host if is_address else host.partition(".")[0]
    label = "".join(one if one.isascii() and (one.isalnum() or one == "_") else " " for one in name)
    label = "-".join(label.split())
    if not label or label.isdigit():  # Digits alone are the number of a node.
        return f"node-{label}".strip("-")
    return label
