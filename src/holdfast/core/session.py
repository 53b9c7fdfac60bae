"""One node's session with its coordinator.

The session keeps a connection open, repeats messages that the coordinator may not have received,
delivers new views, and gives up if the coordinator has been unreachable for too long. It decides nothing
about workers: `core.supervision` acts on the views.

::

    DOWN ── retry is due: Connect ──► CONNECTING ── Connected: Send(status) ──► UP
     ▲                                    │ Disconnected                        │ Disconnected,
     └────────────────────────────────────┴─────────────────────────────────────┘ silence

Use: perform the effects of each `handle` in order; call it with `TICK` at `next_deadline`. While the
connection is down, nothing is queued: once it is up again, the newest status contains everything.
Times are by the node's own clock. Time during which the process was suspended does not count against
the coordinator.

A heartbeat means that the node supervises its workers. The driver of the session watches the agent's
loop (`core.liveness.LoopWatch`). While that loop is stuck, the node reports this and sends no heartbeats.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from holdfast.core.job_settings import JobSettings
from holdfast.core.liveness import AwakeClock, Lateness, StopDeadline
from holdfast.core.machine import Effect, Event, InvalidEvent, Story, Tick
from holdfast.core.phases import NodePhase, NodeRole
from holdfast.core.protocol import (
    UNRESERVED,
    Ack,
    Failure,
    Heartbeat,
    NodeInfo,
    Request,
    Status,
    View,
    echo,
)

if TYPE_CHECKING:
    from collections.abc import Callable


RETRY_FIRST_S = 0.02
RETRY_MAX_S = 1.0
"""This plus the duration of a connection attempt must be less than `rounds.RECOVER_S_MAX`; otherwise
nodes of a running round reconnect too late for a new coordinator to resume it."""
RETRY_SOON_S, RETRY_SOON_MAX_S = 10.0, 0.25
"""In the first seconds after a loss, nodes retry at least this often. A coordinator that restarts at once forms no round
before the settle time is over (1 s), and by then they have reconnected. In a job of thousands of nodes each retries
less often, as with heartbeats."""
HEARTBEAT_S_PER_NODE = 0.0002
"""Several times the coordinator's work for one heartbeat. In jobs of thousands of nodes each node sends
fewer heartbeats, but enough not to count as lost."""
HEARTBEATS_PER_SILENCE_MIN = 2.5
CLOSED_UNREACHABLE_S = 5.0
"""Once the job is over, agents wait only this long for their coordinator."""


class ConnectionState(Enum):
    """The connection to the coordinator."""

    DOWN = "down"
    CONNECTING = "connecting"
    UP = "up"


class SessionTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """The time limits of a node."""

    heartbeat_s: float = 1.0
    """The interval between heartbeats. Raising it delays the detection of lost nodes and coordinators."""
    silence_s: float = 5.0
    """Node and coordinator each close a connection that was silent for this long."""
    unreachable_s: float = 60.0
    """How long to wait for a coordinator after contact was lost; workers continue meanwhile."""
    first_contact_s: float = 600.0
    """How long to wait for the first contact with a coordinator."""
    needs_answers: bool = False
    """Whether a disconnected node stops its workers before they may be replaced elsewhere."""


# Events. A `View` and an `Ack` of the coordinator are events, too.


class Connected(Event):
    """The connection is open, and both sides are authenticated."""

    confirmed_at: float | None = None
    """The send time of this node's newest message that is known to be delivered; 0 if there is none;
    None if the connection is new."""
    endpoint_index: int = 0
    """The index of the endpoint in the list."""


class Disconnected(Event):
    """The connection closed, or could not be opened."""

    why: str
    permanent: bool = False
    """Whether the peer refuses the node and a retry would not help; it may still accept connections."""


class StatusChanged(Event):
    """The node's own state changed."""

    phase: NodePhase
    generation: int
    failure: Failure | None = None
    report: bytes = b""
    clear: int = -1
    """As in `Status`."""


class Rejoined(Event):
    """The node rejoins as this incarnation, after it was fenced."""

    incarnation: int
    node: str = ""
    """The node's new id, if it has one."""

    def applied_to(self, info: NodeInfo) -> NodeInfo:
        """Return a node's properties after it rejoined."""
        info = msgspec.structs.replace(info, incarnation=self.incarnation)
        if not self.node:
            return info
        return msgspec.structs.replace(info, node=self.node, reserved_on=UNRESERVED)


class PortsChanged(Event):
    """The node holds new ports for the workers' store; the next status reports them."""

    ports: tuple[int, ...]


class RequestMade(Event):
    """An operator sent a request to the job through this node."""

    request: Request


class LoopStuck(Event):
    """The loop that supervises the workers is stuck."""

    why: str


class LoopResumed(Event):
    """The stuck loop runs again."""


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
    """Close the connection; no event follows."""

    why: str


class Send(Effect):
    """Send this over the connection."""

    message: Status | Heartbeat


class DeliverView(Effect):
    """Pass the node's newest view to its supervision."""

    view: View


class GiveUp(Effect):
    """The coordinator did not respond within the limit."""

    unreachable_s: float
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
        """The newest status that the coordinator has acknowledged."""
        self.last_problem = ""
        self.had_contact = False
        self.had_view = False
        self.endpoint_index = 0
        """The index of the last endpoint to which the node connected. It never connects to an earlier one again."""
        self.is_refused = False
        """Whether the coordinator accepts connections and then always refuses the node."""
        self.story = Story("session", node=info.node)
        self._status = Status(seq=0, run_id=run_id, info=info, settings=settings)
        self._timeouts = timeouts
        self._draw = draw
        self._clock = AwakeClock(now, max(timeouts.heartbeat_s, timeouts.silence_s / 5))
        self._heartbeat_s = min(
            timeouts.heartbeat_s, timeouts.unreachable_s / HEARTBEATS_PER_SILENCE_MIN
        )
        self._received_at = 0.0  # This time and the next six are by the awake clock.
        self._opened_at = 0.0
        self._unreachable_since: float | None = None  # Cleared by a view, not by a connection.
        self._heartbeat_at = 0.0
        self._sent_at = 0.0
        self._failed_at = 0.0  # The time to which the ages in the reported failure refer.
        self._retry_at = 0.0
        self._retries = 0
        self._term = self._revision = 0
        self._given_up = False
        self._stop = StopDeadline(needs_answers=timeouts.needs_answers)
        self._lateness = Lateness(timeouts.silence_s)
        self._due = math.inf  # When the next tick is due.
        self._now = now
        self._confirmed_at = now  # Messages before this time may not have reached the peer.

    @property
    def stop_at(self) -> float | None:
        """When all workers must have exited unless the deadline is renewed; None before the first view."""
        view = self.view
        if view is None:
            return None
        return self._stop.at(view.silence_s or self._timeouts.silence_s)

    @property
    def stop_extra_s(self) -> float:
        """How much later the workers may exit if this agent is ready to run and only gets no CPU."""
        view = self.view
        return self._stop.extra_s((view and view.silence_s) or self._timeouts.silence_s)

    @property
    def patience(self) -> int:
        """For how many further silence limits this node asks others to wait, because it gets little CPU."""
        return self._lateness.patience

    def silence(self, now: float) -> tuple[float, float]:
        """Return how long the coordinator has been silent, and how long until the session gives up.

        Any thread may call this.
        """
        silent_s = self._clock.peek(now) - self._received_at
        return silent_s, 0.0 if self._given_up else max(0.0, self._limit_s() - silent_s)

    def is_late(self, now: float) -> bool:
        """Whether at least two responses are missing. Any thread may call this."""
        return self.silence(now)[0] >= self._timeouts.silence_s / 2

    @property
    def status(self) -> Status:
        """The newest status of the node."""
        return self._status

    def handle(self, now: float, event: SessionEvent, cause: str = "") -> list[SessionEffect]:
        at = self._clock.read(now)
        state = self.connection
        self._now = now
        if isinstance(event, Tick):
            self._note_lateness(now, at)
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
                # The loop that reports this is not stuck.
                self._update_status(
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
                self.endpoint_index = max(self.endpoint_index, event.endpoint_index)
                self._opened_at = self._heartbeat_at = at
                self._confirmed_at = now if event.confirmed_at is None else event.confirmed_at
                self._stop.patience = 0  # Another coordinator has not promised anything.
                if not self.is_refused:
                    self._retries = 0
                unreachable_s = (
                    0.0 if self._unreachable_since is None else at - self._unreachable_since
                )
                self._update_status(unreachable_s=unreachable_s)
                effects = self._send(at)
            case Disconnected(why, permanent):
                self.is_refused = self.is_refused or (
                    permanent and self.connection is ConnectionState.UP
                )
                effects = self._closed(at, why)
            case Rejoined(_, node):
                info = event.applied_to(self._status.info)
                self.view = None
                self.acked_seq = -1
                # The coordinator that fenced it knows whether the node is drained.
                self._update_status(
                    info=info,
                    phase=NodePhase.READY,
                    failure=None,
                    report=b"",
                    stuck="",
                    drained=False,
                )
                effects = self._reconnect(at) if node else self._send(at)
            case PortsChanged(ports):
                info = msgspec.structs.replace(self._status.info, ports=ports)
                self._update_status(info=info)
                effects = []
            case RequestMade(request):
                if self.view is None or not self.view.answers(request):
                    self._update_status(request=request)
                    effects = self._send(at)
                else:
                    effects = []  # The view already has the answer.
            case LoopStuck(why):
                self._stop.expire(now)
                self._update_status(stuck=why)
                effects = self._send(at)
            case LoopResumed():
                self._update_status(stuck="")
                effects = self._send(at)
            case _:
                raise InvalidEvent(f"{event!r} is not an event of a session")
        self.story.record(now, state, event, effects, cause)
        return effects

    def next_deadline(self, now: float) -> float:
        at = self._clock.read(now)
        rest = (
            self._received_at + self._limit_s() - at if self._may_give_up() else self._clock.step_s
        )
        if self.connection is ConnectionState.UP and not self._withholds_heartbeats():
            rest = min(rest, self._heartbeat_at + self._heartbeat_s - at)
        elif self.connection is ConnectionState.DOWN:
            rest = min(rest, self._retry_at - at)
        self._due = now + max(0.0, min(rest, self._clock.step_s))
        return self._due

    # Messages of the coordinator.

    def _viewed(self, at: float, view: View) -> list[SessionEffect]:
        self._received(at)
        self._answered(self._confirmed_at)
        if view.incarnation != self._status.info.incarnation:
            return []
        if (view.term, view.revision) <= (self._term, self._revision):
            return []
        self._term, self._revision = view.term, view.revision
        self.view = view
        self.had_view = True
        self._heartbeat_s = self._heartbeat_interval(view)
        self._unreachable_since = None
        self._status = echo(self._status, view)
        effects: list[SessionEffect] = [DeliverView(view)]
        if view.role is NodeRole.CLOSED and not view.final and self._status.report:
            effects += self._send(at)  # Perhaps only an earlier coordinator received the report.
        return effects

    def _acked(self, at: float, ack: Ack) -> list[SessionEffect]:
        self._received(at)
        # A coordinator that does not know the node (-1) may have replaced it.
        if ack.seq >= 0:
            self._answered(ack.sent_at)
        if ack.sent_at:
            self._stop.patience = min(ack.patience, self.patience)
        if ack.incarnation != self._status.info.incarnation:
            return []
        self.acked_seq = max(self.acked_seq, ack.seq)
        called = ack.call != 0 and ack.call != self._status.call
        if called:
            self._update_status(call=ack.call)
        if ack.seq < self._status.seq and at - self._sent_at >= self._timeouts.heartbeat_s / 2:
            # The first copy may still be in transit: keep its number unless the status changed.
            return self._send(at, new_seq=called)
        if called and self.connection is ConnectionState.UP and not self._withholds_heartbeats():
            self._heartbeat_at = at
            return [Send(self._heartbeat())]
        return []

    def _answered(self, sent_at: float) -> None:
        if sent_at and not self._status.stuck:
            self._stop.answered(self._now, sent_at)

    def _received(self, at: float) -> None:
        self.had_contact = True
        if self.is_refused:
            # A refusal may be in transit, so this message does not prove that the peer accepts the node.
            if at - self._opened_at < self._timeouts.silence_s / 2:
                return
            self.is_refused = False
            self._retries = 0
        self._received_at = at

    def _heartbeat_interval(self, view: View) -> float:
        # The coordinator may be configured with a shorter silence limit than this node, and this node
        # with a shorter `unreachable_s` than its silence limit.
        timeouts = self._timeouts
        silence_s = min(
            timeouts.silence_s, view.silence_s or timeouts.silence_s, timeouts.unreachable_s
        )
        wanted = max(timeouts.heartbeat_s, HEARTBEAT_S_PER_NODE * view.present)
        return min(wanted, silence_s / HEARTBEATS_PER_SILENCE_MIN)

    def _closed(self, at: float, why: str) -> list[SessionEffect]:
        self.connection = ConnectionState.DOWN
        if self._unreachable_since is None and self.had_contact:
            self._unreachable_since = at
        self.last_problem = why
        wait = min(self._retry_max_s(at), RETRY_FIRST_S * 2 ** min(self._retries, 20))
        self._retries += 1
        self._retry_at = at + wait * (0.5 + self._draw() / 2)
        return self._tick(at)

    def _retry_max_s(self, at: float) -> float:
        since = self._unreachable_since
        if since is None or at - since >= RETRY_SOON_S or self.is_refused:
            return RETRY_MAX_S
        present = self.view.present if self.view is not None else 0
        return min(RETRY_MAX_S, max(RETRY_SOON_MAX_S, HEARTBEAT_S_PER_NODE * present))

    def _reconnect(self, at: float) -> list[SessionEffect]:
        """Replace the connection: it belongs to the node's earlier id."""
        self.story.node = self._status.info.node
        if self.connection is not ConnectionState.UP:
            return []
        why = "the node has another id now"
        self._retries = 0
        return [Disconnect(why), *self._closed(at, why)]

    # Deadlines.

    def _tick(self, at: float) -> list[SessionEffect]:
        timeouts = self._timeouts
        effects: list[SessionEffect] = []
        if not self._status.stuck:
            self._stop.awake(self._now)
        # Another program may listen at the endpoint, and accept the connection without responding.
        if (
            self.connection is ConnectionState.UP
            and at - max(self._received_at, self._opened_at) >= timeouts.silence_s
        ):
            why = f"no response for {timeouts.silence_s:g} s"
            return [Disconnect(why), *self._closed(at, why)]
        if self._may_give_up() and at - self._received_at >= self._limit_s():
            self._given_up = True
            is_connected = self.connection is ConnectionState.UP
            why = f"no response for {self._limit_s():g} s" if is_connected else self.last_problem
            effects.append(GiveUp(at - self._received_at, why))
        if self.connection is ConnectionState.DOWN and at >= self._retry_at:
            self.connection = ConnectionState.CONNECTING
            return [*effects, Connect()]
        is_due = at - self._heartbeat_at >= self._heartbeat_s
        if is_due and self.connection is ConnectionState.UP and not self._withholds_heartbeats():
            self._heartbeat_at = at
            return [*effects, Send(self._heartbeat())]
        return effects

    def _note_lateness(self, now: float, at: float) -> None:
        """Ask for patience if this tick is late, and tell it at once."""
        if self._lateness.note(now, now - self._due):
            self._stop.patience = min(self._stop.patience, self.patience)
            self._heartbeat_at = min(self._heartbeat_at, at - self._heartbeat_s)
        self._due = math.inf

    def _withholds_heartbeats(self) -> bool:
        """Whether to send no heartbeats: the loop is stuck, and the node has not been fenced yet."""
        fenced = self.view is not None and self.view.role is NodeRole.FENCED
        return bool(self._status.stuck) and not fenced

    def _may_give_up(self) -> bool:
        # A connection that opened after refusals gets the whole time limit.
        return not (self._given_up or (self.is_refused and self.connection is ConnectionState.UP))

    def _limit_s(self) -> float:
        if self.view is not None and self.view.role is NodeRole.CLOSED:
            return CLOSED_UNREACHABLE_S
        return self._timeouts.unreachable_s if self.had_contact else self._timeouts.first_contact_s

    # Sending.

    def _update_status(self, **changes: object) -> None:
        self._status = msgspec.structs.replace(self._status, **changes)

    def _send(self, at: float, *, new_seq: bool = True) -> list[SessionEffect]:
        """Send the status. A report may take long to send, so first send the status without it."""
        has_report = bool(self._status.report)
        if new_seq:
            self._update_status(seq=self._status.seq + 1 + has_report)
        if self._status.failure is not None and at > self._failed_at:
            self._update_status(
                failure=with_older_times(self._status.failure, at - self._failed_at)
            )
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
            patience=self.patience,
        )


def with_older_times(failure: Failure, by_s: float) -> Failure:
    """Return a failure with its ages increased."""
    traceback_ago_s = failure.traceback_ago_s + by_s if failure.traceback_ago_s else 0.0
    return msgspec.structs.replace(
        failure, ended_ago_s=failure.ended_ago_s + by_s, traceback_ago_s=traceback_ago_s
    )


def _is_heartbeat(effect: SessionEffect) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, Heartbeat)
