"""One node's session with its coordinator.

It keeps a connection, repeats what the coordinator may not have received, delivers what is new,
and gives up when the coordinator has been away for too long. It decides nothing about workers:
what a node does about a view is for `core.coordinated_supervision`.

::

    DOWN ── retry is due: Connect ──► CONNECTING ── Connected: Send(status) ──► UP
     ▲                                    │ Disconnected                        │ Disconnected,
     └────────────────────────────────────┴─────────────────────────────────────┘ silence

Use: perform the effects of each `handle` in order; call it with `TICK` at `next_deadline`. While
the connection is down nothing is queued: when it is up again the newest status has everything.
Times are by the node's own clock, and only time it was awake for counts against the coordinator.

A heartbeat means that the node's workers are supervised. Whoever drives the session watches the
loop that does so (`core.liveness.LoopWatch`); while that is stuck the node says so and is mute.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from holdfast.core.job_settings import JobSettings
from holdfast.core.liveness import AttendedClock, StopDeadline
from holdfast.core.machine import Effect, Event, InvalidEvent, Story, Tick
from holdfast.core.protocol import (
    Ack,
    Failure,
    Heartbeat,
    NodeInfo,
    NodePhase,
    NodeRole,
    Request,
    Status,
    View,
    echo,
)

if TYPE_CHECKING:
    from collections.abc import Callable


RETRY_FIRST_S = 0.02
RETRY_MAX_S = 1.0
"""With the time a connection attempt may take less than `rounds.RECOVER_S_MAX`, or nodes of a
running round would come back too late for a new coordinator to carry it on."""
HEARTBEAT_S_PER_NODE = 0.0002
"""A coordinator's work for one heartbeat, several times over: in jobs of more than some thousand
nodes each sends fewer, but no fewer than it must to be heard in time."""
HEARTBEATS_PER_SILENCE_MIN = 2.5
CLOSED_AWAY_S = 5.0  # Once the job is over, nobody waits long for a coordinator that left.


class ConnectionState(Enum):
    """The connection to the coordinator."""

    DOWN = "down"
    CONNECTING = "connecting"
    UP = "up"


class SessionTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long a node waits for what."""

    heartbeat_s: float = 1.0
    """A heartbeat this often; raising it makes lost nodes and coordinators be noticed later."""
    silence_s: float = 5.0
    """An open connection that was silent for so long is closed; the coordinator does likewise."""
    away_s: float = 60.0
    """A coordinator that was there is waited for so long; workers go on meanwhile."""
    first_contact_s: float = 600.0
    """A coordinator that was never there is waited for so long."""
    needs_answers: bool = False
    """Whether workers are stopped before others may take their place, if the node is cut off."""


# Events; a `View` and an `Ack` of the coordinator are events too.


class Connected(Event):
    """The connection asked for is there, and both sides have proven what they must."""

    heard_at: float | None = None
    """When that was sent which the other side last heard of the node, if it was before; 0 if
    nobody may have heard of it."""
    place: int = 0
    """Which of several endpoints it is, in their order."""


class Disconnected(Event):
    """The connection is gone, or could not be opened."""

    why: str
    permanent: bool = False
    """Something is refused, and will be each time: a connection that opens proves nothing."""


class StatusChanged(Event):
    """The node has something new to report of itself."""

    phase: NodePhase
    generation: int
    failure: Failure | None = None
    report: bytes = b""
    clear: int = -1
    """As in `Status`."""


class Rejoined(Event):
    """The node begins anew as this incarnation, after it was fenced."""

    incarnation: int


class PortsChanged(Event):
    """The node holds other ports for the workers' store; the next status says so."""

    ports: tuple[int, ...]


class RequestMade(Event):
    """Somebody asks something of the job through this node."""

    request: Request


class LoopStuck(Event):
    """The loop that supervises the workers has not turned for too long."""

    why: str


class LoopResumed(Event):
    """The loop that was stuck turns again."""


SessionEvent = (
    Tick
    | Connected
    | Disconnected
    | StatusChanged
    | Rejoined
    | PortsChanged
    | RequestMade
    | LoopStuck
    | LoopResumed
    | View
    | Ack
)

# Effects.


class Connect(Effect):
    """Connect; the outcome is `Connected` or `Disconnected`."""


class Disconnect(Effect):
    """Close the connection; it brings no event of its own."""

    why: str


class Send(Effect):
    """Send this over the connection."""

    message: Status | Heartbeat


class DeliverView(Effect):
    """Give the node's newest view to whoever runs its workers."""

    view: View


class GiveUp(Effect):
    """The coordinator stayed away past the limit."""

    away_s: float
    why: str


SessionEffect = Connect | Disconnect | Send | DeliverView | GiveUp


class Session:
    """The machine of one node; `draw` returns random numbers from 0 to 1, to spread retries."""

    def __init__(
        self,
        now: float,
        *,
        run_id: str,
        info: NodeInfo,
        settings: JobSettings,
        timeouts: SessionTimeouts,
        draw: Callable[[], float],
    ) -> None:
        self.connection = ConnectionState.DOWN
        self.view: View | None = None
        self.acked_seq = -1
        """The newest status that the coordinator is known to have."""
        self.last_problem = ""
        self.had_contact = False
        self.had_view = False
        self.place = 0
        """The last place at which it was connected: it goes back to none before that."""
        self.is_refused = False
        """Whether the other side accepts connections and soon refuses to go on, every time."""
        self.story = Story("session", node=info.node)
        self._status = Status(seq=0, run_id=run_id, info=info, settings=settings)
        self._timeouts = timeouts
        self._draw = draw
        self._clock = AttendedClock(now, max(timeouts.heartbeat_s, timeouts.silence_s / 5))
        self._heartbeat_s = min(timeouts.heartbeat_s, timeouts.away_s / HEARTBEATS_PER_SILENCE_MIN)
        self._received_at = 0.0  # This and the next five by the attended clock.
        self._opened_at = 0.0
        self._away_since: float | None = None  # Until there is a view again, not just a connection.
        self._heartbeat_at = 0.0
        self._sent_at = 0.0
        self._failed_at = 0.0  # When the ages in the failure it reports were true.
        self._retry_at = 0.0
        self._retries = 0
        self._term = self._revision = 0
        self._given_up = False
        self._stop = StopDeadline(needs_answers=timeouts.needs_answers)
        self._now = now
        self._heard_at = now  # Nothing sent before has reached this connection's other side.

    @property
    def stop_at(self) -> float | None:
        """When the workers must be gone, unless it is put off; None before there is a view."""
        view = self.view
        if view is None:
            return None
        return self._stop.at(view.silence_s or self._timeouts.silence_s)

    def silence(self, now: float) -> tuple[float, float]:
        """Return how long nothing was heard, and how much longer that is borne; any thread may ask."""
        silent_s = self._clock.peek(now) - self._received_at
        return silent_s, 0.0 if self._given_up else max(0.0, self._limit_s() - silent_s)

    def is_late(self, now: float) -> bool:
        """Whether at least two responses are missing; any thread may call."""
        return self.silence(now)[0] >= self._timeouts.silence_s / 2

    @property
    def status(self) -> Status:
        """What the node last reported of itself."""
        return self._status

    def handle(self, now: float, event: SessionEvent, cause: str = "") -> list[SessionEffect]:
        at = self._clock.look(now)
        state = self.connection
        self._now = now
        if isinstance(event, (Tick, Ack)):  # Nearly all events are.
            effects = self._tick(at) if isinstance(event, Tick) else self._acked(at, event)
            if effects and not _is_heartbeat(effects[0]):
                self.story.record(now, state, event, effects, cause)
            return effects
        match event:
            case View():
                effects = self._viewed(at, event)
                cause = cause or event.id
            case StatusChanged(phase, generation, failure, report, clear):
                # Whoever reports turns, even if nobody has noticed yet.
                self._restate(
                    phase=phase,
                    generation=generation,
                    failure=failure,
                    report=report,
                    clear=clear,
                    stuck="",
                )
                self._failed_at = at
                effects = self._send(at)
            case Connected():
                self.connection = ConnectionState.UP
                self.place = max(self.place, event.place)
                self._opened_at = self._heartbeat_at = at
                self._heard_at = now if event.heard_at is None else event.heard_at
                if not self.is_refused:
                    self._retries = 0
                away_s = 0.0 if self._away_since is None else at - self._away_since
                self._restate(away_s=away_s)
                effects = self._send(at)
            case Disconnected(why, permanent):
                self.is_refused = self.is_refused or (
                    permanent and self.connection is ConnectionState.UP
                )
                effects = self._closed(at, why)
            case Rejoined(incarnation):
                info = msgspec.structs.replace(self._status.info, incarnation=incarnation)
                self.view = None
                self.acked_seq = -1
                # Whoever fenced it knows the job, and whether the node is drained.
                self._restate(
                    info=info,
                    phase=NodePhase.READY,
                    failure=None,
                    report=b"",
                    stuck="",
                    drained=False,
                )
                effects = self._send(at)
            case PortsChanged(ports):
                info = msgspec.structs.replace(self._status.info, ports=ports)
                self._restate(info=info)
                effects = []
            case RequestMade(request):
                if self.view is None or not self.view.answers(request):
                    self._restate(request=request)
                    effects = self._send(at)
                else:
                    effects = []  # The answer is there already.
            case LoopStuck(why):
                self._stop.expire(now)
                self._restate(stuck=why)
                effects = self._send(at)
            case LoopResumed():
                self._restate(stuck="")
                effects = self._send(at)
            case _:
                raise InvalidEvent(f"{event!r} is not an event of a session")
        self.story.record(now, state, event, effects, cause)
        return effects

    def next_deadline(self, now: float) -> float:
        at = self._clock.look(now)
        rest = (
            self._received_at + self._limit_s() - at if self._may_give_up() else self._clock.step_s
        )
        if self.connection is ConnectionState.UP and not self._is_mute():
            rest = min(rest, self._heartbeat_at + self._heartbeat_s - at)
        elif self.connection is ConnectionState.DOWN:
            rest = min(rest, self._retry_at - at)
        return now + max(0.0, min(rest, self._clock.step_s))

    # Messages of the coordinator.

    def _viewed(self, at: float, view: View) -> list[SessionEffect]:
        self._received(at)
        self._answered(self._heard_at)
        if view.incarnation != self._status.info.incarnation:
            return []
        if (view.term, view.revision) <= (self._term, self._revision):
            return []
        self._term, self._revision = view.term, view.revision
        self.view = view
        self.had_view = True
        self._heartbeat_s = self._pace(view)
        self._away_since = None
        self._status = echo(self._status, view)
        effects: list[SessionEffect] = [DeliverView(view)]
        if view.role is NodeRole.CLOSED and not view.final and self._status.report:
            effects += self._send(at)  # A coordinator that is gone may have got it.
        return effects

    def _acked(self, at: float, ack: Ack) -> list[SessionEffect]:
        self._received(at)
        self._answered(ack.sent_at)
        if ack.incarnation != self._status.info.incarnation:
            return []
        self.acked_seq = max(self.acked_seq, ack.seq)
        called = ack.call != 0 and ack.call != self._status.call
        if called:
            self._restate(call=ack.call)
        if ack.seq < self._status.seq and at - self._sent_at >= self._timeouts.heartbeat_s / 2:
            # The same again, unless it has changed: it may still be on its way.
            return self._send(at, anew=called)
        if called and self.connection is ConnectionState.UP and not self._is_mute():
            self._heartbeat_at = at
            return [Send(self._heartbeat())]
        return []

    def _answered(self, sent_at: float) -> None:
        if sent_at and not self._status.stuck:
            self._stop.answered(self._now, sent_at)

    def _received(self, at: float) -> None:
        self.had_contact = True
        if self.is_refused:
            # The next refusal may be on its way: until then this proves nothing.
            if at - self._opened_at < self._timeouts.silence_s / 2:
                return
            self.is_refused = False
            self._retries = 0
        self._received_at = at

    def _pace(self, view: View) -> float:
        # The coordinator may be configured to give up on silent nodes sooner than this node would,
        # and this node to give up on the coordinator sooner than on a silent connection.
        timeouts = self._timeouts
        silence_s = min(timeouts.silence_s, view.silence_s or timeouts.silence_s, timeouts.away_s)
        wanted = max(timeouts.heartbeat_s, HEARTBEAT_S_PER_NODE * view.present)
        return min(wanted, silence_s / HEARTBEATS_PER_SILENCE_MIN)

    def _closed(self, at: float, why: str) -> list[SessionEffect]:
        self.connection = ConnectionState.DOWN
        if self._away_since is None and self.had_contact:
            self._away_since = at
        self.last_problem = why
        wait = min(RETRY_MAX_S, RETRY_FIRST_S * 2 ** min(self._retries, 20))
        self._retries += 1
        self._retry_at = at + wait * (0.5 + self._draw() / 2)
        return self._tick(at)

    # Deadlines.

    def _tick(self, at: float) -> list[SessionEffect]:
        timeouts = self._timeouts
        effects: list[SessionEffect] = []
        if not self._status.stuck:
            self._stop.awake(self._now)
        # A connection may open and stay silent, to something else that listens there.
        if (
            self.connection is ConnectionState.UP
            and at - max(self._received_at, self._opened_at) >= timeouts.silence_s
        ):
            why = f"no answer for {timeouts.silence_s:g} s"
            return [Disconnect(why), *self._closed(at, why)]
        if self._may_give_up() and at - self._received_at >= self._limit_s():
            self._given_up = True
            is_mute = self.connection is ConnectionState.UP
            why = f"no answer for {self._limit_s():g} s" if is_mute else self.last_problem
            effects.append(GiveUp(at - self._received_at, why))
        if self.connection is ConnectionState.DOWN and at >= self._retry_at:
            self.connection = ConnectionState.CONNECTING
            return [*effects, Connect()]
        is_due = at - self._heartbeat_at >= self._heartbeat_s
        if is_due and self.connection is ConnectionState.UP and not self._is_mute():
            self._heartbeat_at = at
            return [*effects, Send(self._heartbeat())]
        return effects

    def _is_mute(self) -> bool:
        """Whether heartbeats would say more than is true: the job still counts on this node."""
        fenced = self.view is not None and self.view.role is NodeRole.FENCED
        return bool(self._status.stuck) and not fenced

    def _may_give_up(self) -> bool:
        # A connection that opened after refusals is given its time to prove itself.
        return not (self._given_up or (self.is_refused and self.connection is ConnectionState.UP))

    def _limit_s(self) -> float:
        if self.view is not None and self.view.role is NodeRole.CLOSED:
            return CLOSED_AWAY_S
        return self._timeouts.away_s if self.had_contact else self._timeouts.first_contact_s

    # What is sent.

    def _restate(self, **changes: object) -> None:
        self._status = msgspec.structs.replace(self._status, **changes)

    def _send(self, at: float, *, anew: bool = True) -> list[SessionEffect]:
        """Send the status; one with a report, which may take long, after the same without it."""
        has_report = bool(self._status.report)
        if anew:
            self._restate(seq=self._status.seq + 1 + has_report)
        if self._status.failure is not None and at > self._failed_at:
            self._restate(failure=older(self._status.failure, at - self._failed_at))
            self._failed_at = at
        if self.connection is not ConnectionState.UP:
            return []
        self._sent_at = at
        status = self._status
        if not has_report:
            return [Send(status)]
        short = msgspec.structs.replace(status, seq=status.seq - 1, report=b"")
        return [Send(short), Send(status)]

    def _heartbeat(self) -> Heartbeat:
        status = self._status
        return Heartbeat(
            run_id=status.run_id,
            node=status.info.node,
            incarnation=status.info.incarnation,
            seq=status.seq,
            term=self._term,
            revision=self._revision,
            call=status.call,
            sent_at=self._now,
        )


def older(failure: Failure, by_s: float) -> Failure:
    """Return a failure as it is told a while later."""
    spoke_ago_s = failure.spoke_ago_s + by_s if failure.spoke_ago_s else 0.0
    return msgspec.structs.replace(
        failure, ended_ago_s=failure.ended_ago_s + by_s, spoke_ago_s=spoke_ago_s
    )


def _is_heartbeat(effect: SessionEffect) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, Heartbeat)
