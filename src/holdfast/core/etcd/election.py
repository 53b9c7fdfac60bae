"""Whether this node leads a job on etcd: the machine `Election`.

Whoever creates the leader's key leads until the key is gone; the key is on that node's lease. The
revision that created the key is the leader's `term`: a transaction that compares it (`still`) does
nothing once another node leads, whatever the node that sent it believes.

::

    idle ── no leader, and a lease: campaign ──► campaigning ── the key is created ──► leading
     ▲                                                │ another's key is there           │
     └────────────────────────────────────────────────┴── the key or the lease is gone ──┘

Every node watches the key and tries to create it when it is gone. The watch may report the node's
own victory before the answer does, or the answer may be lost with its session; the value of the
key says which node and which lease made it.
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
    """The session opened with this lease, and found this leader."""

    lease: int
    leader: KeyValue | None


class LeaseReplaced(Event):
    """The lease ended; this is the new one."""

    lease: int


class SessionLost(Event):
    """The session or its lease is gone."""


class LeaderKeyChanged(Event):
    """The watch saw a change of the leader's key."""

    change: Change


class LeadershipLost(Event):
    """A transaction showed that this node does not lead any more, or it gave the key back."""


class ResignRequested(Event):
    """This node is to lead no more."""


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
    """This node leads now, with this term."""

    term: int


class StopLeading(Effect):
    """This node led, and does not any more."""


class FailSession(Effect):
    """End the session: etcd cannot be relied on."""

    problem: Problem


ElectionEffect = SendRequest | BecomeLeader | StopLeading | FailSession


class Election:
    """The candidacy of one node."""

    def __init__(self, *, key: bytes, name: str, numbers: Iterator[int]) -> None:
        self.term = 0
        """The revision that created the leader's key if it is this node's, else 0."""
        self.is_open = True
        """Whether this node is willing to lead."""
        self.presence: Presence | None = None
        """Where others can see that the leader's process is there."""
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
        """Take in one event; return what must now be done, in order."""
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
                self.is_open = False
                return []

    def still(self) -> Compare:
        """Return the comparison that fails once this node does not lead any more."""
        return Compare(self._key, Field.CREATE, self.term)

    def _leader_changed(self, change: Change) -> list[ElectionEffect]:
        if change.mod_revision <= self.term:
            return []  # It was before this node led.
        if change.value is None:
            return self._step_down() + self._run()
        if self.is_own(change.value):
            return self._lead(change.create_revision)
        return self._step_down()

    def _found(self, leader: KeyValue | None) -> list[ElectionEffect]:
        if leader is None:
            return self._run()
        if self.is_own(leader.value):
            return self._lead(leader.create_revision)  # It led before, and may go on.
        return []

    def _run(self) -> list[ElectionEffect]:
        if not self._lease or not self.is_open or self._campaign or self.term:
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
            # Of a lease that is gone the session hears itself, and gets another.
            return [] if answer.kind is ProblemKind.LEASE_GONE else [FailSession(answer)]
        assert isinstance(answer, TxnDone)
        if answer.succeeded:
            return self._lead(answer.revision)
        return self._found(answer.results[0][0] if answer.results[0] else None)

    def _lead(self, term: int) -> list[ElectionEffect]:
        self._campaign = 0
        self.term = term
        return [BecomeLeader(term)]

    def _step_down(self) -> list[ElectionEffect]:
        self._campaign = 0  # The answer to a campaign that is under way means nothing.
        led, self.term = self.term, 0
        return [StopLeading()] if led else []

    def is_own(self, value: bytes) -> bool:
        """Whether a leader's key is this node's, made with this very lease."""
        return value.partition(b"\n")[0] == leader_signature(self._name, self._lease)
