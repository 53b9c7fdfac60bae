"""What the leader of one job makes of what its nodes say and of their ends: `Lead`.

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

import msgspec

from holdfast.core.broken_jobs import close_broken
from holdfast.core.job import Job, JobPhase, NodeLost, NodesLost, TimeUp
from holdfast.core.liveness import AttendedClock
from holdfast.core.news import Beat, NodeInfo, Phase, Status, View
from holdfast.core.rounds import Event, Rounds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Lead:
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
            beat = Beat(
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
        return self._tell(now, TimeUp(self._wait[0]))

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
            status.phase is Phase.FAILED
            and job.phase is JobPhase.ACTIVE
            and status.generation == job.generation
            and self.rounds.seats.incarnation_of(info.node) == info.incarnation
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
