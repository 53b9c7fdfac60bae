"""The membership in a job on etcd: `--rdzv-backend etcd` and `--ha`.

The leases of the nodes show which nodes are alive. One of the nodes leads; if it is lost, another one
leads after its lease expires. No other node depends on this process, so it may exit at any time.

In this order: the stores of a node, `core.etcd.session` performed on a real etcd, the membership, and
readers of job records for `control/`.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING
from urllib.parse import unquote

from holdfast import console
from holdfast.coordinator.connect import ConnectFailed
from holdfast.core.etcd.calls import (
    Get,
    KeysChanged,
    ReportUnreadable,
    RequestAnswered,
    SendRequest,
    StartWatch,
    StopWatch,
    Txn,
    WatchEnded,
)
from holdfast.core.etcd.keys import (
    JobKeys,
    JobRecord,
    NodeRecord,
    Presence,
    get_prefix,
    read_leader,
    unpack,
)
from holdfast.core.etcd.session import (
    DeliverMessage,
    DropRequested,
    EtcdSession,
    LeaveRequested,
    MessageSubmitted,
    OpenRequested,
    ReportClosed,
    ReportLeft,
    ReportOpened,
    SessionEvent,
)
from holdfast.core.etcd.witness import (
    WATCHED_MAX,
    ConnectPresence,
    DropPresence,
    PresenceClosed,
    PresenceRefused,
    PresenceSeen,
    PresenceUnknown,
)
from holdfast.core.machine import TICK
from holdfast.etcd.etcd_store import EtcdStore
from holdfast.membership.interface import ControlAccess
from holdfast.membership.threaded import ThreadedMembership
from holdfast.net import addresses, listening
from holdfast.net.agent_port import OFF, ControlCredentials, open_control
from holdfast.net.endpoints import format_endpoint
from holdfast.net.presence import PresencePort, PresenceWatcher, Sight
from holdfast.wire.messages import NodeReport, StoreCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.etcd.calls import Change, Problem
    from holdfast.core.job_settings import JobSettings
    from holdfast.core.protocol import Ack, ControlPort, Heartbeat, NodeInfo, Request, Status, View
    from holdfast.core.session import SessionTimeouts
    from holdfast.etcd.async_client import AsyncEtcdClient, WatchHandle
    from holdfast.etcd.etcd_settings import EtcdSettings
    from holdfast.etcd.sync_client import EtcdClient
    from holdfast.wire.control import Contacts
    from holdfast.wire.messages import JobSummary

DEFAULT_PREFIX = "/torchelastic/p2p"
CALLS_PER_LEASE = 2.5
"""A call that takes longer than this part of a lease is cancelled: another endpoint may be faster."""
LEAVE_S = 2.0
STORE_TTL_S = 600
"""What agents write into their store outlasts them by no more than this."""
WATCHED_SHARE = 4
"""Connections to other agents use at most one in this many of the available descriptors."""


# Stores.


class GenerationStores:
    """The stores of one node: one for each generation, and parts of it, until `close`.

    Only those of the newest generation are held here. An older one stays for as long as it is used
    elsewhere, and with it the lease and the thread that keep what it wrote. The client is the
    caller's to close.
    """

    def __init__(self, client: EtcdClient, root: bytes) -> None:
        self._client = client
        self._root = root.decode()
        self._scope = ""
        self._newest: dict[str, EtcdStore] = {}
        self._every: weakref.WeakSet[EtcdStore] = weakref.WeakSet()

    def store(self, scope: str, *below: str) -> EtcdStore:
        """Return the store of a generation, or of a part of it; scopes have separate keys."""
        if scope != self._scope:
            self._scope, self._newest = scope, {}
        prefix = "/".join([self._root + scope, *below])
        store = self._newest.get(prefix)
        if store is None:
            store = self._newest[prefix] = EtcdStore(self._client, prefix, ttl_s=STORE_TTL_S)
            self._every.add(store)
        return store

    def close(self) -> None:
        """Close all that are still in use."""
        for store in tuple(self._every):
            store.close()
        self._newest = {}


# The session, performed on a real etcd.

_SIGHTS: dict[Sight, type[PresenceSeen | PresenceClosed | PresenceRefused | PresenceUnknown]] = {
    Sight.SEEN: PresenceSeen,
    Sight.CLOSED: PresenceClosed,
    Sight.REFUSED: PresenceRefused,
    Sight.UNKNOWN: PresenceUnknown,
}


class EtcdConnection:
    """One session at etcd, as a `session_driver.Connection`."""

    def __init__(self, connector: EtcdConnector) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.on_message: Callable[[Ack | View], None] | None = None
        self.on_closed: Callable[[str], None] | None = None
        self.problem: ConnectFailed | None = None
        self.heard_at: float | None = None
        self._connector = connector

    def send(self, message: Status | Heartbeat | StoreCall | NodeReport) -> None:
        """Store the node's status, or renew its lease."""
        # The agents' store is in etcd itself, and nobody asks for reports there.
        assert not isinstance(message, StoreCall | NodeReport)
        self._connector.send(self, message)

    def close(self, why: str = "") -> None:
        """End the session; what was sent is stored already."""
        del why
        self.abort()

    def abort(self) -> bool:
        """End the session now."""
        self._connector.drop(self)
        if not self.ended.done():
            self.ended.set_result(None)
        return True


class EtcdConnector:
    """Opens sessions of one node and performs their effects; belongs to one loop.

    The lease and the leadership outlive a session, so there is one connector for as long as the node
    is in the job, and one transport at a time.
    """

    place = 0

    def __init__(self, etcd: AsyncEtcdClient, session: EtcdSession, lease_s: float) -> None:
        self._etcd = etcd
        self._session = session
        self.suspicion = ""
        self._limit_s = lease_s / CALLS_PER_LEASE
        self._loop = asyncio.get_running_loop()
        self._transport: EtcdConnection | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._watches: dict[int, WatchHandle] = {}
        self._watcher = PresenceWatcher()
        self._presences: dict[int, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._left = asyncio.Event()
        self._early: list[Ack | View] = []

    async def connect(self) -> EtcdConnection:
        """Return the transport of a session that is up, or raise `ConnectFailed`."""
        transport = self._transport = EtcdConnection(self)
        self._early = []
        self._handle(OpenRequested())
        try:
            await transport.ready
        except asyncio.CancelledError:
            self.drop(transport)
            raise
        if transport.problem is not None:  # It ended before it could be returned.
            raise transport.problem
        self._loop.call_soon(self._deliver_early, transport)
        return transport

    def send(self, transport: EtcdConnection, message: Status | Heartbeat) -> None:
        """Pass on a message of the current transport."""
        if transport is self._transport:
            self._handle(MessageSubmitted(message))

    def drop(self, transport: EtcdConnection) -> None:
        """End the session of the current transport."""
        if transport is self._transport:
            self._transport = None
            self._handle(DropRequested())

    async def leave(self, limit_s: float) -> None:
        """Hand over the leadership and remove this node's keys, as far as there is time."""
        self._handle(LeaveRequested())
        try:
            async with asyncio.timeout(limit_s):
                await self._left.wait()
        except TimeoutError:
            pass  # Its lease ends all the same, a little later.

    async def close(self) -> None:
        """Stop whatever is under way."""
        if self._timer is not None:
            self._timer.cancel()
        for watch in self._watches.values():
            watch.cancel()
        self._watches.clear()
        under_way = [*self._calls, *self._presences.values()]
        for one in under_way:
            one.cancel()
        if under_way:
            await asyncio.wait(under_way)

    # Performing.

    def _handle(self, event: SessionEvent, cause: str = "") -> None:
        session = self._session
        session.address = self._etcd.local_address
        for effect in session.handle(self._loop.time(), event, cause):
            match effect:
                case SendRequest():
                    task = self._loop.create_task(self._call(effect, session.story.last))
                    self._calls.add(task)
                    task.add_done_callback(self._calls.discard)
                case StartWatch():
                    self._watch(effect)
                case StopWatch(number):
                    watch = self._watches.pop(number, None)
                    if watch is not None:
                        watch.cancel()
                case DeliverMessage(message):
                    self._deliver(message)
                case ConnectPresence(number, presence):
                    self._see(number, presence, session.witness.story.last)
                case DropPresence(number):
                    seeing = self._presences.pop(number, None)
                    if seeing is not None:
                        seeing.cancel()
                case ReportOpened(heard_at):
                    if self._transport is not None and not self._transport.ready.done():
                        self._transport.heard_at = heard_at
                        self._transport.ready.set_result(None)
                case ReportClosed(why, permanent):
                    self._closed(why, permanent=permanent)
                case ReportLeft():
                    self._left.set()
                case ReportUnreadable(key, node, why):
                    whose = f"of the node {node!r} " if node else ""
                    console.warning(
                        f"the record {whose}in etcd is ignored: {why} ({key.decode(errors='replace')})"
                    )
        self._schedule()

    async def _call(self, sent: SendRequest, cause: str) -> None:
        answer = await self._etcd.call(sent.request, limit_s=self._limit_s)
        self._handle(RequestAnswered(sent.number, answer), cause)

    def _watch(self, watch: StartWatch) -> None:
        number = watch.number

        def changed(_revision: int, changes: tuple[Change, ...]) -> None:
            self._handle(KeysChanged(number, changes))

        def ended(problem: Problem) -> None:
            self._watches.pop(number, None)
            self._handle(WatchEnded(number, problem))

        self._watches[number] = self._etcd.watch(
            watch.key, watch.end, watch.start_revision, changed, ended
        )

    def _see(self, number: int, presence: Presence, cause: str) -> None:
        """Watch another agent's presence until that ends, or is not wanted any more."""
        where = format_endpoint(presence.address, presence.port)

        def report(sight: Sight) -> None:
            console.debug(f"the agent at {where}: {sight.value}")
            if sight is not Sight.SEEN:
                self._presences.pop(number, None)
            self._handle(_SIGHTS[sight](number), cause)

        work = self._watcher.watch(presence.address, presence.port, presence.id, report)
        self._presences[number] = self._loop.create_task(work)

    def _deliver(self, message: Ack | View) -> None:
        transport = self._transport
        if transport is None:
            return
        if transport.on_message is not None:
            transport.on_message(message)
        else:
            self._early.append(message)  # It was there when the session opened.

    def _deliver_early(self, transport: EtcdConnection) -> None:
        early, self._early = self._early, []
        for message in early:
            if transport is self._transport and transport.on_message is not None:
                transport.on_message(message)

    def _closed(self, why: str, *, permanent: bool) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        why = why if permanent else self._etcd.describe(why)
        console.debug(f"the session at etcd ended: {why}")
        transport.problem = ConnectFailed(why, permanent=permanent)
        if not transport.ready.done():
            transport.ready.set_exception(transport.problem)
        elif transport.on_closed is not None:
            transport.on_closed(why)

    def _schedule(self) -> None:
        at = self._session.next_deadline(self._loop.time())
        if self._timer is not None:
            # A timer that fires too early does no harm and costs less than a new one every time.
            if at is None or self._timer.when() <= at:
                return
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer = self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._handle(TICK)


# The agent's connection.


class EtcdControl(ControlAccess):
    """Control of a job through the records that its agents keep in etcd."""

    def __init__(self, membership: EtcdMembership) -> None:
        self._membership = membership

    def request(self, request: Request) -> None:
        """Submit an operator's request in this node's status."""
        self._membership.request(request)

    def summary(self) -> JobSummary | None:
        """Return the job as the leader stored it, with the newer status of each node."""
        return self._membership.summary()

    def contacts(self) -> Contacts:
        """Return how clients reach the agents, from the agents' records."""
        return self._membership.contacts()


class EtcdMembership(ThreadedMembership):
    """One node's membership in a job on etcd, from `start` until `close`."""

    authority = "etcd"

    def __init__(
        self,
        etcd: EtcdSettings,
        *,
        prefix: str,
        run_id: str,
        info: NodeInfo,
        settings: JobSettings,
        timeouts: SessionTimeouts,
        lease_s: float,
        shows_presence: bool = True,
        access: ControlCredentials | None = None,
        control: str = OFF,
    ) -> None:
        super().__init__(run_id=run_id, info=info, settings=settings, timeouts=timeouts)
        self.control = EtcdControl(self)
        self._access = access or ControlCredentials(run_id=run_id)
        self._control_setting = control
        self._shows_presence = shows_presence
        self._presence: PresencePort | None = None
        self._etcd_settings = etcd
        self._prefix = prefix
        self._lease_s = lease_s
        self._etcd: AsyncEtcdClient | None = None
        self._connector: EtcdConnector | None = None
        self._session: EtcdSession | None = None
        self._store_client: EtcdClient | None = None
        self._stores: GenerationStores | None = None

    @property
    def where(self) -> str:
        """The endpoints of etcd, as text."""
        return self._etcd_settings.where

    @property
    def presence_fd(self) -> int:
        """The socket that must not close before the workers are gone."""
        return self._presence.fileno() if self._presence is not None else -1

    def store(self, scope: str) -> EtcdStore:
        """Return the store of this job's nodes; scopes have separate keys."""
        from holdfast.etcd.sync_client import EtcdClient

        assert self._session is not None
        if self._store_client is None or self._stores is None:
            self._store_client = EtcdClient(self._etcd_settings)
            self._stores = GenerationStores(self._store_client, self._session.keys.store)
        return self._stores.store(scope)

    def summary(self) -> JobSummary | None:
        """Return the job as the leader stored it, and its nodes as they did."""
        from holdfast.etcd.sync_client import EtcdClient

        client = EtcdClient(self._etcd_settings)
        try:
            return read_job(client, self.run_id, self._prefix)[0]
        finally:
            client.close()

    def contacts(self) -> Contacts:
        """Return how people reach the agents, as these have stored it."""
        from holdfast.etcd.sync_client import EtcdClient

        with EtcdClient(self._etcd_settings) as client:
            return self._access.contacts(read_ports(client, self.run_id, self._prefix))

    def close(self, drain_s: float = LEAVE_S) -> None:
        """Close the connection and its stores."""
        super().close(drain_s)
        if self._stores is not None:
            self._stores.close()
            self._stores = None
        if self._store_client is not None:
            self._store_client.close()
            self._store_client = None

    # In the thread.

    async def _open(self) -> EtcdConnector:
        from holdfast.etcd.async_client import AsyncEtcdClient

        self._etcd = etcd = AsyncEtcdClient(self._etcd_settings)
        port = self.control.port = open_control(
            self._info.address, self._access, self._control_setting
        )
        self._session = EtcdSession(
            run_id=self.run_id,
            info=self._info,
            prefix=self._prefix,
            lease_s=self._lease_s,
            presence=self._show_presence() if self._shows_presence else None,
            control=port.port if port is not None else None,
        )
        at_most = listening.descriptor_limit() // WATCHED_SHARE
        self._session.witness.watched_max = min(WATCHED_MAX, at_most)
        self._connector = self._make_connector(etcd, self._session)
        return self._connector

    def _show_presence(self) -> Presence | None:
        address = self._info.address
        is_alone = bool(address) and addresses.names_loopback(address)
        try:
            where = listening.candidates_of(address, 0) if is_alone else listening.everywhere(0)
            self._presence = shown = PresencePort(where)
        except OSError as problem:
            console.debug(f"no port for this agent's presence: {problem}")
            return None
        shown.open()
        return Presence("", shown.port, shown.id)

    def _make_connector(self, etcd: AsyncEtcdClient, session: EtcdSession) -> EtcdConnector:
        return EtcdConnector(etcd, session, self._lease_s)

    async def _shut(self, drain_s: float) -> None:
        if self._connector is not None:
            await self._connector.leave(drain_s)
        if self._driver is not None:
            await self._driver.close()
        if self._connector is not None:
            await self._connector.close()
        if self._etcd is not None:
            await self._etcd.close()
        if self.control.port is not None:
            self.control.port.close()
        if self._presence is not None:
            self._presence.close()  # Last: who sees that it is gone finds nothing of this node.


# Reading jobs.


def read_job(
    client: EtcdClient, run_id: str, prefix: str = DEFAULT_PREFIX
) -> tuple[JobSummary | None, str]:
    """Return the summary of a job and its leader; None if there is no such job.

    One read, of what the leader stored last and of the nodes' own status, which is newer. Raises
    `EtcdError`.
    """
    import msgspec

    from holdfast.core.rounds import Rounds
    from holdfast.wire.job_summary import summary_of

    keys = JobKeys(prefix, run_id)
    read = Txn((), (Get(keys.job), Get(keys.leader), get_prefix(keys.nodes)))
    stored, leader, nodes = client.txn(read).results
    record = unpack(JobRecord, stored[0].value) if stored else None
    if record is None:
        return None, ""
    job = record.job
    for one in nodes:
        node = unpack(NodeRecord, one.value)
        known = job.nodes.get(node.status.info.node) if node is not None else None
        if node is None or known is None or known.info.incarnation != node.status.info.incarnation:
            continue
        known.phase, known.generation = node.status.phase, node.status.generation
    summary = summary_of(Rounds(job))
    who = read_leader(leader[0].value)[0] if leader else ""
    return msgspec.structs.replace(summary, history=[job.why] if job.why else []), who


def read_ports(
    client: EtcdClient, run_id: str, prefix: str = DEFAULT_PREFIX
) -> list[tuple[str, str, ControlPort | None]]:
    """Return node, address and control port of each agent of a job, that of the leader first.

    Raises `EtcdError`.
    """
    keys = JobKeys(prefix, run_id)
    leader, nodes = client.txn(Txn((), (Get(keys.leader), get_prefix(keys.nodes)))).results
    who = read_leader(leader[0].value)[0] if leader else ""
    found = [record for one in nodes if (record := unpack(NodeRecord, one.value)) is not None]
    found.sort(key=lambda record: record.status.info.node != who)
    return [(one.status.info.node, one.status.info.address, one.control) for one in found]


def read_run_ids(
    client: EtcdClient, prefix: str = DEFAULT_PREFIX, *, running: bool = False
) -> list[str]:
    """Return the run ids of all jobs below a prefix, or of those that have a node. Raises `EtcdError`."""
    kind = b"nodes" if running else b"job"
    root = f"{prefix.rstrip('/')}/".encode()
    [found] = client.txn(Txn((), (get_prefix(root, keys_only=True),))).results
    names = {
        unquote(name.decode(errors="replace"))
        for one in found
        for name, _, rest in [one.key[len(root) :].partition(b"/")]
        if rest.partition(b"/")[0] == kind
    }
    return sorted(names)
