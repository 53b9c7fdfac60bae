"""One node's session at etcd: a lease, what the node says, what it is told, and who leads.

To `core.membership` a session is a link like one to a coordinator: it is opened, it carries what
the node says, it brings views and signs of life, and it may be lost. Behind it:

- the node's lease, which outlives the session: whoever comes back in time is not missed;
- the node's record, stored with each status. That it is stored is what `Ack` says;
- two watches, on what this node is told and on what all share (who leads, roll calls);
- `core.etcd_leading`, since any node may have to lead.

::

    DOWN ── open ──► OPENING: lease, then look ──► UP
     ▲                  │ a problem                 │ a problem, a watch ended
     └──────────────────┴───────────────────────────┘

A lease that ended while the node lives is replaced at once, and the node says its status again:
what becomes of that, the leader decides. An etcd that answers and takes no writes is of no use, so
after a write that was refused no session is open before one was taken. Nothing waits here but
statements, in order, for the one before to be stored; and of those no more than `UNSAID_MAX`.
"""

from __future__ import annotations

from collections import deque

import msgspec

from holdfast.core.etcd_asking import Ask, Asking
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
    Trouble,
    Txn,
    TxnDone,
    end_of_prefix,
)
from holdfast.core.etcd_effects import Closed, Effect, Heard, Left, Opened
from holdfast.core.etcd_keys import NodeRecord, Places, all_below, call_of, pack, unpack
from holdfast.core.etcd_leading import Leadership
from holdfast.core.etcd_leaving import leave
from holdfast.core.news import Ack, Beat, NodeInfo, Status, View
from holdfast.core.rounds import Rounds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from holdfast.core.job import Job

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
        self.places = Places(prefix, run_id)
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

    def open(self) -> list[Effect]:
        """Begin a session, unless the node goes."""
        if self._goes:
            return [Closed("this node leaves the job")]
        if self._lease:
            return [self._asking.ask(KeepAlive(self._lease), self._leased)]
        return [self._asking.ask(Grant(self._ttl_s), self._leased)]

    def drop(self) -> list[Effect]:
        """End the session without a word; the lease stays for as long as it lasts."""
        if self._goes:
            return []  # What is under way takes away what is its own.
        self.is_up = False
        self._putting = self._renewing = False
        self._unsaid.clear()  # When there is a session again, the newest status says all.
        return self._follow_up([*self.leadership.election.down(), *self._asking.forget()])

    def send(self, now: float, message: Status | Beat) -> list[Effect]:
        """Store what the node says, or show that it lives."""
        if not self.is_up:
            return []
        if isinstance(message, Beat):
            return self._renew(now)
        self._unsaid.append(message)
        # A node that has much to say beats less, and a lease is not renewed by what is stored.
        late = now - self._renewed_at >= self._ttl_s / RENEWALS_PER_LEASE
        return self._put_next() + (self._renew(now) if late else [])

    def _renew(self, now: float) -> list[Effect]:
        if self._renewing or not self._lease:
            return []
        self._renewing = True
        self._renewed_at = now
        lease = self._lease

        def renewed(_now: float, answer: Answer) -> list[Effect]:
            self._renewing = False
            if isinstance(answer, Problem):
                return self._fail(answer)
            assert isinstance(answer, KeptAlive)
            if answer.ttl_s > 0:
                return [Heard(self._ack())]
            if lease != self._lease:
                return []  # That it ended was heard before.
            if not self._unsaid and not self._putting and self._stored is not None:
                self._unsaid.append(self._stored)
            return self._lease_again()

        return [self._asking.ask(KeepAlive(lease), renewed)]

    def leave(self) -> list[Effect]:
        """Hand over what this node leads, and take away what is its own; `Left` says when."""
        self._leaving = True
        return [*self.leadership.resign(), *self._leave_if_resigned()]

    def tick(self, now: float) -> list[Effect]:
        """See what time has brought."""
        return self._follow_up([*self.leadership.tick(now)])

    def next_deadline(self, now: float) -> float | None:
        """Return when `tick` is wanted next, or None."""
        return self.leadership.next_deadline(now)

    # What etcd says.

    def answered(self, now: float, number: int, answer: Answer) -> list[Effect]:
        """Take in an answer."""
        return self._follow_up(self._asking.answered(now, number, answer))

    def changed(self, now: float, number: int, changes: tuple[Change, ...]) -> list[Effect]:
        """Take in what a watch tells."""
        return self._follow_up(self._asking.changed(now, number, changes))

    def watch_ended(self, number: int, problem: Problem) -> list[Effect]:
        """Take in that a watch is over: begin a session anew, which looks at everything again."""
        if not self._asking.is_watching(number):
            return []
        if problem.kind is Trouble.COMPACTED:
            problem = Problem(Trouble.UNREACHABLE, f"a watch fell behind: {problem.why}")
        return self._follow_up(self._fail(problem))

    def _follow_up(self, effects: list[Effect]) -> list[Effect]:
        return effects + self._leave_if_resigned() if self._leaving else effects

    # Opening.

    def _leased(self, now: float, answer: Answer) -> list[Effect]:
        self._renewed_at = now
        if isinstance(answer, KeptAlive) and answer.ttl_s <= 0:
            self._lease = 0
            return self.open()
        if isinstance(answer, Problem):
            return self._fail(answer)
        if isinstance(answer, Granted):
            self._lease = answer.lease
        return [self._store(self._doubted)] if self._doubted is not None else self._look()

    def _look(self) -> list[Effect]:
        look = Txn((), (all_below(self.places.shared), all_below(self._views)))
        return [self._asking.ask(look, self._looked)]

    def _looked(self, _now: float, answer: Answer) -> list[Effect]:
        if isinstance(answer, Problem):
            return self._fail(answer)
        assert isinstance(answer, TxnDone)
        self.is_up = True
        after = answer.revision + 1
        shared, views = self.places.shared, self._views
        effects: list[Effect] = [
            self._asking.watch(views, end_of_prefix(views), after, self._told),
            self._asking.watch(shared, end_of_prefix(shared), after, self._shared_changed),
            Opened(),
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

    def _put_next(self) -> list[Effect]:
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

    def _store(self, status: Status) -> Ask:
        self._putting = True
        lease = self._lease
        record = NodeRecord(self._addressed(status), self._call)
        key = self.places.node(status.info.node, status.info.incarnation)
        # What is sent may be carried out late: then it must not undo what came after it.
        ops: list[Op] = [Put(key, pack(record), lease)]
        if self._key and self._key != key:
            ops.append(Delete(self._key))  # It was this node's until it began anew.

        mine = Compare(key, Field.MOD, self._key_revision if self._key == key else 0)

        def put(now: float, answer: Answer) -> list[Effect]:
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
            effects: list[Effect] = [Heard(self._ack())]
            effects += self.leadership.own_said(now, record.status, record.call)
            return effects + self._put_next()

        return self._asking.ask(Txn((mine,), tuple(ops), (Get(key),)), put)

    def _not_stored(self, status: Status, lease: int, problem: Problem) -> list[Effect]:
        if problem.kind is not Trouble.LEASE_GONE:
            if problem.kind is not Trouble.UNREACHABLE:
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

    def _lease_again(self) -> list[Effect]:
        """Get another lease for one that ended; the node lives, whatever others had to think."""
        self._lease = 0
        effects: list[Effect] = [*self.leadership.election.down()]
        effects.append(self._asking.ask(Grant(self._ttl_s), self._leased_again))
        return effects

    def _leased_again(self, _now: float, answer: Answer) -> list[Effect]:
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

    def _told(self, _now: float, changes: tuple[Change, ...]) -> list[Effect]:
        effects: list[Effect] = []
        for change in changes:
            if change.value is not None:
                effects += self._hear_view(change.value)
        return effects

    def _hear_view(self, value: bytes) -> list[Effect]:
        view = unpack(View, value)
        return [Heard(view)] if view is not None and view.run_id == self._run_id else []

    def _shared_changed(self, _now: float, changes: tuple[Change, ...]) -> list[Effect]:
        effects: list[Effect] = []
        for change in changes:
            if change.key == self.places.leader:
                effects += self.leadership.election.leader_changed(change)
            elif change.key == self.places.call and change.value is not None:
                self._hear_call(change.value)
                effects += self._put_next()
        return effects

    def _hear_call(self, value: bytes) -> None:
        number = call_of(value)
        if number > self._call:
            self._call, self._answer_due = number, True

    # The end.

    def _fail(self, problem: Problem) -> list[Any]:
        """End the session because etcd cannot be relied on."""
        if problem.kind is not Trouble.UNREACHABLE and self._doubted is None:
            self._doubted = self._stored
        permanent = problem.kind in (Trouble.DENIED, Trouble.REFUSED)
        return [*self.drop(), Closed(problem.why, permanent)]

    def _leave_if_resigned(self) -> list[Effect]:
        if not self._leaving or not self.leadership.is_resigned:
            return []
        self._leaving = False
        lease, self._lease = self._lease, 0
        effects = self.drop()  # Whatever else is under way, or fails, does not matter any more.
        self._goes = True
        return effects + leave(self._asking, self.places, self._key, lease, lambda: [Left()])
