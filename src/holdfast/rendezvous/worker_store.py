"""The store of a job's workers (`MASTER_ADDR`, `MASTER_PORT`), served by the agent of the first node.

Every generation has an empty store on its own port, which no other generation of the job uses. A late
worker of an earlier generation, on any node, has the old port in its environment, so it cannot change the
new keys. A node reserves `PORTS` ports for future generations and replaces each one that is used. These ports
listen from the start, on every node. So if workers of other nodes connect before the first node's agent is ready,
they wait instead of being refused.

With `served` False the ports are only reserved, and the worker of rank 0 serves the store.

The other nodes of a generation attest their hosts at the store with the generation's key:
`store.tcp.host_admission` decides which hosts a store serves.
"""

from __future__ import annotations

import hmac
import os
import select
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.errors import EnvironmentProblem
from holdfast.net import addresses
from holdfast.net.addresses import LOOPBACK
from holdfast.net.listening import ReservedPort, address_of
from holdfast.rendezvous.handler import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from holdfast.store import memory_store
from holdfast.store.tcp import embedded

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from holdfast.core.protocol import View
    from holdfast.store.tcp.attestation import HostAttestation
    from holdfast.store.tcp.embedded import TcpStoreServer
    from holdfast.store.tcp.forwarding import Forwarder

WORKERS_SERVE_ENV = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
PORTS = 2
"""One for the next generation, and one because another generation may be decided before this node learns that the
first port is used. `core.rounds` explains why two are enough."""
TRIES_MAX = 100
"""How many ports are tried to find an unused one; after very many generations there may be none."""
SECRET_BYTES = 32
KEPT = 2
"""How many generations keep their stores: the newest and the previous one. Other nodes may still be stopping
workers of the previous generation, which should exit because of the signal, not because of a lost store."""


class WorkerStore:
    """This node's ports for the workers' store, and the stores on the ports in use.

    The ports are on one `address` of this host, or on all of them. If the user chose a port `number`, all
    generations use it, without the protection described above.
    """

    def __init__(
        self,
        *,
        ports: int = 1,
        number: int = 0,
        served: bool = True,
        address: str = "",
        access: str = "open",
    ) -> None:
        self._kept = KEPT if ports > 1 else 1  # A single node has already stopped the old workers.
        self._number = number
        self._served = served
        self._address = address
        self._access = access
        self.secret = os.urandom(SECRET_BYTES) if served and ports > 1 else b""
        """The source of the keys for generations in which this node is the first."""
        self.token = b""
        """The job's token, if it has one (`key_of`)."""
        self.on_new_ports: Callable[[tuple[int, ...]], object] | None = None
        """Receives the ports when `follow` has replaced one."""
        self._attestation: HostAttestation | None = None
        self._forwarders: dict[int, Forwarder] = {}  # By generation, for this node's workers only.
        self._ports: list[ReservedPort] = []  # For future generations.
        self._port_of: dict[int, ReservedPort] = {}  # By generation, like the servers.
        self._servers: dict[int, TcpStoreServer] = {}
        self._used_numbers: set[int] = set()  # The numbers of released ports.
        self._newest = -1
        self._failures: dict[int, str] = {}  # By generation.
        self._unserved: int | None = None  # The generation whose store waits for its first client.
        self._alarm = -1
        self._events = select.epoll()  # Readable for the alarm and for that first client.
        try:
            self._alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._events.register(self._alarm, select.EPOLLIN)
            self._count = ports
            self._reserve_ports()
        except BaseException:
            self.close()
            raise

    @property
    def numbers(self) -> tuple[int, ...]:
        """The ports in the order in which generations use them."""
        return tuple(port.number for port in self._ports)

    @property
    def is_serving(self) -> bool:
        """Whether the workers of the newest generation depend on this process."""
        return self._newest in (self._unserved, *self._servers)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take_failure` is due."""
        return -1 if self._events.closed else self._events.fileno()

    def take_failure(self) -> str:
        """Return why the newest generation's store failed; empty if it did not, or if this was already returned.

        If a store waits for its first client and has one, start serving it.
        """
        if any(descriptor != self._alarm for descriptor, _ in self._events.poll(0)):
            self.serve_now()
        try:
            os.eventfd_read(self._alarm)
        except BlockingIOError:
            return ""
        why = self._failures.pop(self._newest, "")
        return f"the workers' store on this node failed: {why}" if why else ""

    def follow(self, view: View) -> None:
        """Once the workers of a member's view may start, serve their store, or attest this host to it."""
        if not view.start:  # No worker needs it yet, and its port may change.
            return
        held = self.numbers
        self.begin(
            view.generation,
            rank=view.rank,
            size=view.size,
            host=view.master_addr,
            number=view.master_port,
            key=key_of(view, self.token),
        )
        if self.numbers != held and self.on_new_ports is not None:
            self.on_new_ports(self.numbers)

    def begin(
        self, generation: int, *, rank: int, size: int, host: str, number: int, key: bytes
    ) -> None:
        """Begin a generation in which this node has this rank of `size`.

        Its store is at `host` and `number`. The first node serves it; the others prove there that they have `key`.
        The key is empty if not all nodes can prove that they have it.
        """
        if generation == self._newest:
            return
        if rank == 0:
            if self._is_unreachable_for_others(host):
                self._move(host)
            self.open(generation, number, key, alone=size == 1)
            return
        self._newest = generation
        self._retire(self._kept - 1)
        if self._attestation is not None:
            self._attestation.cancel()
            self._attestation = None
        if not self._served or addresses.is_loopback(host):
            return
        if self._access == "private":
            self._forward(generation, host, number, key)
        elif key:
            from holdfast.store.tcp.attestation import HostAttestation

            optional = self._access == "open"
            self._attestation = HostAttestation(host, number, key, generation, optional=optional)
            self._attestation.start()

    def store_address(self, generation: int, host: str, number: int) -> tuple[str, int]:
        """Return the address of the store for this node's workers; the other nodes use `host` and `number`."""
        if self._access != "private" or not self._served:
            return host, number
        if generation in self._servers:
            return self._address or LOOPBACK, number
        if generation in self._forwarders:
            return LOOPBACK, self._port_of[generation].number
        return host, number  # The whole job is on this host.

    def _forward(self, generation: int, host: str, number: int, key: bytes) -> None:
        """Forward this node's workers to the store, from a port on loopback."""
        if not key:
            raise EnvironmentProblem(
                "store=private: not every agent of this job can authenticate itself",
                hint="start all agents without --worker-store",
            )
        from holdfast.store.tcp.forwarding import Forwarder

        port = self._port_of[generation] = self._reserve(LOOPBACK)
        forwarder = Forwarder(
            port.listener(),
            host,
            number,
            key,
            generation,
            lambda why: self._failed(generation, why),
        )
        self._forwarders[generation] = forwarder
        forwarder.start()

    def open(
        self,
        generation: int,
        number: int = 0,
        key: bytes = b"",
        *,
        alone: bool = True,
        on_demand: bool = False,
    ) -> int:
        """Serve a generation's store; return its port: the next one, or `number`.

        The store of a single node (`alone`) may be served `on_demand`: its first client waits until
        `take_failure` or `serve_now` starts to serve it.
        """
        self._newest = generation
        if generation not in self._port_of:
            self._retire(self._kept - 1)
            port = self._take_port(number)
            self._port_of[generation] = port
            if self._served and on_demand:
                self._unserved = generation
                self._events.register(port.fileno(), select.EPOLLIN)
            elif self._served:
                self._serve(generation, key, alone=alone)
        return self._port_of[generation].number

    def serve_now(self) -> None:
        """Serve the store that waits for its first client, if there is one."""
        generation = self._unserved
        if generation is not None:
            self._stop_waiting()
            self._serve(generation, b"", alone=True)

    def _serve(self, generation: int, key: bytes, *, alone: bool) -> None:
        mode = self._access if key or alone else self._without_keys()
        server = embedded.TcpStoreServer(
            self._port_of[generation].listener(),
            lambda why: self._failed(generation, why),
            embedded.HostAccess(mode, key, generation),
        )
        server.start()
        self._servers[generation] = server

    def _stop_waiting(self) -> None:
        assert self._unserved is not None
        self._events.unregister(self._port_of[self._unserved].fileno())
        self._unserved = None

    def _without_keys(self) -> str:
        """Return the access mode to use if not every agent can attest its host."""
        if self._access == "private":
            return "private"
        if self._access != "open":
            console.warning(
                "not every agent can authenticate its host (some run with --worker-store): the workers' "
                "store serves every host"
            )
        return "open"

    def close(self) -> None:
        """Close all stores and release the ports."""
        if self._attestation is not None:
            self._attestation.cancel()
            self._attestation = None
        for server in self._servers.values():
            server.close()
        for forwarder in self._forwarders.values():
            forwarder.close()
        self._servers.clear()
        self._forwarders.clear()
        for port in (*self._ports, *self._port_of.values()):
            port.release()
        self._ports.clear()
        self._port_of.clear()
        self._unserved = None
        self._events.close()
        if self._alarm >= 0:
            os.close(self._alarm)
            self._alarm = -1

    def _is_unreachable_for_others(self, host: str) -> bool:
        """Whether this node listens only on loopback, although other nodes connect over the network."""
        return (
            bool(self._address)
            and addresses.is_loopback(self._address)
            and not addresses.is_loopback(host)
        )

    def _move(self, host: str) -> None:
        """Reserve other ports on an address that other nodes can reach. Clients that connected early retry."""
        self._release(self._ports)
        self._ports.clear()
        self._address = address_of(host)
        self._reserve_ports()

    def _reserve_ports(self) -> None:
        while len(self._ports) < self._count:
            self._ports.append(self._reserve())

    def _take_port(self, number: int) -> ReservedPort:
        """Return the port of a generation, and reserve another one in its place.

        The ports before it in the list belong to generations that this node has not seen. Other nodes may have
        started workers of these generations, whose connections may still wait on the ports, so they are
        released.
        """
        self._reserve_ports()
        numbers = self.numbers
        if number and number not in numbers:  # It was chosen from an older list of ports.
            return ReservedPort(number, listening=self._served, address=self._address)
        place = numbers.index(number) if number else 0
        port = self._ports[place]
        if self._number:
            return port
        self._release(self._ports[:place])
        del self._ports[: place + 1]
        if self._count > 1:  # A single node reserves the next one when it needs it.
            self._reserve_ports()
        return port

    def _release(self, ports: list[ReservedPort]) -> None:
        for port in ports:
            self._used_numbers.add(port.number)
            port.release()

    def _reserve(self, address: str | None = None) -> ReservedPort:
        """Reserve a port that no generation has used."""
        address = self._address if address is None else address
        rejected: list[ReservedPort] = []
        try:
            while True:
                port = ReservedPort(self._number, listening=self._served, address=address)
                if port.number not in self._used_numbers or len(rejected) >= TRIES_MAX:
                    return port
                rejected.append(port)  # Kept reserved, so that the kernel assigns another.
        finally:
            for other in rejected:
                other.release()

    def _failed(self, generation: int, why: str) -> None:
        """Record a failure and raise the alarm. The store's thread calls this."""
        self._failures[generation] = why
        os.eventfd_write(self._alarm, 1)

    def _retire(self, kept: int) -> None:
        """Close all stores except the newest one and `kept` stores before it."""
        for old in [old for old in self._port_of if old < self._newest - kept]:
            if old in self._servers:
                self._servers.pop(old).close()
            if old in self._forwarders:
                self._forwarders.pop(old).close()
            if old == self._unserved:
                self._stop_waiting()
            port = self._port_of.pop(old)
            if not self._number:
                self._release([port])


def key_of(view: View, token: bytes) -> bytes:
    """Return the key of a view's store, combined with the job's token if there is one.

    Without TLS a third party may read a view, but does not know the token.
    """
    if not view.store_key or not token:
        return view.store_key
    return hmac.digest(token, view.store_key, "sha256")


def workers_serve_by_environment() -> bool:
    """Return whether TorchElastic's variable makes the worker of rank 0 serve the store."""
    return os.environ.get(WORKERS_SERVE_ENV) == "1"


# A job with one node: its rendezvous is the workers' store, since its rounds need no other node.


class StoreOnDemand:
    """The store of a round of one node, created at first use, because the agent itself does not need it."""

    def __getattr__(self, name: str) -> Any:
        if "_store" not in self.__dict__:
            self._store = memory_store.MemoryStore()
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
        workers_serve: bool = False,
        store_access: str = "open",
    ) -> None:
        self._run_id = run_id
        self._backend = backend
        self._closed = False
        is_private = store_access == "private"
        self.master_addr = LOOPBACK if is_private or not master_addr else master_addr
        self.master_port = master_port
        self._workers_serve = workers_serve
        self._store_access = store_access
        self._store: WorkerStore | None = None
        self._rounds = 0

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent serves the workers' store, instead of the worker of rank 0."""
        return not self._workers_serve

    @property
    def polls_membership(self) -> bool:
        """Return False: no other node can join."""
        return False

    @property
    def store_alarm(self) -> int:
        """A descriptor that is readable once the workers' store has failed here, or has its first client."""
        return self._store.fileno() if self._store is not None else -1

    def take_store_failure(self) -> str:
        """Return why this node's workers' store failed; empty if it did not, or if this was already returned."""
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
        port = self.master_port
        if not port or not self._workers_serve:
            if self._store is None:
                served = not self._workers_serve
                address = address_of(self.master_addr) if served else ""
                self._store = WorkerStore(
                    number=port or 0, served=served, address=address, access=self._store_access
                )
            port = self._store.open(self._rounds, on_demand=self.defers_threads)
            self._rounds += 1
        store_address = RendezvousStoreInfo(self.master_addr, port)
        return RendezvousInfo(StoreOnDemand(), 0, 1, store_address)

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
