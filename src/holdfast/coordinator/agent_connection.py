"""One node's side of a connection: performs what `core.session` asks for.

The machine says when to connect, what to send and when to give up; this owns the link and the one
timer. It takes no thread, so a loop can run thousands of nodes. Whoever uses it gets told through
callbacks, which must not block:

- `on_view` for each newer view;
- `on_gave_up` when the coordinator stayed away past the limit (it is still tried after that);
- `on_away` when a coordinator that was there stays away for a moment, and `on_back`;
- `on_refused` when trying again cannot help, as with a wrong token; then nothing more is tried. A
  node that was in touch before is not turned away like that: another program may have the port
  for a moment, and the limit for an absent coordinator applies.
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
from holdfast.coordinator.connect import ConnectFailed, CoordinatorConnector
from holdfast.coordinator.kv import DEFAULT_TIMEOUT_S, KeyValueStore, StoreCalls
from holdfast.coordinator.server import CoordinatorServer
from holdfast.core.protocol import (
    Ack,
    Failure,
    Heartbeat,
    JobSettings,
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
    Effect,
    Event,
    GiveUp,
    Rejoined,
    Send,
    Session,
    SessionTimeouts,
    StatusChanged,
    Tick,
)
from holdfast.errors import HoldfastError, UsageError
from holdfast.net import addresses, listening
from holdfast.net.loop_thread import LoopThread
from holdfast.wire.errors import BadMessage
from holdfast.wire.limits import NAME_CHARS_MAX, REPORT_BYTES_MAX, SUMMARY_CHARS_MAX, clip
from holdfast.wire.messages import StoreResult, check

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Coroutine

    from holdfast.core.protocol import JobSettings, NodeInfo
    from holdfast.core.session import SessionTimeouts
    from holdfast.net.addresses import Address
    from holdfast.net.tls import TlsFiles
    from holdfast.store.interface import RoundStore
    from holdfast.wire.messages import Message, StoreCall


CLOSE_S = 1.0  # For what is still to be sent at the end.
AWAY_TOLD_S = 1.0  # Shorter absences are nobody's concern.


class CoordinatorLost(msgspec.Struct, frozen=True):
    """The coordinator was away for too long, or this side of it is broken."""

    why: str
    """The last problem. Whoever tells the person adds the endpoint, here and in `JoinRefused`."""
    away_s: float = 0.0


class JoinRefused(msgspec.Struct, frozen=True):
    """The coordinator does not want this node, or is none; trying again does not help."""

    why: str


class Connection(Protocol):
    """A link, to a coordinator or to what stands for one; `dialing.Link` says what is what."""

    ended: asyncio.Future[None]
    on_message: Callable[[Any], None] | None
    on_closed: Callable[[str], None] | None
    problem: ConnectFailed | None

    def say(self, message: Status | Heartbeat) -> None:
        """Carry what the node says."""

    def send(self, frame: bytes) -> None:
        """Carry a frame of the coordinator's store."""

    def close(self, why: str) -> None:
        """End once everything is said."""

    def drop(self) -> object:
        """End now."""


class Connector(Protocol):
    """Opens links."""

    async def dial(self) -> Connection:
        """Return a link, or raise `ConnectFailed`."""


class SessionDriver:
    """Keeps one node in touch with its coordinator, from `start` until `close`."""

    def __init__(
        self,
        membership: Session,
        dialer: Connector,
        *,
        on_view: Callable[[View], None],
        on_gave_up: Callable[[CoordinatorLost], None],
        on_refused: Callable[[JoinRefused], None],
        on_away: Callable[[str], None] | None = None,
        on_back: Callable[[], None] | None = None,
        doubt: Callable[[], str] = str,
    ) -> None:
        self.membership = membership
        self.store = StoreCalls(self.send)
        self.down_since: float | None = None
        """When the link was lost, or first tried; None while it is up."""
        self.refused = ""
        self._loop = asyncio.get_running_loop()
        self._dialer = dialer
        self._on_view = on_view
        self._on_gave_up = on_gave_up
        self._on_refused = on_refused
        self._on_away, self._on_back = on_away, on_back
        self._doubt = doubt  # What seems wrong with the attempt to connect that is under way.
        self._away: asyncio.TimerHandle | None = None
        self._told_away = False
        self._link: Connection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._closed = False

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to hear: the job's end is known."""
        view = self.membership.view
        return view is not None and view.role is NodeRole.CLOSED and view.final

    @property
    def last_problem(self) -> str:
        """Why there is no link, as far as is known by now; any thread may ask."""
        return self._doubt() or self.membership.last_problem

    def start(self) -> None:
        """Connect."""
        self.down_since = self._loop.time()
        self._handle(Tick())

    def say(
        self,
        phase: NodePhase,
        generation: int,
        failure: Failure | None = None,
        report: bytes = b"",
    ) -> None:
        """Tell the coordinator what the node does now."""
        if failure is not None:
            failure = _sendable_failure(failure)
        self._handle(StatusChanged(phase, generation, failure, report[:REPORT_BYTES_MAX]))

    def rejoin(self, incarnation: int) -> None:
        """Begin anew after the node was fenced."""
        self._handle(Rejoined(incarnation))

    async def leave(self, limit_s: float) -> bool:
        """Say that the node goes; return whether the coordinator is known to have heard it."""
        membership = self.membership
        self.say(NodePhase.LEAVING, membership.status.generation)
        seq = membership.status.seq
        try:
            async with asyncio.timeout(limit_s):
                while not self._closed and membership.link is ConnectionState.UP:
                    view = membership.view
                    if membership.heard_seq >= seq:
                        return True
                    if view is not None and view.role in (
                        NodeRole.FENCED,
                        NodeRole.REFUSED,
                        NodeRole.CLOSED,
                    ):
                        return True  # It is out of the job already.
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pass
        return False

    async def close(self) -> None:
        """Close the link and stop; what was said before is still sent."""
        self._closed = True
        for timer in (self._timer, self._away):
            if timer is not None:
                timer.cancel()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        link, self._link = self._link, None
        if link is not None:
            link.close("the node is done")
            await asyncio.wait([link.ended], timeout=CLOSE_S)
            link.drop()
        self.store.fail("the node's connection was closed")
        self._news.set()

    def send(self, frame: bytes) -> bool:
        """Send a frame if the link is up; return whether it is."""
        if self._link is None:
            return False
        self._link.send(frame)
        return True

    # The machine.

    def _handle(self, event: Event) -> None:
        if self._closed:
            return
        for effect in self.membership.handle(self._loop.time(), event):
            self._perform(effect)
        if not self._closed:
            self._schedule()

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send(message):
                if self._link is not None:
                    self._link.say(message)
            case DeliverView(view):
                self._on_view(view)
            case Connect():
                self._opening = self._loop.create_task(self._open())
            case Disconnect(_):
                self._lose_link()
            case GiveUp(away_s, why):
                self._on_gave_up(CoordinatorLost(self._doubt() or why, away_s))

    def _schedule(self) -> None:
        at = self.membership.next_deadline(self._loop.time())
        # A timer that comes too early does no harm and costs less than a new one every time.
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._handle(Tick())

    # The link.

    async def _open(self) -> None:
        try:
            link = await self._dialer.dial()
        except ConnectFailed as problem:
            self._opening = None
            self._failed(problem)
            return
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 (a bug here must not silence the node)
            self._opening = None
            self._failed(ConnectFailed(f"{type(error).__name__}: {error}"))
            return
        self._opening = None
        if self._closed:
            link.drop()
            return
        link.on_message = self._received
        link.on_closed = self._link_closed
        self._link = link
        self.down_since = None
        if not self.membership.is_refused:
            self._is_back()
        self._handle(Connected())
        self.store.link_up()

    def _failed(self, problem: ConnectFailed) -> None:
        if problem.permanent and not self.membership.ever_up:
            self._refuse(problem.why)
        else:
            self._handle(Disconnected(problem.why, problem.permanent))

    def _link_closed(self, why: str) -> None:
        problem = self._link.problem if self._link is not None else None
        permanent = problem is not None and problem.permanent
        self._lose_link()
        # That a link was up says little where a node itself may have to lead, as on etcd.
        if permanent and not self.membership.ever_told:
            self._refuse(why)
        else:
            self._handle(Disconnected(why, permanent))

    def _refuse(self, why: str) -> None:
        self.refused = why
        self._closed = True
        self.store.fail(why)
        self._on_refused(JoinRefused(why))

    def _lose_link(self) -> None:
        link, self._link = self._link, None
        self.down_since = self._loop.time()
        if self._on_away is not None and self._away is None and self.membership.ever_up:
            self._away = self._loop.call_later(AWAY_TOLD_S, self._stays_away, self._on_away)
        if link is not None:
            link.drop()
        self.store.link_down()
        self._news.set()

    def _stays_away(self, tell: Callable[[str], None]) -> None:
        if not self._closed and not self.is_over:
            self._told_away = True
            tell(self.membership.last_problem)

    def _is_back(self) -> None:
        if self._away is not None:
            self._away.cancel()
            self._away = None
        if self._told_away and self._on_back is not None:
            self._told_away = False
            self._on_back()

    def _received(self, message: Message) -> None:
        kind = type(message)
        if kind is View or kind is Ack:
            # What the coordinator says never brings a deadline nearer than the timer that runs.
            effects = self.membership.handle(self._loop.time(), message)  # type: ignore[arg-type]
            for effect in effects:
                self._perform(effect)
            if self._away is not None and not self.membership.is_refused:
                self._is_back()
            self._news.set()
        elif kind is StoreResult:
            self.store.answered(message)  # type: ignore[arg-type]


def _sendable_failure(failure: Failure) -> Failure:
    """Return a failure that the other side takes, however long or odd the worker's words are."""
    return msgspec.structs.replace(
        failure,
        summary=clip(failure.summary, SUMMARY_CHARS_MAX),
        host=_printable(clip(failure.host, NAME_CHARS_MAX)),
    )


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in text)


# What an agent has still to hear, put down by one thread and taken by another: `Mailbox`.
#
# Of views only the newest is kept, since a view says all there is to know; of faults the first
# few,
# which say most. `fileno()` is readable while there is something to `take`, from `open` to
# `close`.
#
# It does not judge what is put into it: whether a view is for this incarnation, its owner knows.
# It
# never calls out, so an owner may hold a lock of its own around any call.


FAULTS_MAX = 16  # Besides the newest view.

News = View | CoordinatorLost | JoinRefused


class Mailbox:
    """The newest view, the first faults, and a descriptor that tells of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._view: View | None = None
        self._faults: list[CoordinatorLost | JoinRefused] = []
        self._wakes = -1

    def open(self) -> None:
        """Get the descriptor."""
        self._wakes = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def close(self) -> None:
        """Release the descriptor; may be called more than once, and without `open`."""
        with self._lock:
            if self._wakes >= 0:
                os.close(self._wakes)
                self._wakes = -1

    def fileno(self) -> int:
        """Return the descriptor, or -1 while there is none."""
        return self._wakes

    def put_view(self, view: View) -> None:
        """Put a view in the place of the one before."""
        with self._lock:
            self._view = view
            self._wake()

    def put_fault(self, fault: CoordinatorLost | JoinRefused) -> None:
        """Add a fault, if there are not too many."""
        with self._lock:
            if len(self._faults) < FAULTS_MAX:
                self._faults.append(fault)
                self._wake()

    def forget_view(self) -> None:
        """Throw away a view that was not taken."""
        with self._lock:
            self._view = None

    def take(self) -> list[News]:
        """Return what was put here since the last call."""
        with self._lock:
            if self._wakes >= 0:
                try:
                    os.eventfd_read(self._wakes)
                except BlockingIOError:
                    pass
            taken: list[News] = [self._view] if self._view is not None else []
            taken += self._faults
            self._view = None
            self._faults = []
            return taken

    def _wake(self) -> None:
        if self._wakes >= 0:
            os.eventfd_write(self._wakes, 1)


# What an agent holds of its node's connection, wherever the job is decided about:
# `AgentConnection`.
#
# One daemon thread runs the client that keeps the node in touch (`coordinator.agent_connection`),
# whatever the
# agent does. The agent says what its node does (`say`) and hears what is new: `fileno()` is
# readable
# while there is something to `take`. Several views that came meanwhile are one, the newest; a view
# says all there is to know.
#
# Whatever goes wrong in the thread and was not expected comes out of `take` as a
# `CoordinatorLost`.


INCARNATION_BITS = 63
START_S = 10.0
DRAIN_S = 5.0
"""How long a coordinator whose job is over waits for nodes to hear of it."""
_CLOSE_SLACK_S = 5.0
REMIND_S = 60.0
"""How often an agent that was never told anything says why. Whoever looks at a job that does not
begin finds the reason near the end of its output; oftener would only fill logs."""


def draw_incarnation() -> int:
    """Return a number that no other agent has drawn."""
    return secrets.randbits(INCARNATION_BITS)


class AgentConnection:
    """One node's connection, from `start` until `close`; subclasses say to what."""

    decider = "the coordinator"
    """What decides about the job, as a person calls it."""

    def __init__(
        self, *, run_id: str, info: NodeInfo, settings: JobSettings, times: SessionTimeouts
    ) -> None:
        self.run_id = run_id
        self.hosting = False
        """Whether all other nodes depend on this process."""
        self.view: View | None = None
        self._info, self._settings, self._times = info, settings, times
        self._incarnation = info.incarnation
        self._lock = threading.Lock()  # For the incarnation and its view.
        self._box = Mailbox()
        self._thread: LoopThread | None = None
        self._client: SessionDriver | None = None
        self._closed = False
        self._ending = False

    @property
    def where(self) -> str:
        """The endpoint as a person writes it."""
        raise NotImplementedError

    def store(self, scope: str) -> RoundStore:
        """Return the store of this job's nodes; scopes know nothing of each other's keys."""
        raise NotImplementedError

    # From start to end.

    def _launch(self, begin: Coroutine[Any, Any, None]) -> None:
        """Start the thread and let it begin."""
        self._box.open()
        self._thread = LoopThread("holdfast-coordinator", self._broken)
        try:
            self._thread.start()
            self._thread.ask(begin, START_S)
        except BaseException:
            self.close()
            raise

    def leave(self, limit_s: float) -> bool:
        """Say that this node goes; return whether that is known to have been heard.

        Waits for that no longer than `limit_s`, and not at all while there is no link.
        """
        self._ending = True
        if self._client is None or self._thread is None or not self._thread.runs:
            return False
        try:
            return self._thread.ask(self._client.leave(limit_s), limit_s + _CLOSE_SLACK_S)
        except (TimeoutError, RuntimeError):
            return False

    def close(self, drain_s: float = DRAIN_S) -> None:
        """Close the connection and end the thread; may be called more than once.

        A process that others depend on lets them hear of the job's end first, for `drain_s` at
        most.
        """
        if self._closed:
            return
        self._closed = self._ending = True
        try:
            if self._thread is not None:
                self._thread.ask(self._end(drain_s), drain_s + _CLOSE_SLACK_S)
        except Exception as error:  # noqa: BLE001 (an end must come to an end)
            console.debug(
                f"{self.decider} at {self.where}: the connection did not end well: {error!r}"
            )
        finally:
            if self._thread is not None:
                self._thread.stop()
            self._box.close()

    # What the agent hears and says.

    def fileno(self) -> int:
        """Return a descriptor that is readable while there is something to `take`."""
        return self._box.fileno()

    def take(self) -> list[News]:
        """Return what is new since the last call."""
        return self._box.take()

    def say(
        self,
        phase: NodePhase,
        generation: int,
        failure: Failure | None = None,
        report: bytes = b"",
    ) -> None:
        """Tell what this node does now."""
        if self._client is not None and self._thread is not None:
            self._thread.post(self._client.say, phase, generation, failure, report)

    def rejoin(self) -> int:
        """Begin anew as another incarnation, after this one was fenced; return its number."""
        with self._lock:
            self._incarnation = draw_incarnation()
            self._box.forget_view()  # It was for the one before.
            self.view = None
        if self._client is not None and self._thread is not None:
            self._thread.post(self._client.rejoin, self._incarnation)
        return self._incarnation

    def problem(self) -> str:
        """Return why there is no link and since when, or nothing."""
        client = self._client
        if client is None:
            return f"not connected to {self.decider} at {self.where}"
        if client.refused:
            return f"{self.decider.removeprefix('the ')} at {self.where}: {client.refused}"
        since = client.down_since
        if since is None:
            return ""
        why = client.last_problem or "connecting"
        away_s = time.monotonic() - since
        return f"no {self.decider.removeprefix('the ')} at {self.where} for {away_s:.1f} s: {why}"

    # In the thread.

    def _connect(
        self, now: float, dialer: Connector, doubt: Callable[[], str] = str
    ) -> SessionDriver:
        """Begin to keep the node in touch."""
        membership = Session(
            now,
            run_id=self.run_id,
            info=self._info,
            settings=self._settings,
            times=self._times,
            draw=random.random,
        )
        self._client = SessionDriver(
            membership,
            dialer,
            on_view=self._told,
            on_gave_up=self._box.put_fault,
            on_refused=self._box.put_fault,
            on_away=self._tell_away,
            on_back=lambda: console.notice(f"{self.decider} at {self.where} is back"),
            doubt=doubt,
        )
        self._client.start()
        asyncio.get_running_loop().call_later(REMIND_S, self._remind)
        return self._client

    def _remind(self) -> None:
        client = self._client
        if client is None or self._ending or client.refused or client.membership.ever_told:
            return
        problem = self.problem()
        if problem:
            console.notice(f"still waiting: {problem}")
        asyncio.get_running_loop().call_later(REMIND_S, self._remind)

    async def _end(self, drain_s: float) -> None:
        """Close what the thread holds."""
        raise NotImplementedError

    def _tell_away(self, why: str) -> None:
        if not self._ending:
            console.notice(
                f"lost {self.decider} at {self.where} ({why}); workers go on without it for up "
                f"to {self._times.away_s:g} s"
            )

    def _told(self, view: View) -> None:
        with self._lock:
            if view.incarnation == self._incarnation:
                self.view = view
                self._box.put_view(view)

    def _broken(self, what: str) -> None:
        self._box.put_fault(CoordinatorLost(f"this side of the connection is broken: {what}"))

    def _check(self) -> None:
        """Raise for values that nobody would take, before anybody is asked."""
        try:
            check(Status(seq=0, run_id=self.run_id, info=self._info, settings=self._settings))
        except BadMessage as error:
            raise UsageError(f"this node cannot join {self.run_id!r}: {error}") from None


# An agent's connection to its coordinator, for code that blocks: `CoordinatorConnection`.
#
# The thread that keeps the node in touch (`node_line`) also runs the coordinator itself, if this
# process could bind the endpoint.
#
# If the coordinator goes away and the endpoint is this machine's, the client's thread binds it and
# coordinates from then on; the other nodes connect to it, and it learns from them where the job
# was.


_warned = threading.Event()


def warn_if_open(listener: socket.socket, token: bytes | None, host: str) -> None:
    """Say, once, that everybody who can reach a coordinator may take part."""
    here = addresses.plain(str(listener.getsockname()[0]))
    if token is not None or addresses.is_loopback(here) or _warned.is_set():
        return
    _warned.set()
    where = addresses.written(host, listener.getsockname()[1])
    console.warning(
        f"the coordinator at {where} has no token: whoever reaches the port can join or disturb "
        "the job (set HOLDFAST_TOKEN or HOLDFAST_TOKEN_FILE to the same on all nodes)"
    )


class CoordinatorConnection(AgentConnection):
    """One node's connection, from `start` until `close`."""

    def __init__(
        self,
        endpoint_host: str,
        endpoint_port: int,
        *,
        run_id: str,
        info: NodeInfo,
        settings: JobSettings,
        times: SessionTimeouts,
        is_host: bool | None,
        token: bytes | None,
        tls: TlsFiles | None,
        reconnect_grace_s: float = 0.2,
    ) -> None:
        super().__init__(run_id=run_id, info=info, settings=settings, times=times)
        self._host, self._port = endpoint_host, endpoint_port
        self._is_host, self._token, self._tls = is_host, token, tls
        self._grace_s = reconnect_grace_s
        self._server_tls: ssl.SSLContext | None = None
        self._client_tls: ssl.SSLContext | None = None
        self._server: CoordinatorServer | None = None

    # From start to end.

    def start(self) -> None:
        """Bind the endpoint if that is this process's matter, and connect.

        Raises `UsageError` or `EnvironmentProblem` for what cannot work; a coordinator that is not
        there (yet) is no such thing.
        """
        self._check()
        if self._tls is not None:
            self._client_tls = self._tls.for_client()
            if self._tls.can_serve or self._is_host:
                self._server_tls = self._tls.for_server()
        listener = None
        if self._may_host:
            listener = listening.try_bind(self._host, self._port, self._is_host)
        if listener is not None:
            self._port = listener.getsockname()[1]
        elif self._port == 0:
            where = addresses.written(self._host, 0)
            raise UsageError(
                f"{where} is no endpoint to connect to: only the node that coordinates can choose "
                "any free port",
                hint="give the port that it reports",
            )
        try:
            self._launch(self._begin(listener))
        except BaseException:
            if listener is not None:
                listener.close()
            raise

    # Where it is.

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the coordinator; the port that was really bound, if it is here."""
        return self._host, self._port

    @property
    def where(self) -> str:
        """The endpoint as a person writes it."""
        return addresses.written(self._host, self._port)

    # The job's store.

    def store(self, scope: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> KeyValueStore:
        """Return the store of this job's nodes; scopes know nothing of each other's keys."""
        return KeyValueStore(self, scope, timeout_s)

    def begin_call(self, call: StoreCall) -> Future[StoreResult]:
        """Send a call to the store."""
        answer: Future[StoreResult] = Future()
        client, thread = self._client, self._thread
        if client is None or thread is None or not thread.post(client.store.begin, call, answer):
            answer.set_exception(ConnectionError("the connection is closed"))
        return answer

    def forget_call(self, answer: Future[StoreResult]) -> None:
        """Stop waiting for an answer of the store."""
        if self._client is not None and self._thread is not None:
            self._thread.post(self._client.store.forget, answer)

    # In the thread.

    async def _begin(self, listener: socket.socket | None) -> None:
        loop = asyncio.get_running_loop()
        if listener is not None:
            self._serve(listener)
        dialer = CoordinatorConnector(
            self._host,
            self._port,
            token=self._token,
            tls=self._client_tls,
            server_name=self._tls.server_name if self._tls is not None else None,
            when_refused=self._take_over if self._may_host else None,
        )
        self._connect(loop.time(), dialer, lambda: dialer.doubt)

    def _serve(self, listener: socket.socket, *, follows_another: bool = False) -> None:
        warn_if_open(listener, self._token, self._host)
        self._server = CoordinatorServer(
            listener,
            silence_s=self._times.silence_s,
            grace_s=self._grace_s,
            token=self._token,
            tls=self._server_tls,
            follows_another=follows_another,
        )
        self.hosting = True

    def _take_over(self, found: list[Address]) -> bool:
        """Coordinate from now on, if the endpoint is this machine's and nobody was quicker."""
        client = self._client
        if self._ending or self._server is not None or (client is not None and client.is_over):
            return False
        try:
            listener = listening.bind_one_of(self._host, self._port, found, None)
        except HoldfastError as error:
            console.warning(str(error))
            return False
        if listener is None:
            return False
        console.info(f"nobody coordinates at {self.where} any more: this node does from now on")
        self._serve(listener, follows_another=True)
        return True

    async def _end(self, drain_s: float) -> None:
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            await self._server.drain(drain_s)
            others = self._server.nodes_besides(self.run_id)
            if others:
                console.notice(
                    f"the coordinator at {self.where} ends with this agent; {others} "
                    f"node{'s' * (others != 1)} of other jobs {'is' if others == 1 else 'are'} "
                    "connected: run `holdfast coordinator` for endpoints that several jobs share"
                )
            await self._server.stop()

    # What may be.

    @property
    def _may_host(self) -> bool:
        """Whether this process may coordinate; with TLS it needs a certificate for that."""
        if self._is_host is False:
            return False
        return self._tls is None or self._tls.can_serve or bool(self._is_host)
