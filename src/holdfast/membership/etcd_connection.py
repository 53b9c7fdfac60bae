"""Performs `core.etcd.etcd_session` on a real etcd: connections for a `SessionDriver`, made by a connector."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.coordinator.connect import ConnectFailed
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
    ReportOpened,
    SessionEvent,
)
from holdfast.core.etcd.witness import (
    ConnectPresence,
    DropPresence,
    PresenceClosed,
    PresenceRefused,
    PresenceSeen,
    PresenceUnknown,
)
from holdfast.core.machine import TICK
from holdfast.net.deadline_timer import DeadlineTimer
from holdfast.net.endpoints import format_endpoint
from holdfast.net.presence import PresenceWatcher, Sight
from holdfast.wire.messages import NodeReport, StoreCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.etcd.calls import Change, Problem
    from holdfast.core.etcd.keys import JobKeys, Presence
    from holdfast.core.protocol import Ack, Heartbeat, Status, View
    from holdfast.etcd.async_client import AsyncEtcdClient, WatchHandle
    from holdfast.membership.cluster_check import ClusterCheck

CALLS_PER_LEASE = 2.5
"""A call that takes longer than this part of a lease is cancelled: another endpoint may be faster."""

_SIGHTS: dict[Sight, type[PresenceSeen | PresenceClosed | PresenceRefused | PresenceUnknown]] = {
    Sight.SEEN: PresenceSeen,
    Sight.CLOSED: PresenceClosed,
    Sight.REFUSED: PresenceRefused,
    Sight.UNKNOWN: PresenceUnknown,
}


class EtcdConnection:
    """One session on etcd, as a `threaded.Connection`."""

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
        """End the session; what was sent is already stored."""
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

    The lease and the leadership outlive a session, so a node has one connector while it is in the
    job, and one connection at a time. `cluster` is checked before each session.
    """

    place = 0

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
                    self._see(number, presence, session.witness.story.last)
                case DropPresence(number):
                    seeing = self._presences.pop(number, None)
                    if seeing is not None:
                        seeing.cancel()
                case ReportOpened(confirmed_at):
                    if self._connection is not None and not self._connection.ready.done():
                        self._connection.confirmed_at = confirmed_at
                        self._connection.ready.set_result(None)
                case ReportClosed(why, permanent):
                    self._closed(why, permanent=permanent)
                case ReportLeft():
                    self._left.set()
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

    def _see(self, number: int, presence: Presence, cause: str) -> None:
        """Watch another agent's presence until it ends or is dropped."""
        where = format_endpoint(presence.address, presence.port)

        def report(sight: Sight) -> None:
            console.debug(f"the agent at {where}: {sight.value}")
            if sight is not Sight.SEEN:
                self._presences.pop(number, None)
            self._handle(_SIGHTS[sight](number), cause)

        work = self._watcher.watch(presence.address, presence.port, presence.id, report)
        self._presences[number] = self._loop.create_task(work)

    def _deliver(self, message: Ack | View) -> None:
        connection = self._connection
        if connection is None:
            return
        if connection.on_message is not None:
            connection.on_message(message)
        else:
            self._early.append(message)  # The session found it when it opened.

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
