"""A membership with a thread: the agent calls it, and the thread's loop drives the node's session.

`ThreadedMembership` is the agent's side. `SessionDriver` performs `core.session` in the thread, over connections that
a `Connector` opens. A `Mailbox` holds the events for the agent's loop. The driver itself needs no thread, so one loop
can run thousands of nodes.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from holdfast import console
from holdfast.coordinator.connections import ConnectFailed
from holdfast.core.job_settings import JobSettings
from holdfast.core.limits import NAME_CHARS_MAX, REPORT_BYTES_MAX, SUMMARY_CHARS_MAX
from holdfast.core.machine import TICK
from holdfast.core.phases import NodePhase, NodeRole
from holdfast.core.protocol import Ack, Failure, Heartbeat, NodeInfo, Status, View
from holdfast.core.session import (
    Connect,
    Connected,
    ConnectionState,
    DeliverView,
    Disconnect,
    Disconnected,
    GiveUp,
    PortsChanged,
    Rejoined,
    RequestMade,
    Send,
    Session,
    SessionEffect,
    SessionEvent,
    StatusChanged,
)
from holdfast.core.supervision import CoordinatorLost, ViewReceived
from holdfast.errors import UsageError
from holdfast.membership.coordinator_store import StoreCalls
from holdfast.membership.interface import (
    JoinRefused,
    MembershipEvent,
    ProtectionChanged,
    random_incarnation,
)
from holdfast.membership.loop_heartbeat import LoopHeartbeat, LoopMonitor
from holdfast.net.deadline_timer import DeadlineTimer
from holdfast.net.loop_thread import LoopThread
from holdfast.printable import one_line
from holdfast.wire.messages import StoreCall, StoreResult, Watch, check
from holdfast.wire.wire_errors import BadMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from holdfast.core.protocol import Request
    from holdfast.core.session import SessionTimeouts
    from holdfast.membership.interface import ControlAccess, RenewDeadline
    from holdfast.store.store_interface import RoundStore
    from holdfast.wire.messages import Message, NodeReport

START_S = 10.0
DRAIN_S = 5.0
"""How long a coordinator waits, after its job has ended, for its nodes to learn the outcome."""
SLACK_S = 5.0
REMIND_S = 60.0
"""How often an agent repeats why it has received nothing so far, so that the reason is near the end of the output
of a job that does not start."""

LOSSES_MAX = 16  # In addition to the newest view.
CLOSE_S = 1.0  # The time to send queued messages before closing.
OUTAGE_NOTICE_S = 1.0  # Shorter outages are not reported.
OUTAGE_REMIND_S = 15.0
"""An outage is reported again after half of the remaining time, unless that half is shorter than this. So an
outage causes only a few lines."""

T = TypeVar("T")

NodeEvent = StatusChanged | Rejoined | PortsChanged | RequestMade
"""The events that an agent reports to its session."""


class Driver(Protocol):
    """Performs the session of one node in the thread's loop."""

    @property
    def view(self) -> View | None:
        """The newest view of any incarnation; any thread may read it."""

    @property
    def is_refused(self) -> bool:
        """Whether it delivered `JoinRefused` and stopped."""

    @property
    def is_stuck(self) -> bool:
        """Whether the agent's loop is stuck."""

    def start(self) -> None: ...

    def handle(self, event: NodeEvent, cause: str = "") -> None: ...

    def watch_stop_deadline(self, renew: RenewDeadline) -> None:
        """Call `renew` with the deadline for the workers' exit, now and when it changes."""

    def problem(self, peer: str) -> str:
        """Return the problem with the connection to `peer`, or an empty string; any thread may call."""

    async def leave(self, limit_s: float) -> bool:
        """Report that the node leaves; return whether the report is known to have arrived."""

    async def close(self) -> None: ...


class ThreadedMembership:
    """A `Membership` with a thread. A subclass opens and closes the resources of its driver.

    If the thread fails unexpectedly, `take` returns a `CoordinatorLost`.
    """

    authority = "the coordinator"
    """The name in messages for the side that runs the job's rounds."""
    hosting = False
    control: ControlAccess

    def __init__(self, *, run_id: str, info: NodeInfo, settings: JobSettings) -> None:
        self.run_id = run_id
        self._info, self.settings = info, settings
        self._mailbox = Mailbox(info.incarnation)
        self.heartbeat = self._mailbox.heartbeat
        self._thread: LoopThread | None = None
        self._driver: Driver | None = None
        self._closed = False
        self._ending = False

    # Subclasses provide these.

    @property
    def presence_fd(self) -> int:
        return -1

    @property
    def where(self) -> str:
        raise NotImplementedError

    def store(self, scope: str) -> RoundStore:
        raise NotImplementedError

    async def _open_driver(self) -> Driver:
        """Open the driver's resources, in the thread; return the driver."""
        raise NotImplementedError

    async def _close_driver(self, drain_s: float) -> None:
        """Close the driver and its resources, in the thread."""
        raise NotImplementedError

    # From start to end.

    def start(self) -> None:
        """Connect; raise `UsageError` or `EnvironmentProblem` for invalid settings.

        A coordinator that is not running yet is not an error.
        """
        try:
            check(Status(seq=0, run_id=self.run_id, info=self._info, settings=self.settings))
        except BadMessage as error:
            raise UsageError(f"this node cannot join {self.run_id!r}: {error}") from None
        self._mailbox.open()
        self._thread = LoopThread("holdfast-membership", self._report_fault)
        try:
            self._thread.start()
            self._thread.run(self._start(), START_S)
        except BaseException:
            self.close()
            raise

    def leave(self, limit_s: float) -> bool:
        self._ending = True
        if self._driver is None:
            return False
        try:
            return self._run_in_loop(self._driver.leave(limit_s), limit_s)
        except (TimeoutError, RuntimeError):
            return False

    def close(self, drain_s: float = DRAIN_S) -> None:
        if self._closed:
            return
        self._closed = self._ending = True
        try:
            if self._thread is not None:
                self._run_in_loop(self._close_driver(drain_s), drain_s)
        except Exception as error:  # noqa: BLE001 (closing must not fail)
            console.debug(f"closing the connection to {self.peer} failed: {error!r}")
        finally:
            if self._thread is not None:
                self._thread.stop()
            self._mailbox.close()

    # For the agent.

    @property
    def peer(self) -> str:
        """The name of the other side, for messages."""
        return f"{self.authority} at {self.where}"

    @property
    def view(self) -> View | None:
        return self._mailbox.view

    def fileno(self) -> int:
        return self._mailbox.fileno()

    def take(self) -> list[MembershipEvent]:
        return self._mailbox.take()

    def report(
        self,
        phase: NodePhase,
        generation: int,
        failure: Failure | None = None,
        report: bytes = b"",
        *,
        clear: int = -1,
        cause: str = "",
    ) -> None:
        self._handle(status_change(phase, generation, failure, report, clear), cause)

    def hold_ports(self, ports: tuple[int, ...]) -> None:
        self._handle(PortsChanged(ports))

    def request(self, request: Request) -> None:
        """Submit an operator's request to the job."""
        self._handle(RequestMade(request))

    def watch_stop_deadline(self, renew: RenewDeadline) -> None:
        driver = self._driver
        if driver is None:
            return

        def renew_unless_hosting(at: float | None, extra_s: float) -> None:
            # If this process hosts the coordinator and is stopped, no node can be replaced meanwhile.
            is_safe = self.hosting and not driver.is_stuck
            renew(None if is_safe else at, extra_s)

        driver.watch_stop_deadline(renew_unless_hosting)

    @property
    def node(self) -> str:
        return self._info.node

    def rejoin(self, *, cause: str = "") -> int:
        view, incarnation = self._mailbox.view, random_incarnation()
        rejoined = Rejoined(incarnation, view.new_id if view is not None else "")
        self._info = rejoined.applied_to(self._info)
        self._mailbox.begin_incarnation(incarnation)
        self._handle(rejoined, cause)
        return incarnation

    def problem(self) -> str:
        if self._driver is None:
            return f"not connected to {self.peer}"
        return self._driver.problem(self.peer)

    def _handle(self, event: NodeEvent, cause: str = "") -> None:
        if self._driver is not None:
            self._post(self._driver.handle, event, cause)

    def _post(self, call: Callable[..., object], *args: Any) -> bool:
        """Schedule a call in the thread; return False if the thread has ended."""
        return self._thread is not None and self._thread.post(call, *args)

    def _run_in_loop(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Return the result of a coroutine in the thread; the coroutine itself ends within the limit."""
        assert self._thread is not None
        return self._thread.run(work, limit_s + SLACK_S)

    # In the thread.

    async def _start(self) -> None:
        self._driver = await self._open_driver()
        self._driver.start()
        asyncio.get_running_loop().call_later(REMIND_S, self._print_reminder)

    def _drive(
        self, connector: Connector, timeouts: SessionTimeouts, advice: str = ""
    ) -> SessionDriver:
        """Return the driver of a session over a connector; `advice` is for messages about an outage."""
        now = asyncio.get_running_loop().time()
        session = Session(
            now,
            run_id=self.run_id,
            info=self._info,
            settings=self.settings,
            timeouts=timeouts,
            draw=random.random,
        )
        notices = OutageNotices(lambda: self.peer, timeouts, advice)

        def note_outage(why: str) -> None:
            if not why:
                notices.over()
            elif not self._ending:
                notices.lost(session, why)

        monitor = LoopMonitor(now, self._mailbox, timeouts.silence_s)
        return SessionDriver(session, connector, self._mailbox.put, note_outage, monitor)

    def _report_fault(self, what: str) -> None:
        self._mailbox.put(CoordinatorLost(f"this side of the connection failed: {what}"))

    def _print_reminder(self) -> None:
        driver = self._driver
        if driver is None or self._ending or driver.is_refused or driver.view is not None:
            return
        problem = self.problem()
        if problem:
            console.notice(f"still waiting: {problem}")
        asyncio.get_running_loop().call_later(REMIND_S, self._print_reminder)


class Mailbox:
    """Holds the newest view of an incarnation, the newest change of protection, and the first few losses, until the agent
    takes them.

    Its descriptor is readable while it has events, from `open` to `close`.
    """

    def __init__(self, incarnation: int) -> None:
        self.heartbeat = LoopHeartbeat()
        self.view: View | None = None
        """The newest view of this incarnation, even after `take`."""
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._newest: ViewReceived | None = None
        self._protection: ProtectionChanged | None = None
        self._losses: list[CoordinatorLost | JoinRefused] = []
        self._eventfd = -1

    def open(self) -> None:
        self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def close(self) -> None:
        """Release the descriptor; may be called more than once, and without `open`."""
        with self._lock:
            if self._eventfd >= 0:
                os.close(self._eventfd)
                self._eventfd = -1

    def fileno(self) -> int:
        return self._eventfd

    def put(self, event: MembershipEvent) -> None:
        """Store a view, unless it is for another incarnation; or add a loss."""
        with self._lock:
            if isinstance(event, ViewReceived):
                if event.view.incarnation != self._incarnation:
                    return
                self.view, self._newest = event.view, event
            elif isinstance(event, ProtectionChanged):
                self._protection = event
            elif len(self._losses) < LOSSES_MAX:
                self._losses.append(event)
            else:
                return
            if self._eventfd >= 0:
                os.eventfd_write(self._eventfd, 1)

    def request_beat(self) -> None:
        """Wake the loop to call `take`, if its heartbeat has started and no request is pending."""
        with self._lock:
            heartbeat = self.heartbeat
            if self._eventfd >= 0 and heartbeat.is_started and not heartbeat.is_requested:
                heartbeat.is_requested = True
                os.eventfd_write(self._eventfd, 1)

    def begin_incarnation(self, incarnation: int) -> None:
        """Accept views of this incarnation only, from now on."""
        with self._lock:
            self._incarnation = incarnation
            self.view = self._newest = None

    def take(self) -> list[MembershipEvent]:
        with self._lock:
            self.heartbeat.is_requested = False
            if self._eventfd >= 0:
                try:
                    os.eventfd_read(self._eventfd)
                except BlockingIOError:
                    pass
            taken: list[MembershipEvent] = [self._newest] if self._newest is not None else []
            if self._protection is not None:
                taken.append(self._protection)
            taken += self._losses
            self._newest = self._protection = None
            self._losses = []
            return taken


class SessionConnection(Protocol):
    """One connection: a `ClientConnection` to a coordinator, or a session on etcd."""

    ended: asyncio.Future[None]
    on_message: Callable[[Any], None] | None
    on_closed: Callable[[str], None] | None
    problem: ConnectFailed | None
    """Why it ended."""
    confirmed_at: float | None
    """When this side sent the last message that the other side is known to have received. None means the
    time at which the connection was made."""

    def send(self, message: Status | Heartbeat | StoreCall | NodeReport) -> None: ...

    def close(self, why: str) -> None:
        """Close once everything is sent."""

    def abort(self) -> object:
        """Close now; `on_closed` is not called."""


class Connector(Protocol):
    """Opens connections, one at a time."""

    @property
    def suspicion(self) -> str:
        """The likely problem with the attempt in progress; any thread may read it."""

    @property
    def endpoint_index(self) -> int:
        """The index of the endpoint that the last connection reached, or of the one to try first."""

    async def connect(self) -> SessionConnection:
        """Return a connection that is ready, or raise `ConnectFailed`."""


class SessionDriver:
    """Performs `core.session` for one node, from `start` until `close`; belongs to one loop.

    `deliver` receives each newer view. It receives `CoordinatorLost` when the coordinator is unreachable
    beyond the limit; the driver keeps retrying. It receives `JoinRefused` when retrying cannot help,
    for example after a wrong token; the driver then stops. A node that was connected before gets no
    `JoinRefused`: another program may hold the port for a moment, so the limit for an unreachable
    coordinator applies. `on_outage` receives the reason once an outage has lasted for a second, then again as a
    reminder, and an empty string when the outage ends. Neither callback may block.
    """

    def __init__(
        self,
        session: Session,
        connector: Connector,
        deliver: Callable[[MembershipEvent], None],
        on_outage: Callable[[str], None] | None = None,
        monitor: LoopMonitor | None = None,
    ) -> None:
        self.session = session
        self.store = StoreCalls(self._send)
        self.down_since: float | None = None
        """When the connection was lost or first attempted; None while it is up."""
        self.refused = ""
        self._watched: Callable[[Watch], None] | None = None
        self._early_watches: dict[bool, Watch] = {}
        """The newest of each kind that arrived before `on_watch`, by `Watch.attach`."""
        self.renew: RenewDeadline | None = None
        """Receives the deadline for the workers' exit when it changes."""
        self._deadline: tuple[float | None, float] = (None, 0.0)
        self._loop = asyncio.get_running_loop()
        self._connector = connector
        self._deliver = deliver
        self._on_outage = on_outage
        self._monitor = monitor
        self.outage_noted = False
        """Whether `on_outage` has reported the current outage."""
        self._outage: asyncio.TimerHandle | None = None
        self._connection: SessionConnection | None = None
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
        """Return the problem with the connection to `peer`, or an empty string; any thread may call."""
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
        deadline = self.session.stop_at, self.session.stop_extra_s
        if deadline != self._deadline:
            self._deadline = deadline
            if self.renew is not None:
                self.renew(*deadline)

    def watch_stop_deadline(self, renew: RenewDeadline) -> None:
        """Call `renew` with the deadline for the workers' exit, now and when it changes."""
        self.renew = renew
        renew(*self._deadline)

    def _perform(self, effect: SessionEffect) -> None:
        match effect:
            case Send(message):
                if self._connection is not None:
                    self._connection.send(message)
            case DeliverView(view):
                self._deliver(ViewReceived(view))
            case Connect():
                self._connecting = self._loop.create_task(self._connect())
            case Disconnect(_):
                self._drop_connection()
            case GiveUp(unreachable_s, why):
                self._deliver(CoordinatorLost(self._connector.suspicion or why, unreachable_s))

    def _tick(self) -> None:
        if self._monitor is not None:
            changed = self._monitor.check(self._loop.time())
            if changed is not None:
                self.handle(changed)
        was_patient = self.session.patience
        self.handle(TICK)
        if self.session.patience and not was_patient:
            console.notice(
                "this agent was stopped, or gets too little CPU: other nodes now wait longer for it"
            )

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
        self.handle(Connected(connection.confirmed_at, self._connector.endpoint_index))
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
        # On etcd, a connection does not mean that the node has joined; its first view does.
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
        elif isinstance(message, Watch):
            if self._watched is not None:
                self._watched(message)
            else:
                self._early_watches[message.attach] = message

    def on_watch(self, watched: Callable[[Watch], None]) -> None:
        """Call `watched` for the newest clients so far, and later for each client that watches this node."""
        self._watched = watched
        early, self._early_watches = self._early_watches, {}
        for watch in early.values():
            watched(watch)

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


class OutageNotices:
    """Reports the outages of one membership; `peer` returns the name of the other side for messages."""

    def __init__(self, peer: Callable[[], str], timeouts: SessionTimeouts, advice: str) -> None:
        self._peer, self._timeouts, self._advice = peer, timeouts, advice
        self._lost = ""
        """The name of the side that the current outage cut off; empty without an outage."""

    def lost(self, session: Session, why: str) -> None:
        """Report an outage; the caller repeats this while the outage lasts."""
        silent_s, left_s = session.silence(time.monotonic())
        if self._lost:
            console.notice(
                f"still no connection to {self._peer()} ({why}): this node exits in {left_s:.0f} s"
            )
            return
        self._lost = self._peer()
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent_s))
        console.notice(
            f"lost the connection to {self._lost}, last message at {since} ({why}); "
            f"{self._workers_of(session)}"
        )
        advice = f"; {self._advice}" if self._advice else ""
        runs = session.status.phase is NodePhase.RUNNING
        console.notice(
            f"this node retries for {left_s:.0f} s more (coordinator_timeout="
            f"{self._timeouts.unreachable_s:g}), then {'stops its workers and ' * runs}exits{advice}"
        )

    def over(self) -> None:
        """Report that the outage is over."""
        lost, self._lost = self._lost, ""
        if lost:
            peer = self._peer()
            console.notice(
                f"reconnected to {peer}" if peer == lost else f"connected to {peer} instead"
            )

    def _workers_of(self, session: Session) -> str:
        status, stop_at = session.status, session.stop_at
        if status.phase is NodePhase.SUCCEEDED:
            return "this node's workers have finished"
        if status.phase is not NodePhase.RUNNING:
            return "this node runs no workers"
        workers = f"the workers of generation {status.generation}"
        if not self._timeouts.needs_answers or stop_at is None:
            return f"{workers} keep running"
        left_s = max(0.0, stop_at - time.monotonic())
        return (
            f"this node stops {workers} unless it reconnects within {left_s:.1f} s (on_lost=stop)"
        )
