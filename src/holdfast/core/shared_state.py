"""A node's session over a compare-and-set store: the nodes share the job's state without a coordinator.

Each node reads the state and applies its own observations with `core.rounds`: its statuses, the end of a
wait, another node's counter that does not increase. It writes the result with the token of the state that
it read. If several nodes write, one succeeds, and the others read again. After each read the node computes
its own view, as a coordinator would have sent it.

::

    IDLE ── a read is due, or there is a new status: ReadState ────► READING
     ▲ ▲                                                               │ StateRead
     │ └────── nothing to store: DeliverView if the view is new ◄──────┤
     │                                                                 ▼ something to store
     ├── StateWritten: DeliverView if the view is new ◄──────────── WRITING
     └── WriteConflict: read again after a random, growing pause; CallFailed: after a longer one

The rules:

1.  A status counts once it is stored; until then the node keeps it. If the node is in the job, it
    stores its statuses in order, because "succeeded" followed by "leaving" means more than "leaving"
    alone. Otherwise it stores only the newest.
2.  A live node increments a counter in the state every `interval_s`, less often in larger jobs. Each
    node measures by its own clock how long the counters of other nodes have not changed, and how long a
    wait has lasted.
3.  If two nodes apply the same event, the second has no effect: `core.rounds` ignores events that it
    has already applied.
4.  If a read returns an older state than an earlier read, as a replicated store may do, its view is
    ignored.
5.  If the job is final, or the node is not in it, the node stops reading until it has a new status. A
    node that joins just after the job failed still waits for the report.
6.  If the store fails or does not respond for `unreachable_s`, the node reports once that it gives up, but keeps
    trying. Time during which the process was suspended does not count. If the first state it reads is
    invalid, or the store does not keep the state, the node gives up immediately.
7.  If another node has the same node id, this node watches it. If the other node is lost, this node
    stores the loss; if the other node is known to be alive, this node is refused.
8.  If a live member takes longer than `absent_s` to start a generation, or to stop its earlier workers,
    the other members remove it. This applies only where agents poll for rounds and may stop polling.

Use: perform each effect of `handle` and report its outcome as one event. At most one call to the store is
under way, and it may hang. Call `handle` with `Tick` at `next_deadline`. A node joins with its first
status; before that it only reads. Times are by the caller's monotonic clock.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.core.bounded import MALFORMED
from holdfast.core.job_settings import JobSettings
from holdfast.core.liveness import AwakeClock, Liveness, StopDeadline
from holdfast.core.machine import Effect, Event, InvalidEvent, Story, Tick, short_text
from holdfast.core.phases import JobOutcome, NodePhase, NodeRole, RefusalReason
from holdfast.core.protocol import NodeInfo, Status, View, echo
from holdfast.core.rounds import (
    SILENCES_UNTIL_ALIVE,
    CloseRequested,
    Job,
    JobEvent,
    JobPhase,
    Node,
    NodeLost,
    NodesLost,
    Rounds,
    WaitTimers,
    contender_refused_text,
    is_held,
    sanitized_job,
    view_for_node,
    view_for_outsider,
    view_with_other_id,
)
from holdfast.core.session import (
    CLOSED_UNREACHABLE_S,
    DeliverView,
    GiveUp,
    LoopResumed,
    LoopStuck,
    PortsChanged,
    Rejoined,
    RequestMade,
    StatusChanged,
)
from holdfast.defaults import PROTOCOL_VERSION, SAME_VERSION
from holdfast.printable import quoted

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.protocol import ControlPort

STATE_PREFIX = b"holdfast job "
STATE_MARK = STATE_PREFIX + b"%d\n" % PROTOCOL_VERSION
STATE_BYTES_MAX = 4 * 1024 * 1024
"""A larger state is not read. This is enough for about ten thousand nodes, and TCPStore can hold it."""
UNSTORED_MAX = 8
"""Statuses that wait to be stored. If the store is unavailable and there are more, the oldest are dropped."""
READ_S_MIN = 0.005
READ_S_MAX = 0.1
READ_S_PER_NODE = 0.004
"""The pause between reads grows with the number of nodes, because each node reads the whole state."""
BACKOFF_S_MIN = 0.002
BACKOFF_S_MAX = 1.0
BEAT_S_PER_NODE = 0.05
"""All nodes together write at most twenty heartbeats a second, because each write makes concurrent
writes fail."""
BEATS_PER_SILENCE_MIN = 3
"""A node is lost only after it missed this many heartbeats. So large jobs detect a loss later than
configured: by default above 33 nodes, and after 15 s with 100."""
UNCONFIRMED_WRITES_MAX = 3
"""If a store has no state after this many unconfirmed writes, it does not keep the state. A single such
write may be a race with another node that removed the state."""
CLOCK_STEPS_MIN = 10
"""Clock readings per `unreachable_s`. A longer gap means that the process was suspended."""
NO_RESPONSE = "no response"
NOT_KEPT = "the store does not keep the state"

_decoder = msgspec.msgpack.Decoder(Job)
_encoder = msgspec.msgpack.Encoder()


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """The time limits of a node."""

    interval_s: float = 1.0
    """The interval between increments of its counter."""
    lost_after_s: float = 5.0
    """A node whose counter does not change for this long is lost."""
    unreachable_s: float = 60.0
    """How long to wait for a store that fails or hangs."""
    absent_s: float | None = None
    """How long a live member may take to start a generation before it is removed; None: no limit."""
    needs_answers: bool = False
    """Whether a disconnected node stops its workers before they may be replaced elsewhere."""
    read_s: float = READ_S_MAX
    """The time between two reads while no change is expected."""
    backoff_s_max: float = BACKOFF_S_MAX
    """The longest pause after a write that failed because another node wrote first. Pauses are random, and their limit
    doubles with each such failure."""


class CallState(Enum):
    """The call to the store that is under way."""

    IDLE = "idle"
    READING = "reading"
    WRITING = "writing"


# Events, in addition to `Tick` and those of `core.session`.


class RefreshRequested(Event):
    """A caller wants the current state."""


class StateRead(msgspec.Struct, frozen=True):
    """The state and its token; None if nothing is stored."""

    state: bytes | None
    token: Any

    def __str__(self) -> str:
        return f"StateRead({len(self.state or b'')} bytes)"


class StateWritten(Event):
    """The write succeeded."""


class WriteConflict(Event):
    """Another node wrote first; the write had no effect."""


class CallFailed(Event):
    """The call to the store failed; a write may or may not have taken effect."""

    why: str
    invalid: bool = False
    """The stored state is malformed or belongs to another job, so a retry does not help."""


SessionEvent = (
    Tick
    | StatusChanged
    | Rejoined
    | PortsChanged
    | RequestMade
    | LoopStuck
    | LoopResumed
    | RefreshRequested
    | StateRead
    | StateWritten
    | WriteConflict
    | CallFailed
)

# Effects, in addition to `DeliverView` and `GiveUp` of `core.session`.


class ReadState(Effect):
    """Read the state; the outcome is `StateRead` or `CallFailed`."""


class WriteState(msgspec.Struct, frozen=True):
    """Replace the state of this token; the outcome is `StateWritten`, `WriteConflict` or `CallFailed`."""

    state: bytes
    token: Any
    changes: tuple[JobEvent, ...]
    """The events that changed the state; empty if it is only a heartbeat."""

    def __str__(self) -> str:
        return f"WriteState({', '.join(short_text(change) for change in self.changes)})"


class RefuseJoin(Effect):
    """The node cannot join; a retry does not help."""

    why: str


SessionEffect = ReadState | WriteState | DeliverView | GiveUp | RefuseJoin


class SharedStateSession:
    """The machine of one node; `draw` returns random numbers from 0 to 1, to spread retries."""

    def __init__(
        self,
        now: float,
        *,
        run_id: str,
        info: NodeInfo,
        settings: JobSettings,
        timeouts: Timeouts,
        draw: Callable[[], float],
        fence_floor: int = 0,
        control: ControlPort | None = None,
        rounds: Callable[[Job], Rounds] = Rounds,
    ) -> None:
        self.call = CallState.IDLE
        self.status = Status(seq=0, run_id=run_id, info=info, settings=settings)
        self.view: View | None = None
        self.stored_seq = -1
        """The number of the newest status that is stored or does not need to be."""
        self.closed = False
        """Whether the job is over, whether or not this node was in it."""
        self.in_job = False
        self.reads_begun = 0
        self.reads = 0
        """The number of the newest successful read."""
        self.problem = ""
        """Why the last call failed; empty if it succeeded."""
        self.ever_read = False
        self._unconfirmed_writes = 0  # Since a state was last read.
        self._timeouts = timeouts
        self._draw = draw
        self._fence_floor = fence_floor
        self._control = control
        self._make_rounds = rounds
        self._joins = False
        self._present = 0
        self._stops_reading = True
        self._unstored: deque[Status] = deque(maxlen=UNSTORED_MAX)
        self._newest = (0, 0)  # Term and revision of the newest view.
        self._accepted_at: float | None = None  # When it last read or wrote a state successfully.
        # The last known state and its machine; None if the machine has changed since.
        self._state: bytes | None = None
        self._rounds: Rounds | None = None
        self._offer: tuple[bytes, Rounds] | None = None
        self._changes: tuple[JobEvent, ...] = ()
        self._answer: View | None = None
        self._peers = PeerLiveness(now, timeouts)
        self._stop = StopDeadline(needs_answers=timeouts.needs_answers)
        self._ticked_at = self._write_at = now
        # A generation, and since when this node waits for the others.
        self._waiting_since = (-1, now)
        self._contending = (-1, 0.0)  # Another node with this node's id, and since when.
        # When to read. The pause grows while nothing happens, and after each conflict.
        self._read_at: float | None = None
        self._pause_s = READ_S_MIN
        self._backoff_s = BACKOFF_S_MIN
        self._reads_again = False
        # The availability of the store. `_contact_at` is by the awake clock.
        self._clock = AwakeClock(now, timeouts.unreachable_s / CLOCK_STEPS_MIN)
        self._contact_at = 0.0
        self.given_up = False
        self._at = 0.0  # The time of the newest event, by that clock.
        self.story = Story("shared_state", node=info.node)
        self._cause = ""

    @property
    def rounds(self) -> Rounds | None:
        """The last known job; read-only."""
        if self._rounds is None and self._state is not None:
            return self._make_rounds(decode(self._state))
        return self._rounds

    def handle(self, now: float, event: SessionEvent, cause: str = "") -> list[SessionEffect]:
        """Handle one event; return the effects in order."""
        call, self._cause = self.call, cause
        effects = self._handle(now, event)
        if belongs_in_story(event, effects):
            self.story.record(now, call, event, effects, self._cause)
        return effects

    def _handle(self, now: float, event: SessionEvent) -> list[SessionEffect]:
        self._at = self._clock.read(now)
        if self.call is CallState.IDLE and not self.problem:
            self._contact_at = self._at  # Without a call under way, no response is missing.
        match event:
            case Tick():
                self._ticked_at = now
                if not self.status.stuck:
                    # Others count from the last heartbeat, which may be an interval ago.
                    self._stop.awake(now - self._peers.beat_s)
                effects = self._overdue()
                if self.call is CallState.IDLE and self._read_at is not None:
                    effects += self._read() if now >= self._read_at else []
                return effects
            case StatusChanged(phase, generation, failure, report, clear):
                self._joins = True
                self._update_status(
                    seq=self.status.seq + 1,
                    phase=phase,
                    generation=generation,
                    failure=failure,
                    report=report,
                    clear=clear,
                    stuck="",
                )
                self._unstored.append(self.status)
                return self._read_soon()
            case Rejoined():
                self._joins = True
                info = event.applied_to(self.status.info)
                self.story.node = info.node
                self._update_status(
                    seq=self.status.seq + 1,
                    info=info,
                    phase=NodePhase.READY,
                    failure=None,
                    report=b"",
                    stuck="",
                    drained=False,
                )
                self._unstored.clear()
                self._unstored.append(self.status)
                self.view = None
                return self._read_soon()
            case PortsChanged(ports):
                self._update_status(info=msgspec.structs.replace(self.status.info, ports=ports))
                return []
            case RequestMade(request):
                if self.view is not None and self.view.answers(request):
                    return []  # The view already has the answer.
                self._update_status(seq=self.status.seq + 1, request=request)
                if self._joins:
                    self._unstored.append(self.status)
                return self._read_soon()
            case LoopStuck() | LoopResumed():
                why = event.why if isinstance(event, LoopStuck) else ""
                if why:
                    self._stop.expire(now)
                self._update_status(seq=self.status.seq + 1, stuck=why)
                if self._joins:
                    self._unstored.append(self.status)
                return self._read_soon()
            case RefreshRequested():
                return self._read_soon()
            case StateRead(state, token):
                self._expect(CallState.READING, event)
                return self._after_call(self._was_read(now, state, token))
            case StateWritten():
                self._expect(CallState.WRITING, event)
                assert self._offer is not None
                if not self.status.stuck:
                    self._stop.answered(now, self._write_at)
                self._state, self._rounds = self._offer
                self._peers.observe(now, self._rounds, self._own_node(self._rounds.job))
                return self._after_call(self._accept(now, self._rounds))
            case WriteConflict():
                self._expect(CallState.WRITING, event)
                self._store_responded()
                self._unconfirmed_writes += 1
                longest_s = self._timeouts.backoff_s_max
                self._read_at = now + self._draw() * min(longest_s, self._backoff_s)
                self._backoff_s = min(longest_s, self._backoff_s * 2)
                return self._after_call([])
            case CallFailed(why, invalid):
                if self.call is CallState.IDLE:
                    raise InvalidEvent(f"{event!r} without a call under way")
                return self._after_call(self._failed(now, why, invalid=invalid))

    def next_deadline(self, now: float) -> float | None:
        """Return when the next `Tick` is due, or None if nothing has a deadline."""
        at = self._clock.read(now)
        times = [] if self._read_at is None or self.call is not CallState.IDLE else [self._read_at]
        if not self.given_up and (self.problem or self.call is not CallState.IDLE):
            rest = self._limit_s() - (at - self._contact_at)
            # The clock counts the whole time only if it is read at least every `step_s`.
            times.append(now + max(0.0, min(rest, self._clock.step_s)))
        if self.view is not None and not self._timeouts.needs_answers:
            # A tick shows that the node is awake, even if the store hangs or the job is over.
            times.append(self._ticked_at + self._peers.beat_s)
        return min(times, default=None)

    @property
    def stop_at(self) -> float | None:
        """When all workers must have exited unless the deadline is renewed; None before the first view."""
        return None if self.view is None else self._stop.at(self._peers.silence_s)

    def unreachable_s(self, now: float) -> float:
        """Return how long the store has failed or not responded."""
        return self._clock.peek(now) - self._contact_at

    # Calls to the store.

    def _expect(self, call: CallState, event: SessionEvent) -> None:
        if self.call is not call:
            raise InvalidEvent(f"{event!r} while {self.call.value}")

    def _read_soon(self) -> list[SessionEffect]:
        self._pause_s = READ_S_MIN
        if self.call is CallState.IDLE:
            return self._read()
        self._reads_again = True
        return []

    def _read(self) -> list[SessionEffect]:
        self.call = CallState.READING
        self.reads_begun += 1
        self._reads_again = False
        return [ReadState()]

    def _after_call(self, effects: list[SessionEffect]) -> list[SessionEffect]:
        """Continue after a call: with a write, or with a read that was requested meanwhile."""
        if any(type(effect) is WriteState for effect in effects):
            self.call = CallState.WRITING
            return effects
        self.call = CallState.IDLE
        effects += self._overdue()
        return [*effects, *self._read()] if self._reads_again else effects

    def _store_responded(self) -> None:
        """Note that the store responded."""
        self._contact_at = self._at
        self.problem = ""
        self.ever_read = True

    def _failed(self, now: float, why: str, *, invalid: bool) -> list[SessionEffect]:
        self.problem = why
        self._rounds = None
        self._read_at = now + self._longest_pause_s()
        is_new = not self.ever_read or self._unconfirmed_writes >= UNCONFIRMED_WRITES_MAX
        if invalid and is_new and not self.given_up:
            # Refuse only a new node: an older one waits until the state can be read again.
            self.given_up = True
            return [RefuseJoin(why)]
        return []

    def _overdue(self) -> list[SessionEffect]:
        unreachable_s = self._at - self._contact_at
        if self.given_up or unreachable_s < self._limit_s():
            return []
        self.given_up = True
        return [GiveUp(unreachable_s, self.problem or NO_RESPONSE)]

    def _limit_s(self) -> float:
        closed = self.view is not None and self.view.role is NodeRole.CLOSED
        unreachable_s = self._timeouts.unreachable_s
        return min(CLOSED_UNREACHABLE_S, unreachable_s) if closed else unreachable_s

    # One read of the state.

    def _was_read(self, now: float, state: bytes | None, token: Any) -> list[SessionEffect]:
        if state is not None or self.in_job:
            self._unconfirmed_writes = 0
        if self._unconfirmed_writes >= UNCONFIRMED_WRITES_MAX:
            return self._failed(now, NOT_KEPT, invalid=True)
        try:
            rounds = self._current(state)
        except ValueError as problem:
            return self._failed(now, f"the stored state cannot be read: {problem}", invalid=True)
        self._store_responded()
        job = rounds.job
        me = self._own_node(job)
        self._peers.observe(now, rounds, me)
        is_new = self._join(now, rounds) if me is None else self._apply(now, rounds)
        rounds.check()
        if not is_new:
            return self._accept(now, rounds)
        self._rounds = None  # The changed state does not count until it is stored.
        try:
            state = encode(job)
        except ValueError as problem:
            return self._failed(now, str(problem), invalid=False)
        self._offer, self._write_at = (state, rounds), now
        return [WriteState(state, token, self._changes)]

    def _current(self, state: bytes | None) -> Rounds:
        """Return the machine of a state; decoding is slow, so the machine is cached."""
        if self._rounds is None or state != self._state:
            job = self._new_job() if state is None else decode(state)
            if job.run_id != self.status.run_id:
                raise ValueError(f"it belongs to the job {job.run_id!r}")
            self._state, self._rounds = state, self._make_rounds(job)
        return self._rounds

    def _new_job(self) -> Job:
        return Job(run_id=self.status.run_id, fence_floor=self._fence_floor)

    def _join(self, now: float, rounds: Rounds) -> bool:
        """Add this node to the job; return whether there is a change to store.

        If the node was in the job before and the store lost the job, `core.rounds` recovers it.
        """
        self._answer = None
        status = self.status
        if not self._joins or status.phase is NodePhase.LEAVING:
            return False
        unreachable_s = 0.0 if self._accepted_at is None else now - self._accepted_at
        status = msgspec.structs.replace(status, unreachable_s=unreachable_s)
        self._changes = (*self._loss_of_rival(rounds.job), status)
        views: list[View] = []
        for event in self._changes:
            views = rounds.handle(now, event, self._cause)
        self._rounds = None
        me = self._own_node(rounds.job)
        if me is not None:
            me.heartbeats += 1
            me.control = self._control
            return True
        if status.phase is NodePhase.CLOSING and rounds.job.phase is not JobPhase.CLOSED:
            # Any node that can write to the store may end the job, whatever its settings.
            close = CloseRequested(JobOutcome.STOPPED, f"{status.info.node} closed the job")
            self._changes = (close,)
            rounds.handle(now, close, self._cause)
            return True
        mine = [one for one in views if one.incarnation == status.info.incarnation]
        self._answer = self._contender_view(rounds.job, mine[-1]) if mine else None
        return False

    def _loss_of_rival(self, job: Job) -> tuple[NodeLost, ...]:
        """Return the loss of the other node with this node's id, if that node is lost."""
        rival = job.nodes.get(self.status.info.node)
        lost = rival and self._peers.loss_of(rival)
        return (lost,) if lost else ()

    def _contender_view(self, job: Job, answer: View) -> View:
        """Return the view of this node while another node has its node id."""
        if answer.role is not NodeRole.WAITING:
            return answer
        rival = job.nodes[self.status.info.node].info
        if self._contending[0] != rival.incarnation:
            self._contending = (rival.incarnation, self._at)
        if self._at - self._contending[1] < SILENCES_UNTIL_ALIVE * self._peers.silence_s:
            return answer
        if self.status.info.reserved_on:
            return view_with_other_id(job, self.status, has_waited=True)
        refused = (NodeRole.REFUSED, contender_refused_text(rival), RefusalReason.REPLACED)
        return view_for_outsider(job, self.status.info, *refused)

    def _apply(self, now: float, rounds: Rounds) -> bool:
        """Apply the observations of this node; return whether there is a change to store."""
        job = rounds.job
        self._answer = None
        me = self._own_node(job)
        assert me is not None
        events: list[JobEvent] = [*self._to_store(job, me), *self._lost_members(now, job)]
        events += self._peers.due_events(now, rounds, me)
        self._changes = tuple(events)
        for event in events:
            rounds.handle(now, event, self._cause)
        me = self._own_node(job)
        if me is None:
            return True
        if events or (not job.final and self._peers.is_beat_due(now)):
            me.heartbeats += 1
            me.control = self._control
            return True
        return False

    def _to_store(self, job: Job, me: Node) -> list[Status]:
        if job.final:
            return []
        unstored = [one for one in self._unstored if one.seq > me.seq]
        if (
            job.phase is JobPhase.CLOSED
        ):  # The job still waits for the report, or the loss of its node.
            return [one for one in unstored if one.failure or one.phase is NodePhase.LEAVING]
        return unstored

    def _lost_members(self, now: float, job: Job) -> list[JobEvent]:
        """Return the loss of members that exceeded `absent_s`."""
        absent_s = self._timeouts.absent_s
        if absent_s is None or job.phase is not JobPhase.ACTIVE:
            return []
        status, generation = self.status, job.generation
        held = is_held(job)
        attends = status.phase is NodePhase.RUNNING and status.generation == generation
        attends = attends or (held and status.phase is NodePhase.READY)
        if not attends or self._waiting_since[0] != generation:
            self._waiting_since = (generation, now)
            return []
        if now - self._waiting_since[1] < absent_s:
            return []
        action = "stop its workers for" if held else "start"
        why = f"it did not {action} generation {generation} within {absent_s:g} s"
        absent = tuple(
            NodeLost(info.node, info.incarnation, why)
            for info in job.members
            if (known := known_incarnation(job, info.node, info.incarnation)) is not None
            and (known.workers >= 0 if held else known.generation < generation)
        )
        return [NodesLost(absent)] if absent else []

    # The stored state.

    def _accept(self, now: float, rounds: Rounds) -> list[SessionEffect]:
        """Accept the stored state, and compute this node's view."""
        self._store_responded()
        job = rounds.job
        self._accepted_at = now
        self._backoff_s = BACKOFF_S_MIN
        self.reads = self.reads_begun
        me, view = self._own_node(job), self._answer
        self.stored_seq = self.status.seq  # A node outside the job has nothing more to store.
        if me is not None:
            self._peers.note_own_heartbeat(now, me)
            if not job.final:
                self.stored_seq = me.seq
            view = self._view_of(rounds, me)
        while self._unstored and self._unstored[0].seq <= self.stored_seq:
            self._unstored.popleft()
        self.in_job = me is not None
        self.closed = job.phase is JobPhase.CLOSED
        self._present = len(job.nodes)
        contends = view is not None and view.role is NodeRole.WAITING
        self._stops_reading = job.final or (me is None and not self.closed and not contends)
        effects = self._deliver(view) if view is not None else []
        self._schedule_read(now, has_changed=bool(effects))
        return effects

    def _view_of(self, rounds: Rounds, me: Node) -> View | None:
        job, info = rounds.job, me.info
        if info.incarnation in job.departed:  # This node leaves, or was replaced.
            retired = job.retired.get(info.incarnation)
            if retired is None or not retired.superseded:
                return None
            refused = (NodeRole.REFUSED, retired.why, RefusalReason.REPLACED)
            return view_for_outsider(job, info, *refused)
        recovering = job.phase is JobPhase.RECOVERING  # All nodes continue until the recovery ends.
        return None if recovering else view_for_node(job, rounds.rank_table, info)

    def _deliver(self, view: View) -> list[SessionEffect]:
        if (view.term, view.revision) < self._newest:
            return []  # A replicated store may return an older state for a while.
        self._newest = (view.term, view.revision)
        self.status = echo(self.status, view)
        if self.view is not None and _content(view) == _content(self.view):
            return []
        self.view = view
        return [DeliverView(view)]

    def _schedule_read(self, now: float, *, has_changed: bool) -> None:
        """Schedule the next read: soon if a change is expected, and in time for deadlines."""
        if self._stops_reading:
            self._read_at = None
            return
        if has_changed:
            self._pause_s = READ_S_MIN
        longest_s = self._longest_pause_s()
        view = self.view
        expects = (
            view is None
            or view.role is NodeRole.WAITING
            or not view.start
            or (view.role is NodeRole.CLOSED and not view.final)
        )
        pause_s = min(self._pause_s, longest_s) if expects else longest_s
        self._pause_s = min(longest_s, self._pause_s * 1.5)
        if self.in_job:
            pause_s = min(pause_s, max(READ_S_MIN, self._peers.next_deadline(now) - now))
        self._read_at = now + pause_s

    def _longest_pause_s(self) -> float:
        return self._timeouts.read_s + READ_S_PER_NODE * self._present

    def _own_node(self, job: Job) -> Node | None:
        info = self.status.info
        return known_incarnation(job, info.node, info.incarnation) or job.departed.get(
            info.incarnation
        )

    def _update_status(self, **changes: object) -> None:
        self.status = msgspec.structs.replace(self.status, **changes)


def belongs_in_story(event: SessionEvent, effects: list[SessionEffect]) -> bool:
    """Return whether a step belongs in the story: not a read or a heartbeat that changed nothing."""
    if isinstance(event, StatusChanged | Rejoined | LoopStuck | LoopResumed | CallFailed):
        return True
    return any(
        effect.changes != () if isinstance(effect, WriteState) else type(effect) is not ReadState
        for effect in effects
    )


Peer = tuple[str, int]  # Node and incarnation.


class PeerLiveness:
    """One node's observations by its own clock: which counters do not change, and which waits are over.

    It also tracks when this node must increment its own counter.
    """

    def __init__(self, now: float, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        lost_after_s = timeouts.lost_after_s
        self._beats: dict[Peer, int] = {}
        self._lost: dict[Peer, str] = {}
        self.silence_s = lost_after_s
        """How long a counter may remain unchanged, in a job of the current size."""
        self._liveness: Liveness[Peer] = Liveness(now, silence_s=lost_after_s, grace_s=lost_after_s)
        self._lengthened_at = now
        self._waits = WaitTimers()
        self._term = 0  # After a store lost its state, the numbers of waits restart.
        self._my_beat, self._beat_at = 0, now
        self.beat_s = timeouts.interval_s
        """The time between two increments of this node's counter."""

    def observe(self, now: float, rounds: Rounds, me: Node | None) -> None:
        """Update from the stored state; `me` is this node."""
        job = rounds.job
        shared_s = BEAT_S_PER_NODE * len(job.nodes)
        self.silence_s = max(self._timeouts.lost_after_s, BEATS_PER_SILENCE_MIN * shared_s)
        # A disconnected node does not know that the job shrank: its workers keep the longer deadline.
        longest_s = self._liveness.silence_s
        if self.silence_s >= longest_s or now - self._lengthened_at >= longest_s:
            self._liveness.silence_s, self._lengthened_at = self.silence_s, now
        interval_s = max(self._timeouts.interval_s, shared_s)
        self.beat_s = min(interval_s, self.silence_s / BEATS_PER_SILENCE_MIN)
        peers = set()
        for node in others(job, me):
            peer = (node.info.node, node.info.incarnation)
            peers.add(peer)
            if self._beats.get(peer) != node.heartbeats:
                self._beats[peer] = node.heartbeats
                self._lost.pop(peer, None)
                self._liveness.received(peer, now)
        for peer in self._beats.keys() - peers:
            del self._beats[peer]
            self._lost.pop(peer, None)
            self._liveness.forget(peer)
        self._lost |= self._liveness.expired(now)
        if job.term != self._term:
            self._term, self._waits = job.term, WaitTimers()
        self._waits.observe(now, rounds)

    def loss_of(self, node: Node) -> NodeLost | None:
        """Return the loss of a node as of the last `observe`, or None."""
        info = node.info
        why = self._lost.get((info.node, info.incarnation))
        return NodeLost(info.node, info.incarnation, why) if why else None

    def due_events(self, now: float, rounds: Rounds, me: Node) -> list[JobEvent]:
        """Return lost nodes and ended waits as of the last `observe`; nothing once the job is final."""
        job = rounds.job
        events: list[JobEvent] = []
        if job.final:
            return events
        nodes = others(job, me) if self._lost else []
        lost = tuple(one for node in nodes if (one := self.loss_of(node)) is not None)
        if lost:
            events.append(NodesLost(lost))
        return events + [ended for ended, _cause in self._waits.ended(now)]

    def is_beat_due(self, now: float) -> bool:
        """Return whether this node must increment its counter even without another change."""
        return now - self._beat_at >= self.beat_s

    def note_own_heartbeat(self, now: float, me: Node) -> None:
        """Note the stored value of this node's counter."""
        if me.heartbeats != self._my_beat:
            self._my_beat, self._beat_at = me.heartbeats, now

    def next_deadline(self, now: float) -> float:
        """Return the latest time for the next read."""
        times = [
            self._beat_at + self.beat_s,
            self._waits.next_end,
            self._liveness.next_deadline(now),
        ]
        return min(one for one in times if one is not None)


def others(job: Job, me: Node | None) -> list[Node]:
    """Return the other nodes, including departed ones that may still have workers."""
    return [node for node in (*job.nodes.values(), *job.departed.values()) if node is not me]


def known_incarnation(job: Job, node: str, incarnation: int) -> Node | None:
    """Return a node of the job if it is this incarnation."""
    known = job.nodes.get(node)
    return known if known is not None and known.info.incarnation == incarnation else None


def encode(job: Job) -> bytes:
    """Return the job as bytes to store, without its report if that would make it too large."""
    state = STATE_MARK + _encoder.encode(job)
    if len(state) > STATE_BYTES_MAX and job.report:  # The failure still has a summary.
        job.report = b""
        state = STATE_MARK + _encoder.encode(job)
    if len(state) > STATE_BYTES_MAX:
        raise ValueError(
            f"the state of the job {job.run_id!r} has {len(state)} bytes; the limit is "
            f"{STATE_BYTES_MAX}"
        )
    return state


def decode(state: bytes) -> Job:
    """Return the job that was stored; raise `ValueError` if it is not a valid one."""
    if len(state) > STATE_BYTES_MAX:
        raise ValueError(f"it has {len(state)} bytes, above the limit of {STATE_BYTES_MAX}")
    if not state.startswith(STATE_PREFIX):
        raise ValueError("another program wrote it")
    if not state.startswith(STATE_MARK):
        raise ValueError(f"another version of Holdfast wrote it: {SAME_VERSION}")
    try:
        return sanitized_job(_decoder.decode(memoryview(state)[len(STATE_MARK) :]))
    except MALFORMED as problem:
        raise ValueError(quoted(str(problem))) from None


def _content(view: View) -> View:
    """Return the view without fields that do not matter to the node, such as the number of standbys."""
    waits = view.role is NodeRole.WAITING
    return msgspec.structs.replace(view, term=0, revision=0, present=view.present if waits else 0)
