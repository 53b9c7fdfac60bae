"""Whether this node is the leader of a job on etcd: `Election`.

Whoever creates the leader's key leads, until the key is gone; it is on the leader's lease. The
revision that created the key is the leader's `term`: a transaction that compares it (`still`) does
nothing once another leads, whatever the node that sent it believes.

Every node watches the key, and tries to create it when it is gone. That it won may be heard by the
watch before the answer, or after a session in which no answer came at all; the key tells by whom
it was made.
"""

from __future__ import annotations

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
    Txn,
    TxnDone,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.etcd.calls import Asking, EtcdEffect


class Election:
    """One node's candidacy; `won` and `lost` are called as it comes to lead and ceases to."""

    def __init__(
        self,
        *,
        asking: Asking,
        key: bytes,
        name: str,
        won: Callable[[], list[EtcdEffect]],
        lost: Callable[[], list[EtcdEffect]],
        fail: Callable[[Problem], list[EtcdEffect]],
    ) -> None:
        self.term = 0
        """The revision that created the leader's key if it is this node's, else 0."""
        self.is_open = True
        """Whether this node wants to lead, should nobody do so."""
        self.is_campaigning = False
        self._asking = asking
        self._key = key
        self._name = name
        self._won, self._lost, self._fail = won, lost, fail
        self._lease = 0
        self._campaign_number = 0

    def up(self, lease: int, leader: KeyValue | None) -> list[EtcdEffect]:
        """Take part with this lease, now that it is known who leads."""
        self._lease = lease
        return self._heed(leader)

    def leased(self, lease: int) -> list[EtcdEffect]:
        """Take part with another lease."""
        self._lease = lease
        return self._campaign()

    def down(self) -> list[EtcdEffect]:
        """Lead no more, as far as is known here: the session or the lease is lost."""
        self._lease = 0
        return self.step_down()

    def step_down(self) -> list[EtcdEffect]:
        """Lead no more: another does, or nobody."""
        self._campaign_number += 1  # The answer to a campaign that is under way means nothing.
        self.is_campaigning = False
        led, self.term = self.term, 0
        return self._lost() if led else []

    def leader_changed(self, change: Change) -> list[EtcdEffect]:
        """Take note of a change of the leader's key."""
        if change.mod_revision <= self.term:
            return []  # It was before this node led.
        if change.value is None:
            return self.step_down() + self._campaign()
        if change.value == self._signature():
            return self._lead(change.create_revision)
        return self.step_down()

    def still(self) -> Compare:
        """Return the comparison that fails once this node does not lead any more."""
        return Compare(self._key, Field.CREATE, self.term)

    def _heed(self, leader: KeyValue | None) -> list[EtcdEffect]:
        if leader is None:
            return self._campaign()
        if leader.value == self._signature():
            return self._lead(leader.create_revision)  # It led before, and may go on.
        return []

    def _campaign(self) -> list[EtcdEffect]:
        if not self._lease or not self.is_open or self.is_campaigning or self.term:
            return []
        self.is_campaigning = True
        self._campaign_number += 1
        number = self._campaign_number
        txn = Txn(
            (Compare(self._key, Field.CREATE, 0),),
            (Put(self._key, self._signature(), self._lease),),
            (Get(self._key),),
        )

        def answered(_now: float, answer: Answer) -> list[EtcdEffect]:
            if number != self._campaign_number:
                return []
            self.is_campaigning = False
            if isinstance(answer, Problem):
                # Of a lease that is gone the session hears itself, and gets another.
                return [] if answer.kind is ProblemKind.LEASE_GONE else self._fail(answer)
            assert isinstance(answer, TxnDone)
            if answer.succeeded:
                return self._lead(answer.revision)
            return self._heed(answer.results[0][0] if answer.results[0] else None)

        return [self._asking.ask(txn, answered)]

    def _lead(self, term: int) -> list[EtcdEffect]:
        self._campaign_number += 1
        self.is_campaigning = False
        self.term = term
        return self._won()

    def _signature(self) -> bytes:
        """Return what only this node's key has, and only with this lease."""
        return f"{self._name} {self._lease:x}".encode()
