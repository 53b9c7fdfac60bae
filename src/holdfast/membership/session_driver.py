"""Performs `core.session` for one node in an asyncio loop, over connections that a connector makes.

A `SessionDriver` needs no thread, so one loop can run thousands of nodes.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from holdfast.coordinator.connect import ConnectFailed
from holdfast.core.coordinated_supervision import CoordinatorLost
from holdfast.core.limits import NAME_CHARS_MAX, REPORT_BYTES_MAX, SUMMARY_CHARS_MAX
from holdfast.core.machine import TICK
from holdfast.core.protocol import Ack, Failure, Heartbeat, NodePhase, NodeRole, Status, View
from holdfast.core.session import (
    Connect,
    Connected,
    ConnectionState,
    DeliverView,
    Disconnect,
    Disconnected,
    GiveUp,
    Send,
    Session,
    SessionEffect,
    SessionEvent,
    StatusChanged,
)
from holdfast.membership.coordinator_store import StoreCalls
from holdfast.membership.interface import JoinRefused, News
from holdfast.net.deadline_timer import DeadlineTimer
from holdfast.printable import one_line
from holdfast.wire.messages import StoreCall, StoreResult, Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.membership.loop_heartbeat import LoopMonitor
    from holdfast.wire.messages import Message, NodeReport

CLOSE_S = 1.0  # The time to send queued messages before closing.
OUTAGE_NOTICE_S = 1.0  # Shorter outages are not reported.
OUTAGE_REMIND_S = 15.0
"""An outage is reported again after half of the remaining time, unless that half is shorter than this. So an
outage causes only a few lines."""


class Connection(Protocol):
    """One connection: a `ClientConnection` to a coordinator, or a session on etcd."""

    ended: asyncio.Future[None]
    on_message: Callable[[Any], None] | None
    on_closed: Callable[[str], None] | None
    problem: ConnectFailed | None
    """Why it ended."""
    confirmed_at: float | None
    """When the last message was sent that the other side received, if that was before `ready`."""

    def send(self, message: Status | Heartbeat | StoreCall | NodeReport) -> None: ...

    def close(self, why: str) -> None:
        """Close once everything is sent."""

    def abort(self) -> object:
        """Close now; `on_closed` is not called."""


class Connector(Protocol):
    """Makes connections, one at a time."""

    @property
    def suspicion(self) -> str:
        """The likely problem with the attempt in progress; any thread may read it."""

    @property
    def place(self) -> int:
        """The index of the endpoint that the last connection reached, or that is tried first."""

    async def connect(self) -> Connection:
        """Return a connection that is ready, or raise `ConnectFailed`."""


class SessionDriver:
    """Performs `core.session` for one node, from `start` until `close`; belongs to one loop.

    `deliver` receives each newer view. It receives `CoordinatorLost` when the coordinator is unreachable
    beyond the limit; the driver keeps retrying. It receives `JoinRefused` when retrying cannot help,
    as with a wrong token; the driver then stops. A node that was connected before gets no
    `JoinRefused`: another program may hold the port for a moment, so the limit for an unreachable
    coordinator applies. `on_outage` receives the reason when an outage lasts for a second, a few reminders, and
    an empty text when the outage ends. Neither callback may block.
    """

    def __init__(
        self,
        session: Session,
        connector: Connector,
        deliver: Callable[[News], None],
        on_outage: Callable[[str], None] | None = None,
        monitor: LoopMonitor | None = None,
    ) -> None:
        self.session = session
        self.store = StoreCalls(self._send)
        self.down_since: float | None = None
        """When the connection was lost or first attempted; None while it is up."""
        self.refused = ""
        self.watched: Callable[[Watch], None] | None = None
        """Receives requests to report to clients that watch this node."""
        self.renew: Callable[[float | None], None] | None = None
        """Receives the deadline for the workers' exit when it changes."""
        self._stop_at: float | None = None
        self._loop = asyncio.get_running_loop()
        self._connector = connector
        self._deliver = deliver
        self._on_outage = on_outage
        self._monitor = monitor
        self.outage_noted = False
        """Whether `on_outage` has reported the current outage."""
        self._outage: asyncio.TimerHandle | None = None
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._timer = DeadlineTimer(self._loop, self._tick)
        self._progress = asyncio.Event()
        self._closed = False

    @property
    def is_over(self) -> bool:
        """Whether the job has ended and this node knows it."""
        view = self.session.view
        return view is not None and view.role is NodeRole.CLOSED and view.final

    @property
    def is_refused(self) -> bool:
        """Whether it delivered `JoinRefused` and stopped."""
        return bool(self.refused)

    @property
    def view(self) -> View | None:
        """The newest view; any thread may read it."""
        return self.session.view

    @property
    def is_stuck(self) -> bool:
        """Whether the agent's loop is stuck."""
        return bool(self.session.status.stuck)

    @property
    def last_problem(self) -> str:
        """Why there is no connection, as far as known; any thread may read it."""
        return self._connector.suspicion or self.session.last_problem

    def problem(self, peer: str) -> str:
        """Return the problem with the connection to `peer`, or an empty text; any thread may call."""
        if self.refused:
            return f"{peer}: {self.refused}"
        now, since = time.monotonic(), self.down_since
        if since is not None:
            why = self.last_problem or "connecting"
            return f"no connection to {peer} for {now - since:.1f} s: {why}"
        if not self.session.is_late(now):
            return ""
        return f"no response from {peer} for {self.session.silence(now)[0]:.1f} s"

    def start(self) -> None:
        self.down_since = self._loop.time()
        self.handle(TICK)

    async def leave(self, limit_s: float) -> bool:
        """Report that the node leaves; return whether the report is known to have arrived."""
        session = self.session
        self.handle(StatusChanged(NodePhase.LEAVING, session.status.generation))
        seq = session.status.seq
        out = (NodeRole.FENCED, NodeRole.REFUSED, NodeRole.CLOSED)
        try:
            async with asyncio.timeout(limit_s):
                while not self._closed and session.connection is ConnectionState.UP:
                    view = session.view
                    if session.acked_seq >= seq or (view is not None and view.role in out):
                        return True
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            pass
        return False

    async def close(self) -> None:
        """Send the pending reports, then close the connection and stop."""
        self._closed = True
        self._timer.cancel()
        if self._outage is not None:
            self._outage.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close("the node is done")
            await asyncio.wait([connection.ended], timeout=CLOSE_S)
            connection.abort()
        self.store.fail("the node's connection was closed")
        self._progress.set()

    def _send(self, call: StoreCall) -> bool:
        if self._connection is None:
            return False
        self._connection.send(call)
        return True

    # The machine.

    def handle(self, event: SessionEvent, cause: str = "") -> None:
        """Give the session one event and perform its effects; does nothing after `close`."""
        if self._closed:
            return
        for effect in self.session.handle(self._loop.time(), event, cause):
            self._perform(effect)
        self._renew()
        if not self._closed:
            self._timer.set(self.session.next_deadline(self._loop.time()))

    def _renew(self) -> None:
        stop_at = self.session.stop_at
        if stop_at != self._stop_at:
            self._stop_at = stop_at
            if self.renew is not None:
                self.renew(stop_at)

    def guard(self, renew: Callable[[float | None], None]) -> None:
        """Call `renew` with the deadline for the workers' exit, now and when it changes."""
        self.renew = renew
        renew(self._stop_at)

    def _perform(self, effect: SessionEffect) -> None:
        match effect:
            case Send(message):
                if self._connection is not None:
                    self._connection.send(message)
            case DeliverView(view):
                self._deliver(view)
            case Connect():
                self._connecting = self._loop.create_task(self._connect())
            case Disconnect(_):
                self._drop_connection()
            case GiveUp(away_s, why):
                self._deliver(CoordinatorLost(self._connector.suspicion or why, away_s))

    def _tick(self) -> None:
        if self._monitor is not None:
            changed = self._monitor.check(self._loop.time())
            if changed is not None:
                self.handle(changed)
        self.handle(TICK)

    # The connection.

    async def _connect(self) -> None:
        try:
            connection = await self._connector.connect()
        except ConnectFailed as problem:
            self._connect_failed(problem)
            return
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 (a bug here must not silence the node)
            self._connect_failed(ConnectFailed(f"{type(error).__name__}: {error}"))
            return
        self._connecting = None
        if self._closed:
            connection.abort()
            return
        connection.on_message = self._received
        connection.on_closed = self._connection_closed
        self._connection = connection
        self.down_since = None
        if not self.session.is_refused:
            self._outage_over()
        self.handle(Connected(connection.confirmed_at, self._connector.place))
        self.store.connected()

    def _connect_failed(self, problem: ConnectFailed) -> None:
        self._connecting = None
        if problem.permanent and not self.session.had_contact:
            self._refuse(problem.why)
        else:
            self.handle(Disconnected(problem.why, problem.permanent))

    def _connection_closed(self, why: str) -> None:
        problem = self._connection.problem if self._connection is not None else None
        permanent = problem is not None and problem.permanent
        self._drop_connection()
        # On etcd a connection does not mean that the node has joined: it has only with its first view.
        if permanent and not self.session.had_view:
            self._refuse(why)
        else:
            self.handle(Disconnected(why, permanent))

    def _refuse(self, why: str) -> None:
        self.refused = why
        self._closed = True
        self.store.fail(why)
        self._deliver(JoinRefused(why))

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        self.down_since = self._loop.time()
        if self._on_outage is not None and self._outage is None and self.session.had_contact:
            self._outage = self._loop.call_later(OUTAGE_NOTICE_S, self._outage_lasts)
        if connection is not None:
            connection.abort()
        self.store.disconnected()
        self._progress.set()

    def _outage_lasts(self) -> None:
        left_s = self.session.silence(self._loop.time())[1]
        if self._on_outage is None or self._closed or self.is_over or not left_s:
            return
        self._on_outage(self.last_problem)
        self.outage_noted = True
        if left_s / 2 >= OUTAGE_REMIND_S:
            self._outage = self._loop.call_later(left_s / 2, self._outage_lasts)

    def _outage_over(self) -> None:
        if self._outage is not None:
            self._outage.cancel()
            self._outage = None
        if self.outage_noted and self._on_outage is not None:
            self.outage_noted = False
            self._on_outage("")

    def _received(self, message: Message) -> None:
        if isinstance(message, (View, Ack)):
            # A message never makes a deadline earlier than the current timer.
            for effect in self.session.handle(self._loop.time(), message):
                self._perform(effect)
            self._renew()
            if self._outage is not None and not self.session.is_refused:
                self._outage_over()
            self._progress.set()
        elif isinstance(message, StoreResult):
            self.store.answered(message)
        elif isinstance(message, Watch) and self.watched is not None:
            self.watched(message)

    def send_report(self, report: NodeReport) -> None:
        """Send a report if there is a connection."""
        if self._connection is not None:
            self._connection.send(report)


def status_change(
    phase: NodePhase, generation: int, failure: Failure | None, report: bytes, clear: int = -1
) -> StatusChanged:
    """Return the event for a new status, with texts shortened to the limits of the protocol."""
    if failure is not None:
        failure = msgspec.structs.replace(
            failure,
            summary=one_line(failure.summary, SUMMARY_CHARS_MAX),
            host=one_line(failure.host, NAME_CHARS_MAX),
        )
    return StatusChanged(phase, generation, failure, report[:REPORT_BYTES_MAX], clear)
