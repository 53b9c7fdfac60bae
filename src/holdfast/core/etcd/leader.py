"""The leader of a job on etcd: it reads the job, decides, and stores it. The machine `Leadership`.

::

    FOLLOWING ── elected (`core.etcd.election`) ──► LOADING ── all is read ──► LEADING
        ▲                                              │                          │
        └──────────── another leads, or etcd cannot be reached ───────────────────┘

A leader is to its job what a coordinator is (`core.rounds` decides in both), with two differences.
Whether a node is alive is etcd's judgement, by the node's lease. And the job was another leader's
before and may be another's again: a leader takes over what the last one stored, and stores what
must outlast it.

**Writes.** A decision counts once it is stored. The job is stored first, then the views, one key
each; a successor finds out from the job which views are missing. Every write does nothing once
another node leads, or if the stored job is not the one that the decision was made from: a write
whose outcome is unknown may be carried out late. Whenever an outcome is unknown the session ends,
and in the next one the leader, if it still is, reads everything again. One write is under way at a
time, and takes all that was decided meanwhile.

**Roll calls.** A failure is held until all other members have responded (`core.failure_hold`): the leader
raises the number of the roll call, and each node responds by storing its status with that number.
A new leader calls the roll too: a leader seldom dies alone, and the leases of the others may end a
little after its own. It decides nothing before each node that the job knows has responded or is
gone. If all are alive that is one round trip; else the rest of a lease.
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
)
from holdfast.core.etcd.witness import (
    ENDED,
    Subject,
    SubjectGone,
    SubjectKnown,
    SubjectsKnown,
    Witness,
    WitnessEffect,
)
from holdfast.core.failure_hold import FailureHold, must_hold
from holdfast.core.first_failure import with_local_times
from holdfast.core.liveness import AttendedClock
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
"""The lease of a job. So long its end can be looked up, or it can be resumed, without a leader."""
JOB_KEEP_ALIVE_S = JOB_KEEP_S / 5
STEPS_PER_LEASE = 5
ROLL_CALLS_AHEAD_MAX = 2**32
"""Nodes may have answered so many more calls than are known of: the stored number may be gone."""
OPS_MAX = 100  # Operations in one transaction; etcd's default limit is 128.
WRITE_BYTES_MAX = 1_000_000  # In one transaction; etcd's default limit is 1.5 MiB.


class NodeReported(Event):
    """A node stored its status, and with it the number of the last roll call it has seen."""

    status: Status
    roll_call: int


class LedJob:
    """The decisions about one job, from when this leader took it over.

    Times are the caller's monotonic clock. The views that are returned are to be stored.
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
        """Of the leader's own node, which need not answer."""
        self.own_is_underway = False
        """Whether there is news of that node that is not stored yet, such as that its workers are gone."""
        self.is_new = False
        """Whether the job began with this leader, as far as is known."""
        self.broken = ""
        """Which invariant the job broke, for which it was closed."""
        self.is_changed = False
        """Whether the job must be stored; whoever does so resets it."""
        self.decisions: list[tuple[JobEvent, Job]] | None = None
        """Events and the job after each, for an observer that empties it; None without one."""
        self._strict = strict
        self._make = rounds
        self._clock = AttendedClock(now, step_s)
        self._waits = WaitTimers()  # By the attended clock.
        self._hold = FailureHold()
        self._late: dict[int, Status] = {}  # Came when all was over but for the report.
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
        """Take the job over: `alive` are the nodes that are there, in the order of their coming.

        `stored_views` has the revision of the view that is stored for each incarnation, and
        `lost_why` the reason given for one that is gone.
        """
        views: dict[Peer, View] = {}
        peers: dict[Peer, None] = {}  # In order, so that equal runs are equal.
        is_underway, self.own_is_underway = self.own_is_underway, True  # Until all are heard.
        for report in alive:
            info = report.status.info
            peers[info.node, info.incarnation] = None
            _merge(views, self.handle(now, report))
        self.own_is_underway = is_underway
        there = (*self.job.nodes.values(), *self.job.departed.values())
        known = [(node.info.node, node.info.incarnation) for node in there]
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
            view = self.rounds.missing_view(beat)  # What the last leader had no time to store.
            if view is not None:
                views[peer] = view
                self.is_changed = True  # Its number must not be given to another view.
        return [*views.values()]

    def handle(
        self, now: float, event: NodeReported | NodesLost | Tick, cause: str = ""
    ) -> list[View]:
        """Take in one event; return the views to be stored. The story is that of `rounds`."""
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
        """Return when `Tick` is wanted next, or None while there is nothing to wait for."""
        end = self._waits.next_end
        if end is None:
            return None
        rest = end - self._clock.read(now)
        # Looking at least every step is what makes the whole of the time count.
        return now + max(0.0, min(rest, self._clock.step_s))

    def _reported(self, now: float, status: Status, roll_call: int) -> list[View]:
        status, info = with_local_times(now, status), status.info
        if roll_call > self.roll_call + ROLL_CALLS_AHEAD_MAX:
            roll_call = 0  # Nobody has called that: it would be counted on from.
        # The stored number may have gone with the lease of the job.
        self.roll_call = max(self.roll_call, roll_call)
        if roll_call == self.roll_call:
            self._hold.responded(info.node, info.incarnation)
        if must_hold(self.rounds, status):
            if self._hold.hold(self.job, status):
                self.roll_call += 1
            return self._release(now)
        # The leader itself must not wait for responses when it leaves: it hands over.
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
        """Decide about the failures that need not be held any longer."""
        if self.own_is_underway:
            return []
        self._hold.exempt(self.own_incarnation)
        views: dict[Peer, View] = {}
        failures, endings = self._hold.release(self.job)
        for status in failures:
            if self.rounds.seq_of(status.info.node, status.info.incarnation) >= 0:
                _merge(views, self._decide(now, status))
        for event in endings:
            _merge(views, self._decide(now, event))
        return [*views.values()]

    # The job.

    def _decide(self, now: float, event: JobEvent, cause: str = "") -> list[View]:
        before = self._mark()
        try:
            views = self.rounds.handle(now, event, cause)
            if not self.broken:
                self.rounds.check()
        except Exception as error:  # (a job in an impossible state must end with an explanation)
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
        """Return what differs after a change that must outlast this leader."""
        job = self.job
        sizes = len(job.succeeded), len(job.departed)
        waits = job.wait_seq, job.quiet, *(one.until for one in job.exclusions.values())
        return job.revision, job.phase, sizes, waits, *job.nodes


def _merge(views: dict[Peer, View], newer: list[View]) -> None:
    """Keep the newest view of each incarnation."""
    for view in newer:
        views[view.node, view.incarnation] = view


class LeaderWrite(msgspec.Struct, frozen=True):
    """A transaction of the leader's, and the decisions it stores; for observers."""

    txn: Txn
    led: LedJob
    decisions: list[tuple[JobEvent, Job]]
    views: list[View]


class PendingWrites:
    """What a leader has decided and etcd does not have yet.

    It is written in portions that etcd takes, the job first: a view is never stored before the
    decision it comes from. Of several views for one node only the newest is kept.
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
        """Have a view stored."""
        peer = (view.node, view.incarnation)
        self._views[peer] = view
        # It may be back with its old view not yet deleted; etcd refuses both for one key at once.
        self._deletions.pop(self._keys.view(*peer), None)

    def forget(self, node: str, incarnation: int) -> None:
        """Delete the view of an incarnation that is gone, stored or not."""
        self._views.pop((node, incarnation), None)
        self.delete(self._keys.view(node, incarnation))

    def delete(self, key: bytes) -> None:
        """Have a key deleted."""
        self._deletions[key] = None

    @property
    def is_urgent(self) -> bool:
        """Whether anything is to be stored that a node waits for, or that must not be lost."""
        return self._led.is_changed or self._led.roll_call != self._roll_call or bool(self._views)

    @property
    def is_empty(self) -> bool:
        return not self.is_urgent and not self._deletions

    def take(self) -> tuple[list[Op], list[View]]:
        """Return the next portion: operations for one transaction, and the views among them."""
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


def inherit(
    record: JobRecord | None, alive: set[Peer], term: int, run_id: str, lease_s: float
) -> Job:
    """Return the job to go on with: the stored one, without its nodes if none of them is left.

    Its nodes may be there as other incarnations: all leases end if etcd or all machines were
    stopped for long. They report which round they were in, and the job is rebuilt from that. Nodes
    that are cut off may still run what they ran, so no number is used again.
    """
    if record is None:
        return Job(run_id=run_id, term=term, silence_s=lease_s, fence_floor=term)
    job, before = record.job, record.job.term
    known = ((node.info.node, node.info.incarnation) for node in job.nodes.values())
    if job.outcome is None and not any(peer in alive for peer in known):
        job = restore_job(snapshot_job(job), patience_s=0.0)
        job.silence_s, job.retired = lease_s, record.job.retired
    job.term = max(term, before + 1)
    if job.failure is not None:  # Its times are by the clock of another leader.
        job.failure = msgspec.structs.replace(job.failure, ended_ns=0, traceback_ns=0)
    job.fence_floor = term  # etcd's revision: it only grows.
    return job


class TakeoverRollCall:
    """The roll call of one node's newest term as the leader.

    A leader that goes on after a lost session knows the answers already and calls nobody.
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
        """Look at what was read; return whether an answer is missing.

        `stored` is the number of the stored roll call.
        """
        self._awaited = set()
        if record is None or record.job.outcome is not None or record.job.term >= term:
            return False
        answered: dict[Peer, int] = {}
        for one in nodes:
            peer, report = self._keys.peer_of(one.key), unpack(NodeRecord, one.value)
            if peer is not None and report is not None:
                is_true = report.call <= stored + ROLL_CALLS_AHEAD_MAX
                answered[peer] = report.call if is_true else 0
        if self._term != term:  # The stored number may be gone where some have answered it.
            self._term, self._number = term, max([stored, *answered.values()]) + 1
        known = {(node.info.node, node.info.incarnation) for node in record.job.nodes.values()}
        self._awaited = {
            peer
            for peer in known & answered.keys()
            if peer[1] != own_incarnation and answered[peer] < self._number
        }
        return bool(self._awaited)

    def unstored(self, stored: int, lease: int) -> tuple[Op, ...]:
        """Return what is to be stored for the nodes to see the call, unless it is stored."""
        if stored >= self._number:
            return ()
        return (Put(self._keys.roll_call, str(self._number).encode(), lease),)

    def is_answered(self, changes: tuple[Change, ...]) -> bool:
        """Take in answers and losses; return whether none is missing."""
        for change in changes:
            peer = self._keys.peer_of(change.key)
            report = unpack(NodeRecord, change.value) if change.value is not None else None
            if peer is not None and (report is None or report.call >= self._number):
                self._awaited.discard(peer)
        return not self._awaited


# The machine.


class LeaderState(Enum):
    """Where a node is on its way to leading."""

    FOLLOWING = "following"
    LOADING = "loading"
    LEADING = "leading"


class OwnStatusStored(Event):
    """This node's own status was stored; the watch will report it later."""

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


# What a request under way is for.


class _Load(msgspec.Struct, frozen=True):
    """Read everything there is of the job."""


class _RollCall(msgspec.Struct, frozen=True):
    """Store the number of the takeover's roll call."""


class _JobLease(msgspec.Struct, frozen=True):
    """Get a lease for the job that was read."""

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
    """The machine of one node's part in leading a job."""

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
        """What fences are above besides etcd's revision, for an etcd that is younger than the run id."""
        self.is_observed = False
        """Whether `last_write` is wanted."""
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
        self._followed = ("", "")  # The last leader but this node: its name and presence.
        self._takeover = TakeoverRollCall(keys)
        self._unreadable = UnreadableKeys(keys)
        self._own_incarnation = 0
        self._own: NodeReported | None = None  # What this node stored last.
        self.own_is_underway = False
        """Whether a status of this node's own is about to be stored."""
        self._cause = ""
        self._requests: dict[int, _Purpose] = {}
        self._forget()

    def _forget(self) -> None:
        self._requests.clear()  # Answers to what was sent before mean nothing from now on.
        self.state = LeaderState.FOLLOWING
        self.led = None
        self._job_lease = 0
        self._job_revision = 0  # Of the job as it is stored, 0 if it is not.
        self._kept_at = 0.0
        self._watch = 0
        self._alive: set[Peer] = set()
        self._presences: dict[Peer, str] = {}
        self._pending: PendingWrites | None = None

    @property
    def is_resigned(self) -> bool:
        """Whether this node leads no more and never will."""
        election = self.election
        return not (election.is_open or election.is_campaigning or election.term)

    def handle(self, now: float, event: LeaderEvent, cause: str = "") -> list[LeaderEffect]:
        """Take in one event; return what must now be done, in order."""
        state = self.state
        self._cause = cause
        if self.led is not None:
            self.led.own_is_underway = self.own_is_underway
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
                return self._hand_over() if waits else self._go_on()
            case _:
                return self._elect(now, event)

    def next_deadline(self, now: float) -> float | None:
        """Return when `Tick` is wanted next, or None."""
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
        """Watch whoever leads, unless it is this node: then it watches all others."""
        subjects: tuple[Subject, ...] = ()
        if leader is not None:
            if self.election.is_own(leader):
                return []
            name, lease, presence = read_leader(leader)
            self._followed = (name, presence.id if presence is not None else "")
            subjects = (Subject(presence, lease),) if presence is not None else ()
        return [*self._witness.handle(now, SubjectsKnown(subjects), self._cause)]

    def _answered(self, now: float, purpose: _Purpose, answer: Answer) -> list[LeaderEffect]:
        if isinstance(answer, Problem):
            # The lease is the job's: begin again, with another.
            if answer.kind is ProblemKind.LEASE_GONE and isinstance(purpose, _RollCall | _Write):
                return self._again()
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
                return self._again() if answer.ttl_s <= 0 else []
            case _HandOver():
                return self._elect(now, LeadershipLost())

    # Taking over.

    def _load(self) -> list[LeaderEffect]:
        self._forget()
        self.state = LeaderState.LOADING
        keys = self._keys
        everything = Txn(
            (self.election.still(),),
            (Get(keys.job), Get(keys.roll_call), get_prefix(keys.nodes), get_prefix(keys.views)),
        )
        return [self._send(_Load(), everything)]

    def _loaded(self, now: float, read: TxnDone) -> list[LeaderEffect]:
        if not read.succeeded:
            return self._elect(now, LeadershipLost())  # The watch reports who leads instead.
        if not self.election.is_open:
            return self._hand_over()
        job, roll_call, nodes, _views = read.results
        self._job_revision = job[0].mod_revision if job else 0
        try:
            record = read_record(JobRecord, job[0].value) if job else None
        except ValueError as problem:
            why = (
                f"{self._keys.job.decode()} does not hold a job of this version of Holdfast "
                f"({problem}): another program or version uses the same keys"
            )
            return [FailSession(Problem(ProblemKind.REFUSED, why))]
        number = roll_call_number(roll_call[0].value) if roll_call else 0
        term, own = self.election.term, self._own_incarnation
        if self._takeover.waits(term, record, nodes, number, own):
            assert record is not None
            return self._call_roll(read.revision, self._takeover.unstored(number, record.lease))
        if record is None:
            return [self._send(_JobLease(read, record), Grant(JOB_KEEP_S))]
        self._job_lease = record.lease
        if record.job.outcome is not None:  # Looking up how it ended does not make it last longer.
            return self._begin(now, read, record)
        return [self._send(_JobLease(read, record), KeepAlive(record.lease))]

    def _call_roll(self, revision: int, unstored: tuple[Op, ...]) -> list[LeaderEffect]:
        """Wait until it is known which of the job's nodes are alive; then read everything again."""
        watch = self._watch_nodes(revision)
        if not unstored:
            return [watch]
        return [watch, self._send(_RollCall(), Txn((self.election.still(),), unstored))]

    def _begin(self, now: float, read: TxnDone, record: JobRecord | None) -> list[LeaderEffect]:
        _job, roll_call, nodes, views = read.results
        reports: list[NodeReported] = []
        subjects: list[Subject] = []
        for one in sorted(nodes, key=lambda one: one.create_revision):
            record_there = self._record_at(one.key, one.value)
            if record_there is not None:
                reports.append(self._newest(NodeReported(record_there.status, record_there.call)))
                subjects += self._subject_of(record_there)
        alive = {(one.status.info.node, one.status.info.incarnation) for one in reports}
        job = inherit(record, alive, self.election.term, self._run_id, self._lease_s)
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
        led.own_is_underway = self.own_is_underway
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
        effects += self._witness.handle(now, SubjectsKnown(tuple(subjects)), self._cause)
        return effects + self._decided(led.begin(now, reports, stored, self._lost_why))

    def _newest(self, report: NodeReported) -> NodeReported:
        """Return what is known of a node: of this one it may be more than what was read.

        Others answer a roll call with their newest status; this one is not asked.
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

    def _again(self) -> list[LeaderEffect]:
        """Read everything again: what is stored is not what it was."""
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
            return self._again() if self._takeover.is_answered(changes) else []
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
                if gone not in self._presences.values():  # Else it began anew.
                    effects += self._witness.handle(now, SubjectGone(gone), self._cause)
                continue
            record = self._record_at(change.key, change.value)
            if record is not None:
                if peer in lost:  # It is back, and its report comes after its loss.
                    views += led.handle(now, NodesLost(tuple(lost.values())), self._cause)
                    lost = {}
                self._alive.add(peer)
                for subject in self._subject_of(record):
                    effects += self._witness.handle(now, SubjectKnown(subject), self._cause)
                views += led.handle(now, NodeReported(record.status, record.call))
        views += led.handle(now, NodesLost(tuple(lost.values())), self._cause)
        return effects + self._decided(views)

    def _subject_of(self, record: NodeRecord) -> list[Subject]:
        """Return whom to watch for a node's end, if it can be watched."""
        info, presence = record.status.info, record.presence
        if presence is None:
            return []
        self._presences[info.node, info.incarnation] = presence.id
        return [Subject(presence, record.lease)]

    def _record_at(self, key: bytes, value: bytes) -> NodeRecord | None:
        """Return what a node stored; None, and it is said once, if that cannot be used."""
        try:
            record = read_record(NodeRecord, value)
            info, run_id = record.status.info, record.status.run_id
            if run_id != self._run_id or self._keys.peer_of(key) != (info.node, info.incarnation):
                raise ValueError(f"it is of {info.node!r}, of the job {run_id!r}")
        except ValueError as problem:
            self._unreadable.add(key, str(problem))
            return None
        return record

    def _lost_why(self, peer: Peer) -> str:
        name, presence = self._followed
        presence = self._presences.get(peer, presence if name == peer[0] else "")
        if presence and self._witness.has_ended(presence):
            return ENDED
        return f"no heartbeat for {self._lease_s:g} s, or it ended"

    def _decided(self, views: list[View]) -> list[LeaderEffect]:
        for view in views:
            if (view.node, view.incarnation) in self._alive:
                assert self._pending is not None
                self._pending.add(view)
        return self._go_on()

    def _go_on(self) -> list[LeaderEffect]:
        """Store what is pending, unless a write is under way; resign if nothing is left."""
        led, pending, is_open = self.led, self._pending, self.election.is_open
        if led is None or pending is None or self._is_writing():
            return []
        if pending.is_urgent or (is_open and not pending.is_empty):
            return self._write(led, pending)
        return [] if is_open else self._hand_over()

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
        """Return what must hold for a write to be made."""
        unchanged = Compare(self._keys.job, Field.MOD, self._job_revision)
        return self.election.still(), unchanged

    def _written(self, now: float, answer: TxnDone, *, has_job: bool) -> list[LeaderEffect]:
        if answer.succeeded:
            if has_job:
                self._job_revision = answer.revision
            return self._go_on()
        # If this node still leads, the write was overtaken by an earlier one of its own that it
        # had given up: etcd carries out what it was sent, however late.
        leader = answer.results[0]
        if leader and leader[0].create_revision == self.election.term:
            return self._again()
        return self._elect(now, LeadershipLost())

    def _hand_over(self) -> list[LeaderEffect]:
        delete = Txn((self.election.still(),), (Delete(self._keys.leader),))
        return [self._send(_HandOver(), delete)]

    def _send(self, purpose: _Purpose, request: Request) -> SendRequest:
        number = next(self._numbers)
        self._requests[number] = purpose
        return SendRequest(number, request)
