"""An agent's connection to whoever decides for its job: what it offers, and how it is kept.

::

    the agent's thread               the connection's thread, an asyncio loop
    report, rejoin, leave ─────────► SessionDriver ◄──► core.session
    take ◄──────── Mailbox ◄──────────   │
                                     Transport, made by a Connector: to a coordinator, or to etcd

`JobConnection` is all that an agent knows of it. `SessionDriver` needs no thread, so one loop can
run thousands of nodes. `AgentConnection` gives one of them a thread; `CoordinatorConnection` is
that for a job with a coordinator, which it also runs itself if this process can bind the endpoint.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from holdfast import console
from holdfast.coordinator.attendance import Attendance, StuckLoop
from holdfast.coordinator.connect import ConnectFailed, CoordinatorConnector
from holdfast.coordinator.kv import DEFAULT_TIMEOUT_S, KeyValueStore, StoreCalls
from holdfast.core.coordinated_supervision import CoordinatorLost
from holdfast.core.job_settings import JobSettings
from holdfast.core.limits import NAME_CHARS_MAX, REPORT_BYTES_MAX, SUMMARY_CHARS_MAX
from holdfast.core.machine import TICK
from holdfast.core.protocol import (
    Ack,
    Failure,
    Heartbeat,
    NodeInfo,
    NodePhase,
    NodeRole,
    Status,
    View,
)
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
    SessionTimeouts,
    StatusChanged,
)
from holdfast.errors import HoldfastError, UsageError
from holdfast.net import addresses, listening
from holdfast.net.endpoints import format_endpoint
from holdfast.net.loop_thread import LoopThread
from holdfast.printable import one_line
from holdfast.wire.errors import BadMessage
from holdfast.wire.messages import StoreCall, StoreResult, Watch, check

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Sequence

    from holdfast.coordinator.control_port import ControlListener
    from holdfast.coordinator.places import Places
    from holdfast.coordinator.server import CoordinatorServer
    from holdfast.coordinator.state_file import StateFile
    from holdfast.core.protocol import Request
    from holdfast.net.addresses import Address
    from holdfast.net.tls import TlsFiles, TlsToken
    from holdfast.store.interface import RoundStore
    from holdfast.wire.control import Contacts
    from holdfast.wire.messages import JobSummary, Message, NodeReport

LOSSES_MAX = 16  # In the mailbox, besides the newest view.
CLOSE_S = 1.0  # For what is still to be sent at the end.
OUTAGE_NOTICE_S = 1.0  # Shorter outages are not reported.
OUTAGE_REMIND_S = 15.0
"""An outage is reported again when half of the time is over for which it is waited for, and then of the
rest, as long as that is more than this: often enough to be seen, and a few lines in all."""
START_S = 10.0
DRAIN_S = 5.0
"""How long a coordinator whose job is over waits for nodes to receive that."""
SLACK_S = 5.0
REMIND_S = 60.0
"""How often an agent that never received anything reports why: the reason should be near the end of
the output of a job that does not begin, and more often would only fill logs."""
PREIMPORT_S = 1.0
"""When a node that may take over imports what it needs for that: after the start, which should be
fast, and before the coordinator is lost, when the installation may have been upgraded."""
INCARNATION_BITS = 63


class JoinRefused(msgspec.Struct, frozen=True):
    """The other side does not want this node, or is no coordinator; retrying does not help."""

    why: str
    """Without the endpoint, which the caller adds."""


News = View | CoordinatorLost | JoinRefused


class JobConnection(Protocol):
    """One node's connection to whoever decides for its job, as the agent uses it.

    `fileno()` is readable while there is something to `take`. Of several views that came meanwhile
    only the newest is kept, since a view has everything. All methods may be called from one thread
    at a time, in any order, also after `close`.
    """

    run_id: str
    view: View | None
    """The newest view of this incarnation."""
    hosting: bool
    """Whether all other nodes depend on this process."""

    @property
    def presence_fd(self) -> int:
        """A socket that must stay open until the workers are gone, or -1."""

    @property
    def where(self) -> str:
        """The endpoint, as a person writes it."""

    def fileno(self) -> int: ...

    def take(self) -> list[News]:
        """Return what arrived since the last call."""

    @property
    def attendance(self) -> Attendance:
        """The promise of the loop that takes from here to go on doing so; it sets it, if ever."""

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
        """Report what this node does now, and which step of the agent's story is the cause.

        `clear` is that of `Status`.
        """

    def guard(self, renew: Callable[[float | None], None]) -> None:
        """Have `renew` called with the time at which the workers must be gone, when it changes.

        From any thread; None is no such time.
        """

    def rejoin(self, *, cause: str = "") -> int:
        """Begin anew as another incarnation, after this one was fenced; return its number."""

    def hold_ports(self, ports: tuple[int, ...]) -> None:
        """Have the next status say that this node holds these ports for the workers' store."""

    def request(self, request: Request) -> None:
        """Ask whoever decides for something; `View.answered` has what became of it, or has it already."""

    def on_watch(self, watched: Callable[[Watch], None]) -> None:
        """Have `watched` called, from any thread, when somebody wants to watch this node."""

    def send_report(self, report: NodeReport) -> None:
        """Send a report to those who watch, if there is a way."""

    def operator(self, loop: asyncio.AbstractEventLoop) -> CoordinatorConnector | None:
        """Return how operators connect to whoever decides, for one loop; None if they cannot."""

    def summary(self) -> JobSummary | None:
        """Return the state of the job, where no coordinator can be asked for it; may block."""

    def contacts(self) -> Contacts:
        """Return how people reach the job's agents, where no coordinator can be asked; may block."""

    @property
    def control(self) -> ControlListener | None:
        """Where they reach this one, if there is such a port; the connection closes it."""

    def problem(self) -> str:
        """Return why there is no connection and since when, or nothing."""

    def store(self, scope: str) -> RoundStore:
        """Return the store of this job's nodes; scopes know nothing of each other's keys."""

    def leave(self, limit_s: float) -> bool:
        """Report that this node leaves; return whether that is known to have arrived.

        Waits for that no longer than `limit_s`, and not at all while there is no connection.
        """

    def close(self) -> None:
        """Close the connection; may be called more than once.

        A process that others depend on lets them receive the job's end first, for a while.
        """


def draw_incarnation() -> int:
    """Return a number that no other agent has drawn."""
    return secrets.randbits(INCARNATION_BITS)


class Mailbox:
    """What an agent has still to take, put by one thread and taken by another.

    The newest view, the first few losses, and a descriptor that is readable while there are any,
    from `open` to `close`. It never calls out, so an owner may hold a lock around any call.
    """

    def __init__(self) -> None:
        self.attendance = Attendance()
        self._lock = threading.Lock()
        self._view: View | None = None
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

    def put(self, news: News) -> None:
        """Put a view in the place of the one before, or add a loss if there are not too many."""
        with self._lock:
            if isinstance(news, View):
                self._view = news
            elif len(self._losses) < LOSSES_MAX:
                self._losses.append(news)
            else:
                return
            if self._eventfd >= 0:
                os.eventfd_write(self._eventfd, 1)

    def ask(self) -> None:
        """Have the loop answer by taking, if it is expected to and was not asked before."""
        with self._lock:
            attendance = self.attendance
            if self._eventfd >= 0 and attendance.is_promised and not attendance.is_asked:
                attendance.is_asked = True
                os.eventfd_write(self._eventfd, 1)

    def forget_view(self) -> None:
        """Drop a view that was not taken."""
        with self._lock:
            self._view = None

    def take(self) -> list[News]:
        with self._lock:
            self.attendance.is_asked = False
            if self._eventfd >= 0:
                try:
                    os.eventfd_read(self._eventfd)
                except BlockingIOError:
                    pass
            taken: list[News] = [self._view] if self._view is not None else []
            taken += self._losses
            self._view = None
            self._losses = []
            return taken


class Transport(Protocol):
    """One connection to whoever decides: `connect.ClientConnection`, or a session at etcd."""

    ended: asyncio.Future[None]
    on_message: Callable[[Any], None] | None
    on_closed: Callable[[str], None] | None
    problem: ConnectFailed | None
    """Why it ended, once it has."""
    heard_at: float | None
    """When that was sent which the other side last heard of this node, if before it was ready."""

    def send(self, message: Status | Heartbeat | StoreCall | NodeReport) -> None: ...

    def close(self, why: str) -> None:
        """End once everything is sent."""

    def abort(self) -> object:
        """End now; `on_closed` is not called."""


class Connector(Protocol):
    """Makes transports, one at a time."""

    @property
    def suspicion(self) -> str:
        """What seems wrong with the attempt that is under way; any thread may look."""

    @property
    def place(self) -> int:
        """At which one of several endpoints the last transport was made, or tried first."""

    async def connect(self) -> Transport:
        """Return a transport that is ready, or raise `ConnectFailed`."""


class SessionDriver:
    """Performs `core.session` for one node, from `start` until `close`; belongs to one loop.

    `deliver` gets each newer view; a `CoordinatorLost` when the coordinator stayed away past the
    limit (it is still retried after that); and a `JoinRefused` when retrying cannot help, as with
    a wrong token: then nothing more is tried. A node that was in touch before is not turned away
    like that: another program may have the port for a moment, and the limit for an absent
    coordinator applies. `on_outage` gets the reason when a connection that was there has been gone
    for a moment, now and then again, and an empty text when it is back. Neither may block.
    """

    def __init__(
        self,
        session: Session,
        connector: Connector,
        deliver: Callable[[News], None],
        on_outage: Callable[[str], None] | None = None,
        supervision: StuckLoop | None = None,
    ) -> None:
        self.session = session
        self.store = StoreCalls(self._send)
        self.down_since: float | None = None
        """When the connection was lost, or first tried; None while it is up."""
        self.refused = ""
        self.watched: Callable[[Watch], None] | None = None
        """Gets what is asked for on behalf of those who watch."""
        self.renew: Callable[[float | None], None] | None = None
        """Gets the time at which the workers must be gone, when it changes."""
        self._stop_at: float | None = None
        self._loop = asyncio.get_running_loop()
        self._connector = connector
        self._deliver = deliver
        self._on_outage = on_outage
        self._supervision = supervision
        self.outage_noted = False
        """Whether it was reported that the connection is gone."""
        self._outage: asyncio.TimerHandle | None = None
        self._transport: Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._received_some = asyncio.Event()
        self._closed = False

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to receive: the job's end is known."""
        view = self.session.view
        return view is not None and view.role is NodeRole.CLOSED and view.final

    @property
    def last_problem(self) -> str:
        """Why there is no connection, as far as is known by now; any thread may ask."""
        return self._connector.suspicion or self.session.last_problem

    def start(self) -> None:
        self.down_since = self._loop.time()
        self.handle(TICK)

    async def leave(self, limit_s: float) -> bool:
        """Report that the node leaves; return whether the coordinator is known to have it."""
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
                    self._received_some.clear()
                    await self._received_some.wait()
        except TimeoutError:
            pass
        return False

    async def close(self) -> None:
        """Close the connection and stop; what was reported before is still sent."""
        self._closed = True
        for timer in (self._timer, self._outage):
            if timer is not None:
                timer.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close("the node is done")
            await asyncio.wait([transport.ended], timeout=CLOSE_S)
            transport.abort()
        self.store.fail("the node's connection was closed")
        self._received_some.set()

    def _send(self, call: StoreCall) -> bool:
        if self._transport is None:
            return False
        self._transport.send(call)
        return True

    # The machine.

    def handle(self, event: SessionEvent, cause: str = "") -> None:
        """Give the session one event, and do what it wants; nothing after `close`."""
        if self._closed:
            return
        for effect in self.session.handle(self._loop.time(), event, cause):
            self._perform(effect)
        self._renew()
        if not self._closed:
            self._schedule()

    def _renew(self) -> None:
        stop_at = self.session.stop_at
        if stop_at != self._stop_at:
            self._stop_at = stop_at
            if self.renew is not None:
                self.renew(stop_at)

    def guard(self, renew: Callable[[float | None], None]) -> None:
        """Have `renew` called with the time at which the workers must be gone."""
        self.renew = renew
        renew(self._stop_at)

    def _perform(self, effect: SessionEffect) -> None:
        match effect:
            case Send(message):
                if self._transport is not None:
                    self._transport.send(message)
            case DeliverView(view):
                self._deliver(view)
            case Connect():
                self._connecting = self._loop.create_task(self._connect())
            case Disconnect(_):
                self._lose_transport()
            case GiveUp(away_s, why):
                self._deliver(CoordinatorLost(self._connector.suspicion or why, away_s))

    def _schedule(self) -> None:
        at = self.session.next_deadline(self._loop.time())
        # A timer that comes too early does no harm and costs less than a new one every time.
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._supervision is not None:
            changed = self._supervision.look(self._loop.time())
            if changed is not None:
                self.handle(changed)
        self.handle(TICK)

    # The transport.

    async def _connect(self) -> None:
        try:
            transport = await self._connector.connect()
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
            transport.abort()
            return
        transport.on_message = self._received
        transport.on_closed = self._transport_closed
        self._transport = transport
        self.down_since = None
        if not self.session.is_refused:
            self._outage_over()
        self.handle(Connected(transport.heard_at, self._connector.place))
        self.store.connected()

    def _connect_failed(self, problem: ConnectFailed) -> None:
        self._connecting = None
        if problem.permanent and not self.session.had_contact:
            self._refuse(problem.why)
        else:
            self.handle(Disconnected(problem.why, problem.permanent))

    def _transport_closed(self, why: str) -> None:
        problem = self._transport.problem if self._transport is not None else None
        permanent = problem is not None and problem.permanent
        self._lose_transport()
        # That a connection was up means little where a node itself may have to lead, as on etcd.
        if permanent and not self.session.had_view:
            self._refuse(why)
        else:
            self.handle(Disconnected(why, permanent))

    def _refuse(self, why: str) -> None:
        self.refused = why
        self._closed = True
        self.store.fail(why)
        self._deliver(JoinRefused(why))

    def _lose_transport(self) -> None:
        transport, self._transport = self._transport, None
        self.down_since = self._loop.time()
        if self._on_outage is not None and self._outage is None and self.session.had_contact:
            self._outage = self._loop.call_later(OUTAGE_NOTICE_S, self._outage_lasts)
        if transport is not None:
            transport.abort()
        self.store.disconnected()
        self._received_some.set()

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
            # What the coordinator sends never brings a deadline nearer than the timer that runs.
            for effect in self.session.handle(self._loop.time(), message):
                self._perform(effect)
            self._renew()
            if self._outage is not None and not self.session.is_refused:
                self._outage_over()
            self._received_some.set()
        elif isinstance(message, StoreResult):
            self.store.answered(message)
        elif isinstance(message, Watch) and self.watched is not None:
            self.watched(message)

    def send_report(self, report: NodeReport) -> None:
        """Send a report, if there is a connection; nobody waits for it."""
        if self._transport is not None:
            self._transport.send(report)


def status_change(
    phase: NodePhase, generation: int, failure: Failure | None, report: bytes, clear: int = -1
) -> StatusChanged:
    """Return a change that the other side accepts, however long or odd a worker's message is."""
    if failure is not None:
        failure = msgspec.structs.replace(
            failure,
            summary=one_line(failure.summary, SUMMARY_CHARS_MAX),
            host=one_line(failure.host, NAME_CHARS_MAX),
        )
    return StatusChanged(phase, generation, failure, report[:REPORT_BYTES_MAX], clear)


class AgentConnection:
    """A `JobConnection` with a thread of its own; subclasses say to what.

    Whatever goes wrong in the thread and was not expected comes out of `take` as a loss.
    """

    decider = "the coordinator"
    """What decides for the job, as a person calls it."""
    advice = ""
    """What would help while that is lost, or would have helped; for a person."""
    control: ControlListener | None = None

    def __init__(
        self, *, run_id: str, info: NodeInfo, settings: JobSettings, timeouts: SessionTimeouts
    ) -> None:
        self.run_id = run_id
        self.hosting = False
        self.view: View | None = None
        self._info, self._settings, self._timeouts = info, settings, timeouts
        self._incarnation = info.incarnation
        self._lock = threading.Lock()  # For the incarnation and its view.
        self._mailbox = Mailbox()
        self._thread: LoopThread | None = None
        self._driver: SessionDriver | None = None
        self._closed = False
        self._ending = False
        self._lost_from = ""

    # What subclasses provide.

    @property
    def presence_fd(self) -> int:
        return -1

    @property
    def where(self) -> str:
        raise NotImplementedError

    def store(self, scope: str) -> RoundStore:
        raise NotImplementedError

    async def _begin(self) -> Connector:
        """Prepare, in the thread; return what connects."""
        raise NotImplementedError

    async def _end(self, drain_s: float) -> None:
        """Close the driver and whatever else the thread holds."""
        raise NotImplementedError

    # From start to end.

    def start(self) -> None:
        """Connect; raise `UsageError` or `EnvironmentProblem` for what cannot work.

        A coordinator that is not there (yet) is no such thing.
        """
        try:
            check(Status(seq=0, run_id=self.run_id, info=self._info, settings=self._settings))
        except BadMessage as error:
            raise UsageError(f"this node cannot join {self.run_id!r}: {error}") from None
        self._mailbox.open()
        self._thread = LoopThread("holdfast-coordinator", self._broke)
        try:
            self._thread.start()
            self._thread.ask(self._start(), START_S)
        except BaseException:
            self.close()
            raise

    def leave(self, limit_s: float) -> bool:
        self._ending = True
        if self._driver is None or self._thread is None or not self._thread.runs:
            return False
        try:
            return self._thread.ask(self._driver.leave(limit_s), limit_s + SLACK_S)
        except (TimeoutError, RuntimeError):
            return False

    def close(self, drain_s: float = DRAIN_S) -> None:
        if self._closed:
            return
        self._closed = self._ending = True
        try:
            if self._thread is not None:
                self._thread.ask(self._end(drain_s), drain_s + SLACK_S)
        except Exception as error:  # noqa: BLE001 (an end must come to an end)
            console.debug(f"{self.decider} at {self.where}: the connection closed badly: {error!r}")
        finally:
            if self._thread is not None:
                self._thread.stop()
            self._mailbox.close()

    # In between.

    def fileno(self) -> int:
        return self._mailbox.fileno()

    def take(self) -> list[News]:
        return self._mailbox.take()

    @property
    def attendance(self) -> Attendance:
        return self._mailbox.attendance

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
        if self._driver is not None and self._thread is not None:
            change = status_change(phase, generation, failure, report, clear)
            self._thread.post(self._driver.handle, change, cause)

    def guard(self, renew: Callable[[float | None], None]) -> None:
        driver = self._driver
        if driver is None:
            return

        def renew_unless_hosting(at: float | None) -> None:
            # Nobody can take a place while the one who would decide it is stopped, too.
            is_safe = self.hosting and not driver.session.status.stuck
            renew(None if is_safe else at)

        driver.guard(renew_unless_hosting)

    def rejoin(self, *, cause: str = "") -> int:
        with self._lock:
            self._incarnation = draw_incarnation()
            self._mailbox.forget_view()  # It was for the one before.
            self.view = None
        if self._driver is not None and self._thread is not None:
            self._thread.post(self._driver.handle, Rejoined(self._incarnation), cause)
        return self._incarnation

    def hold_ports(self, ports: tuple[int, ...]) -> None:
        if self._driver is not None and self._thread is not None:
            self._thread.post(self._driver.handle, PortsChanged(ports))

    def request(self, request: Request) -> None:
        if self._driver is not None and self._thread is not None:
            self._thread.post(self._driver.handle, RequestMade(request))

    def on_watch(self, watched: Callable[[Watch], None]) -> None:
        if self._driver is not None:
            self._driver.watched = watched

    def send_report(self, report: NodeReport) -> None:
        if self._driver is not None and self._thread is not None:
            self._thread.post(self._driver.send_report, report)

    def operator(self, loop: asyncio.AbstractEventLoop) -> CoordinatorConnector | None:
        del loop
        return None

    def summary(self) -> JobSummary | None:
        return None

    def contacts(self) -> Contacts:
        from holdfast.wire.control import Contacts

        return Contacts()

    def problem(self) -> str:
        driver = self._driver
        decider = self.decider.removeprefix("the ")
        if driver is None:
            return f"not connected to {self.decider} at {self.where}"
        if driver.refused:
            return f"{decider} at {self.where}: {driver.refused}"
        since = driver.down_since
        if since is None:
            silent_s = driver.session.silence(time.monotonic())[0]
            is_late = silent_s >= self._timeouts.silence_s / 2  # Two answers are missing, at least.
            return f"no answer of {self.decider} at {self.where} for {silent_s:.1f} s" * is_late
        why = driver.last_problem or "connecting"
        return f"no {decider} at {self.where} for {time.monotonic() - since:.1f} s: {why}"

    # In the thread.

    async def _start(self) -> None:
        connector = await self._begin()
        loop = asyncio.get_running_loop()
        session = Session(
            loop.time(),
            run_id=self.run_id,
            info=self._info,
            settings=self._settings,
            timeouts=self._timeouts,
            draw=random.random,
        )
        supervision = StuckLoop(loop.time(), self._mailbox, self._timeouts.silence_s)
        self._driver = SessionDriver(
            session, connector, self._deliver, self._note_outage, supervision
        )
        self._driver.start()
        loop.call_later(REMIND_S, self._remind, loop)

    def _deliver(self, news: News) -> None:
        with self._lock:
            if isinstance(news, View):
                if news.incarnation != self._incarnation:
                    return
                self.view = news
            self._mailbox.put(news)

    def _broke(self, what: str) -> None:
        self._mailbox.put(CoordinatorLost(f"this side of the connection is broken: {what}"))

    def _remind(self, loop: asyncio.AbstractEventLoop) -> None:
        driver = self._driver
        if driver is None or self._ending or driver.refused or driver.session.had_view:
            return
        problem = self.problem()
        if problem:
            console.notice(f"still waiting: {problem}")
        loop.call_later(REMIND_S, self._remind, loop)

    def _note_outage(self, why: str) -> None:
        """Say what is lost, what still runs, how long it is waited for and what helps; or its return."""
        who = f"{self.decider} at {self.where}"
        driver = self._driver
        if not why:
            moved = self.where != self._lost_from
            console.notice(f"{self.decider} is at {self.where} now" if moved else f"{who} is back")
        elif not self._ending and driver is not None:
            silent_s, left_s = driver.session.silence(time.monotonic())
            if driver.outage_noted:
                console.notice(f"still without {who} ({why}): this node ends in {left_s:.0f} s")
                return
            self._lost_from = self.where
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent_s))
            console.notice(
                f"lost {who}, last heard of at {since} ({why}); {self._what_runs(driver)}"
            )
            advice = f"; {self.advice}" if self.advice else ""
            runs = driver.session.status.phase is NodePhase.RUNNING
            console.notice(
                f"this node waits for it for {left_s:.0f} s more (coordinator_timeout="
                f"{self._timeouts.away_s:g}), then {'stops its workers and ' * runs}ends{advice}"
            )

    def _what_runs(self, driver: SessionDriver) -> str:
        status, stop_at = driver.session.status, driver.session.stop_at
        if status.phase is NodePhase.SUCCEEDED:
            return "this node's workers are done"
        if status.phase is not NodePhase.RUNNING:
            return "no workers run here"
        workers = f"the workers of generation {status.generation}"
        if not self._timeouts.needs_answers or stop_at is None:
            return f"{workers} run on"
        left_s = max(0.0, stop_at - time.monotonic())
        return f"{workers} are stopped unless it is back within {left_s:.1f} s (on_lost=stop)"


class CoordinatorConnection(AgentConnection):
    """One node's connection to a coordinator, which this process runs if it can bind the endpoint.

    If the coordinator goes away and the endpoint is this machine's, the connection's thread binds
    it and coordinates from then on; the other nodes connect to it, and it learns from them where
    the job was. With `later` endpoints, a coordinator that took over at one of them is followed, and
    replaces the one here (`coordinator.places`).
    """

    def __init__(
        self,
        endpoint_host: str,
        endpoint_port: int,
        *,
        run_id: str,
        info: NodeInfo,
        settings: JobSettings,
        timeouts: SessionTimeouts,
        is_host: bool | None,
        token: bytes | None,
        tls: TlsFiles | TlsToken | None,
        reconnect_grace_s: float = 0.2,
        advertised_port: int | None = None,
        recover_s: float | None = None,
        state_file: str | None = None,
        may_raise_limit: bool = False,
        advice: str = "",
        later: Sequence[tuple[str, int]] = (),
    ) -> None:
        super().__init__(run_id=run_id, info=info, settings=settings, timeouts=timeouts)
        self.advice = advice
        self._host, self._port = endpoint_host, endpoint_port
        self._later = later
        self._places: Places | None = None
        self._watch: asyncio.Task[None] | None = None
        self._is_host, self._token, self._tls = is_host, token, tls
        self._grace_s, self._advertised_port = reconnect_grace_s, advertised_port
        self._recover_s, self._state_file = recover_s, state_file
        self._may_raise_limit = may_raise_limit
        # With TLS a coordinator needs a certificate.
        self._may_host = is_host is not False and (tls is None or tls.can_serve or bool(is_host))
        self._server_tls: ssl.SSLContext | None = None
        self._client_tls: ssl.SSLContext | None = None
        self._listener: socket.socket | None = None
        self._server: CoordinatorServer | None = None

    def start(self) -> None:
        """Bind the endpoint if that is this process's task, and connect."""
        if self._tls is not None:
            self._client_tls = self._tls.for_client()
            if self._may_host:
                self._server_tls = self._tls.for_server()
        if self._may_host:
            self._listener = listening.try_bind(self._host, self._port, self._is_host)
        if self._listener is not None:
            self._port = self._listener.getsockname()[1]
        elif self._port == 0:
            raise UsageError(
                f"{self.where} is no endpoint to connect to: only the node that coordinates can "
                "choose any free port",
                hint="give the port that it reports",
            )
        try:
            super().start()
        except BaseException:
            if self._listener is not None:
                self._listener.close()
            raise

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the coordinator; the port that was really bound, if it is here."""
        return self._host, self._port

    @property
    def where(self) -> str:
        return format_endpoint(*self._here()[1])

    def _here(self) -> tuple[int, tuple[str, int]]:
        """Return the place at which the coordinator was last, and its endpoint."""
        place = self._places.place if self._places is not None else 0
        return place, [(self._host, self._port), *self._later][place]

    def operator(self, loop: asyncio.AbstractEventLoop) -> CoordinatorConnector | None:
        del loop
        place, (host, port) = self._here()
        return self._connector(host, port, place=place)

    # The job's store.

    def store(self, scope: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> KeyValueStore:
        return KeyValueStore(self, scope, timeout_s)

    def begin_call(self, call: StoreCall) -> Future[StoreResult]:
        answer: Future[StoreResult] = Future()
        driver, thread = self._driver, self._thread
        if driver is None or thread is None or not thread.post(driver.store.begin, call, answer):
            answer.set_exception(ConnectionError("the connection is closed"))
        return answer

    def forget_call(self, answer: Future[StoreResult]) -> None:
        if self._driver is not None and self._thread is not None:
            self._thread.post(self._driver.store.forget, answer)

    # In the thread.

    async def _begin(self) -> Connector:
        when_refused = self._take_over if self._may_host else None
        connector = self._connector(self._host, self._port, when_refused=when_refused)
        if self._later:
            from holdfast.coordinator.places import FIRST_LOOK_S, Places

            ends = [(self._host, self._port), *self._later]
            self._places = Places(
                [self._connector(*one, place=place) for place, one in enumerate(ends)],
                floor=lambda: self._driver.session.place if self._driver is not None else 0,
                host=connector if self._may_host else None,
            )
            if self._listener is not None:
                by = await self._places.replaced_at(0, FIRST_LOOK_S)
                if by:
                    self._listener.close()
                    self._listener = None
                    console.notice(
                        f"a coordinator took over at {by}: this node does not coordinate"
                    )
        if self._listener is not None:
            self._serve(self._listener, self._open_state())
        elif self._may_host:
            asyncio.get_running_loop().call_later(PREIMPORT_S, preimport_server)
        return self._places or connector

    def _connector(
        self,
        host: str,
        port: int,
        *,
        place: int = 0,
        when_refused: Callable[[list[Address]], bool] | None = None,
    ) -> CoordinatorConnector:
        return CoordinatorConnector(
            host,
            port,
            run_id=self.run_id,
            token=self._token,
            tls=self._client_tls,
            has_psk=self._tls is not None and self._tls.is_psk,
            server_name=self._tls.server_name if self._tls is not None else None,
            # Who has a token proves it; who says is_host=0 means whoever is there.
            own_users_only=self._token is None and self._is_host is not False,
            place=place,
            when_refused=when_refused,
        )

    def _open_state(self) -> StateFile | None:
        if self._state_file is None:
            return None
        from holdfast.coordinator.state_file import StateFile

        return StateFile(self._state_file)

    def _serve(
        self, listener: socket.socket, state: StateFile | None, *, follows_another: bool = False
    ) -> None:
        from holdfast.coordinator.server import CoordinatorServer

        if self._may_raise_limit:
            listening.raise_descriptor_limit()
        warn_if_open(listener, self._token, self._tls, self._host)
        self._server = CoordinatorServer(
            listener,
            silence_s=self._timeouts.silence_s,
            grace_s=self._grace_s,
            token=self._token,
            run_id=self.run_id,
            advertised_port=self._advertised_port,
            tls=self._server_tls,
            follows_another=follows_another,
            host=self._info.node,
            recover_s=self._recover_s,
            state=state,
        )
        self.hosting = True
        if self._places is not None:
            self._watch = asyncio.get_running_loop().create_task(self._until_replaced(self._places))

    async def _until_replaced(self, places: Places) -> None:
        """End the coordinator here when another has taken over: it was cut off, and thought dead."""
        by = await places.replaced(0)
        why = f"a coordinator took over at {by}"
        console.warning(f"{why}: the one at {self.where} ends, and this node joins there")
        server, self._server = self._server, None
        self._may_host = self.hosting = False
        if server is not None:
            await server.stop(why)

    def _take_over(self, found: list[Address]) -> bool:
        """Coordinate from now on, if the endpoint is this machine's and nobody was quicker."""
        driver = self._driver
        is_over = driver is not None and driver.is_over
        if self._ending or not self._may_host or self._server is not None or is_over:
            return False
        try:
            listener = listening.bind_one_of(self._host, self._port, found, None)
        except HoldfastError as error:
            console.warning(str(error))
            return False
        if listener is None:
            return False
        console.info(f"no coordinator at {self.where} any more: this node coordinates from now on")
        try:
            state = self._open_state()
        except UsageError as error:
            console.warning(f"{error}; coordinating without it")
            state = None
        self._serve(listener, state, follows_another=True)
        return True

    async def _end(self, drain_s: float) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._driver is not None:
            await self._driver.close()
        if self._server is None:
            return
        await self._server.drain(drain_s)
        others = self._server.nodes_besides(self.run_id)
        if others:
            console.notice(
                f"the coordinator at {self.where} ends with this agent; {others} "
                f"node{'s' * (others != 1)} of other jobs {'is' if others == 1 else 'are'} "
                "connected: run `holdfast coordinator` for endpoints that several jobs share"
            )
        await self._server.stop()


def preimport_server() -> None:
    """Import what a node needs to coordinate."""
    try:
        __import__("holdfast.coordinator.server")
        __import__("holdfast.coordinator.state_file")
    except Exception as problem:  # noqa: BLE001 (nothing has failed yet)
        console.warning(
            f"this node cannot take over from a coordinator: {console.describe(problem)}"
        )


_warned = threading.Event()


def warn_if_open(
    listener: socket.socket, token: bytes | None, tls: TlsFiles | TlsToken | None, host: str
) -> None:
    """Warn, once, that everybody who can reach a coordinator may take part."""
    address, port = listener.getsockname()[:2]
    if token is not None or addresses.is_loopback(str(address)) or _warned.is_set():
        return
    if tls is not None and tls.ca is not None:
        return  # It requires a certificate.
    _warned.set()
    console.warning(
        f"the coordinator at {format_endpoint(host, port)} asks for no token (auth=none): anybody "
        "who reaches the port can join or disturb the job"
    )
