"""The store of a job's workers (`MASTER_ADDR`, `MASTER_PORT`), served by the agent of the first node.

Every generation gets an empty store on a port of its own, which no other generation of the job is
ever given. A late worker of an earlier one, in whatever process it survived and on whatever node,
has the old port in its environment and cannot touch the keys of the new one. A node holds `PORTS`
ports for generations to come, and replaces one that was given. All listen from the beginning, on
every node: workers of other nodes may be faster than the first node's agent, and then wait for it to
answer instead of being refused.

With `served` False the ports are only reserved, and the worker of rank 0 serves the store itself.

The other nodes of a generation attest their hosts there, by the generation's key: see
`store.tcp.admission` for whom a store serves.
"""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.errors import EnvironmentProblem
from holdfast.net.listening import LOOPBACK, ReservedPort, address_of

if TYPE_CHECKING:
    from holdfast.store.tcp.attestation import HostAttestation
    from holdfast.store.tcp.embedded import TcpStoreServer
    from holdfast.store.tcp.forwarding import Forwarder

WORKERS_SERVE_ENV = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
PORTS = 2
"""That of the next generation, and one more: the next may be decided before it is known that the
first was given. `core.rounds` says why that is enough."""
DRAWS_MAX = 100
"""So many ports are drawn at most to find one that was not given before: after very many generations
there may be none."""
SECRET_BYTES = 32
KEPT = 2
"""How many generations' stores are kept: the newest, and the one before for workers that other nodes
have yet to stop, so that they end by their agent's signal and not by a lost store."""


class WorkerStore:
    """This node's ports for the workers' store, and the stores behind those that were given.

    They are held at one `address` of this host, or at all of them. A `number` that a person chose
    is the one port of all generations: theirs to answer for.
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
        self._kept = KEPT if ports > 1 else 1  # A node alone has stopped the old workers itself.
        self._number = number
        self._served = served
        self._address = address
        self._access = access
        self.secret = os.urandom(SECRET_BYTES) if served and ports > 1 else b""
        """From which the keys of generations come in which this node is the first."""
        self._attestation: HostAttestation | None = None
        self._forwarders: dict[int, Forwarder] = {}  # By generation: for this node's workers alone.
        self._ports: list[ReservedPort] = []  # For generations to come.
        self._given: dict[int, ReservedPort] = {}  # By generation, as the servers.
        self._servers: dict[int, TcpStoreServer] = {}
        self._past: set[int] = set()  # The numbers of ports that are given back.
        self._newest = -1
        self._failures: dict[int, str] = {}  # by generation
        self._unserved: int | None = None  # The generation whose store waits for its first client.
        self._alarm = -1
        self._events = select.epoll()  # The alarm, and that first client.
        try:
            self._alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._events.register(self._alarm, select.EPOLLIN)
            self._count = ports
            self._hold()
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
        return self._newest in (self._unserved, *self._servers)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take_failure` has something to do."""
        return -1 if self._events.closed else self._events.fileno()

    def take_failure(self) -> str:
        """Return why the store of the newest generation failed, once; nothing while it serves.

        Serves a store that has its first client.
        """
        if any(descriptor != self._alarm for descriptor, _ in self._events.poll(0)):
            self.serve_now()
        try:
            os.eventfd_read(self._alarm)
        except BlockingIOError:
            return ""
        why = self._failures.pop(self._newest, "")
        return f"the workers' store on this node failed: {why}" if why else ""

    def begin(
        self, generation: int, *, rank: int, size: int, host: str, number: int, key: bytes
    ) -> None:
        """Begin a generation, in which this node has this rank among so many.

        Its store is at `host` and `number`, and this node's to serve if it is the first; the others
        prove `key` there. Without one, not all of them can.
        """
        if generation == self._newest:
            return
        if rank == 0:
            if self._is_beyond_reach(host):
                self._move(host)
            self.open(generation, number, key, alone=size == 1)
            return
        self._newest = generation
        self._retire(self._kept - 1)
        if self._attestation is not None:
            self._attestation.cancel()
            self._attestation = None
        if not self._served or _is_loopback(host):
            return
        if self._access == "private":
            self._forward(generation, host, number, key)
        elif key:
            from holdfast.store.tcp.attestation import HostAttestation

            optional = self._access == "open"
            self._attestation = HostAttestation(host, number, key, generation, optional=optional)
            self._attestation.start()

    def meeting_point(self, generation: int, host: str, number: int) -> tuple[str, int]:
        """Return where this node's workers find the store that the others look for there."""
        if self._access != "private" or not self._served:
            return host, number
        if generation in self._servers:
            return self._address or LOOPBACK, number
        if generation in self._forwarders:
            return LOOPBACK, self._given[generation].number
        return host, number  # On this host, as all of the job.

    def _forward(self, generation: int, host: str, number: int, key: bytes) -> None:
        """Be the store to this node's workers, at a port on loopback."""
        if not key:
            raise EnvironmentProblem(
                "store=private: not all agents of this job can prove that they are of it",
                hint="start all of them without --worker-store",
            )
        from holdfast.store.tcp.forwarding import Forwarder

        port = self._given[generation] = self._reserve(LOOPBACK)
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
        """Serve a generation's store, once; return its port: the next one, unless it has a number.

        That of a node `alone` may be served `on_demand`: its first client waits until it is seen by
        `take_failure`, or until `serve_now`.
        """
        self._newest = generation
        if generation not in self._given:
            self._retire(self._kept - 1)
            port = self._give(number)
            self._given[generation] = port
            if self._served and on_demand:
                self._unserved = generation
                self._events.register(port.fileno(), select.EPOLLIN)
            elif self._served:
                self._serve(generation, key, alone=alone)
        return self._given[generation].number

    def serve_now(self) -> None:
        """Serve the store that waits for its first client, if there is one."""
        generation = self._unserved
        if generation is not None:
            self._wait_no_more()
            self._serve(generation, b"", alone=True)

    def _serve(self, generation: int, key: bytes, *, alone: bool) -> None:
        from holdfast.store.tcp.embedded import Access, TcpStoreServer

        mode = self._access if key or alone else self._without_keys()
        server = TcpStoreServer(
            self._given[generation].listener(),
            lambda why: self._failed(generation, why),
            Access(mode, key, generation),
        )
        server.start()
        self._servers[generation] = server

    def _wait_no_more(self) -> None:
        assert self._unserved is not None
        self._events.unregister(self._given[self._unserved].fileno())
        self._unserved = None

    def _without_keys(self) -> str:
        """Return which hosts to serve if no agent can attest its host."""
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
        for port in (*self._ports, *self._given.values()):
            port.release()
        self._ports.clear()
        self._given.clear()
        self._unserved = None
        self._events.close()
        if self._alarm >= 0:
            os.close(self._alarm)
            self._alarm = -1

    def _is_beyond_reach(self, host: str) -> bool:
        """Whether the others look for it elsewhere: not all nodes reached loopback, as this one."""
        return bool(self._address) and _is_loopback(self._address) and not _is_loopback(host)

    def _move(self, host: str) -> None:
        """Hold other ports, where others find this node. Who came too early has to try again."""
        self._release(self._ports)
        self._ports.clear()
        self._address = address_of(host)
        self._hold()

    def _hold(self) -> None:
        while len(self._ports) < self._count:
            self._ports.append(self._reserve())

    def _give(self, number: int) -> ReservedPort:
        """Return the port of a generation, and hold another one in its place.

        Those before it in the list were for generations that this node has not heard of: others may
        have workers of these, and connections of theirs may wait there.
        """
        self._hold()
        numbers = self.numbers
        if number and number not in numbers:  # Whoever chose it has not heard of the newer ones.
            return ReservedPort(number, listening=self._served, address=self._address)
        place = numbers.index(number) if number else 0
        port = self._ports[place]
        if self._number:
            return port
        self._release(self._ports[:place])
        del self._ports[: place + 1]
        if self._count > 1:  # Else nobody asks for the next one before it is needed.
            self._hold()
        return port

    def _release(self, ports: list[ReservedPort]) -> None:
        for port in ports:
            self._past.add(port.number)
            port.release()

    def _reserve(self, address: str | None = None) -> ReservedPort:
        """Reserve a port that no generation was given before."""
        address = self._address if address is None else address
        drawn: list[ReservedPort] = []
        try:
            while True:
                port = ReservedPort(self._number, listening=self._served, address=address)
                if port.number not in self._past or len(drawn) >= DRAWS_MAX:
                    return port
                drawn.append(port)  # Held meanwhile, or the kernel might give the same again.
        finally:
            for other in drawn:
                other.release()

    def _failed(self, generation: int, why: str) -> None:
        """Sound the alarm; in the thread of the store, which is joined before the alarm is closed."""
        self._failures[generation] = why
        os.eventfd_write(self._alarm, 1)

    def _retire(self, kept: int) -> None:
        """Close all stores but those of so many generations before the newest."""
        for old in [old for old in self._given if old < self._newest - kept]:
            if old in self._servers:
                self._servers.pop(old).close()
            if old in self._forwarders:
                self._forwarders.pop(old).close()
            if old == self._unserved:
                self._wait_no_more()
            port = self._given.pop(old)
            if not self._number:
                self._release([port])


def _is_loopback(host: str) -> bool:
    from holdfast.net.addresses import is_loopback

    return is_loopback(host)


def workers_serve_by_environment() -> bool:
    """Return whether TorchElastic's variable asks the worker of rank 0 to serve the store."""
    return os.environ.get(WORKERS_SERVE_ENV) == "1"
