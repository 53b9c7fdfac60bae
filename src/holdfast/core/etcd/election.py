"""Whether this node leads a job on etcd: the machine `Election`.

The node that creates the leader's key is the leader until the key is deleted. The key is on that node's
lease. The revision that created the key is the leader's `term`. A transaction that compares the term
(`leader_condition`) has no effect once another node leads, even if its sender still believes that it leads.

::

    idle ── no leader, and a lease: campaign ──► campaigning ── the key is created ──► leading
     ▲                                                │ another node's key exists        │
     └────────────────────────────────────────────────┴── the key or the lease is gone ──┘

Every node watches the key and tries to create it when it is deleted. The watch may report this node's
victory before the answer does, or the answer may be lost with its session. So the key's value names the
node and the lease that created it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.etcd.calls import (
    Answer,
    Change,
    Compare,
    Field,
    Get,
    KeyValue,
    Problem,
    ProblemKind,
    Put,
    RequestAnswered,
    SendRequest,
    Txn,
    TxnDone,
)
from holdfast.core.etcd.keys import leader_signature, leader_value
from holdfast.core.machine import Effect, Event, Story

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.core.etcd.keys import Presence


# Events.


class SessionUp(Event):
    """The session opened with this lease; this is the current leader, if any."""

    lease: int
    leader: KeyValue | None


class LeaseReplaced(Event):
    """The lease ended; this is the new one."""

    lease: int


class SessionLost(Event):
    """The session or its lease is gone."""


class LeaderKeyChanged(Event):
    """The watch reported a change of the leader's key."""

    change: Change


class LeadershipLost(Event):
    """A transaction showed that this node is no longer the leader, or this node deleted its key."""


class ResignRequested(Event):
    """This node must not run for leader again."""


ElectionEvent = (
    SessionUp
    | LeaseReplaced
    | SessionLost
    | LeaderKeyChanged
    | LeadershipLost
    | ResignRequested
    | RequestAnswered
)

# Effects.


class BecomeLeader(Effect):
    """This node is the leader from now on, in this term."""

    term: int


class StopLeading(Effect):
    """This node is no longer the leader."""


class FailSession(Effect):
    """End the session, because etcd is not usable."""

    problem: Problem


ElectionEffect = SendRequest | BecomeLeader | StopLeading | FailSession


class Election:
    """The machine of one candidate."""

    def __init__(self, *, key: bytes, name: str, numbers: Iterator[int]) -> None:
        self.term = 0
        """If this node leads, the revision that created the leader's key; otherwise 0."""
        self.is_candidate = True
        """Whether this node is willing to lead."""
        self.presence: Presence | None = None
        """The port at which others observe that this process runs."""
        self._key = key
        self._name = name
        self._numbers = numbers
        self._lease = 0
        self._campaign = 0  # The number of the request under way, or 0.
        self.story = Story("election", node=name)

    @property
    def is_campaigning(self) -> bool:
        return self._campaign != 0

    def handle(self, now: float, event: ElectionEvent, cause: str = "") -> list[ElectionEffect]:
        """Handle one event; return the effects in order."""
        state = f"term {self.term}" if self.term else "campaigning" if self._campaign else "idle"
        effects = self._handle(event)
        if effects:
            self.story.record(now, state, event, effects, cause)
        return effects

    def _handle(self, event: ElectionEvent) -> list[ElectionEffect]:
        match event:
            case LeaderKeyChanged(change):
                return self._leader_changed(change)
            case RequestAnswered(number, answer):
                return self._answered(answer) if number == self._campaign else []
            case SessionUp(lease, leader):
                self._lease = lease
                return self._found(leader)
            case LeaseReplaced(lease):
                self._lease = lease
                return self._run()
            case SessionLost():
                self._lease = 0
                return self._step_down()
            case LeadershipLost():
                return self._step_down()
            case ResignRequested():
                self.is_candidate = False
                return []

    def leader_condition(self) -> Compare:
        """Return the condition that holds while this node is the leader."""
        return Compare(self._key, Field.CREATE, self.term)

    def _leader_changed(self, change: Change) -> list[ElectionEffect]:
        if change.mod_revision <= self.term:
            return []  # The change precedes this node's term.
        if change.value is None:
            return self._step_down() + self._run()
        if self.is_own(change.value):
            return self._become_leader(change.create_revision)
        return self._step_down()

    def _found(self, leader: KeyValue | None) -> list[ElectionEffect]:
        if leader is None:
            return self._run()
        if self.is_own(leader.value):
            # This node led before, and continues.
            return self._become_leader(leader.create_revision)
        return []

    def _run(self) -> list[ElectionEffect]:
        if not self._lease or not self.is_candidate or self._campaign or self.term:
            return []
        self._campaign = next(self._numbers)
        txn = Txn(
            (Compare(self._key, Field.CREATE, 0),),
            (Put(self._key, leader_value(self._name, self._lease, self.presence), self._lease),),
            (Get(self._key),),
        )
        return [SendRequest(self._campaign, txn)]

    def _answered(self, answer: Answer) -> list[ElectionEffect]:
        self._campaign = 0
        if isinstance(answer, Problem):
            # The session learns on its own that its lease is gone, and gets another one.
            return [] if answer.kind is ProblemKind.LEASE_GONE else [FailSession(answer)]
        assert isinstance(answer, TxnDone)
        if answer.succeeded:
            return self._become_leader(answer.revision)
        return self._found(answer.results[0][0] if answer.results[0] else None)

    def _become_leader(self, term: int) -> list[ElectionEffect]:
        self._campaign = 0
        self.term = term
        return [BecomeLeader(term)]

    def _step_down(self) -> list[ElectionEffect]:
        self._campaign = 0  # Ignore the answer to a campaign that is under way.
        led, self.term = self.term, 0
        return [StopLeading()] if led else []

    def is_own(self, value: bytes) -> bool:
        """Whether this node created a leader's key, with its current lease."""
        return value.partition(b"\n")[0] == leader_signature(self._name, self._lease)
