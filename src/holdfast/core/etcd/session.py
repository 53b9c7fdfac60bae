"""What a session at etcd wants done, and what it tells the node: the effects of `EtcdSession`."""

from __future__ import annotations

from collections import deque

import msgspec

from holdfast.core.etcd.calls import (
    Answer,
    Asking,
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
    Op,
    Problem,
    ProblemKind,
    Put,
    Revoke,
    SendRequest,
    Txn,
    TxnDone,
    end_of_prefix,
)
from holdfast.core.etcd.keys import (
    JobKeys,
    JobRecord,
    NodeRecord,
    get_prefix,
    pack,
    roll_call_number,
    unpack,
)
from holdfast.core.etcd.leader import Leadership
from holdfast.core.protocol import Ack, Heartbeat, NodeInfo, Status, View
from holdfast.core.rounds import Rounds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from holdfast.core.rounds import Job


class ReportOpened(msgspec.Struct, frozen=True):
    """The session is there."""


class ReportClosed(msgspec.Struct, frozen=True):
    """The session is gone, or could not be opened."""

    why: str
    permanent: bool = False
    """Trying again does not help."""


class DeliverMessage(msgspec.Struct, frozen=True):
    """Something for the node: what it is told, or that what it said is stored."""

    message: View | Ack


class ReportLeft(msgspec.Struct, frozen=True):
    """Nothing of this node is left in etcd."""


SessionEffect = EtcdEffect | ReportOpened | ReportClosed | DeliverMessage | ReportLeft


# What a node takes out of etcd when it goes: what is its own, and the last one what was all's.
#
# Nodes may go at the same moment, and each of them would think that another is still there. So
# each
# takes itself out and looks in one transaction: exactly one finds nobody else. That one removes
# what
# the job does not need any more, unless somebody leads by then: a new job may have begun.
#
# What stays is a job that has come to its end, so that late nodes are told of it, on its own
# lease.
# One of which nobody is left, and not even its end, is nothing that a later job should find.


def leave(
    asking: Asking, places: JobKeys, key: bytes, lease: int, left: Callable[[], list[Any]]
) -> list[Any]:
    """Return the first effects of a node's going; `left` returns the last ones.

    `key` is where the node speaks, empty if it never did. Whatever goes wrong on the way, the
    leases see to the rest.
    """

    def looked(_now: float, answer: Answer) -> list[Any]:
        if not isinstance(answer, TxnDone):
            return revoke([lease])
        nodes, leader, job = answer.results[-3:]
        if nodes or leader:
            return revoke([lease])
        record = unpack(JobRecord, job[0].value) if job else None
        goes_on = record is not None and record.job.outcome is None
        unneeded: list[Op] = [Delete(one, end_of_prefix(one)) for one in shared]
        if goes_on:
            unneeded.append(Delete(places.job))
        fence = (
            Compare(places.leader, Field.CREATE, 0),
            Compare(places.job, Field.MOD, job[0].mod_revision if job else 0),
        )

        def swept(_now: float, answer: Answer) -> list[Any]:
            done = isinstance(answer, TxnDone) and answer.succeeded
            old = [record.lease] if record is not None and goes_on and done else []
            return revoke([*old, lease])

        return [asking.ask(Txn(fence, tuple(unneeded)), swept)]

    def revoke(leases: list[int]) -> list[Any]:
        rest = [one for one in leases if one]
        if not rest:
            return left()
        return [asking.ask(Revoke(rest[0]), lambda _now, _answer: revoke(rest[1:]))]

    shared = (places.views, places.store, places.shared)
    own = [Delete(key), Delete(places.views + key[len(places.nodes) :])] if key else []
    look = (get_prefix(places.nodes, keys_only=True), Get(places.leader), Get(places.job))
    return [asking.ask(Txn((), (*own, *look)), looked)]


# One node's session at etcd: a lease, what the node says, what it is told, and who leads.
#
# To `core.session` a session is a link like one to a coordinator: it is opened, it carries what
# the node says, it brings views and signs of life, and it may be lost. Behind it:
#
# - the node's lease, which outlives the session: whoever comes back in time is not missed;
# - the node's record, stored with each status. That it is stored is what `Ack` says;
# - two watches, on what this node is told and on what all share (who leads, roll calls);
# - `core.etcd.leader`, since any node may have to lead.
#
# ::
#
#     DOWN ── open ──► OPENING: lease, then look ──► UP
#      ▲                  │ a problem                 │ a problem, a watch ended
#      └──────────────────┴───────────────────────────┘
#
# A lease that ended while the node lives is replaced at once, and the node says its status again:
# what becomes of that, the leader decides. An etcd that answers and takes no writes is of no use,
# so
# after a write that was refused no session is open before one was taken. Nothing waits here but
# statements, in order, for the one before to be stored; and of those no more than `UNSAID_MAX`.


RENEWALS_PER_LEASE = 3
UNSAID_MAX = 8
"""Statements that wait to be stored; more come only if etcd is very slow, and older ones go."""


class EtcdSession:
    """The machine of one node; the effects of each call are to be performed in order."""

    def __init__(
        self,
        *,
        run_id: str,
        info: NodeInfo,
        prefix: str,
        lease_s: float,
        strict: bool = False,
        rounds: Callable[[Job], Rounds] = Rounds,
    ) -> None:
        self.is_up = False
        self.places = JobKeys(prefix, run_id)
        self.address = ""
        """Where other nodes reach this one, if its own info does not say."""
        self._run_id = run_id
        self._node = info.node
        self._ttl_s = max(1, round(lease_s))
        self._asking = Asking()
        self._lease = 0
        self._renewed_at = 0.0
        self._unsaid: deque[Status] = deque(maxlen=UNSAID_MAX)
        self._stored: Status | None = None
        self._key = b""  # Where the stored status lies, and the revision that made it.
        self._key_revision = 0
        self._doubted: Status | None = None  # Whether etcd takes it must be seen first.
        self._call = 0
        self._answer_due = False
        self._putting = self._renewing = False
        self._leaving = self._goes = False  # It is asked to go; it does, and never comes back.
        self.leadership = Leadership(
            asking=self._asking,
            places=self.places,
            run_id=run_id,
            name=info.node,
            lease_s=lease_s,
            fail=self._fail,
            strict=strict,
            rounds=rounds,
        )

    # What the node wants.

    def open(self) -> list[SessionEffect]:
        """Begin a session, unless the node goes."""
        if self._goes:
            return [ReportClosed("this node leaves the job")]
        if self._lease:
            return [self._asking.ask(KeepAlive(self._lease), self._leased)]
        return [self._asking.ask(Grant(self._ttl_s), self._leased)]

    def drop(self) -> list[SessionEffect]:
        """End the session without a word; the lease stays for as long as it lasts."""
        if self._goes:
            return []  # What is under way takes away what is its own.
        self.is_up = False
        self._putting = self._renewing = False
        self._unsaid.clear()  # When there is a session again, the newest status says all.
        return self._follow_up([*self.leadership.election.down(), *self._asking.forget()])

    def send(self, now: float, message: Status | Heartbeat) -> list[SessionEffect]:
        """Store what the node says, or show that it lives."""
        if not self.is_up:
            return []
        if isinstance(message, Heartbeat):
            return self._renew(now)
        self._unsaid.append(message)
        # A node that has much to say beats less, and a lease is not renewed by what is stored.
        late = now - self._renewed_at >= self._ttl_s / RENEWALS_PER_LEASE
        return self._put_next() + (self._renew(now) if late else [])

    def _renew(self, now: float) -> list[SessionEffect]:
        if self._renewing or not self._lease:
            return []
        self._renewing = True
        self._renewed_at = now
        lease = self._lease

        def renewed(_now: float, answer: Answer) -> list[SessionEffect]:
            self._renewing = False
            if isinstance(answer, Problem):
                return self._fail(answer)
            assert isinstance(answer, KeptAlive)
            if answer.ttl_s > 0:
                return [DeliverMessage(self._ack())]
            if lease != self._lease:
                return []  # That it ended was heard before.
            if not self._unsaid and not self._putting and self._stored is not None:
                self._unsaid.append(self._stored)
            return self._lease_again()

        return [self._asking.ask(KeepAlive(lease), renewed)]

    def leave(self) -> list[SessionEffect]:
        """Hand over what this node leads, and take away what is its own; `ReportLeft` says when."""
        self._leaving = True
        return [*self.leadership.resign(), *self._leave_if_resigned()]

    def tick(self, now: float) -> list[SessionEffect]:
        """See what time has brought."""
        return self._follow_up([*self.leadership.tick(now)])

    def next_deadline(self, now: float) -> float | None:
        """Return when `tick` is wanted next, or None."""
        return self.leadership.next_deadline(now)

    # What etcd says.

    def answered(self, now: float, number: int, answer: Answer) -> list[SessionEffect]:
        """Take in an answer."""
        return self._follow_up(self._asking.answered(now, number, answer))

    def changed(self, now: float, number: int, changes: tuple[Change, ...]) -> list[SessionEffect]:
        """Take in what a watch tells."""
        return self._follow_up(self._asking.changed(now, number, changes))

    def watch_ended(self, number: int, problem: Problem) -> list[SessionEffect]:
        """Take in that a watch is over: begin a session anew, which looks at everything again."""
        if not self._asking.is_watching(number):
            return []
        if problem.kind is ProblemKind.COMPACTED:
            problem = Problem(ProblemKind.UNREACHABLE, f"a watch fell behind: {problem.why}")
        return self._follow_up(self._fail(problem))

    def _follow_up(self, effects: list[SessionEffect]) -> list[SessionEffect]:
        return effects + self._leave_if_resigned() if self._leaving else effects

    # Opening.

    def _leased(self, now: float, answer: Answer) -> list[SessionEffect]:
        self._renewed_at = now
        if isinstance(answer, KeptAlive) and answer.ttl_s <= 0:
            self._lease = 0
            return self.open()
        if isinstance(answer, Problem):
            return self._fail(answer)
        if isinstance(answer, Granted):
            self._lease = answer.lease
        return [self._store(self._doubted)] if self._doubted is not None else self._look()

    def _look(self) -> list[SessionEffect]:
        look = Txn((), (get_prefix(self.places.shared), get_prefix(self._views)))
        return [self._asking.ask(look, self._looked)]

    def _looked(self, _now: float, answer: Answer) -> list[SessionEffect]:
        if isinstance(answer, Problem):
            return self._fail(answer)
        assert isinstance(answer, TxnDone)
        self.is_up = True
        after = answer.revision + 1
        shared, views = self.places.shared, self._views
        effects: list[SessionEffect] = [
            self._asking.watch(views, end_of_prefix(views), after, self._told),
            self._asking.watch(shared, end_of_prefix(shared), after, self._shared_changed),
            ReportOpened(),
        ]
        leader = None
        for one in answer.results[0]:
            if one.key == self.places.leader:
                leader = one
            elif one.key == self.places.call:
                self._hear_call(one.value)
        effects += self.leadership.election.up(self._lease, leader)
        for one in answer.results[1]:
            effects += self._hear_view(one.value)
        return effects

    @property
    def _views(self) -> bytes:
        return self.places.views_of(self._node)

    # What the node says.

    def _put_next(self) -> list[SessionEffect]:
        """Store the next statement, or the last one again if a roll call wants it."""
        if self._putting or not self._lease or not self.is_up:
            return []
        if self._unsaid:
            status = self._unsaid.popleft()
        elif self._answer_due and self._stored is not None:
            status = self._stored
        else:
            return []
        self._answer_due = False
        return [self._store(status)]

    def _store(self, status: Status) -> SendRequest:
        self._putting = True
        lease = self._lease
        record = NodeRecord(self._addressed(status), self._call)
        key = self.places.node(status.info.node, status.info.incarnation)
        # What is sent may be carried out late: then it must not undo what came after it.
        ops: list[Op] = [Put(key, pack(record), lease)]
        if self._key and self._key != key:
            ops.append(Delete(self._key))  # It was this node's until it began anew.

        mine = Compare(key, Field.MOD, self._key_revision if self._key == key else 0)

        def put(now: float, answer: Answer) -> list[SessionEffect]:
            self._putting = False
            if isinstance(answer, Problem):
                return self._not_stored(status, lease, answer)
            assert isinstance(answer, TxnDone)
            self._key = key
            if not answer.succeeded:  # It went with its lease, or an earlier put came late.
                self._key_revision = answer.results[0][0].mod_revision if answer.results[0] else 0
                if not self.is_up:
                    return [self._store(status)]
                self._unsay(status)
                return self._put_next()
            self._stored, self._key_revision = status, answer.revision
            self._doubted = None
            if lease != self._lease:  # It went with its lease, whose end was heard of first.
                self._unsay(status)
                return self._put_next()
            if not self.is_up:
                return self._look()
            effects: list[SessionEffect] = [DeliverMessage(self._ack())]
            effects += self.leadership.own_said(now, record.status, record.call)
            return effects + self._put_next()

        return self._asking.ask(Txn((mine,), tuple(ops), (Get(key),)), put)

    def _not_stored(self, status: Status, lease: int, problem: Problem) -> list[SessionEffect]:
        if problem.kind is not ProblemKind.LEASE_GONE:
            if problem.kind is not ProblemKind.UNREACHABLE:
                self._doubted = status
            return self._fail(problem)
        if not self.is_up:
            self._lease = 0
            return self.open()
        self._unsay(status)
        return self._lease_again() if lease == self._lease else self._put_next()

    def _unsay(self, status: Status) -> None:
        """Have a status stored after all, unless there are newer ones."""
        if not self._unsaid:
            self._unsaid.append(status)

    def _addressed(self, status: Status) -> Status:
        if status.info.address or not self.address:
            return status
        info = msgspec.structs.replace(status.info, address=self.address)
        return msgspec.structs.replace(status, info=info)

    def _lease_again(self) -> list[SessionEffect]:
        """Get another lease for one that ended; the node lives, whatever others had to think."""
        self._lease = 0
        effects: list[SessionEffect] = [*self.leadership.election.down()]
        effects.append(self._asking.ask(Grant(self._ttl_s), self._leased_again))
        return effects

    def _leased_again(self, _now: float, answer: Answer) -> list[SessionEffect]:
        if isinstance(answer, Problem):
            return self._fail(answer)
        assert isinstance(answer, Granted)
        self._lease = answer.lease
        return [*self.leadership.election.leased(self._lease), *self._put_next()]

    def _ack(self) -> Ack:
        stored = self._stored
        info = stored.info if stored is not None else None
        return Ack(
            run_id=self._run_id,
            node=self._node,
            incarnation=info.incarnation if info is not None else 0,
            seq=stored.seq if stored is not None else -1,
        )

    # What the node is told.

    def _told(self, _now: float, changes: tuple[Change, ...]) -> list[SessionEffect]:
        effects: list[SessionEffect] = []
        for change in changes:
            if change.value is not None:
                effects += self._hear_view(change.value)
        return effects

    def _hear_view(self, value: bytes) -> list[SessionEffect]:
        view = unpack(View, value)
        return [DeliverMessage(view)] if view is not None and view.run_id == self._run_id else []

    def _shared_changed(self, _now: float, changes: tuple[Change, ...]) -> list[SessionEffect]:
        effects: list[SessionEffect] = []
        for change in changes:
            if change.key == self.places.leader:
                effects += self.leadership.election.leader_changed(change)
            elif change.key == self.places.call and change.value is not None:
                self._hear_call(change.value)
                effects += self._put_next()
        return effects

    def _hear_call(self, value: bytes) -> None:
        number = roll_call_number(value)
        if number > self._call:
            self._call, self._answer_due = number, True

    # The end.

    def _fail(self, problem: Problem) -> list[Any]:
        """End the session because etcd cannot be relied on."""
        if problem.kind is not ProblemKind.UNREACHABLE and self._doubted is None:
            self._doubted = self._stored
        permanent = problem.kind in (ProblemKind.DENIED, ProblemKind.REFUSED)
        return [*self.drop(), ReportClosed(problem.why, permanent)]

    def _leave_if_resigned(self) -> list[SessionEffect]:
        if not self._leaving or not self.leadership.is_resigned:
            return []
        self._leaving = False
        lease, self._lease = self._lease, 0
        effects = self.drop()  # Whatever else is under way, or fails, does not matter any more.
        self._goes = True
        return effects + leave(self._asking, self.places, self._key, lease, lambda: [ReportLeft()])
