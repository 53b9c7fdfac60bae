"""Holding a failure until every other member of the round has responded: `FailureHold`.

When a machine dies, workers on other nodes lose their connections to it and fail, often sooner than
the machine's silence is noticed. Charging such a failure would be wrong: the lost node is the
reason. The rules, for one job:

1.  If a member reports a failure of the current generation, the failure is held, and the first one
    of a generation begins a roll call: every other member whose workers still run must respond.
2.  If a member does not respond, it is soon lost. The loss then changes the round, and the failure
    changes nothing any more.
3.  If all members have responded, or the generation is over, the failures are released, the
    likeliest cause first. A failure of a node that was lost meanwhile is dropped.
4.  If a node whose failure is held leaves, or closes the job, that is held too: its failure was
    first. Nobody waits for its response.

Use: `hold` each status for which `must_hold` is true, and `follow` each for which `must_follow` is.
Call `responded` for each response. After every event, decide about what `release` returns. Drivers
differ in how they ask a member and in what counts as its response: a coordinator sends an
acknowledgement with the number of the roll call, a leader on etcd stores that number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.first_failure import likeliest_first
from holdfast.core.protocol import NodePhase, Status
from holdfast.core.rounds import JobPhase

if TYPE_CHECKING:
    from holdfast.core.rounds import Job, NodeLost, Rounds

    Peer = tuple[str, int]
    """A node and its incarnation."""


class FailureHold:
    """The failures of one job that are held, and the members that have yet to respond."""

    def __init__(self) -> None:
        self.awaited: set[Peer] = set()
        """The members that have yet to respond."""
        self.leaving: set[Peer] = set()
        """The nodes that left after a held failure, whose loss is no news."""
        self._generation = -1  # Of the newest roll call.
        self._failures: dict[str, Status] = {}  # By node.
        self._endings: list[Status | NodeLost] = []

    def __bool__(self) -> bool:
        return bool(self._failures)

    def held(self, node: str, incarnation: int) -> Status | None:
        """Return the held failure of an incarnation."""
        status = self._failures.get(node)
        return status if status is not None and status.info.incarnation == incarnation else None

    def must_follow(self, status: Status) -> bool:
        """Whether a node leaves, or closes the job, while its failure is held."""
        ends = status.phase in (NodePhase.LEAVING, NodePhase.CLOSING)
        return ends and self.held(status.info.node, status.info.incarnation) is not None

    def hold(self, job: Job, status: Status) -> bool:
        """Hold a failure; return whether that begins a roll call."""
        info = status.info
        self._failures[info.node] = status
        begins = self._generation != job.generation
        if begins:
            self._generation = job.generation
            running = (one for one in job.members if one.node not in job.succeeded)
            self.awaited = {(one.node, one.incarnation) for one in running}
        self.awaited.discard((info.node, info.incarnation))
        return begins

    def follow(self, event: Status | NodeLost) -> None:
        """Hold what becomes of a node after its failure, until that is released."""
        self._endings.append(event)
        if isinstance(event, Status):
            self.leaving.add((event.info.node, event.info.incarnation))

    def responded(self, node: str, incarnation: int) -> None:
        """Note that a member responded to the roll call."""
        self.awaited.discard((node, incarnation))

    def excuse(self, incarnation: int) -> None:
        """Expect no response of an incarnation that is known to be alive: the leader's own."""
        self.awaited = {peer for peer in self.awaited if peer[1] != incarnation}

    def release(self, job: Job | None) -> tuple[list[Status], list[Status | NodeLost]]:
        """Return the failures to decide about now, then what became of their nodes."""
        if not self._failures or (job is not None and self._awaits_response(job)):
            return [], []
        failures, endings = likeliest_first([*self._failures.values()]), self._endings
        self._failures, self._endings, self.leaving = {}, [], set()
        return failures, endings

    def _awaits_response(self, job: Job) -> bool:
        """Whether a member of the generation that failed may turn out to be lost."""
        if job.phase is not JobPhase.ACTIVE or job.generation != self._generation:
            return False
        return any(node not in job.succeeded for node, _incarnation in self.awaited)


def must_hold(rounds: Rounds, status: Status) -> bool:
    """Whether a status is a member's new report of a failure of the current generation."""
    job, info = rounds.job, status.info
    return (
        status.phase is NodePhase.FAILED
        and job.phase is JobPhase.ACTIVE
        and status.generation == job.generation
        and rounds.rank_table.incarnation_of(info.node) == info.incarnation
        and 0 <= rounds.seq_of(info.node, info.incarnation) < status.seq
    )
