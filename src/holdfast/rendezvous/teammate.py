"""One node of a team whose job lies in a shared state: what it says of itself, and what it is told.

The agent says what its node does (`say`); a look at the state applies that, and whatever else this
node can vouch for (`observer`), by `core.rounds`, as a coordinator would. Nobody tells the node
anything: after each look it works out its own view, and that is news if it says something else
than the last one did.

What was said counts once it is stored, so it is kept until then: statements of a node that is in
the job one after the other, since "done" and "leaving" mean more than "leaving" alone; of one that
is not, or no longer, only the newest. Once the job is over and its report is there, nothing is
stored any more. Pure: times are the caller's monotonic clock; no I/O.
"""

from __future__ import annotations

from collections import deque

import msgspec

from holdfast.core import views
from holdfast.core.job import Job, JobPhase, Node
from holdfast.core.news import Failure, JobSettings, NodeInfo, Phase, Role, Status, View
from holdfast.core.rounds import Rounds
from holdfast.rendezvous.observer import Observer, known_as

UNSAID_MAX = 8
"""Statements that wait to be stored; more come only while the place is away, and older ones go."""


class Outlook(msgspec.Struct, frozen=True):
    """What a look at the state brought."""

    view: View | None = None
    """The newest view; the same object until there is another."""
    heard_seq: int = -1
    """The newest status that all can know of, or need not."""
    present: int = 0
    in_job: bool = False
    rests: bool = True
    """Nothing more can come before this node says something."""

    @property
    def hurries(self) -> bool:
        """Whether something is likely to happen soon."""
        view = self.view
        if view is None or view.role is Role.WAITING:
            return True
        return view.role is Role.CLOSED and not view.final

    @property
    def mark(self) -> object:
        """What differs after a change that others may follow."""
        return self.view


class Teammate:
    """Turns what an agent says and what lies in the state into changes of it, and into views."""

    def __init__(
        self,
        now: float,
        *,
        run_id: str,
        info: NodeInfo,
        settings: JobSettings,
        interval_s: float,
        lost_after_s: float,
    ) -> None:
        self.standing = Outlook()
        self.status = Status(seq=0, run_id=run_id, info=info, settings=settings)
        self._unsaid: deque[Status] = deque(maxlen=UNSAID_MAX)
        self._view: View | None = None
        self._seen = (0, 0)  # Term and revision.
        self._kept_at: float | None = None  # When it last saw how things stand.
        self._rounds: Rounds | None = None  # That of the last step: making one takes a while.
        self._observer = Observer(now, info.node, interval_s=interval_s, lost_after_s=lost_after_s)

    # What the agent says.

    def say(
        self, phase: Phase, generation: int, failure: Failure | None = None, report: bytes = b""
    ) -> None:
        """Take in what the node does now."""
        self._restate(
            seq=self.status.seq + 1,
            phase=phase,
            generation=generation,
            failure=failure,
            report=report,
        )
        self._unsaid.append(self.status)

    def rejoin(self, incarnation: int) -> None:
        """Begin anew as another incarnation."""
        self._restate(info=msgspec.structs.replace(self.status.info, incarnation=incarnation))
        self._unsaid.clear()
        self._view = None
        self.say(Phase.READY, self.status.generation)

    # One look at the state.

    def step(self, now: float, job: Job) -> tuple[View | None, bool]:
        """Change the job by what this node knows.

        Returns what the node was answered if it is not in the job, which `keep` wants to know, and
        whether there is anything to store.
        """
        rounds = self._rounds = Rounds(job)
        self._observer.observe(now, rounds)
        before = self._me(job)
        if before is None:
            answer = self._introduce(now, rounds)
            events = []
        else:
            answer = None
            events = [*self._to_say(job, before), *self._observer.judge(now, rounds)]
            for event in events:
                rounds.handle(event)
        rounds.check()
        me = self._me(job)
        if me is None:
            return answer, before is not None
        if before is None or events or (not job.final and self._observer.is_beat_due(now)):
            me.beat += 1
            return None, True
        return None, False

    def keep(self, now: float, job: Job, answer: View | None) -> Outlook:
        """Take in the job as it is stored; return how it looks."""
        rounds = self._rounds if self._rounds and self._rounds.job is job else Rounds(job)
        self._observer.observe(now, rounds)
        self._kept_at = now
        me, status = self._me(job), self.status
        heard = status.seq  # One that is not in the job has nothing more to say to it.
        view = answer
        if me is not None:
            self._observer.note_own(now, me)
            heard = status.seq if job.final else me.seq
            recovering = job.phase is JobPhase.RECOVERING  # All keep on until it is decided.
            view = None if recovering else views.to_node(job, rounds.seats, me.info)
        while self._unsaid and self._unsaid[0].seq <= heard:
            self._unsaid.popleft()
        if view is not None:
            self._take(view)
        over = job.final or me is None
        self.standing = Outlook(self._view, heard, len(job.nodes), me is not None, over)
        return self.standing

    def next_deadline(self, now: float) -> float | None:
        """Return when this node must look again, or None if nothing depends on it."""
        if not self.standing.in_job or self.standing.rests:
            return None
        return self._observer.next_deadline(now)

    # What it says.

    def _me(self, job: Job) -> Node | None:
        info = self.status.info
        return known_as(job, info.node, info.incarnation)

    def _introduce(self, now: float, rounds: Rounds) -> View | None:
        """Say all there is to say of a node that the job does not know; return how it is received.

        It may have been in the job before, and the place have lost it; the machine sees to that.
        """
        if self.status.phase is Phase.LEAVING:
            return None
        away_s = 0.0 if self._kept_at is None else now - self._kept_at
        told = rounds.handle(msgspec.structs.replace(self.status, away_s=away_s))
        mine = [one for one in told if one.incarnation == self.status.info.incarnation]
        return mine[-1] if mine else None

    def _to_say(self, job: Job, me: Node) -> list[Status]:
        if job.final:
            return []
        unsaid = [one for one in self._unsaid if one.seq > me.seq]
        if job.phase is JobPhase.CLOSED:  # Only the report is still waited for, or its author.
            return [one for one in unsaid if one.failure or one.phase is Phase.LEAVING]
        return unsaid

    # What it is told.

    def _take(self, view: View) -> None:
        if (view.term, view.revision) < self._seen:
            return  # A place that many machines keep may show an older state for a while.
        self._seen = (view.term, view.revision)
        member = view.role is Role.MEMBER
        self._restate(
            term=view.term,
            round_term=view.round_term if member else 0,
            round=view.round if member else -1,
            round_key=view.round_key if member else 0,
            told_generation=view.generation if member else -1,
            rank=view.rank if member else -1,
            size=view.size if member else 0,
            restarts=max(view.restarts, self.status.restarts),
        )
        if self._view is None or _content(view) != _content(self._view):
            self._view = view

    def _restate(self, **changes: object) -> None:
        self.status = msgspec.structs.replace(self.status, **changes)


def _content(view: View) -> View:
    """Return what matters of a view; how many stand by is nothing to a member."""
    waits = view.role is Role.WAITING
    return msgspec.structs.replace(view, term=0, revision=0, present=view.present if waits else 0)
