"""What the leader of one job makes of what its nodes say and of their ends: `LedJob`.

A leader is to its job what a coordinator is, but for two things. Nodes live as long as somebody
else says so (etcd, by their leases), so nobody is watched here. And the job has been somebody
else's before and may be again: `begin` takes over what the last leader left, and `is_changed` says
when what must outlast this one has to be stored.

**Roll calls.** Workers see the end of another machine at once and fail of it, seconds before that
node's lease ends. So a failure is not blamed on anybody before all other members have shown that
they live: the leader asks for a sign (`call` goes up), each answers with the number, and a member
that does not is soon lost, which is then the reason for the restart.

Pure: times are the caller's monotonic clock.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from holdfast.core.coordinator import close_broken
from holdfast.core.etcd.calls import (
    Answer,
    Change,
    Compare,
    Delete,
    Field,
    Get,
    Grant,
    Granted,
    KeepAlive,
    KeptAlive,
    KeyValue,
    Op,
    Problem,
    ProblemKind,
    Put,
    Request,
    Txn,
    TxnDone,
    end_of_prefix,
)
from holdfast.core.etcd.election import Election
from holdfast.core.etcd.keys import (
    JobKeys,
    JobRecord,
    NodeRecord,
    get_prefix,
    pack,
    roll_call_number,
    unpack,
)
from holdfast.core.liveness import AttendedClock
from holdfast.core.protocol import Heartbeat, NodeInfo, NodePhase, Status, View
from holdfast.core.rounds import Event, Job, JobPhase, NodeLost, NodesLost, Rounds, WaitEnded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.core.etcd.calls import Asking, EtcdEffect, SendRequest
    from holdfast.core.rounds import Event

    Peer = tuple[str, int]


class LedJob:
    """One job, from when this leader took it over."""

    def __init__(
        self,
        now: float,
        job: Job,
        *,
        step_s: float,
        call: int = 0,
        strict: bool = False,
        rounds: Callable[[Job], Rounds] = Rounds,
    ) -> None:
        self.rounds = rounds(job)
        self.call = call
        """The number of the newest roll call."""
        self.own = 0
        """The incarnation of the leader's own node, which need not answer."""
        self.is_new = False
        """Whether the job began with this leader, as far as is known."""
        self.broken = ""
        """Which invariant the job broke, for which it was closed."""
        self.is_changed = False
        """Whether the job must be stored; whoever does so sets it back."""
        self.decisions: list[tuple[Event, Job]] | None = None
        """What happened, and the job after it, if somebody wants to know and empties it."""
        self._strict = strict
        self._make = rounds
        self._clock = AttendedClock(now, step_s)
        self._wait: tuple[int, float] | None = None  # Its number, when it ends (attended).
        self._held: dict[str, Status] = {}  # Failures that may be due to a loss, by node.
        self._called_for = -1  # The generation that the newest roll call was for.
        self._answered: dict[int, int] = {}  # The newest call heard, by incarnation.
        self._awaited: set[int] = set()  # Incarnations of which it is not known whether they live,
        self._awaited_as: object = None  # as long as all this stays as it is.
        self._late: dict[int, Status] = {}  # Came when all was over but for the report.
        self._note_wait(now)

    @property
    def job(self) -> Job:
        """The state of the job."""
        return self.rounds.job

    def begin(
        self,
        now: float,
        there: Iterable[tuple[Status, int]],
        shown: dict[tuple[str, int], int],
        gone: str,
    ) -> list[View]:
        """Take the job over: `there` are the nodes that live, in the order in which they came.

        `shown` has the revision of the view that lies ready for each incarnation, and `gone` says
        what became of those who are no longer there.
        """
        told: dict[tuple[str, int], View] = {}
        alive: dict[tuple[str, int], None] = {}  # In order, so that equal runs are equal.
        for status, call in there:
            alive[status.info.node, status.info.incarnation] = None
            _gather(told, self.said(now, status, call))
        lost = [
            NodeLost(node.info.node, node.info.incarnation, gone)
            for node in self.job.nodes.values()
            if (node.info.node, node.info.incarnation) not in alive
        ]
        _gather(told, self.lost(now, lost))
        for peer in alive:
            if peer in told:
                continue
            beat = Heartbeat(
                run_id=self.job.run_id,
                node=peer[0],
                incarnation=peer[1],
                seq=0,
                term=self.job.term,
                revision=shown.get(peer, -1),
            )
            view = self.rounds.behind(beat)  # What the last leader had no time to tell.
            if view is not None:
                told[peer] = view
                self.is_changed = True  # Its number must not be given to another view.
        return [*told.values()]

    def said(self, now: float, status: Status, call: int) -> list[View]:
        """Take in what a node says, and which roll call it has heard."""
        info = status.info
        self._answered[info.incarnation] = call
        self.call = max(self.call, call)  # The number may have gone with the lease of the job.
        if call == self.call:
            self._awaited.discard(info.incarnation)
        if self._may_be_due_to_a_loss(status):
            if self._called_for != status.generation:
                self._called_for = status.generation
                self.call += 1
            self._held[info.node] = status
            self._awaited.discard(info.incarnation)
            return self._release(now)
        told = self._tell(now, status)
        if info.node in self.job.succeeded:
            self._awaited.discard(info.incarnation)
        told += self._release(now)
        is_known = self.rounds.seq_of(info.node, info.incarnation) >= 0
        if self.job.outcome is not None and not self.job.final and not is_known:
            self._late[info.incarnation] = status
        return told

    def lost(self, now: float, those: list[NodeLost]) -> list[View]:
        """Take in that nodes are gone, all at once."""
        if not those:
            return []
        for one in those:
            self._answered.pop(one.incarnation, None)
            self._awaited.discard(one.incarnation)
            self._late.pop(one.incarnation, None)
        return self._tell(now, NodesLost(tuple(those))) + self._release(now)

    def tick(self, now: float) -> list[View]:
        """See what time has brought."""
        if self._wait is None or self._clock.look(now) < self._wait[1]:
            return []
        return self._tell(now, WaitEnded(self._wait[0]))

    def next_deadline(self, now: float) -> float | None:
        """Return when `tick` is wanted next, or None while there is nothing to wait for."""
        if self._wait is None:
            return None
        rest = self._wait[1] - self._clock.look(now)
        # Looking at least every step is what makes the whole of the time count.
        return now + max(0.0, min(rest, self._clock.step_s))

    # Failures that may be another's.

    def _may_be_due_to_a_loss(self, status: Status) -> bool:
        job, info = self.job, status.info
        return (
            status.phase is NodePhase.FAILED
            and job.phase is JobPhase.ACTIVE
            and status.generation == job.generation
            and self.rounds.rank_table.incarnation_of(info.node) == info.incarnation
            and 0 <= self.rounds.seq_of(info.node, info.incarnation) < status.seq
        )

    def _awaits_somebody(self) -> bool:
        """Whether it is not known of a member whether it lives.

        All members are gone through once for a call; then each that is heard of is struck out.
        """
        job = self.job
        if job.phase is not JobPhase.ACTIVE:
            return False
        now_as = self.call, self.own, job.round_term, job.round, job.generation
        if self._awaited_as != now_as:
            self._awaited_as = now_as
            self._awaited = {info.incarnation for info in job.members if self._is_awaited(info)}
        return bool(self._awaited)

    def _is_awaited(self, info: NodeInfo) -> bool:
        return (
            not self._failed_in(self.job.generation, info.node)
            and info.node not in self.job.succeeded
            and info.incarnation != self.own
            and self._answered.get(info.incarnation, 0) < self.call
        )

    def _failed_in(self, generation: int, node: str) -> bool:
        held = self._held.get(node)
        return held is not None and held.generation == generation

    def _release(self, now: float) -> list[View]:
        """Let the job have the failures that are held back, once everybody's fate is known."""
        if not self._held or self._awaits_somebody():
            return []
        held, self._held = self._held, {}
        self._awaited_as = None
        told: dict[tuple[str, int], View] = {}
        for node, status in held.items():
            if self.rounds.seq_of(node, status.info.incarnation) >= 0:  # Else it has gone itself.
                _gather(told, self._tell(now, status))
        return [*told.values()]

    # The job.

    def _tell(self, now: float, event: Event) -> list[View]:
        before = self._mark()
        try:
            told = self.rounds.handle(event)
            if not self.broken:
                self.rounds.check()
        except Exception as error:  # (a job that makes no sense must end in words)
            if self._strict:
                raise
            self.broken = f"{type(error).__name__}: {error}"
            told, self.rounds = close_broken(self.rounds, self.broken, self._make)
        if self._late and self.job.final:
            late, self._late = self._late, {}
            for status in late.values():
                told += self.rounds.handle(status)
        self._note_wait(now)
        self.is_changed = self.is_changed or self._mark() != before
        if self.decisions is not None:
            job = self.job
            self.decisions.append((event, msgspec.structs.replace(job, nodes=dict(job.nodes))))
        return told

    def _mark(self) -> object:
        """Return what differs after a change that must outlast this leader."""
        job = self.job
        return job.revision, job.wait_seq, job.phase, len(job.succeeded), *job.nodes

    def _note_wait(self, now: float) -> None:
        wait = self.rounds.wait
        if wait is None:
            self._wait = None
        elif self._wait is None or self._wait[0] != wait.seq:
            self._wait = (wait.seq, self._clock.look(now) + wait.delay_s)


def _gather(told: dict[tuple[str, int], View], views: list[View]) -> None:
    """Keep the newest view of each incarnation."""
    for view in views:
        told[view.node, view.incarnation] = view


# What a leader has decided and etcd does not have yet: `PendingWrites`.
#
# It is written in portions that etcd takes, the job first: what a node is told is never stored
# before
# the decision it comes from. Of several views for one node only the newest is left.


OPS_MAX = 100  # Operations in one transaction; etcd takes 128 unless told otherwise.
WRITE_BYTES_MAX = 1_000_000  # In one transaction; etcd takes 1.5 MiB unless told otherwise.


class LeaderWrite(msgspec.Struct, frozen=True):
    """A transaction of the leader's, and what it stands for."""

    txn: Txn
    lead: LedJob
    decisions: list[tuple[Event, Job]]
    views: list[View]


class PendingWrites:
    """The decisions of one leader that wait to be stored."""

    def __init__(self, places: JobKeys, lead: LedJob, lease: int, ops_max: int = OPS_MAX) -> None:
        self._places = places
        self._lead = lead
        self._lease = lease
        self._call = lead.call
        self._ops_max = ops_max
        self._views: dict[Peer, View] = {}
        self._unneeded: dict[bytes, None] = {}  # Keys to delete.

    def tell(self, view: View) -> None:
        """Have a node told something."""
        peer = (view.node, view.incarnation)
        self._views[peer] = view
        # It may be back with its view not yet taken away; etcd refuses both for one key at once.
        self._unneeded.pop(self._places.view(*peer), None)

    def forget(self, node: str, incarnation: int) -> None:
        """Take away what an incarnation that is gone was told, or was to be."""
        self._views.pop((node, incarnation), None)
        self.remove(self._places.view(node, incarnation))

    def remove(self, key: bytes) -> None:
        """Have a key deleted."""
        self._unneeded[key] = None

    @property
    def is_urgent(self) -> bool:
        """Whether anything is to be stored that somebody waits for, or must not be lost."""
        return self._lead.is_changed or self._lead.call != self._call or bool(self._views)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do at all."""
        return not self.is_urgent and not self._unneeded

    def take(self) -> tuple[list[Op], list[View]]:
        """Return the next portion: operations for one transaction, and the views among them."""
        lead, places, ops, size = self._lead, self._places, list[Op](), 0
        if lead.is_changed:
            record = pack(JobRecord(lead.job, self._lease))
            ops.append(Put(places.job, record, self._lease))
            size += len(record)
            lead.is_changed = False
        if lead.call != self._call:
            ops.append(Put(places.call, str(lead.call).encode(), self._lease))
            self._call = lead.call
        views: list[View] = []
        while self._views and len(ops) < self._ops_max:
            peer, view = next(iter(self._views.items()))
            record = pack(view)
            if ops and size + len(record) > WRITE_BYTES_MAX:
                break
            del self._views[peer]
            views.append(view)
            ops.append(Put(places.view(*peer), record, self._lease))
            size += len(record)
        while self._unneeded and len(ops) < self._ops_max:
            ops.append(Delete(self._unneeded.popitem()[0]))
        return ops, views


# What whoever comes to lead a job finds, and who of it still lives: `inherit`, `TakeoverRollCall`.
#
# A leader seldom dies alone: a rack goes, or a whole job is killed to be started again. Then the
# leases of the others end a little before or after the leader's, and whoever leads next would
# count
# the dead in: form a round with them, or go on with a job of which nobody is left. So the nodes
# that
# the job knows are asked for a sign first, by a roll call (`core.etcd.leader`), and nothing is
# decided
# before each has given it or is gone. Where all live that is a round trip; else the rest of a
# lease.
#
# Who leads on, after a session that was lost, knows already and asks for nothing.


def inherit(
    record: JobRecord | None, alive: set[Peer], term: int, run_id: str, lease_s: float
) -> Job:
    """Return the job to go on with; one of which nobody is left, and not even its end, is none.

    Its nodes may still be there: all leases end if etcd or all machines were stopped for long.
    They say which round they were in, and the job is made anew of that.
    """
    if record is not None:
        job = record.job
        known = ((node.info.node, node.info.incarnation) for node in job.nodes.values())
        if job.outcome is not None or any(peer in alive for peer in known):
            job.term = max(term, job.term + 1)
            return job
    return Job(run_id=run_id, term=term, silence_s=lease_s)


class TakeoverRollCall:
    """The roll call of one node's newest term as a leader."""

    def __init__(self, places: JobKeys) -> None:
        self._places = places
        self._term = self._number = 0
        self._awaited: set[Peer] = set()

    def waits(
        self,
        term: int,
        record: JobRecord | None,
        nodes: tuple[KeyValue, ...],
        call: int,
        own: int,
    ) -> bool:
        """Look at what was read; return whether there is anybody to wait for.

        `call` is the number that is stored, and `own` the incarnation of the leader itself.
        """
        self._awaited = set()
        if record is None or record.job.outcome is not None or record.job.term >= term:
            return False
        heard: dict[Peer, int] = {}
        for one in nodes:
            peer, said = self._places.whose(one.key), unpack(NodeRecord, one.value)
            if peer is not None and said is not None:
                heard[peer] = said.call
        if self._term != term:  # The number may be gone where some have heard it.
            self._term, self._number = term, max([call, *heard.values()]) + 1
        known = {(node.info.node, node.info.incarnation) for node in record.job.nodes.values()}
        self._awaited = {
            peer for peer in known & heard.keys() if peer[1] != own and heard[peer] < self._number
        }
        return bool(self._awaited)

    def unsaid(self, call: int, lease: int) -> tuple[Op, ...]:
        """Return what is to be stored so that the nodes hear the call, unless that is so."""
        if call >= self._number:
            return ()
        return (Put(self._places.call, str(self._number).encode(), lease),)

    def is_answered(self, changes: tuple[Change, ...]) -> bool:
        """Take in what nodes said, or that they are gone; return whether all are accounted for."""
        for change in changes:
            peer = self._places.whose(change.key)
            said = unpack(NodeRecord, change.value) if change.value is not None else None
            if peer is not None and (said is None or said.call >= self._number):
                self._awaited.discard(peer)
        return not self._awaited


# What the leader of a job does on etcd: reads the job, decides, and stores it: `Leadership`.
#
# ::
#
#     FOLLOWING ── elected (`core.etcd.election`) ──► LOADING ── all is read ──► LEADING
#         ▲                                              │                          │
#         └──────────── another leads, or etcd cannot be reached ───────────────────┘
#
# It is read again until it is known who of its nodes lives (`core.etcd.leader`).
# What a leader decides counts once it is stored. It stores the job first and then what the nodes
# are
# told, each for itself; a successor finds out from the job what somebody was not told. Every write
# does nothing once another leads, or if the job is not what it was when it was decided about: a
# write
# of which nobody knows what became may be carried out late. Whenever the outcome of a write is not
# known, the session ends, and with the next one the leader, if it still is, reads everything again
# and goes on from there.
#
# One write is under way at a time, and takes all that was decided meanwhile.


JOB_KEEP_S = 600
"""The lease of a job that nobody leads any more: so long its end is known, or it may be resumed."""
JOB_KEEP_ALIVE_S = JOB_KEEP_S / 5
STEPS_PER_LEASE = 5


class LeaderState(Enum):
    """What a node is to the leadership."""

    FOLLOWING = "following"
    LOADING = "loading"
    LEADING = "leading"


class Leadership:
    """One node's part in leading a job; `fail` is how it says that etcd cannot be relied on."""

    def __init__(
        self,
        *,
        asking: Asking,
        places: JobKeys,
        run_id: str,
        name: str,
        lease_s: float,
        fail: Callable[[Problem], list[EtcdEffect]],
        strict: bool = False,
        rounds: Callable[[Job], Rounds] = Rounds,
    ) -> None:
        self.post = LeaderState.FOLLOWING
        self.lead: LedJob | None = None
        self.ops_max = OPS_MAX
        self.is_observed = False
        """Whether somebody wants to know of all decisions."""
        self.writing: LeaderWrite | None = None
        """What the newest transaction stores, if that is so."""
        self.election = Election(
            asking=asking, key=places.leader, name=name, won=self._load, lost=self._stop, fail=fail
        )
        self._asking = asking
        self._places = places
        self._run_id = run_id
        self._lease_s = lease_s
        self._fail = fail
        self._strict = strict
        self._make = rounds
        self._roll = TakeoverRollCall(places)
        self._own = 0
        self._attempt = 0
        self._forget()

    def _forget(self) -> None:
        self._attempt += 1  # Answers to what was asked before mean nothing from now on.
        self.post = LeaderState.FOLLOWING
        self.lead = None
        self._job_lease = 0
        self._job_revision = 0  # Of the job as it is stored, 0 if it is not.
        self._kept_at = 0.0
        self._nodes_watch = 0
        self._there: set[Peer] = set()
        self._unstored: PendingWrites | None = None
        self._writing = False

    # What the session says.

    def own_said(self, now: float, status: Status, call: int) -> list[EtcdEffect]:
        """Take in what this node itself has just stored, before the watch brings it."""
        self._own = status.info.incarnation
        if self.lead is None:
            return []
        self.lead.own = self._own
        self._there.add((status.info.node, self._own))
        return self._decided(self.lead.said(now, status, call))

    @property
    def is_resigned(self) -> bool:
        """Whether this node leads no more and never will."""
        election = self.election
        return not (election.is_open or election.is_campaigning or election.term)

    def resign(self) -> list[EtcdEffect]:
        """Make way for another leader, and lead no more; `is_resigned` is true once that is so."""
        self.election.is_open = False
        waits = self.post is LeaderState.LOADING and self._nodes_watch
        return self._hand_over() if waits else self._go_on()

    def tick(self, now: float) -> list[EtcdEffect]:
        """See what time has brought."""
        lead = self.lead
        if lead is None:
            return []
        doing = self._decided(lead.tick(now))
        if now - self._kept_at >= JOB_KEEP_ALIVE_S:
            self._kept_at = now
            if lead.job.outcome is None:
                doing.append(self._ask(KeepAlive(self._job_lease), self._job_kept))
        return doing

    def next_deadline(self, now: float) -> float | None:
        """Return when `tick` is wanted next, or None."""
        if self.lead is None:
            return None
        at = self._kept_at + JOB_KEEP_ALIVE_S
        deadline = self.lead.next_deadline(now)
        return at if deadline is None else min(at, deadline)

    # Taking over.

    def _load(self) -> list[EtcdEffect]:
        self._forget()
        self.post = LeaderState.LOADING
        places = self._places
        everything = Txn(
            (self.election.still(),),
            (Get(places.job), Get(places.call), get_prefix(places.nodes), get_prefix(places.views)),
        )
        return [self._ask(everything, self._loaded)]

    def _loaded(self, now: float, answer: Answer) -> list[EtcdEffect]:
        if isinstance(answer, Problem):
            return self._fail(answer)
        assert isinstance(answer, TxnDone)
        if not answer.succeeded:
            return self.election.step_down()  # Who leads instead, the watch tells.
        if not self.election.is_open:
            return self._hand_over()
        found = answer.results[0]
        self._job_revision = found[0].mod_revision if found else 0
        record = unpack(JobRecord, found[0].value) if found else None
        if found and record is None:
            why = (
                f"what lies at {self._places.job.decode()} is no job of this version of "
                "Holdfast's: another program or version uses the same place"
            )
            return self._fail(Problem(ProblemKind.REFUSED, why))
        number = roll_call_number(answer.results[1][0].value) if answer.results[1] else 0
        if self._roll.waits(self.election.term, record, answer.results[2], number, self._own):
            assert record is not None
            return self._call_roll(answer.revision, self._roll.unsaid(number, record.lease))

        def begin(now: float, lease: Answer) -> list[EtcdEffect]:
            if isinstance(lease, KeptAlive) and lease.ttl_s <= 0:
                return [self._ask(Grant(JOB_KEEP_S), begin)]
            if isinstance(lease, Problem):
                return self._fail(lease)
            if isinstance(lease, Granted):
                self._job_lease = lease.lease
            return self._begin(now, answer, record)

        if record is not None:
            self._job_lease = record.lease
            if record.job.outcome is not None:  # However often somebody asks how it ended.
                return self._begin(now, answer, record)
            return [self._ask(KeepAlive(record.lease), begin)]
        return [self._ask(Grant(JOB_KEEP_S), begin)]

    def _call_roll(self, revision: int, unsaid: tuple[Op, ...]) -> list[EtcdEffect]:
        """Wait until it is known which of the job's nodes live; then read everything again."""
        key = self._places.nodes
        watch = self._asking.watch(key, end_of_prefix(key), revision + 1, self._roll_heard)
        self._nodes_watch = watch.number
        if not unsaid:
            return [watch]
        return [watch, self._ask(Txn((self.election.still(),), unsaid), self._roll_called)]

    def _roll_called(self, _now: float, answer: Answer) -> list[EtcdEffect]:
        if isinstance(answer, Problem):
            return self._again() if answer.kind is ProblemKind.LEASE_GONE else self._fail(answer)
        assert isinstance(answer, TxnDone)
        return [] if answer.succeeded else self.election.step_down()

    def _roll_heard(self, _now: float, changes: tuple[Change, ...]) -> list[EtcdEffect]:
        return self._again() if self._roll.is_answered(changes) else []

    def _begin(self, now: float, answer: TxnDone, record: JobRecord | None) -> list[EtcdEffect]:
        _job, call, nodes, views = answer.results
        there: list[tuple[Status, int]] = []
        for one in sorted(nodes, key=lambda one: one.create_revision):
            said = unpack(NodeRecord, one.value)
            if said is not None and said.status.run_id == self._run_id:
                there.append((said.status, said.call))
        alive = {(status.info.node, status.info.incarnation) for status, _ in there}
        self.lead = lead = LedJob(
            now,
            inherit(record, alive, self.election.term, self._run_id, self._lease_s),
            step_s=self._lease_s / STEPS_PER_LEASE,
            call=roll_call_number(call[0].value) if call else 0,
            strict=self._strict,
            rounds=self._make,
        )
        lead.own = self._own
        lead.is_new = record is None or lead.job is not record.job
        lead.decisions = [] if self.is_observed else None
        self._unstored = unstored = PendingWrites(self._places, lead, self._job_lease, self.ops_max)
        shown: dict[Peer, int] = {}
        for one in views:
            peer = self._places.whose(one.key)
            view = unpack(View, one.value)
            if peer is None or peer not in alive:
                unstored.remove(one.key)
            elif view is not None:
                shown[peer] = view.revision
        self.post = LeaderState.LEADING
        self._kept_at = now
        self._there = alive
        key = self._places.nodes
        watch = self._asking.watch(key, end_of_prefix(key), answer.revision + 1, self._nodes_said)
        self._nodes_watch = watch.number
        told = lead.begin(now, there, shown, self._gone())
        return [watch, *self._decided(told)]

    def _stop(self) -> list[EtcdEffect]:
        doing: list[EtcdEffect] = [*self._asking.unwatch(self._nodes_watch)]
        self._forget()
        return doing

    def _again(self) -> list[EtcdEffect]:
        """Read everything again: what is stored is not what it was."""
        return self._stop() + self._load()

    # Leading.

    def _nodes_said(self, now: float, changes: tuple[Change, ...]) -> list[EtcdEffect]:
        lead, unstored = self.lead, self._unstored
        assert lead is not None
        assert unstored is not None
        told: list[View] = []
        lost: dict[Peer, NodeLost] = {}
        for change in changes:
            peer = self._places.whose(change.key)
            if peer is None:
                continue
            if change.value is None:
                self._there.discard(peer)
                unstored.forget(*peer)
                lost[peer] = NodeLost(*peer, self._gone())
                continue
            record = unpack(NodeRecord, change.value)
            if record is not None and record.status.run_id == self._run_id:
                if peer in lost:  # It is back, and what it says comes after its loss.
                    told += lead.lost(now, [*lost.values()])
                    lost = {}
                self._there.add(peer)
                told += lead.said(now, record.status, record.call)
        return self._decided(told + lead.lost(now, [*lost.values()]))

    def _gone(self) -> str:
        return f"no sign of life for {self._lease_s:g} s, or it ended"

    def _decided(self, told: list[View]) -> list[EtcdEffect]:
        for view in told:
            if (view.node, view.incarnation) in self._there:
                assert self._unstored is not None
                self._unstored.tell(view)
        return self._go_on()

    def _go_on(self) -> list[EtcdEffect]:
        """Store what there is to store, unless something is being stored; resign if that is all."""
        election, lead = self.election, self.lead
        if lead is None or self._writing:
            return []
        unstored = self._unstored
        assert unstored is not None
        if unstored.is_urgent or not (unstored.is_empty or not election.is_open):
            return self._write(lead, unstored)
        return [] if election.is_open else self._hand_over()

    def _write(self, lead: LedJob, unstored: PendingWrites) -> list[EtcdEffect]:
        ops, views = unstored.take()
        self._writing = True
        places = self._places
        txn = Txn(self._fence(), tuple(ops), (Get(places.leader),))
        stores_job = any(isinstance(op, Put) and op.key == places.job for op in ops)
        if lead.decisions is not None:
            self.writing = LeaderWrite(txn, lead, lead.decisions, views)
            lead.decisions = []

        def written(_now: float, answer: Answer) -> list[EtcdEffect]:
            self._writing = False
            if isinstance(answer, Problem):
                if answer.kind is ProblemKind.LEASE_GONE:  # The job's: begin anew with another.
                    return self._again()
                return self._fail(answer)
            assert isinstance(answer, TxnDone)
            if not answer.succeeded:
                return self._superseded(answer)
            if stores_job:
                self._job_revision = answer.revision
            return self._go_on()

        return [self._ask(txn, written)]

    def _fence(self) -> tuple[Compare, ...]:
        """Return what must hold for a write to be made."""
        unchanged = Compare(self._places.job, Field.MOD, self._job_revision)
        return self.election.still(), unchanged

    def _superseded(self, answer: TxnDone) -> list[EtcdEffect]:
        """Find out why a write was not made.

        If this node still leads, it was overtaken by a write of its own of which it had given up
        hope: etcd carries out what it was sent, however late.
        """
        leader = answer.results[0]
        if leader and leader[0].create_revision == self.election.term:
            return self._again()
        return self.election.step_down()

    def _hand_over(self) -> list[EtcdEffect]:
        """Take the leader's key away."""
        self._writing = True

        def resigned(_now: float, answer: Answer) -> list[EtcdEffect]:
            self._writing = False
            if isinstance(answer, Problem):
                return self._fail(answer)
            return self.election.step_down()

        return [self._ask(Txn((self.election.still(),), (Delete(self._places.leader),)), resigned)]

    def _job_kept(self, _now: float, answer: Answer) -> list[EtcdEffect]:
        if isinstance(answer, Problem):
            return self._fail(answer)
        if isinstance(answer, KeptAlive) and answer.ttl_s <= 0 and self.lead is not None:
            return self._again()
        return []

    def _ask(
        self, request: Request, then: Callable[[float, Answer], list[EtcdEffect]]
    ) -> SendRequest:
        attempt = self._attempt
        return self._asking.ask(
            request, lambda now, answer: then(now, answer) if attempt == self._attempt else []
        )
