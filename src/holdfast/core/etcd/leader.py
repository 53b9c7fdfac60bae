"""The leader of a job on etcd: it reads the job, decides, and stores the job. The machine `Leadership`.

::

    FOLLOWING ── elected (`core.etcd.election`) ──► LOADING ── job is read ──► LEADING
        ▲                                              │                          │
        └──────────── another node leads, or etcd is unreachable ─────────────────┘

A leader does for its job what a coordinator does; in both, `core.rounds` decides. There are two
differences. First, etcd detects lost nodes, by their leases. Second, leaders change: a leader takes over the
state that the previous leader stored, and stores all state that its successor needs.

**Writes.** A decision counts once it is stored. The job is stored first, then the views, one key each; from
the job a successor knows which views are missing. A write has no effect once another node leads. It also
has none if the stored job is not the one on which the decision is based: an earlier write with an unknown
outcome may have been performed late. If an outcome is unknown, the session ends; in the next session the
leader, if it still leads, reads everything again. One write is under way at a time, and the next one
contains all decisions made meanwhile.

**Roll calls.** A failure is held until all other members have responded (`core.failure_hold`): the leader
increments the number of the roll call, and each node responds by storing its status with that number. A new
leader also starts a roll call: other nodes may have been lost together with its predecessor, and their
leases may end slightly later. It decides nothing before each known node has responded or is gone. If all are
alive, this takes one round trip; otherwise the rest of a lease.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from holdfast.core.etcd.calls import (
    Answer,
    Change,
    Compare,
    Delete,
    EtcdEffect,
    Field,
    Get,
    Grant,
    Granted,
    KeepAlive,
    KeptAlive,
    KeysChanged,
    KeyValue,
    Op,
    Problem,
    ProblemKind,
    Put,
    Request,
    RequestAnswered,
    SendRequest,
    StartWatch,
    StopWatch,
    Txn,
    TxnDone,
    WatchEnded,
    end_of_prefix,
)
from holdfast.core.etcd.election import (
    BecomeLeader,
    Election,
    ElectionEvent,
    FailSession,
    LeaderKeyChanged,
    LeadershipLost,
    LeaseReplaced,
    ResignRequested,
    SessionLost,
    SessionUp,
    StopLeading,
)
from holdfast.core.etcd.keys import (
    JobKeys,
    JobRecord,
    NodeRecord,
    UnreadableKeys,
    get_prefix,
    pack,
    read_leader,
    read_record,
    roll_call_number,
    unpack,
    version_refusal,
)
from holdfast.core.etcd.witness import (
    ENDED,
    Subject,
    SubjectAdded,
    SubjectRemoved,
    SubjectsChanged,
    Witness,
    WitnessEffect,
)
from holdfast.core.failure_hold import FailureHold, must_hold
from holdfast.core.first_failure import with_local_times
from holdfast.core.liveness import AwakeClock
from holdfast.core.machine import TICK, Event, Story, Tick
from holdfast.core.protocol import Heartbeat, Status, View
from holdfast.core.rounds import (
    Job,
    JobEvent,
    NodeLost,
    NodesLost,
    Rounds,
    WaitTimers,
    close_broken,
)
from holdfast.core.saved_jobs import restore_job, snapshot_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Peer = tuple[str, int]
    """A node and its incarnation."""

JOB_KEEP_S = 600
"""The lease of a job: how long its outcome can be read, or the job resumed, after the last leader."""
JOB_KEEP_ALIVE_S = JOB_KEEP_S / 5
STEPS_PER_LEASE = 5
ROLL_CALLS_AHEAD_MAX = 2**32
"""If the stored number of the roll call was lost, nodes may report numbers up to this much higher."""
OPS_MAX = 100  # Operations per transaction; etcd's default limit is 128.
WRITE_BYTES_MAX = 1_000_000  # Bytes per transaction; etcd's default limit is 1.5 MiB.


class NodeReported(Event):
    """A node stored its status, with the number of the last roll call that it received."""

    status: Status
    roll_call: int


class LedJob:
    """One job under this leader.

    Times are by the caller's monotonic clock. The caller stores the views that are returned.
    """

    def __init__(
        self,
        now: float,
        job: Job,
        *,
        step_s: float,
        roll_call: int = 0,
        strict: bool = False,
        rounds: Callable[[Job], Rounds] = Rounds,
    ) -> None:
        self.rounds = rounds(job)
        self.roll_call = roll_call
        """The number of the newest roll call."""
        self.own_incarnation = 0
        """The incarnation of the leader's own node, which does not respond to roll calls."""
        self.own_status_pending = False
        """Whether that node has a status that is not stored yet, for example that its workers exited."""
        self.is_new = False
        """Whether, as far as known, the job began with this leader."""
        self.broken = ""
        """The broken invariant for which the job was closed; empty if there is none."""
        self.is_changed = False
        """Whether the job must be stored. The caller resets it."""
        self.decisions: list[tuple[JobEvent, Job]] | None = None
        """Events and the job after each. An observer sets this to a list and empties it."""
        self._strict = strict
        self._make = rounds
        self._clock = AwakeClock(now, step_s)
        self._waits = WaitTimers()  # By the awake clock.
        self._hold = FailureHold()
        self._late: dict[int, Status] = {}  # Nodes that joined a failed job before it had a report.
        self._waits.observe(self._clock.read(now), self.rounds)

    @property
    def job(self) -> Job:
        return self.rounds.job

    def begin(
        self,
        now: float,
        alive: Iterable[NodeReported],
        stored_views: dict[Peer, int],
        lost_why: Callable[[Peer], str],
    ) -> list[View]:
        """Take the job over. `alive` has the records of live nodes, in the order in which they joined.

        `stored_views` has the revision of each incarnation's stored view, and `lost_why` returns the
        reason for the loss of a node.
        """
        views: dict[Peer, View] = {}
        # An ordered set, so that the same input gives the same output.
        peers: dict[Peer, None] = {}
        was_pending = self.own_status_pending
        self.own_status_pending = True  # Until all reports are handled.
        for report in alive:
            info = report.status.info
            peers[info.node, info.incarnation] = None
            _merge(views, self.handle(now, report))
        self.own_status_pending = was_pending
        nodes = (*self.job.nodes.values(), *self.job.departed.values())
        known = [(node.info.node, node.info.incarnation) for node in nodes]
        lost = tuple(NodeLost(*peer, lost_why(peer)) for peer in known if peer not in peers)
        _merge(views, self.handle(now, NodesLost(lost)))
        _merge(views, self._release(now))
        for peer in peers:
            if peer in views:
                continue
            beat = Heartbeat(
                run_id=self.job.run_id,
                node=peer[0],
                incarnation=peer[1],
                seq=0,
                term=self.job.term,
                revision=stored_views.get(peer, -1),
            )
            view = self.rounds.missing_view(beat)  # A view that the last leader did not store.
            if view is not None:
                views[peer] = view
                self.is_changed = True  # Another view must not get the same number.
        return [*views.values()]

    def handle(
        self, now: float, event: NodeReported | NodesLost | Tick, cause: str = ""
    ) -> list[View]:
        """Handle one event; return the views to store. The story of `rounds` records the step."""
        match event:
            case NodeReported(status, roll_call):
                return self._reported(now, status, roll_call)
            case NodesLost(lost):
                return self._lost(now, lost, cause)
            case Tick():
                views: dict[Peer, View] = {}
                for ended, cause in self._waits.ended(self._clock.read(now)):
                    _merge(views, self._decide(now, ended, cause))
                return [*views.values()]

    def next_deadline(self, now: float) -> float | None:
        """Return when the next `Tick` is due, or None."""
        end = self._waits.next_end
        if end is None:
            return None
        rest = end - self._clock.read(now)
        # The clock counts the whole time only if it is read at least every `step_s`.
        return now + max(0.0, min(rest, self._clock.step_s))

    def _reported(self, now: float, status: Status, roll_call: int) -> list[View]:
        status, info = with_local_times(now, status), status.info
        if roll_call > self.roll_call + ROLL_CALLS_AHEAD_MAX:
            roll_call = 0  # This number is invalid; later roll calls must not continue from it.
        # The stored number may be lost with the lease of the job.
        self.roll_call = max(self.roll_call, roll_call)
        if roll_call == self.roll_call:
            self._hold.responded(info.node, info.incarnation)
        if must_hold(self.rounds, status):
            if self._hold.hold(self.job, status):
                self.roll_call += 1
            return self._release(now)
        # When the leader itself leaves, it does not wait for responses but hands over.
        if info.incarnation != self.own_incarnation and self._hold.must_hold_departure(status):
            self._hold.hold_departure(status)
            return self._release(now)
        views = self._decide(now, status)
        views += self._release(now)
        is_known = self.rounds.seq_of(info.node, info.incarnation) >= 0
        if self.job.outcome is not None and not self.job.final and not is_known:
            self._late[info.incarnation] = status
        return views

    def _lost(self, now: float, lost: tuple[NodeLost, ...], cause: str) -> list[View]:
        if not lost:
            return []
        for one in lost:
            self._late.pop(one.incarnation, None)
        leaving = [one for one in lost if (one.node, one.incarnation) in self._hold.leaving]
        for one in leaving:
            self._hold.hold_departure(one)
        lost = tuple(one for one in lost if one not in leaving)
        views = self._decide(now, NodesLost(lost), cause) if lost else []
        return views + self._release(now)

    def _release(self, now: float) -> list[View]:
        """Decide about the failures whose hold is over."""
        if self.own_status_pending:
            return []
        self._hold.exempt(self.own_incarnation)
        views: dict[Peer, View] = {}
        failures, departures = self._hold.release(self.job)
        for status in failures:
            if self.rounds.seq_of(status.info.node, status.info.incarnation) >= 0:
                _merge(views, self._decide(now, status))
        for event in departures:
            _merge(views, self._decide(now, event))
        return [*views.values()]

    # The job.

    def _decide(self, now: float, event: JobEvent, cause: str = "") -> list[View]:
        before = self._mark()
        try:
            views = self.rounds.handle(now, event, cause)
            if not self.broken:
                self.rounds.check()
        except Exception as error:  # A job in an invalid state must end with an explanation.
            if self._strict:
                raise
            self.broken = f"{type(error).__name__}: {error}"
            views, self.rounds = close_broken(now, self.rounds, self.broken, self._make)
        if self._late and self.job.final:
            late, self._late = self._late, {}
            for status in late.values():
                views += self.rounds.handle(now, status)
        self._waits.observe(self._clock.read(now), self.rounds)
        self.is_changed = self.is_changed or self._mark() != before
        if self.decisions is not None:
            job = self.job
            self.decisions.append((event, msgspec.structs.replace(job, nodes=dict(job.nodes))))
        return views

    def _mark(self) -> object:
        """Return a value that differs after each change that a successor must know about."""
        job = self.job
        sizes = len(job.succeeded), len(job.departed)
        waits = job.wait_seq, job.quiet, *(one.until for one in job.exclusions.values())
        return job.revision, job.phase, sizes, waits, *job.nodes


def _merge(views: dict[Peer, View], newer: list[View]) -> None:
    """Keep the newest view of each incarnation."""
    for view in newer:
        views[view.node, view.incarnation] = view


class LeaderWrite(msgspec.Struct, frozen=True):
    """A transaction of the leader, and the decisions that it stores; for observers."""

    txn: Txn
    led: LedJob
    decisions: list[tuple[JobEvent, Job]]
    views: list[View]


class PendingWrites:
    """A leader's decisions that are not stored in etcd yet.

    They are written in portions within etcd's limits, the job first: a view is never stored before the
    decision that led to it. If a node has several views, only the newest is kept.
    """

    def __init__(self, keys: JobKeys, led: LedJob, lease: int, ops_max: int = OPS_MAX) -> None:
        self._keys = keys
        self._led = led
        self._lease = lease
        self._roll_call = led.roll_call
        self._ops_max = ops_max
        self._views: dict[Peer, View] = {}
        self._deletions: dict[bytes, None] = {}  # In order.

    def add(self, view: View) -> None:
        """Add a view to store."""
        peer = (view.node, view.incarnation)
        self._views[peer] = view
        # etcd rejects a transaction that both puts and deletes a key.
        self._deletions.pop(self._keys.view(*peer), None)

    def forget(self, node: str, incarnation: int) -> None:
        """Delete the view of a lost incarnation, stored or not."""
        self._views.pop((node, incarnation), None)
        self.delete(self._keys.view(node, incarnation))

    def delete(self, key: bytes) -> None:
        """Add a key to delete."""
        self._deletions[key] = None

    @property
    def is_urgent(self) -> bool:
        """Whether there is a change that nodes wait for, or that must not be lost."""
        return self._led.is_changed or self._led.roll_call != self._roll_call or bool(self._views)

    @property
    def is_empty(self) -> bool:
        return not self.is_urgent and not self._deletions

    def take(self) -> tuple[list[Op], list[View]]:
        """Return the next portion: the operations of one transaction, and the views in it."""
        led, keys, ops, size = self._led, self._keys, list[Op](), 0
        if led.is_changed:
            record = pack(JobRecord(led.job, self._lease))
            ops.append(Put(keys.job, record, self._lease))
            size += len(record)
            led.is_changed = False
        if led.roll_call != self._roll_call:
            ops.append(Put(keys.roll_call, str(led.roll_call).encode(), self._lease))
            self._roll_call = led.roll_call
        views: list[View] = []
        while self._views and len(ops) < self._ops_max:
            peer, view = next(iter(self._views.items()))
            record = pack(view)
            if ops and size + len(record) > WRITE_BYTES_MAX:
                break
            del self._views[peer]
            views.append(view)
            ops.append(Put(keys.view(*peer), record, self._lease))
            size += len(record)
        while self._deletions and len(ops) < self._ops_max:
            ops.append(Delete(self._deletions.popitem()[0]))
        return ops, views


# Taking over.


def job_to_lead(
    record: JobRecord | None, alive: set[Peer], term: int, run_id: str, lease_s: float
) -> Job:
    """Return the job to continue: the stored job, without its nodes if none of them is left.

    The nodes may be present as new incarnations, since all leases end if etcd or all machines were
    stopped for a long time. They report their round, and the job is rebuilt from these reports. Disconnected
    nodes may still run workers, so no number is used again.
    """
    if record is None:
        return Job(run_id=run_id, term=term, silence_s=lease_s, fence_floor=term)
    job, before = record.job, record.job.term
    known = ((node.info.node, node.info.incarnation) for node in job.nodes.values())
    if job.outcome is None and not any(peer in alive for peer in known):
        job = restore_job(snapshot_job(job), patience_s=0.0)
        job.silence_s, job.retired = lease_s, record.job.retired
    job.term = max(term, before + 1)
    if job.failure is not None:  # Its times are by the clock of an earlier leader.
        job.failure = msgspec.structs.replace(job.failure, ended_ns=0, traceback_ns=0)
    job.fence_floor = term  # etcd's revision: it only grows.
    return job


class TakeoverRollCall:
    """The roll call with which a new leader begins its term.

    If a leader continues after a lost session, it already knows the responses and starts no roll call.
    """

    def __init__(self, keys: JobKeys) -> None:
        self._keys = keys
        self._term = self._number = 0
        self._awaited: set[Peer] = set()

    def waits(
        self,
        term: int,
        record: JobRecord | None,
        nodes: tuple[KeyValue, ...],
        stored: int,
        own_incarnation: int,
    ) -> bool:
        """Evaluate the loaded records; return whether a response is missing.

        `stored` is the number of the stored roll call.
        """
        self._awaited = set()
        if record is None or record.job.outcome is not None or record.job.term >= term:
            return False
        answered: dict[Peer, int] = {}
        for one in nodes:
            peer, report = self._keys.peer_of(one.key), unpack(NodeRecord, one.value)
            if peer is not None and report is not None:
                is_true = report.roll_call <= stored + ROLL_CALLS_AHEAD_MAX
                answered[peer] = report.roll_call if is_true else 0
        if self._term != term:  # The stored number may be lost although nodes responded to it.
            self._term, self._number = term, max([stored, *answered.values()]) + 1
        known = {(node.info.node, node.info.incarnation) for node in record.job.nodes.values()}
        self._awaited = {
            peer
            for peer in known & answered.keys()
            if peer[1] != own_incarnation and answered[peer] < self._number
        }
        return bool(self._awaited)

    def unstored(self, stored: int, lease: int) -> tuple[Op, ...]:
        """Return the operations that store the roll call; none if it is stored."""
        if stored >= self._number:
            return ()
        return (Put(self._keys.roll_call, str(self._number).encode(), lease),)

    def is_answered(self, changes: tuple[Change, ...]) -> bool:
        """Process responses and losses; return whether no response is missing."""
        for change in changes:
            peer = self._keys.peer_of(change.key)
            report = unpack(NodeRecord, change.value) if change.value is not None else None
            if peer is not None and (report is None or report.roll_call >= self._number):
                self._awaited.discard(peer)
        return not self._awaited


# The machine.


class LeaderState(Enum):
    """The state of a node's leadership."""

    FOLLOWING = "following"
    LOADING = "loading"
    LEADING = "leading"


class OwnStatusStored(Event):
    """This node's own status was stored; the watch reports it later."""

    report: NodeReported


LeaderEvent = (
    SessionUp
    | LeaseReplaced
    | SessionLost
    | LeaderKeyChanged
    | ResignRequested
    | OwnStatusStored
    | Tick
    | RequestAnswered
    | KeysChanged
    | WatchEnded
)
LeaderEffect = EtcdEffect | WitnessEffect | FailSession


# The purposes of requests under way.


class _Load(msgspec.Struct, frozen=True):
    """Read all keys of the job."""


class _RollCall(msgspec.Struct, frozen=True):
    """Store the number of the takeover's roll call."""


class _JobLease(msgspec.Struct, frozen=True):
    """Renew or create the lease of the loaded job."""

    read: TxnDone
    record: JobRecord | None


class _Write(msgspec.Struct, frozen=True):
    """Store decisions."""

    has_job: bool


class _HandOver(msgspec.Struct, frozen=True):
    """Delete the leader's key."""


class _KeepJob(msgspec.Struct, frozen=True):
    """Renew the lease of the job."""


_Purpose = _Load | _RollCall | _JobLease | _Write | _HandOver | _KeepJob


class Leadership:
    """The machine of one node's leadership of a job."""

    def __init__(
        self,
        *,
        keys: JobKeys,
        run_id: str,
        name: str,
        lease_s: float,
        numbers: Iterator[int],
        witness: Witness,
        strict: bool = False,
        rounds: Callable[[Job], Rounds] = Rounds,
    ) -> None:
        self.state = LeaderState.FOLLOWING
        self.led: LedJob | None = None
        self.ops_max = OPS_MAX
        self.fence_base = 0
        """Fences are above etcd's revision plus this: a new cluster of `--ha` starts its revisions at 1."""
        self.is_observed = False
        """Whether an observer needs `last_write`."""
        self.last_write: LeaderWrite | None = None
        self.election = Election(key=keys.leader, name=name, numbers=numbers)
        self.story = Story("leader", node=name)
        self._keys = keys
        self._run_id = run_id
        self._lease_s = lease_s
        self._numbers = numbers
        self._strict = strict
        self._make = rounds
        self._witness = witness
        self._followed = ("", "")  # Name and presence of the last leader other than this node.
        self._takeover = TakeoverRollCall(keys)
        self._unreadable = UnreadableKeys(keys)
        self._own_incarnation = 0
        self._own: NodeReported | None = None  # The last stored record of this node.
        self.own_status_pending = False
        """Whether a status of this node is about to be stored."""
        self._cause = ""
        self._requests: dict[int, _Purpose] = {}
        self._forget()

    def _forget(self) -> None:
        self._requests.clear()  # Ignore answers to earlier requests.
        self.state = LeaderState.FOLLOWING
        self.led = None
        self._job_lease = 0
        self._job_revision = 0  # The revision of the stored job; 0 if it is not stored.
        self._kept_at = 0.0
        self._watch = 0
        self._alive: set[Peer] = set()
        self._presences: dict[Peer, str] = {}
        self._pending: PendingWrites | None = None

    @property
    def is_resigned(self) -> bool:
        """Whether this node does not lead and never will again."""
        election = self.election
        return not (election.is_candidate or election.is_campaigning or election.term)

    def handle(self, now: float, event: LeaderEvent, cause: str = "") -> list[LeaderEffect]:
        """Handle one event; return the effects in order."""
        state = self.state
        self._cause = cause
        if self.led is not None:
            self.led.own_status_pending = self.own_status_pending
        effects = self._handle(now, event) + self._unreadable.take()
        if effects or self.state is not state:
            self.story.record(now, state, event, effects, cause)
        return effects

    def _handle(self, now: float, event: LeaderEvent) -> list[LeaderEffect]:
        match event:
            case RequestAnswered(number, answer):
                purpose = self._requests.pop(number, None)
                if purpose is None:
                    return self._elect(now, event)
                return self._answered(now, purpose, answer)
            case KeysChanged(number, changes):
                return self._nodes_changed(now, changes) if number == self._watch else []
            case OwnStatusStored(report):
                return self._own_status_stored(now, report)
            case Tick():
                return self._tick(now)
            case WatchEnded(number, problem):
                return [FailSession(problem)] if number == self._watch else []
            case ResignRequested():
                self.election.handle(now, event, self._cause)
                waits = self.state is LeaderState.LOADING and self._watch
                return self._hand_over() if waits else self._write_pending()
            case _:
                return self._elect(now, event)

    def next_deadline(self, now: float) -> float | None:
        """Return when the next `Tick` is due, or None."""
        if self.led is None:
            return None
        at = self._kept_at + JOB_KEEP_ALIVE_S
        deadline = self.led.next_deadline(now)
        return at if deadline is None else min(at, deadline)

    def _elect(self, now: float, event: ElectionEvent) -> list[LeaderEffect]:
        effects: list[LeaderEffect] = []
        for effect in self.election.handle(now, event, self._cause):
            if isinstance(effect, BecomeLeader):
                effects += self._load()
            elif isinstance(effect, StopLeading):
                effects += self._stop()
            else:
                effects.append(effect)
        match event:
            case SessionUp(_, KeyValue(value=leader)):
                effects += self._follow(now, leader)
            case LeaderKeyChanged(change) if change.mod_revision > self.election.term:
                effects += self._follow(now, change.value)
        return effects

    def _follow(self, now: float, leader: bytes | None) -> list[LeaderEffect]:
        """Watch the leader's process; if this node leads, it watches all others instead."""
        subjects: tuple[Subject, ...] = ()
        if leader is not None:
            if self.election.is_own(leader):
                return []
            other = version_refusal(leader)
            if other:
                return [FailSession(Problem(ProblemKind.REFUSED, f"the leader's key: {other}"))]
            name, lease, presence = read_leader(leader)
            self._followed = (name, presence.id if presence is not None else "")
            subjects = (Subject(presence, lease),) if presence is not None else ()
        return [*self._witness.handle(now, SubjectsChanged(subjects), self._cause)]

    def _answered(self, now: float, purpose: _Purpose, answer: Answer) -> list[LeaderEffect]:
        if isinstance(answer, Problem):
            # The job's lease has ended: read the job again and get another lease.
            if answer.kind is ProblemKind.LEASE_GONE and isinstance(purpose, _RollCall | _Write):
                return self._reload()
            return [FailSession(answer)]
        match purpose:
            case _Write(has_job):
                assert isinstance(answer, TxnDone)
                return self._written(now, answer, has_job=has_job)
            case _Load():
                assert isinstance(answer, TxnDone)
                return self._loaded(now, answer)
            case _RollCall():
                assert isinstance(answer, TxnDone)
                return [] if answer.succeeded else self._elect(now, LeadershipLost())
            case _JobLease(read, record):
                if isinstance(answer, KeptAlive) and answer.ttl_s <= 0:
                    return [self._send(purpose, Grant(JOB_KEEP_S))]
                if isinstance(answer, Granted):
                    self._job_lease = answer.lease
                return self._begin(now, read, record)
            case _KeepJob():
                assert isinstance(answer, KeptAlive)
                return self._reload() if answer.ttl_s <= 0 else []
            case _HandOver():
                return self._elect(now, LeadershipLost())

    # Taking over.

    def _load(self) -> list[LeaderEffect]:
        self._forget()
        self.state = LeaderState.LOADING
        keys = self._keys
        everything = Txn(
            (self.election.leader_condition(),),
            (Get(keys.job), Get(keys.roll_call), get_prefix(keys.nodes), get_prefix(keys.views)),
        )
        return [self._send(_Load(), everything)]

    def _loaded(self, now: float, read: TxnDone) -> list[LeaderEffect]:
        if not read.succeeded:
            return self._elect(now, LeadershipLost())  # The watch reports the new leader.
        if not self.election.is_candidate:
            return self._hand_over()
        job, roll_call, nodes, _views = read.results
        self._job_revision = job[0].mod_revision if job else 0
        try:
            record = read_record(JobRecord, job[0].value) if job else None
        except ValueError as problem:
            why = f"{self._keys.job.decode()} is not the record of a job: {problem}"
            return [FailSession(Problem(ProblemKind.REFUSED, why))]
        number = roll_call_number(roll_call[0].value) if roll_call else 0
        term, own = self.election.term, self._own_incarnation
        if self._takeover.waits(term, record, nodes, number, own):
            assert record is not None
            return self._call_roll(read.revision, self._takeover.unstored(number, record.lease))
        if record is None:
            return [self._send(_JobLease(read, record), Grant(JOB_KEEP_S))]
        self._job_lease = record.lease
        if record.job.outcome is not None:  # Reading the outcome does not renew the job's lease.
            return self._begin(now, read, record)
        return [self._send(_JobLease(read, record), KeepAlive(record.lease))]

    def _call_roll(self, revision: int, unstored: tuple[Op, ...]) -> list[LeaderEffect]:
        """Wait until it is known which nodes of the job are alive; then read everything again."""
        watch = self._watch_nodes(revision)
        if not unstored:
            return [watch]
        return [watch, self._send(_RollCall(), Txn((self.election.leader_condition(),), unstored))]

    def _begin(self, now: float, read: TxnDone, record: JobRecord | None) -> list[LeaderEffect]:
        _job, roll_call, nodes, views = read.results
        reports: list[NodeReported] = []
        subjects: list[Subject] = []
        for one in sorted(nodes, key=lambda one: one.create_revision):
            record_there = self._record_at(one.key, one.value)
            if record_there is not None:
                reports.append(
                    self._newest(NodeReported(record_there.status, record_there.roll_call))
                )
                subjects += self._subject_of(record_there)
        alive = {(one.status.info.node, one.status.info.incarnation) for one in reports}
        job = job_to_lead(record, alive, self.election.term, self._run_id, self._lease_s)
        job.fence_floor += self.fence_base
        self.led = led = LedJob(
            now,
            job,
            step_s=self._lease_s / STEPS_PER_LEASE,
            roll_call=roll_call_number(roll_call[0].value) if roll_call else 0,
            strict=self._strict,
            rounds=self._make,
        )
        led.own_incarnation = self._own_incarnation
        led.own_status_pending = self.own_status_pending
        led.rounds.story.node = f"{self.story.node}/{self._run_id}"
        led.is_new = record is None or led.job is not record.job
        led.decisions = [] if self.is_observed else None
        self._pending = pending = PendingWrites(self._keys, led, self._job_lease, self.ops_max)
        stored: dict[Peer, int] = {}
        for one in views:
            peer = self._keys.peer_of(one.key)
            view = unpack(View, one.value)
            if peer is None or peer not in alive:
                pending.delete(one.key)
            elif view is not None:
                stored[peer] = view.revision
        self.state = LeaderState.LEADING
        self._kept_at = now
        self._alive = alive
        effects: list[LeaderEffect] = [self._watch_nodes(read.revision)]
        effects += self._witness.handle(now, SubjectsChanged(tuple(subjects)), self._cause)
        return effects + self._decided(led.begin(now, reports, stored, self._lost_why))

    def _newest(self, report: NodeReported) -> NodeReported:
        """Return the newest report of a node. For this node it may be newer than the loaded one.

        Other nodes respond to a roll call with their newest status; this one does not.
        """
        own, status = self._own, report.status
        if own is None or own.status.info.incarnation != status.info.incarnation:
            return report
        return own if own.status.seq > status.seq else report

    def _watch_nodes(self, revision: int) -> StartWatch:
        key = self._keys.nodes
        self._watch = next(self._numbers)
        return StartWatch(self._watch, key, end_of_prefix(key), revision + 1)

    def _stop(self) -> list[LeaderEffect]:
        effects: list[LeaderEffect] = [StopWatch(self._watch)] if self._watch else []
        self._forget()
        return effects

    def _reload(self) -> list[LeaderEffect]:
        """Read everything again, because the stored state changed unexpectedly."""
        return self._stop() + self._load()

    # Leading.

    def _own_status_stored(self, now: float, report: NodeReported) -> list[LeaderEffect]:
        info = report.status.info
        self._own, self._own_incarnation = report, info.incarnation
        if self.led is None:
            return []
        self.led.own_incarnation = info.incarnation
        self._alive.add((info.node, info.incarnation))
        return self._decided(self.led.handle(now, report))

    def _tick(self, now: float) -> list[LeaderEffect]:
        if self.led is None:
            return []
        effects = self._decided(self.led.handle(now, TICK))
        if now - self._kept_at >= JOB_KEEP_ALIVE_S:
            self._kept_at = now
            if self.led.job.outcome is None:
                effects.append(self._send(_KeepJob(), KeepAlive(self._job_lease)))
        return effects

    def _nodes_changed(self, now: float, changes: tuple[Change, ...]) -> list[LeaderEffect]:
        led, pending = self.led, self._pending
        if led is None or pending is None:
            return self._reload() if self._takeover.is_answered(changes) else []
        views: list[View] = []
        lost: dict[Peer, NodeLost] = {}
        effects: list[LeaderEffect] = []
        for change in changes:
            peer = self._keys.peer_of(change.key)
            if peer is None:
                continue
            if change.value is None:
                self._alive.discard(peer)
                pending.forget(*peer)
                lost[peer] = NodeLost(*peer, self._lost_why(peer))
                gone = self._presences.pop(peer, "")
                if gone not in self._presences.values():  # Otherwise the agent rejoined.
                    effects += self._witness.handle(now, SubjectRemoved(gone), self._cause)
                continue
            record = self._record_at(change.key, change.value)
            if record is not None:
                if peer in lost:  # The node returned: report its loss before its new status.
                    views += led.handle(now, NodesLost(tuple(lost.values())), self._cause)
                    lost = {}
                self._alive.add(peer)
                for subject in self._subject_of(record):
                    effects += self._witness.handle(now, SubjectAdded(subject), self._cause)
                views += led.handle(now, NodeReported(record.status, record.roll_call))
        views += led.handle(now, NodesLost(tuple(lost.values())), self._cause)
        return effects + self._decided(views)

    def _subject_of(self, record: NodeRecord) -> list[Subject]:
        """Return the process to watch for a node, if its record has a presence."""
        info, presence = record.status.info, record.presence
        if presence is None:
            return []
        self._presences[info.node, info.incarnation] = presence.id
        return [Subject(presence, record.lease)]

    def _record_at(self, key: bytes, value: bytes) -> NodeRecord | None:
        """Return a node's record. If it is invalid, report this once and return None."""
        try:
            record = read_record(NodeRecord, value)
            info, run_id = record.status.info, record.status.run_id
            if run_id != self._run_id or self._keys.peer_of(key) != (info.node, info.incarnation):
                raise ValueError(f"it belongs to {info.node!r} of the job {run_id!r}")
        except ValueError as problem:
            self._unreadable.add(key, str(problem))
            return None
        return record

    def _lost_why(self, peer: Peer) -> str:
        name, presence = self._followed
        presence = self._presences.get(peer, presence if name == peer[0] else "")
        if presence and self._witness.has_ended(presence):
            return ENDED
        return f"no heartbeat for {self._lease_s:g} s, or its agent exited"

    def _decided(self, views: list[View]) -> list[LeaderEffect]:
        for view in views:
            if (view.node, view.incarnation) in self._alive:
                assert self._pending is not None
                self._pending.add(view)
        return self._write_pending()

    def _write_pending(self) -> list[LeaderEffect]:
        """Store the pending changes, unless a write is under way; resign if none are left."""
        led, pending, is_candidate = self.led, self._pending, self.election.is_candidate
        if led is None or pending is None or self._is_writing():
            return []
        if pending.is_urgent or (is_candidate and not pending.is_empty):
            return self._write(led, pending)
        return [] if is_candidate else self._hand_over()

    def _is_writing(self) -> bool:
        return any(isinstance(one, _Write | _HandOver) for one in self._requests.values())

    def _write(self, led: LedJob, pending: PendingWrites) -> list[LeaderEffect]:
        ops, views = pending.take()
        txn = Txn(self._fence(), tuple(ops), (Get(self._keys.leader),))
        if led.decisions is not None:
            self.last_write = LeaderWrite(txn, led, led.decisions, views)
            led.decisions = []
        has_job = any(isinstance(op, Put) and op.key == self._keys.job for op in ops)
        return [self._send(_Write(has_job), txn)]

    def _fence(self) -> tuple[Compare, ...]:
        """Return the conditions of every write."""
        unchanged = Compare(self._keys.job, Field.MOD, self._job_revision)
        return self.election.leader_condition(), unchanged

    def _written(self, now: float, answer: TxnDone, *, has_job: bool) -> list[LeaderEffect]:
        if answer.succeeded:
            if has_job:
                self._job_revision = answer.revision
            return self._write_pending()
        # If this node still leads, an earlier write that it had given up was performed late, and this
        # one failed because of it.
        leader = answer.results[0]
        if leader and leader[0].create_revision == self.election.term:
            return self._reload()
        return self._elect(now, LeadershipLost())

    def _hand_over(self) -> list[LeaderEffect]:
        delete = Txn((self.election.leader_condition(),), (Delete(self._keys.leader),))
        return [self._send(_HandOver(), delete)]

    def _send(self, purpose: _Purpose, request: Request) -> SendRequest:
        number = next(self._numbers)
        self._requests[number] = purpose
        return SendRequest(number, request)
