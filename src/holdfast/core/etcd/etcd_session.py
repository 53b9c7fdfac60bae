"""One node's session with etcd: its lease, its status and its views. The machine `EtcdSession`.

`core.session` uses it like a connection to a coordinator: it opens, carries the node's messages, delivers
views and acknowledgements, and may be lost. It consists of

- the node's lease, which outlives the session: a node that reconnects in time is not lost;
- the node's record, stored with each status; once it is stored, the node gets an `Ack`;
- two watches, on the views for this node and on the shared keys (the leader, roll calls);
- `core.etcd.leader`, since any node may become the leader;
- `core.etcd.witness`, which detects the exit of another node before its lease expires.

::

    DOWN ── OpenRequested ──► OPENING: lease, then snapshot ──► UP
     ▲                           │ a problem                     │ a problem, a watch ended
     └───────────────────────────┴───────────────────────────────┘
    LeaveRequested, and this node does not lead: ──► LEAVING: removes its keys ──► GONE

If a lease ends while its node is alive, the node immediately gets another one and stores its status again;
the leader decides how the node continues. If etcd rejects a write, the next session stores a status
before it opens. Statuses are stored in order, one at a time; at most `UNSENT_MAX` wait.

Use: perform the effects of each `handle` in order; report each outcome as the event with the same
number; call `handle` with `Tick` at `next_deadline`.
"""

from __future__ import annotations

import itertools
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from holdfast.core.etcd.calls import (
    Answer,
    Change,
    Compare,
    Delete,
    EtcdEffect,
    EtcdEvent,
    Field,
    Get,
    Grant,
    Granted,
    KeepAlive,
    KeptAlive,
    KeysChanged,
    Op,
    Problem,
    ProblemKind,
    Put,
    Request,
    RequestAnswered,
    Revoke,
    SendRequest,
    StartWatch,
    StopWatch,
    Txn,
    TxnDone,
    WatchEnded,
    end_of_prefix,
)
from holdfast.core.etcd.election import (
    FailSession,
    LeaderKeyChanged,
    LeaseReplaced,
    ResignRequested,
    SessionLost,
    SessionUp,
)
from holdfast.core.etcd.keys import (
    JobKeys,
    JobRecord,
    NodeRecord,
    Presence,
    UnreadableKeys,
    get_prefix,
    missing_members,
    pack,
    read_record,
    roll_call_number,
    unpack,
)
from holdfast.core.etcd.leader import Leadership, NodeReported, OwnStatusStored
from holdfast.core.etcd.witness import (
    ConnectionEvent,
    PresenceClosed,
    PresenceConfirmed,
    PresenceEffect,
    PresenceInconclusive,
    PresenceRefused,
    RevokeLease,
    SubjectsChanged,
    Witness,
    WitnessEvent,
)
from holdfast.core.machine import Effect, Event, InvalidEvent, Story, Tick
from holdfast.core.protocol import Ack, Heartbeat, NodeInfo, Status, View
from holdfast.core.rounds import Rounds, emptied_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.core.etcd.leader import LeaderEvent
    from holdfast.core.protocol import ControlPort
    from holdfast.core.rounds import Job

RENEWALS_PER_LEASE = 3
_NO_ANSWER = (ProblemKind.UNREACHABLE, ProblemKind.CLOSED)
UNSENT_MAX = 8
"""Statuses that wait to be stored. If etcd is so slow that there are more, the oldest are dropped."""


class SessionState(Enum):
    """The state of a session."""

    DOWN = "down"
    OPENING = "opening"
    UP = "up"
    LEAVING = "leaving"
    """The node removes its keys; it does not rejoin."""
    GONE = "gone"


# Events, in addition to those of etcd (`core.etcd.calls`).


class OpenRequested(Event):
    """The node wants a session."""


class DropRequested(Event):
    """The node gives up the session; the lease remains until it expires."""


class MessageSubmitted(Event):
    """The node has a status to store, or sends a heartbeat."""

    message: Status | Heartbeat


class LeaveRequested(Event):
    """The node leaves the job permanently."""


SessionEvent = (
    OpenRequested
    | DropRequested
    | MessageSubmitted
    | LeaveRequested
    | Tick
    | EtcdEvent
    | ConnectionEvent
)

# Effects, in addition to those for etcd.


class ReportOpened(Effect):
    """Report to the node that the session is up."""

    confirmed_at: float
    """When the lease in the stored record was last known to be renewed; 0 if other nodes may not know
    the current lease."""


class ReportClosed(Effect):
    """Report to the node that the session is lost, or could not be opened."""

    why: str
    permanent: bool = False
    """A retry does not help."""


class DeliverMessage(Effect):
    """Pass a view, or the acknowledgement of a status, to the node."""

    message: View | Ack


class ReportLeft(Effect):
    """Report to the node that etcd no longer has its keys."""


class ReportMissing(Effect):
    """Report to the node which machines of `--ha` are missing, so that the job does not survive a loss."""

    machines: str
    """Their names; empty if the job survives a loss."""


SessionEffect = (
    EtcdEffect
    | ReportOpened
    | ReportClosed
    | DeliverMessage
    | ReportLeft
    | ReportMissing
    | PresenceEffect
)


# The purposes of requests under way.


class _OpenLease(msgspec.Struct, frozen=True):
    """Get or renew the lease, to open the session."""


class _Snapshot(msgspec.Struct, frozen=True):
    """Read the shared keys and the views for this node."""


class _Renew(msgspec.Struct, frozen=True):
    """Renew the lease of an open session."""

    lease: int
    sent_at: float


class _ReplaceLease(msgspec.Struct, frozen=True):
    """Get a new lease, because the last one ended."""


class _ChangePatience(msgspec.Struct, frozen=True):
    """Get a longer or a shorter lease, because the node gets little CPU, or enough again."""

    patience: int
    sent_at: float


class _Store(msgspec.Struct, frozen=True):
    """Store a status."""

    status: Status
    record: NodeRecord
    key: bytes
    lease: int


class _Remove(msgspec.Struct, frozen=True):
    """Delete this node's keys, and read which nodes are left."""

    lease: int


class _Sweep(msgspec.Struct, frozen=True):
    """Delete the keys that the job no longer needs."""

    lease: int


class _Revoke(msgspec.Struct, frozen=True):
    """Revoke the node's lease."""


class _RevokeLease(msgspec.Struct, frozen=True):
    """Revoke the lease of a node whose agent has exited."""


_Purpose = (
    _OpenLease
    | _Snapshot
    | _Renew
    | _ReplaceLease
    | _ChangePatience
    | _Store
    | _Remove
    | _Sweep
    | _Revoke
    | _RevokeLease
)


class EtcdSession:
    """The machine of one node."""

    def __init__(
        self,
        *,
        run_id: str,
        info: NodeInfo,
        prefix: str,
        lease_s: float,
        presence: Presence | None = None,
        control: ControlPort | None = None,
        strict: bool = False,
        rounds: Callable[[Job], Rounds] = Rounds,
    ) -> None:
        """`presence` is the presence of this process; the session adds its address."""
        self.state = SessionState.DOWN
        self.keys = JobKeys(prefix, run_id)
        self.address = ""
        """The address at which other nodes reach this one, unless `NodeInfo` has one."""
        self._run_id = run_id
        self._node = info.node
        self._ttl_s = max(1, round(lease_s))
        self._numbers = itertools.count(1)
        self._requests: dict[int, _Purpose] = {}
        self._views_watch = self._shared_watch = 0
        self._lease = 0
        self._patience = 0  # How many times longer than usual the lease lasts, beyond the first.
        self._renewed_at = self._lease_sent_at = 0.0
        self._lease_at = 0.0  # The send time of the last successful renewal.
        self._stored_lease = 0  # The lease in the stored record, which other nodes see.
        self._unsent: deque[Status] = deque(maxlen=UNSENT_MAX)
        self._stored: Status | None = None
        self._key = b""  # The key of the stored record, and its revision.
        self._key_revision = 0
        self._refused: Status | None = None  # The next session first stores this status.
        self._roll_call = 0
        self._missing = ""
        self._answer_due = False
        self._leave_requested = False
        self._unreadable = UnreadableKeys(self.keys)
        self._cause = ""
        self._presence = presence
        self._control = control
        self._address = info.address
        self.story = Story("etcd", node=info.node)
        own_id = presence.id if presence is not None else ""
        self.witness = Witness(node=info.node, own_id=own_id, numbers=self._numbers)
        self.leadership = Leadership(
            keys=self.keys,
            run_id=run_id,
            name=info.node,
            lease_s=lease_s,
            numbers=self._numbers,
            witness=self.witness,
            strict=strict,
            rounds=rounds,
        )

    @property
    def is_up(self) -> bool:
        return self.state is SessionState.UP

    def handle(self, now: float, event: SessionEvent, cause: str = "") -> list[SessionEffect]:
        """Handle one event; return the effects in order."""
        state = self.state
        self._cause = cause
        effects = self._handle(now, event)
        if self._leave_requested:
            effects += self._leave_if_resigned(now)
        if effects and not _is_renewal(event):
            cause = cause or _message_id(event, effects)
            self.story.record(now, state, event, effects, cause)
        return effects

    def next_deadline(self, now: float) -> float | None:
        """Return when the next `Tick` is due, or None."""
        times = (self.leadership.next_deadline(now), self.witness.next_deadline())
        return min((at for at in times if at is not None), default=None)

    def _handle(self, now: float, event: SessionEvent) -> list[SessionEffect]:
        match event:
            case RequestAnswered(number, answer):
                purpose = self._requests.pop(number, None)
                if purpose is None:
                    return self._leadership_effects(now, event)
                return self._answered(now, purpose, answer)
            case KeysChanged(number, changes):
                if number == self._views_watch:
                    return [
                        one for each in changes for one in self._deliver_view(each.key, each.value)
                    ]
                if number == self._shared_watch:
                    return self._shared_changed(now, changes)
                return self._leadership_effects(now, event)
            case MessageSubmitted(message):
                return self._submit(now, message)
            case Tick():
                return self._leadership_effects(now, event) + self._witness_effects(now, event)
            case (
                PresenceConfirmed() | PresenceClosed() | PresenceRefused() | PresenceInconclusive()
            ):
                return self._witness_effects(now, event)
            case OpenRequested():
                if self.state in (SessionState.OPENING, SessionState.UP):
                    raise InvalidEvent(f"{event!r} cannot happen while {self.state.value}")
                return self._open(now)
            case DropRequested():
                return self._drop(now)
            case WatchEnded(number, problem):
                # The next session reads everything again.
                if number in (self._views_watch, self._shared_watch):
                    return self._fail(now, problem)
                return self._leadership_effects(now, event)
            case LeaveRequested():
                self._leave_requested = True
                return self._leadership_effects(now, ResignRequested())

    def _answered(self, now: float, purpose: _Purpose, answer: Answer) -> list[SessionEffect]:
        match purpose:
            case _Store():
                return self._store_answered(now, purpose, answer)
            case _Renew():
                return self._renewed(now, purpose, answer)
            case _OpenLease():
                return self._leased(now, answer)
            case _Snapshot():
                return self._opened(now, answer)
            case _ReplaceLease():
                return self._lease_replaced(now, answer)
            case _ChangePatience():
                return self._patience_changed(now, purpose, answer)
            case _Remove(lease):
                return self._removed(lease, answer)
            case _Sweep(lease):
                return self._revoke(lease)
            case _Revoke():
                return self._revoke(0)
            case _RevokeLease():
                return self._fail(now, answer) if isinstance(answer, Problem) else []

    def _witness_effects(self, now: float, event: WitnessEvent) -> list[SessionEffect]:
        return self._revoke_leases(self.witness.handle(now, event, self._cause))

    def _revoke_leases(self, effects: Iterable[SessionEffect | RevokeLease]) -> list[SessionEffect]:
        """Turn revocations into requests; without a session they are postponed."""
        converted: list[SessionEffect] = []
        for one in effects:
            if not isinstance(one, RevokeLease):
                converted.append(one)
            elif self.is_up:
                converted.append(self._send(_RevokeLease(), Revoke(one.lease)))
        return converted

    def _leadership_effects(self, now: float, event: LeaderEvent) -> list[SessionEffect]:
        effects: list[SessionEffect] = []
        self.leadership.own_status_pending = bool(self._unsent) or self._awaits(_Store)
        for effect in self.leadership.handle(now, event, self._cause):
            if isinstance(effect, FailSession):
                effects += self._fail(now, effect.problem)
            else:
                effects += self._revoke_leases([effect])
        return effects

    # Opening.

    def _open(self, now: float) -> list[SessionEffect]:
        if self.state in (SessionState.LEAVING, SessionState.GONE):
            return [ReportClosed("this node leaves the job")]
        self.state = SessionState.OPENING
        self._lease_sent_at = now
        lease = KeepAlive(self._lease) if self._lease else Grant(self._ttl_s)
        return [self._send(_OpenLease(), lease)]

    def _leased(self, now: float, answer: Answer) -> list[SessionEffect]:
        self._renewed_at = now
        if isinstance(answer, KeptAlive) and answer.ttl_s <= 0:
            self._lease = 0
            return self._open(now)
        if isinstance(answer, Problem):
            return self._fail(now, answer)
        if isinstance(answer, Granted):
            self._lease, self._patience = answer.lease, 0
        self._lease_at = self._lease_sent_at
        return [self._store(self._refused) if self._refused is not None else self._read()]

    def _read(self) -> SendRequest:
        views = self.keys.views_of(self._node)
        return self._send(_Snapshot(), Txn((), (get_prefix(self.keys.shared), get_prefix(views))))

    def _opened(self, now: float, answer: Answer) -> list[SessionEffect]:
        if isinstance(answer, Problem):
            return self._fail(now, answer)
        assert isinstance(answer, TxnDone)
        self.state = SessionState.UP
        shared, views = self.keys.shared, self.keys.views_of(self._node)
        after = answer.revision + 1
        self._views_watch, self._shared_watch = next(self._numbers), next(self._numbers)
        effects: list[SessionEffect] = [
            StartWatch(self._views_watch, views, end_of_prefix(views), after),
            StartWatch(self._shared_watch, shared, end_of_prefix(shared), after),
            ReportOpened(self._confirmed_at()),
        ]
        leader = None
        for one in answer.results[0]:
            if one.key == self.keys.leader:
                leader = one
            elif one.key == self.keys.roll_call:
                self._note_roll_call(one.value)
            elif one.key == self.keys.missing_members:
                effects += self._note_missing(one.value)
        self.leadership.election.presence = self._own_presence()
        effects += self._leadership_effects(now, SessionUp(self._lease, leader))
        if not self.is_up:
            return effects  # The leader runs another version.
        effects += self._revoke_leases(self.witness.unfinished())
        for one in answer.results[1]:
            effects += self._deliver_view(one.key, one.value)
        return effects

    # The node's status.

    def _submit(self, now: float, message: Status | Heartbeat) -> list[SessionEffect]:
        renamed: list[SessionEffect] = []
        if isinstance(message, Status) and message.info.node != self._node:
            renamed = self._rename(message.info.node)
        return renamed + self._submit_renamed(now, message)

    def _rename(self, node: str) -> list[SessionEffect]:
        """Watch the views for this node's new id. The election keeps the first one: it signs the leader's key."""
        self._node = self.story.node = self.witness.story.node = node
        if not self._views_watch:
            return []  # The next session watches them.
        last, self._views_watch = self._views_watch, next(self._numbers)
        views = self.keys.views_of(node)
        # No view for the new id is older than this node's record, which still has the last id.
        after = self._key_revision + 1
        return [StopWatch(last), StartWatch(self._views_watch, views, end_of_prefix(views), after)]

    def _submit_renamed(self, now: float, message: Status | Heartbeat) -> list[SessionEffect]:
        if not self.is_up:
            return []
        if isinstance(message, Heartbeat):
            return self._change_patience(now, message.patience) or self._renew(now)
        self._unsent.append(message)
        # A node that reports often sends fewer heartbeats, and storing a status does not renew the lease.
        late = now - self._renewed_at >= self._ttl_s / RENEWALS_PER_LEASE
        return self._store_next() + (self._renew(now) if late else [])

    def _store_next(self) -> list[SessionEffect]:
        """Store the next status, or the last one again to respond to a roll call."""
        if self._awaits(_Store) or not self._lease or not self.is_up:
            return []
        if self._unsent:
            status = self._unsent.popleft()
        elif self._answer_due and self._stored is not None:
            status = self._stored
        else:
            return []
        self._answer_due = False
        return [self._store(status)]

    def _store(self, status: Status) -> SendRequest:
        record = NodeRecord(
            self._with_address(status),
            self._roll_call,
            self._lease,
            self._own_presence(),
            self._control,
        )
        key = self.keys.node(status.info.node, status.info.incarnation)
        ops: list[Op] = [Put(key, pack(record), self._lease)]
        if self._key and self._key != key:
            ops.append(Delete(self._key))  # The record of the previous incarnation.
        # etcd may perform this request late. Then it must not overwrite a later record.
        mine = Compare(key, Field.MOD, self._key_revision if self._key == key else 0)
        purpose = _Store(status, record, key, self._lease)
        return self._send(purpose, Txn((mine,), tuple(ops), (Get(key),)))

    def _store_answered(self, now: float, store: _Store, answer: Answer) -> list[SessionEffect]:
        if isinstance(answer, Problem):
            return self._not_stored(now, store, answer)
        assert isinstance(answer, TxnDone)
        self._key = store.key
        if not answer.succeeded:  # The record expired with its lease, or an earlier put ran late.
            self._key_revision = answer.results[0][0].mod_revision if answer.results[0] else 0
            return self._store_again(store.status)
        self._stored, self._key_revision = store.status, answer.revision
        self._stored_lease = store.lease
        self._refused = None
        if store.lease != self._lease:  # The record expired with its lease, which was replaced.
            self._requeue(store.status)
            return self._store_next()
        if not self.is_up:
            return [self._read()]
        effects: list[SessionEffect] = [DeliverMessage(self._ack())]
        report = NodeReported(store.record.status, store.record.roll_call)
        effects += self._leadership_effects(now, OwnStatusStored(report))
        return effects + self._store_next()

    def _store_again(self, status: Status) -> list[SessionEffect]:
        if not self.is_up:
            return [self._store(status)]
        self._requeue(status)
        return self._store_next()

    def _not_stored(self, now: float, store: _Store, problem: Problem) -> list[SessionEffect]:
        if problem.kind is not ProblemKind.LEASE_GONE:
            if problem.kind not in _NO_ANSWER:
                self._refused = store.status
            return self._fail(now, problem)
        if not self.is_up:
            self._lease = 0
            return self._open(now)
        self._requeue(store.status)
        return self._replace_lease(now) if store.lease == self._lease else self._store_next()

    def _requeue(self, status: Status) -> None:
        """Store a status again, unless there are newer ones."""
        if not self._unsent:
            self._unsent.append(status)

    def _with_address(self, status: Status) -> Status:
        if status.info.address or not self.address:
            return status
        info = msgspec.structs.replace(status.info, address=self.address)
        return msgspec.structs.replace(status, info=info)

    def _own_presence(self) -> Presence | None:
        """Return this process's presence with its address, if the address is known."""
        address = self._address or self.address
        if self._presence is None or not address:
            return None
        return msgspec.structs.replace(self._presence, address=address)

    def _confirmed_at(self) -> float:
        return self._lease_at if self._stored_lease == self._lease else 0.0

    def _ack(self) -> Ack:
        stored = self._stored
        return Ack(
            run_id=self._run_id,
            node=self._node,
            incarnation=stored.info.incarnation if stored is not None else 0,
            seq=stored.seq if stored is not None else -1,
            sent_at=self._confirmed_at(),
            patience=self._patience,
        )

    # The lease.

    def _renew(self, now: float) -> list[SessionEffect]:
        if self._awaits(_Renew) or not self._lease:
            return []
        self._renewed_at = now
        return [self._send(_Renew(self._lease, now), KeepAlive(self._lease))]

    def _renewed(self, now: float, renewal: _Renew, answer: Answer) -> list[SessionEffect]:
        if isinstance(answer, Problem):
            return self._fail(now, answer)
        assert isinstance(answer, KeptAlive)
        if answer.ttl_s > 0:
            if renewal.lease == self._lease:
                self._lease_at = max(self._lease_at, renewal.sent_at)
            return [DeliverMessage(self._ack())]
        if renewal.lease != self._lease:
            return []  # The lease was already replaced.
        if not self._unsent and not self._awaits(_Store) and self._stored is not None:
            self._unsent.append(self._stored)
        return self._replace_lease(now)

    def _change_patience(self, now: float, patience: int) -> list[SessionEffect]:
        """Ask for a lease of another length, if that is needed and nothing else is under way."""
        is_busy = self._awaits(_ChangePatience) or self._awaits(_Store) or self._unsent
        if patience == self._patience or is_busy or not self._may_change_lease():
            return []
        purpose = _ChangePatience(patience, now)
        return [self._send(purpose, Grant(self._ttl_s * (1 + patience)))]

    def _may_change_lease(self) -> bool:
        """Whether only the record of this node depends on its lease, not the leader's key."""
        election = self.leadership.election
        leads = election.term or election.is_campaigning
        return not leads and self._lease != 0 and self._stored_lease == self._lease

    def _patience_changed(
        self, now: float, change: _ChangePatience, answer: Answer
    ) -> list[SessionEffect]:
        if isinstance(answer, Problem):
            return self._fail(now, answer)
        assert isinstance(answer, Granted)
        if self._stored is None or not self._may_change_lease():
            return []  # The lease is not used, and ends by itself.
        # The record moves to this lease; until it has, nothing renews the deadline of the workers.
        self._lease, self._patience, self._lease_at = answer.lease, change.patience, change.sent_at
        self._requeue(self._stored)
        return self._leadership_effects(now, LeaseReplaced(self._lease)) + self._store_next()

    def _replace_lease(self, now: float) -> list[SessionEffect]:
        """Get another lease: the last one ended, although the node is alive."""
        self._lease, self._lease_sent_at = 0, now
        effects = self._leadership_effects(now, SessionLost())
        return [*effects, self._send(_ReplaceLease(), Grant(self._ttl_s))]

    def _lease_replaced(self, now: float, answer: Answer) -> list[SessionEffect]:
        if isinstance(answer, Problem):
            return self._fail(now, answer)
        assert isinstance(answer, Granted)
        self._lease, self._patience, self._lease_at = answer.lease, 0, self._lease_sent_at
        return self._leadership_effects(now, LeaseReplaced(self._lease)) + self._store_next()

    # Views and roll calls.

    def _deliver_view(self, key: bytes, value: bytes | None) -> list[SessionEffect]:
        if value is None:
            return []
        try:
            view = read_record(View, value)
            if (view.run_id, view.node) != (self._run_id, self._node):
                raise ValueError(f"it is for {view.node!r} of the job {view.run_id!r}")
        except ValueError as problem:
            self._unreadable.add(key, str(problem))
            return [*self._unreadable.take()]
        return [DeliverMessage(view)]

    def _shared_changed(self, now: float, changes: tuple[Change, ...]) -> list[SessionEffect]:
        effects: list[SessionEffect] = []
        for change in changes:
            if change.key == self.keys.leader:
                effects += self._leadership_effects(now, LeaderKeyChanged(change))
            elif change.key == self.keys.roll_call and change.value is not None:
                self._note_roll_call(change.value)
                effects += self._store_next()
            elif change.key == self.keys.missing_members and change.value is not None:
                effects += self._note_missing(change.value)
        return effects

    def _note_missing(self, value: bytes) -> list[SessionEffect]:
        missing = missing_members(value)
        if missing == self._missing:
            return []
        self._missing = missing
        return [ReportMissing(missing)]

    def _note_roll_call(self, value: bytes) -> None:
        number = roll_call_number(value)
        if number > self._roll_call:
            self._roll_call, self._answer_due = number, True

    # The end of a session.

    def _drop(self, now: float) -> list[SessionEffect]:
        if self.state in (SessionState.LEAVING, SessionState.GONE):
            return []  # The request under way removes the node's keys.
        self.state = SessionState.DOWN
        self._requests.clear()  # Ignore answers to earlier requests.
        self._unsent.clear()  # The next session stores the newest status.
        effects = self._leadership_effects(now, SessionLost())
        effects += [StopWatch(one) for one in (self._views_watch, self._shared_watch) if one]
        self._views_watch = self._shared_watch = 0
        return effects + self._leave_if_resigned(now)

    def _fail(self, now: float, problem: Problem) -> list[SessionEffect]:
        """End the session because of a problem."""
        if problem.kind is ProblemKind.COMPACTED:
            problem = Problem(ProblemKind.UNREACHABLE, f"a watch fell behind: {problem.why}")
        if problem.kind not in _NO_ANSWER and self._refused is None:
            self._refused = self._stored
        permanent = problem.kind in (ProblemKind.DENIED, ProblemKind.REFUSED)
        return [*self._drop(now), ReportClosed(problem.why, permanent)]

    # Leaving. If several nodes leave at the same time, each might assume that the others stay. So each
    # removes its keys and reads the remaining nodes in one transaction: exactly one finds no other node.
    # That node deletes the keys that the job no longer needs. If there is a leader by then, it deletes
    # nothing: the job may have restarted. The job's own record remains until its lease ends, so late nodes
    # can read the outcome. If all nodes left on request, a later start continues the job, with its full
    # budget of restarts. If this procedure fails, the leases remove the keys.

    def _leave_if_resigned(self, now: float) -> list[SessionEffect]:
        if not self._leave_requested or not self.leadership.is_resigned:
            return []
        self._leave_requested = False
        lease, self._lease = self._lease, 0
        effects = self._drop(now)  # Requests under way no longer matter.
        effects += self._witness_effects(now, SubjectsChanged(()))
        self.state = SessionState.LEAVING
        keys, own = self.keys, list[Op]()
        if self._key:
            own = [Delete(self._key), Delete(keys.views + self._key[len(keys.nodes) :])]
        reads = (get_prefix(keys.nodes, keys_only=True), Get(keys.leader), Get(keys.job))
        return [*effects, self._send(_Remove(lease), Txn((), (*own, *reads)))]

    def _removed(self, lease: int, answer: Answer) -> list[SessionEffect]:
        if not isinstance(answer, TxnDone):
            return self._revoke(lease)
        nodes, leader, job = answer.results[-3:]
        if nodes or leader:
            return self._revoke(lease)
        keys = self.keys
        record = unpack(JobRecord, job[0].value) if job else None
        unneeded: list[Op] = [
            Delete(one, end_of_prefix(one)) for one in (keys.views, keys.store, keys.shared)
        ]
        if record is not None and record.job.outcome is None:
            left = emptied_job(record.job)
            unneeded.append(Put(keys.job, pack(JobRecord(left, record.lease)), record.lease))
        fence = (
            Compare(keys.leader, Field.CREATE, 0),
            Compare(keys.job, Field.MOD, job[0].mod_revision if job else 0),
        )
        return [self._send(_Sweep(lease), Txn(fence, tuple(unneeded)))]

    def _revoke(self, lease: int) -> list[SessionEffect]:
        if lease:
            return [self._send(_Revoke(), Revoke(lease))]
        self.state = SessionState.GONE
        return [ReportLeft()]

    # Requests.

    def _send(self, purpose: _Purpose, request: Request) -> SendRequest:
        number = next(self._numbers)
        self._requests[number] = purpose
        return SendRequest(number, request)

    def _awaits(self, kind: type[_Purpose]) -> bool:
        return any(type(one) is kind for one in self._requests.values())


def _message_id(event: SessionEvent, effects: list[SessionEffect]) -> str:
    """Return the id of the status that an event submits, or of the newest view that it delivers."""
    if isinstance(event, MessageSubmitted) and isinstance(event.message, Status):
        return event.message.id
    delivered = [one.message for one in effects if isinstance(one, DeliverMessage)]
    return next((one.id for one in reversed(delivered) if isinstance(one, View)), "")


def _is_renewal(event: SessionEvent) -> bool:
    """Whether the event is a heartbeat or the answer to one; the story does not record these."""
    if isinstance(event, MessageSubmitted):
        return isinstance(event.message, Heartbeat)
    return (
        isinstance(event, RequestAnswered)
        and isinstance(event.answer, KeptAlive)
        and event.answer.ttl_s > 0
    )
