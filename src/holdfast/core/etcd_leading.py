"""What the leader of a job does on etcd: reads the job, decides, and stores it: `Leadership`.

::

    FOLLOWING ── elected (`core.etcd_election`) ──► LOADING ── all is read ──► LEADING
        ▲                                              │                          │
        └──────────── another leads, or etcd cannot be reached ───────────────────┘

It is read again until it is known who of its nodes lives (`core.etcd_takeover`).
What a leader decides counts once it is stored. It stores the job first and then what the nodes are
told, each for itself; a successor finds out from the job what somebody was not told. Every write
does nothing once another leads, or if the job is not what it was when it was decided about: a write
of which nobody knows what became may be carried out late. Whenever the outcome of a write is not
known, the session ends, and with the next one the leader, if it still is, reads everything again
and goes on from there.

One write is under way at a time, and takes all that was decided meanwhile.
"""

from __future__ import annotations

from enum import Enum

from holdfast.core.etcd_calls import (
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
    Op,
    Problem,
    Put,
    Request,
    Trouble,
    Txn,
    TxnDone,
    end_of_prefix,
)
from holdfast.core.etcd_election import Election
from holdfast.core.etcd_keys import JobRecord, NodeRecord, Places, all_below, call_of, unpack
from holdfast.core.etcd_takeover import TakeoverCall, inherit
from holdfast.core.etcd_unstored import OPS_MAX, Unstored, Written
from holdfast.core.job import Job, NodeLost
from holdfast.core.leading import Lead
from holdfast.core.news import Status, View
from holdfast.core.rounds import Rounds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.etcd_asking import Ask, Asking, Doing

    Peer = tuple[str, int]

JOB_KEEP_S = 600
"""The lease of a job that nobody leads any more: so long its end is known, or it may be resumed."""
JOB_KEEP_ALIVE_S = JOB_KEEP_S / 5
STEPS_PER_LEASE = 5


class Post(Enum):
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
        places: Places,
        run_id: str,
        name: str,
        lease_s: float,
        fail: Callable[[Problem], list[Doing]],
        strict: bool = False,
        rounds: Callable[[Job], Rounds] = Rounds,
    ) -> None:
        self.post = Post.FOLLOWING
        self.lead: Lead | None = None
        self.ops_max = OPS_MAX
        self.is_observed = False
        """Whether somebody wants to know of all decisions."""
        self.writing: Written | None = None
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
        self._roll = TakeoverCall(places)
        self._own = 0
        self._attempt = 0
        self._forget()

    def _forget(self) -> None:
        self._attempt += 1  # Answers to what was asked before mean nothing from now on.
        self.post = Post.FOLLOWING
        self.lead = None
        self._job_lease = 0
        self._job_revision = 0  # Of the job as it is stored, 0 if it is not.
        self._kept_at = 0.0
        self._nodes_watch = 0
        self._there: set[Peer] = set()
        self._unstored: Unstored | None = None
        self._writing = False

    # What the session says.

    def own_said(self, now: float, status: Status, call: int) -> list[Doing]:
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

    def resign(self) -> list[Doing]:
        """Make way for another leader, and lead no more; `is_resigned` is true once that is so."""
        self.election.is_open = False
        waits = self.post is Post.LOADING and self._nodes_watch
        return self._hand_over() if waits else self._go_on()

    def tick(self, now: float) -> list[Doing]:
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

    def _load(self) -> list[Doing]:
        self._forget()
        self.post = Post.LOADING
        places = self._places
        everything = Txn(
            (self.election.still(),),
            (Get(places.job), Get(places.call), all_below(places.nodes), all_below(places.views)),
        )
        return [self._ask(everything, self._loaded)]

    def _loaded(self, now: float, answer: Answer) -> list[Doing]:
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
            return self._fail(Problem(Trouble.REFUSED, why))
        number = call_of(answer.results[1][0].value) if answer.results[1] else 0
        if self._roll.waits(self.election.term, record, answer.results[2], number, self._own):
            assert record is not None
            return self._call_roll(answer.revision, self._roll.unsaid(number, record.lease))

        def begin(now: float, lease: Answer) -> list[Doing]:
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

    def _call_roll(self, revision: int, unsaid: tuple[Op, ...]) -> list[Doing]:
        """Wait until it is known which of the job's nodes live; then read everything again."""
        key = self._places.nodes
        watch = self._asking.watch(key, end_of_prefix(key), revision + 1, self._roll_heard)
        self._nodes_watch = watch.number
        if not unsaid:
            return [watch]
        return [watch, self._ask(Txn((self.election.still(),), unsaid), self._roll_called)]

    def _roll_called(self, _now: float, answer: Answer) -> list[Doing]:
        if isinstance(answer, Problem):
            return self._again() if answer.kind is Trouble.LEASE_GONE else self._fail(answer)
        assert isinstance(answer, TxnDone)
        return [] if answer.succeeded else self.election.step_down()

    def _roll_heard(self, _now: float, changes: tuple[Change, ...]) -> list[Doing]:
        return self._again() if self._roll.is_answered(changes) else []

    def _begin(self, now: float, answer: TxnDone, record: JobRecord | None) -> list[Doing]:
        _job, call, nodes, views = answer.results
        there: list[tuple[Status, int]] = []
        for one in sorted(nodes, key=lambda one: one.create_revision):
            said = unpack(NodeRecord, one.value)
            if said is not None and said.status.run_id == self._run_id:
                there.append((said.status, said.call))
        alive = {(status.info.node, status.info.incarnation) for status, _ in there}
        self.lead = lead = Lead(
            now,
            inherit(record, alive, self.election.term, self._run_id, self._lease_s),
            step_s=self._lease_s / STEPS_PER_LEASE,
            call=call_of(call[0].value) if call else 0,
            strict=self._strict,
            rounds=self._make,
        )
        lead.own = self._own
        lead.is_new = record is None or lead.job is not record.job
        lead.decisions = [] if self.is_observed else None
        self._unstored = unstored = Unstored(self._places, lead, self._job_lease, self.ops_max)
        shown: dict[Peer, int] = {}
        for one in views:
            peer = self._places.whose(one.key)
            view = unpack(View, one.value)
            if peer is None or peer not in alive:
                unstored.remove(one.key)
            elif view is not None:
                shown[peer] = view.revision
        self.post = Post.LEADING
        self._kept_at = now
        self._there = alive
        key = self._places.nodes
        watch = self._asking.watch(key, end_of_prefix(key), answer.revision + 1, self._nodes_said)
        self._nodes_watch = watch.number
        told = lead.begin(now, there, shown, self._gone())
        return [watch, *self._decided(told)]

    def _stop(self) -> list[Doing]:
        doing: list[Doing] = [*self._asking.unwatch(self._nodes_watch)]
        self._forget()
        return doing

    def _again(self) -> list[Doing]:
        """Read everything again: what is stored is not what it was."""
        return self._stop() + self._load()

    # Leading.

    def _nodes_said(self, now: float, changes: tuple[Change, ...]) -> list[Doing]:
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

    def _decided(self, told: list[View]) -> list[Doing]:
        for view in told:
            if (view.node, view.incarnation) in self._there:
                assert self._unstored is not None
                self._unstored.tell(view)
        return self._go_on()

    def _go_on(self) -> list[Doing]:
        """Store what there is to store, unless something is being stored; resign if that is all."""
        election, lead = self.election, self.lead
        if lead is None or self._writing:
            return []
        unstored = self._unstored
        assert unstored is not None
        if unstored.is_urgent or not (unstored.is_empty or not election.is_open):
            return self._write(lead, unstored)
        return [] if election.is_open else self._hand_over()

    def _write(self, lead: Lead, unstored: Unstored) -> list[Doing]:
        ops, views = unstored.take()
        self._writing = True
        places = self._places
        txn = Txn(self._fence(), tuple(ops), (Get(places.leader),))
        stores_job = any(isinstance(op, Put) and op.key == places.job for op in ops)
        if lead.decisions is not None:
            self.writing = Written(txn, lead, lead.decisions, views)
            lead.decisions = []

        def written(_now: float, answer: Answer) -> list[Doing]:
            self._writing = False
            if isinstance(answer, Problem):
                if answer.kind is Trouble.LEASE_GONE:  # The job's: begin anew with another.
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

    def _superseded(self, answer: TxnDone) -> list[Doing]:
        """Find out why a write was not made.

        If this node still leads, it was overtaken by a write of its own of which it had given up
        hope: etcd carries out what it was sent, however late.
        """
        leader = answer.results[0]
        if leader and leader[0].create_revision == self.election.term:
            return self._again()
        return self.election.step_down()

    def _hand_over(self) -> list[Doing]:
        """Take the leader's key away."""
        self._writing = True

        def resigned(_now: float, answer: Answer) -> list[Doing]:
            self._writing = False
            if isinstance(answer, Problem):
                return self._fail(answer)
            return self.election.step_down()

        return [self._ask(Txn((self.election.still(),), (Delete(self._places.leader),)), resigned)]

    def _job_kept(self, _now: float, answer: Answer) -> list[Doing]:
        if isinstance(answer, Problem):
            return self._fail(answer)
        if isinstance(answer, KeptAlive) and answer.ttl_s <= 0 and self.lead is not None:
            return self._again()
        return []

    def _ask(self, request: Request, then: Callable[[float, Answer], list[Doing]]) -> Ask:
        attempt = self._attempt
        return self._asking.ask(
            request, lambda now, answer: then(now, answer) if attempt == self._attempt else []
        )
