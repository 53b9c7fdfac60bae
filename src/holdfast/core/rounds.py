"""Who is in a job: the machine that forms rounds, breaks them, and closes the job.

::

    FORMING ── max nodes are there, or min and a settle ──► ACTIVE ── all done ──► CLOSED
       ▲                                                     │  ▲ │  ── budget spent ──► CLOSED
       └───── lost or left, fewer than min remain ───────────┘  └─┘
    RECOVERING ── all of the round are back ──► ACTIVE           a worker failed: same round,
       └── a quiet while, some missing ──► FORMING or ACTIVE     next generation; nodes came,
                                                                 went or were replaced: new round

The rules:

1.  A round has between min and max nodes. It forms at once when no more could join, or when min
    are there and none has joined for the settle time. `spares` of them are kept back.
2.  A node that joins a round with room brings about one regroup after the settle time, so that
    several joiners cost one restart. Above that it is a standby.
3.  A member that is lost or leaves breaks the round. A standby takes its ranks at once; else the
    others regroup if min are left; else they wait. One whose workers are all done is not missed.
4.  Those who stay keep their order and, where the size allows, their ranks (`core.ranks`).
5.  A worker's failure is answered by the next generation for all members, in the same round.
6.  Generation and restart budget belong to the job. Only a worker's failure is charged.
7.  The job ends well when all members' workers are done. Until then a failure restarts them too.
8.  Closed is final, and comes only of success, of a failure without a restart left, or of a
    request. Losing nodes, all of them even, closes nothing.
9.  A node is known by its id and incarnation. A new incarnation puts the old one out; what an
    incarnation that is out still says is answered with its fate and changes nothing.
10. Decisions carry a term and a revision, and nodes pass over what is older than what they have.
    A coordinator that finds nodes of an earlier one takes a higher term than any they heard of,
    and carries their round on, unchanged, if all of its members are back.
11. One machine is one job. Run ids keep jobs apart.

Use: give every event to `handle` and send each `View` it returns to its node; while `wait` is not
None, say `TimeUp` once it has lasted. Whatever is lost on the way is repaired by `behind`, which
must be asked at every `Beat`. Pure: it reads no clock and stores no time.
"""

from __future__ import annotations

from holdfast.core import views
from holdfast.core.book import Book
from holdfast.core.job import (
    NO_CLAIM,
    CloseJob,
    InvalidEvent,
    JobPhase,
    Node,
    NodeLost,
    NodesLost,
    TimeUp,
)
from holdfast.core.news import (
    Ending,
    Phase,
    Role,
    Status,
    View,
)
from holdfast.core.ranks import order_nodes
from holdfast.core.restarts import Budget, Verdict, judge

Event = Status | NodeLost | NodesLost | TimeUp | CloseJob


class Rounds(Book):
    """The machine of one job, over a state that may come from elsewhere."""

    def handle(self, event: Event) -> list[View]:
        """Take in one fact; return what must now be told, each view to its own node."""
        if type(event) is Status:
            return self._status(event)
        if type(event) is NodeLost:
            return self._lose((event,))
        if type(event) is NodesLost:
            return self._lose(event.lost)
        if type(event) is TimeUp:
            return self._time_up() if self.wait and event.seq == self.job.wait_seq else []
        if type(event) is CloseJob:
            return (
                [] if self.job.phase is JobPhase.CLOSED else self._close(event.outcome, event.why)
            )
        raise InvalidEvent(f"{event!r} is no event of a job")

    # What nodes say.

    def _status(self, status: Status) -> list[View]:
        job, info = self.job, status.info
        if status.run_id != job.run_id:
            raise InvalidEvent(f"a status of {status.run_id!r} came to {job.run_id!r}")
        fate = job.retired.get(info.incarnation)
        if fate is not None:
            role = Role.REFUSED if fate.superseded else Role.FENCED
            elsewhere = status.term if status.term > job.term else 0
            return [self._turn_away(info, role, fate.why, heard=elsewhere)]
        known = job.nodes.get(info.node)
        if known is not None and known.info.incarnation == info.incarnation:
            return self._said(known, status) if status.seq > known.seq else []
        if status.phase is Phase.LEAVING:
            return []
        if job.phase is JobPhase.CLOSED:
            return [self._turn_away(info, Role.CLOSED, job.why, heard=status.term)]
        wrong = views.objection(job, status)
        if wrong:
            return [self._turn_away(info, Role.REFUSED, wrong, heard=status.term)]
        if job.round_term and views.claims(status) and not self._outranked(status):
            why = f"the job went on without {info.node}"
            self._retire(info, why)
            return [self._turn_away(info, Role.FENCED, why)]
        told: list[View] = []
        broken = ""
        if known is not None:
            why = f"another agent took the place of {info.node} (on {info.host or 'its host'})"
            broken = why if self._take_out(known, why, superseded=True) else ""
            told = [self._turn_away(known.info, Role.REFUSED, why)]
        told += self._join(status, broken)
        if status.phase is Phase.CLOSING:
            told += self._close(Ending.STOPPED, f"{info.node} closed the job")
        return told

    def _said(self, known: Node, status: Status) -> list[View]:
        known.seq = status.seq
        if status.phase is Phase.LEAVING:
            told = self._remove(known, f"{known.info.node} left")
            if not self.job.nodes:  # Nobody failed: they were all asked to go.
                self.job.restarts = 0
            return told
        known.phase, known.generation = status.phase, status.generation
        known.failure = status.failure
        if self.job.phase is JobPhase.CLOSED:
            return self._said_when_closed(status)
        if status.phase is Phase.CLOSING:
            return self._close(Ending.STOPPED, f"{known.info.node} closed the job")
        told = self._heed(known, status)
        if status.away_s and not told and self.job.phase is not JobPhase.RECOVERING:
            told.append(self._tell(known, anew=True))  # It lost touch, and waits for a word.
        return told

    def _heed(self, known: Node, status: Status) -> list[View]:
        """Act on what a member says of the current generation."""
        job, node = self.job, known.info.node
        if (
            job.phase is not JobPhase.ACTIVE
            or status.generation != job.generation
            or self.seats.incarnation_of(node) != known.info.incarnation
        ):
            return []
        if status.phase is Phase.FAILED:
            return self._worker_failed(known, status.report)
        if status.phase is Phase.SUCCEEDED:
            job.succeeded.add(node)
            if len(job.succeeded) == len(job.members):
                return self._close(Ending.SUCCEEDED, "all workers succeeded")
        elif status.phase is Phase.READY:  # It stopped its workers of its own accord.
            return self._next_generation(f"{node} asked for a new start")
        return []

    def _said_when_closed(self, status: Status) -> list[View]:
        job = self.job
        if job.final or status.failure is None or job.failure is None:
            return []
        likelier = status.failure.sudden and not job.failure.sudden
        if likelier or (status.report and status.failure.node == job.failure.node):
            job.failure, job.report = status.failure, status.report
            self._begin_wait()
        return []

    # Joining, and what comes of time.

    def _join(self, status: Status, broken: str = "") -> list[View]:
        """Take in a newcomer; `broken` says why the round must change anyway."""
        job, info = self.job, status.info
        if job.settings is None or not job.nodes:  # Whoever begins it anew may begin it otherwise.
            job.settings = status.settings
            job.restarts = min(job.restarts, max(0, status.settings.max_restarts))
        node = Node(info, status.seq, status.phase, status.generation, status.failure)
        job.nodes[info.node] = node
        after_another = self._outranked(status)
        if after_another:
            job.term = status.term + 1
            job.recover_s = max(job.recover_s, 2 * status.away_s)
        if not job.round_term:
            job.restarts = max(job.restarts, min(status.restarts, job.settings.max_restarts))
        seen = max(status.generation, status.told_generation)
        if views.claims(status) and not job.round_term:
            job.generation = max(job.generation, seen)
            return self._claimed(node, status)
        if seen > job.generation:  # Another line of the same job: neither may go on as it was.
            job.generation = seen
            if job.phase is JobPhase.ACTIVE:
                return self._mend(f"{info.node} came from another coordinator's round")
        if after_another and job.phase is JobPhase.FORMING and not job.round_term:
            # It waited beside an earlier coordinator's round, whose members may be coming back.
            job.phase = JobPhase.RECOVERING
            self._begin_wait()
        return self._mend(broken) if broken else self._review(node)

    def _outranked(self, status: Status) -> bool:
        """Return whether a newcomer may have heard another coordinator in this term, or a later."""
        return status.term >= self.job.term

    def _review(self, newcomer: Node) -> list[View]:
        """See whether a newcomer completes a round, or begins a wait for more."""
        job = self.job
        if job.phase is JobPhase.RECOVERING:
            return []
        here, most = len(job.nodes), self._settings.max_nodes
        if job.phase is JobPhase.FORMING:
            if here >= self._settings.min_nodes:
                if self._size(here) == most:
                    return self._form(views.newcomer_says(job))
                self._begin_wait()
        elif self._size(here) > len(job.members):
            self._begin_wait()
        return [self._tell(newcomer, anew=True)]

    def _time_up(self) -> list[View]:
        job = self.job
        job.waiting = False
        if job.phase is JobPhase.CLOSED:
            return self._finalize()
        if job.phase is JobPhase.RECOVERING:
            back = "not all nodes came back after the coordinator was gone"
            return self._mend(back if views.claimants(job) else views.newcomer_says(job))
        if job.phase is JobPhase.FORMING:
            return self._form(views.newcomer_says(job))
        joined = self._size(len(job.nodes)) > len(job.members)
        if joined:
            return self._form(views.newcomer_says(job))
        outside = [node for name, node in job.nodes.items() if name not in self.seats.rank_of]
        return [self._tell(node, anew=True) for node in outside]  # They are standbys now.

    def _claimed(self, node: Node, status: Status) -> list[View]:
        """Take note of a member of an earlier coordinator's round; carry it on if it is whole."""
        job = self.job
        node.claim = (status.round_term, status.round, status.round_key)
        node.claimed_rank, node.claimed_size = status.rank, status.size
        job.phase = JobPhase.RECOVERING
        job.round = max(job.round, status.round)
        self._begin_wait()
        back = views.claimants(job) if len(job.nodes) >= status.size else []
        if not back or [one.claimed_rank for one in back] != list(range(back[0].claimed_size)):
            return []
        job.members = [one.info for one in back]
        job.round_term, job.round, _key = back[0].claim
        job.phase, job.waiting = JobPhase.ACTIVE, False
        self.seats = views.Seats(job)
        self._changed("the coordinator is back, and all nodes with it")
        if self._size(len(job.nodes)) > len(back):
            self._begin_wait()
        for one in back:  # What they had to say while there was nobody to hear it.
            if one.generation == job.generation and one.phase is Phase.SUCCEEDED:
                job.succeeded.add(one.info.node)
        return self._settle_up(back) or self._tell_all()

    def _settle_up(self, back: list[Node]) -> list[View]:
        job = self.job
        if len(job.succeeded) == len(job.members):
            return self._close(Ending.SUCCEEDED, "all workers succeeded")
        for one in back:
            if one.generation == job.generation and one.phase in (Phase.FAILED, Phase.READY):
                if one.phase is Phase.FAILED:
                    return self._worker_failed(one, b"")
                return self._next_generation(f"{one.info.node} asked for a new start")
        return []

    # Rounds and generations.

    def _size(self, here: int) -> int:
        """Return how many of so many nodes are to run, spares kept back where that is possible."""
        settings = self._settings
        wanted = max(settings.min_nodes, here - settings.spares)
        return min(wanted, here, settings.max_nodes)

    def _form(self, why: str) -> list[View]:
        job = self.job
        here = list(job.nodes.values())
        previous, previous_size = views.previous_ranks(job, self.seats)
        # A lost node is replaced by a spare before the round is made smaller.
        size = max(self._size(len(here)), min(previous_size, len(here), self._settings.max_nodes))
        first = sorted(here, key=lambda node: node.info.node not in previous)
        infos = [node.info for node in first[:size]]
        job.members = order_nodes(infos, previous, self._settings.order)
        job.round += 1
        job.round_term = job.term
        job.phase, job.waiting = JobPhase.ACTIVE, False
        for node in here:
            node.claim = NO_CLAIM
        self._begin_generation(why)
        return self._tell_all()

    def _next_generation(self, why: str) -> list[View]:
        """Start all workers anew; in a new round if nodes wait, or some that were done are gone."""
        job = self.job
        here = all(self._known(info.node, info.incarnation) for info in job.members)
        if not here or self._size(len(job.nodes)) > len(job.members):
            return self._mend(why)
        self._begin_generation(why)
        return [self._tell(job.nodes[info.node]) for info in job.members]

    def _begin_generation(self, why: str) -> None:
        job = self.job
        job.generation += 1
        job.succeeded = set()
        self.seats = views.Seats(job)
        self._changed(why)

    def _mend(self, why: str) -> list[View]:
        """Go on after the round lost a member: smaller, with a replacement, or waiting for one."""
        if self.job.phase is JobPhase.CLOSED:
            return self._finalize()
        if len(self.job.nodes) >= self._settings.min_nodes:
            return self._form(why)
        self.job.phase = JobPhase.FORMING
        self.job.waiting = False
        for node in self.job.nodes.values():
            node.claim = NO_CLAIM  # It is about to stop its workers of that round.
        self._changed(why)
        return self._tell_all()

    def _lose(self, lost: tuple[NodeLost, ...]) -> list[View]:
        """Take out all that were lost together, at the price of one new round."""
        broken = ""
        for one in lost:
            known = self._known(one.node, one.incarnation)
            why = f"{one.node} was lost: {one.why}"
            if known is not None and self._take_out(known, why):
                broken = broken or why
        return self._mend(broken) if broken else []

    def _remove(self, known: Node, why: str, *, superseded: bool = False) -> list[View]:
        return self._mend(why) if self._take_out(known, why, superseded=superseded) else []

    def _take_out(self, known: Node, why: str, *, superseded: bool = False) -> bool:
        """Strike a node out; return whether things cannot stay as they are without it."""
        job, info = self.job, known.info
        was_member = self.seats.incarnation_of(info.node) == info.incarnation
        del job.nodes[info.node]
        self._retire(info, why, superseded=superseded)
        if job.phase is JobPhase.CLOSED:
            awaited = job.failure is not None and job.failure.node == info.node
            return awaited and not job.report and not job.final
        if job.phase is JobPhase.FORMING and len(job.nodes) < self._settings.min_nodes:
            job.waiting = False
        return job.phase is JobPhase.ACTIVE and was_member and info.node not in job.succeeded

    def _worker_failed(self, node: Node, report: bytes) -> list[View]:
        job, failure = self.job, node.failure
        what = failure.summary if failure else f"a worker on {node.info.node} failed"
        mendable = failure is None or failure.mendable
        job.failure, job.report = failure, report
        budget = Budget(self._settings.max_restarts, job.restarts)
        if judge(budget, mendable=mendable) is Verdict.GIVE_UP:
            return self._close(Ending.FAILED, what)
        job.restarts += 1
        told = self._next_generation(what)
        job.failure, job.report = None, b""
        return told

    def _close(self, outcome: Ending, why: str) -> list[View]:
        job = self.job
        job.phase = JobPhase.CLOSED
        job.outcome = outcome
        job.final = job.failure is None or outcome is not Ending.FAILED
        job.waiting = False
        if not job.final:
            self._begin_wait()
        self._changed(why)
        return self._tell_all()

    def _finalize(self) -> list[View]:
        self.job.final = True
        self.job.waiting = False
        self._changed(self.job.why)
        return self._tell_all()
