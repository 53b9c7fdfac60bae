"""The membership in a job on etcd: `--rdzv-backend etcd` and `--ha`.

The leases of the nodes show which nodes are alive. One of the nodes leads; if it is lost, another node
leads once the lost node's lease has ended. No other node depends on this process, so it may exit at any time.

`EtcdConnector` and `EtcdConnection` perform `core.etcd.etcd_session` on a real etcd, for a `SessionDriver`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.coordinator.connections import ConnectFailed
from holdfast.core.etcd.calls import (
    KeysChanged,
    ReportUnreadable,
    RequestAnswered,
    SendRequest,
    StartWatch,
    StopWatch,
    WatchEnded,
)
from holdfast.core.etcd.etcd_session import (
    DeliverMessage,
    DropRequested,
    EtcdSession,
    LeaveRequested,
    MessageSubmitted,
    OpenRequested,
    ReportClosed,
    ReportLeft,
    ReportMissing,
    ReportOpened,
    SessionEvent,
)
from holdfast.core.etcd.keys import Presence
from holdfast.core.etcd.witness import (
    WATCHED_MAX,
    ConnectPresence,
    DropPresence,
    PresenceClosed,
    PresenceConfirmed,
    PresenceInconclusive,
    PresenceRefused,
)
from holdfast.core.machine import TICK
from holdfast.etcd.async_client import AsyncEtcdClient
from holdfast.etcd.generation_stores import GenerationStores
from holdfast.etcd.job_records import read_job, read_ports
from holdfast.etcd.sync_client import EtcdClient
from holdfast.membership.interface import ControlAccess, ProtectionChanged
from holdfast.membership.threaded import ThreadedMembership
from holdfast.net import listening
from holdfast.net.agent_port import OFF, AgentPort, ControlCredentials, open_agent_port
from holdfast.net.deadline_timer import DeadlineTimer
from holdfast.net.endpoints import format_endpoint
from holdfast.net.presence import PresenceObservation, PresenceWatcher
from holdfast.wire.messages import NodeReport, StoreCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.etcd.calls import Change, Problem
    from holdfast.core.etcd.keys import JobKeys
    from holdfast.core.job_settings import JobSettings
    from holdfast.core.protocol import Ack, Heartbeat, NodeInfo, Request, Status, View
    from holdfast.core.session import SessionTimeouts
    from holdfast.etcd.async_client import WatchHandle
    from holdfast.etcd.etcd_settings import EtcdSettings
    from holdfast.etcd.etcd_store import EtcdStore
    from holdfast.membership.cluster_check import ClusterCheck
    from holdfast.membership.threaded import SessionDriver
    from holdfast.wire.messages import Contacts, JobSummary

LEAVE_S = 2.0
WATCHED_SHARE = 4
"""Connections to other agents use at most the available descriptors divided by this."""

CALLS_PER_LEASE = 2.5
"""A call times out after the lease divided by this, because another endpoint may be faster."""

_EVENT_BY_OBSERVATION: dict[
    PresenceObservation,
    type[PresenceConfirmed | PresenceClosed | PresenceRefused | PresenceInconclusive],
] = {
    PresenceObservation.SEEN: PresenceConfirmed,
    PresenceObservation.CLOSED: PresenceClosed,
    PresenceObservation.REFUSED: PresenceRefused,
    PresenceObservation.UNKNOWN: PresenceInconclusive,
}


class EtcdControl(ControlAccess):
    """Control of a job through the records that its agents keep in etcd."""

    def __init__(self, membership: EtcdMembership) -> None:
        self._membership = membership

    def request(self, request: Request) -> None:
        """Submit an operator's request in this node's status."""
        self._membership.request(request)

    def summary(self) -> JobSummary | None:
        """Return the job that the leader stored, updated with the newer status of each node."""
        return self._membership.summary()

    def contacts(self) -> Contacts:
        """Return the contacts of the agents, from their records."""
        return self._membership.contacts()


class EtcdMembership(ThreadedMembership):
    """One node's membership in a job on etcd. With `cluster`, it refuses to use any other cluster."""

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
        cluster: ClusterCheck | None = None,
        credentials: ControlCredentials | None = None,
        control: str = OFF,
    ) -> None:
        super().__init__(run_id=run_id, info=info, settings=settings)
        self.authority = "etcd" if cluster is None else "the cluster"
        self.etcd, self.prefix = etcd, prefix
        self.credentials = credentials or ControlCredentials(run_id=run_id)
        self.control = EtcdControl(self)
        self._control_setting = control
        self._shows_presence = shows_presence
        self._port: AgentPort | None = None
        self._timeouts, self._lease_s, self._cluster = timeouts, lease_s, cluster
        self._client: AsyncEtcdClient | None = None
        self._connector: EtcdConnector | None = None
        self._store_client: EtcdClient | None = None
        self._stores: GenerationStores | None = None

    @property
    def where(self) -> str:
        return self.etcd.where

    @property
    def presence_fd(self) -> int:
        if self._port is None or not self._port.presence_id:
            return -1
        return self._port.fileno()

    def store(self, scope: str) -> EtcdStore:
        if self._stores is None:
            assert self._connector is not None
            self._store_client = EtcdClient(self.etcd)
            self._stores = GenerationStores(self._store_client, self._connector.keys.store)
        return self._stores.store(scope)

    def close(self, drain_s: float = LEAVE_S) -> None:
        super().close(drain_s)
        if self._stores is not None:
            self._stores.close()
            self._stores = None
        if self._store_client is not None:
            self._store_client.close()
            self._store_client = None

    # For `EtcdControl`.

    def summary(self) -> JobSummary | None:
        """Return the job that the leader stored, updated with the newer status of each node."""
        with EtcdClient(self.etcd) as client:
            return read_job(client, self.run_id, self.prefix)[0]

    def contacts(self) -> Contacts:
        """Return the contacts of the agents, from their records."""
        with EtcdClient(self.etcd) as client:
            return self.credentials.contacts(read_ports(client, self.run_id, self.prefix))

    # In the thread.

    async def _open_driver(self) -> SessionDriver:
        port = self._port = open_agent_port(
            self._info.address,
            self.credentials,
            control=self._control_setting,
            shows_presence=self._shows_presence,
        )
        self.control.port = port if port is not None and port.control is not None else None
        session = EtcdSession(
            run_id=self.run_id,
            info=self._info,
            prefix=self.prefix,
            lease_s=self._lease_s,
            presence=Presence("", port.number, port.presence_id)
            if port is not None and port.presence_id
            else None,
            control=port.control if port is not None else None,
        )
        at_most = listening.descriptor_limit() // WATCHED_SHARE
        session.witness.watched_max = min(WATCHED_MAX, at_most)
        self._client = AsyncEtcdClient(self.etcd)
        self._connector = EtcdConnector(self._client, session, self._lease_s, self._cluster)
        self._connector.on_missing = lambda machines: self._mailbox.put(ProtectionChanged(machines))
        return self._drive(self._connector, self._timeouts)

    async def _close_driver(self, drain_s: float) -> None:
        if self._connector is not None:
            await self._connector.leave(drain_s)
        if self._driver is not None:
            await self._driver.close()
        if self._connector is not None:
            await self._connector.close()
        if self._client is not None:
            await self._client.close()
        if self._port is not None:
            # Last: when another node sees the port close, this node's keys are already removed.
            self._port.close()


class EtcdConnection:
    """One session on etcd, as a `threaded.SessionConnection`."""

    def __init__(self, connector: EtcdConnector) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.on_message: Callable[[Ack | View], None] | None = None
        self.on_closed: Callable[[str], None] | None = None
        self.problem: ConnectFailed | None = None
        self.confirmed_at: float | None = None
        self._connector = connector

    def send(self, message: Status | Heartbeat | StoreCall | NodeReport) -> None:
        """Store the node's status, or renew its lease."""
        # The agents' store is in etcd itself, and etcd forwards no reports.
        assert not isinstance(message, StoreCall | NodeReport)
        self._connector.send(self, message)

    def close(self, why: str = "") -> None:
        """End the session; everything sent is already stored."""
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

    The lease and the leadership outlive a session, so a node has one connector for the whole job, and one
    connection at a time. `cluster` is checked before each session.
    """

    endpoint_index = 0

    def __init__(
        self,
        etcd: AsyncEtcdClient,
        session: EtcdSession,
        lease_s: float,
        cluster: ClusterCheck | None = None,
    ) -> None:
        self._etcd = etcd
        self._session = session
        self._cluster = cluster
        self.suspicion = ""
        self.on_missing: Callable[[str], None] = lambda _: None
        self._limit_s = lease_s / CALLS_PER_LEASE
        self._loop = asyncio.get_running_loop()
        self._connection: EtcdConnection | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._watches: dict[int, WatchHandle] = {}
        self._watcher = PresenceWatcher()
        self._presences: dict[int, asyncio.Task[None]] = {}
        self._timer = DeadlineTimer(self._loop, lambda: self._handle(TICK))
        self._left = asyncio.Event()
        self._early: list[Ack | View] = []

    @property
    def keys(self) -> JobKeys:
        """The keys of the job."""
        return self._session.keys

    async def connect(self) -> EtcdConnection:
        """Return the connection of a session that is up, or raise `ConnectFailed`."""
        if self._cluster is not None:
            await self._cluster.check(self._etcd, self._session, self._limit_s)
        connection = self._connection = EtcdConnection(self)
        self._early = []
        self._handle(OpenRequested())
        try:
            await connection.ready
        except asyncio.CancelledError:
            self.drop(connection)
            raise
        if connection.problem is not None:  # It closed before it could be returned.
            raise connection.problem
        self._loop.call_soon(self._deliver_early, connection)
        return connection

    def send(self, connection: EtcdConnection, message: Status | Heartbeat) -> None:
        """Submit a message of the current connection."""
        if connection is self._connection:
            self._handle(MessageSubmitted(message))

    def drop(self, connection: EtcdConnection) -> None:
        """End the session of the current connection."""
        if connection is self._connection:
            self._connection = None
            self._handle(DropRequested())

    async def leave(self, limit_s: float) -> None:
        """Hand over the leadership and remove this node's keys, within the limit."""
        self._handle(LeaveRequested())
        try:
            async with asyncio.timeout(limit_s):
                await self._left.wait()
        except TimeoutError:
            pass  # Its lease expires a little later.

    async def close(self) -> None:
        """Cancel everything in progress."""
        self._timer.cancel()
        for watch in self._watches.values():
            watch.cancel()
        self._watches.clear()
        pending = [*self._calls, *self._presences.values()]
        for one in pending:
            one.cancel()
        if pending:
            await asyncio.wait(pending)

    # The machine.

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
                    self._watch_presence(number, presence, session.witness.story.last)
                case DropPresence(number):
                    watching = self._presences.pop(number, None)
                    if watching is not None:
                        watching.cancel()
                case ReportOpened(confirmed_at):
                    if self._connection is not None and not self._connection.ready.done():
                        self._connection.confirmed_at = confirmed_at
                        self._connection.ready.set_result(None)
                case ReportClosed(why, permanent):
                    self._closed(why, permanent=permanent)
                case ReportLeft():
                    self._left.set()
                case ReportMissing(machines):
                    self.on_missing(machines)
                case ReportUnreadable(key, node, why):
                    whose = f"of the node {node!r} " if node else ""
                    console.warning(
                        f"ignoring the record {whose}in etcd: {why} ({key.decode(errors='replace')})"
                    )
        self._timer.set(session.next_deadline(self._loop.time()))

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

    def _watch_presence(self, number: int, presence: Presence, cause: str) -> None:
        """Watch another agent's presence until it ends or is dropped."""
        where = format_endpoint(presence.address, presence.port)

        def report(sight: PresenceObservation) -> None:
            console.debug(f"the agent at {where}: {sight.value}")
            if sight is not PresenceObservation.SEEN:
                self._presences.pop(number, None)
            self._handle(_EVENT_BY_OBSERVATION[sight](number), cause)

        work = self._watcher.watch(presence.address, presence.port, presence.id, report)
        self._presences[number] = self._loop.create_task(work)

    def _deliver(self, message: Ack | View) -> None:
        connection = self._connection
        if connection is None:
            return
        if connection.on_message is not None:
            connection.on_message(message)
        else:
            self._early.append(message)  # It arrived while the session was opening.

    def _deliver_early(self, connection: EtcdConnection) -> None:
        early, self._early = self._early, []
        for message in early:
            if connection is self._connection and connection.on_message is not None:
                connection.on_message(message)

    def _closed(self, why: str, *, permanent: bool) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        why = why if permanent else self._etcd.describe(why)
        console.debug(f"the session at etcd ended: {why}")
        connection.problem = ConnectFailed(why, permanent=permanent)
        if not connection.ready.done():
            connection.ready.set_exception(connection.problem)
        elif connection.on_closed is not None:
            connection.on_closed(why)
