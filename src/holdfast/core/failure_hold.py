"""Holds a failure until every other member of the round has responded: `FailureHold`.

When a host dies, workers on other nodes lose their connections to it and fail, often before the
host counts as lost. Such a failure must not be charged: the lost node is the cause. The rules, for
one job:

1.  If a member reports a failure of the current generation, the failure is held. The first failure
    of a generation starts a roll call: every other member whose workers still run must respond.
2.  If a member does not respond, it is soon lost. Its loss changes the round, and the failure no
    longer has an effect.
3.  If all members have responded, or the generation is over, the failures are released, the
    likeliest cause first. If the failed node itself is lost meanwhile, its failure is dropped.
4.  If a node whose failure is held leaves or closes the job, its departure is held too, because the
    failure came first. Its response is not awaited.

Use: call `hold` for each status for which `must_hold` is true, `hold_departure` for each for which
`must_hold_departure` is true, and `responded` for each response. After every event, decide about the
statuses that `release` returns. Drivers request responses differently: a coordinator sends an
acknowledgement with the number of the roll call, and a leader on etcd stores that number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.first_failure import likeliest_first
from holdfast.core.phases import NodePhase
from holdfast.core.protocol import Status
from holdfast.core.rounds import JobPhase

if TYPE_CHECKING:
    from holdfast.core.rounds import Job, NodeLost, Rounds

    Peer = tuple[str, int]
    """A node and its incarnation."""


class FailureHold:
    """The held failures of one job, and the members that have yet to respond."""

    def __init__(self) -> None:
        self.awaited: set[Peer] = set()
        """The members that have yet to respond."""
        self.leaving: set[Peer] = set()
        """The nodes that left after a held failure; their loss is expected."""
        self._generation = -1  # Of the newest roll call.
        self._failures: dict[str, Status] = {}  # By node.
        self._departures: list[Status | NodeLost] = []

    def __bool__(self) -> bool:
        return bool(self._failures)

    def held(self, node: str, incarnation: int) -> Status | None:
        """Return the held failure of an incarnation."""
        status = self._failures.get(node)
        return status if status is not None and status.info.incarnation == incarnation else None

    def must_hold_departure(self, status: Status) -> bool:
        """Whether a node leaves or closes the job while its failure is held."""
        ends = status.phase in (NodePhase.LEAVING, NodePhase.CLOSING)
        return ends and self.held(status.info.node, status.info.incarnation) is not None

    def hold(self, job: Job, status: Status) -> bool:
        """Hold a failure; return whether this starts a roll call."""
        info = status.info
        self._failures[info.node] = status
        begins = self._generation != job.generation
        if begins:
            self._generation = job.generation
            running = (one for one in job.members if one.node not in job.succeeded)
            self.awaited = {(one.node, one.incarnation) for one in running}
        self.awaited.discard((info.node, info.incarnation))
        return begins

    def hold_departure(self, event: Status | NodeLost) -> None:
        """Hold the departure of a node until its failure is released."""
        self._departures.append(event)
        if isinstance(event, Status):
            self.leaving.add((event.info.node, event.info.incarnation))

    def responded(self, node: str, incarnation: int) -> None:
        """Note that a member responded to the roll call."""
        self.awaited.discard((node, incarnation))

    def exempt(self, incarnation: int) -> None:
        """Stop waiting for an incarnation that is known to be alive: the leader's own."""
        self.awaited = {peer for peer in self.awaited if peer[1] != incarnation}

    def release(self, job: Job | None) -> tuple[list[Status], list[Status | NodeLost]]:
        """Return the failures to decide about now, and the departures to decide about after them."""
        if not self._failures or (job is not None and self._awaits_response(job)):
            return [], []
        failures, departures = likeliest_first([*self._failures.values()]), self._departures
        self._failures, self._departures, self.leaving = {}, [], set()
        return failures, departures

    def _awaits_response(self, job: Job) -> bool:
        """Whether a member of the failed generation may still turn out to be lost."""
        if job.phase is not JobPhase.ACTIVE or job.generation != self._generation:
            return False
        return any(node not in job.succeeded for node, _incarnation in self.awaited)


def must_hold(rounds: Rounds, status: Status) -> bool:
    """Whether a status is a member's first report of a failure in the current generation."""
    job, info = rounds.job, status.info
    return (
        status.phase is NodePhase.FAILED
        and job.phase is JobPhase.ACTIVE
        and status.generation == job.generation
        and rounds.rank_table.incarnation_of(info.node) == info.incarnation
        and 0 <= rounds.seq_of(info.node, info.incarnation) < status.seq
    )
