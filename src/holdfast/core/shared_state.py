"""One node of a job whose state lies in a compare-and-set store: what it writes, and what it reads.

There is no coordinator here. Each node, when it reads the state, applies to it by `core.rounds`
what it can vouch for (its own status, that a wait has lasted, that another node's counter stands
still) and offers the result; of two writers one wins, the other reads again. After each read the
node works out its own view. Pure: times are the caller's monotonic clock; no I/O.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from holdfast.core import rounds as views
from holdfast.core.liveness import Liveness
from holdfast.core.protocol import Failure, JobSettings, NodeInfo, NodePhase, NodeRole, Status, View
from holdfast.core.rounds import Job, JobPhase, Node, NodeLost, NodesLost, Rounds, WaitEnded

if TYPE_CHECKING:
    from holdfast.core.rounds import JobEvent


BEAT_S_PER_NODE = 0.05
"""All nodes together write twenty signs of life a second at most: each write makes others fail."""
BEATS_PER_SILENCE_MIN = 3
"""However many nodes there are, each has so many chances to be heard before it counts as lost. The
price is that in jobs of very many nodes a lost one is noticed later than the settings ask for: by
default above 33 nodes, and after 15 s where there are 100."""

Peer = tuple[str, int]  # Node and incarnation.


class Observer:
    """Turns looks at the state into events that any node may give to the machine."""

    def __init__(self, now: float, node: str, *, interval_s: float, lost_after_s: float) -> None:
        self._node = node
        self._interval_s = interval_s
        self._lost_after_s = lost_after_s
        self._beats: dict[Peer, int] = {}
        self._lost: dict[Peer, str] = {}
        self._liveness: Liveness[Peer] = Liveness(now, silence_s=lost_after_s, grace_s=lost_after_s)
        self._wait: tuple[object, float] = (None, now)
        self._wait_ends: float | None = None
        self._my_beat, self._beat_at, self._beat_s = 0, now, interval_s

    def observe(self, now: float, rounds: Rounds) -> None:
        """Take in how things stand in the state."""
        job = rounds.job
        crowd_s = BEAT_S_PER_NODE * len(job.nodes)
        self._beat_s = max(self._interval_s, crowd_s)
        self._liveness.silence_s = max(self._lost_after_s, BEATS_PER_SILENCE_MIN * crowd_s)
        there = set()
        for node in job.nodes.values():
            if node.info.node == self._node:
                continue
            peer = (node.info.node, node.info.incarnation)
            there.add(peer)
            if self._beats.get(peer) != node.beat:
                self._beats[peer] = node.beat
                self._lost.pop(peer, None)
                self._liveness.heard(peer, now)
        for peer in self._beats.keys() - there:
            del self._beats[peer]
            self._lost.pop(peer, None)
            self._liveness.forget(peer)
        self._lost |= self._liveness.overdue(now)
        wait = rounds.wait
        key = wait and (job.term, job.phase, wait.seq)
        if key != self._wait[0]:
            self._wait = (key, now)
        self._wait_ends = self._wait[1] + wait.delay_s if wait else None

    def judge(self, now: float, rounds: Rounds) -> list[JobEvent]:
        """Return what has come of time, as of the last `observe`; nothing once all is over."""
        job = rounds.job
        events: list[JobEvent] = []
        if job.final:
            return events
        lost = tuple(
            NodeLost(node.info.node, node.info.incarnation, why)
            for node in (job.nodes.values() if self._lost else ())
            if (why := self._lost.get((node.info.node, node.info.incarnation)))
        )
        if lost:
            events.append(NodesLost(lost))
        wait = rounds.wait
        if wait is not None and self._wait_ends is not None and now >= self._wait_ends:
            events.append(WaitEnded(wait.seq))
        return events

    def is_beat_due(self, now: float) -> bool:
        """Return whether this node's counter must move, though there is nothing else to store."""
        return now - self._beat_at >= self._beat_s

    def note_own(self, now: float, me: Node) -> None:
        """Take in this node's counter as it is stored."""
        if me.beat != self._my_beat:
            self._my_beat, self._beat_at = me.beat, now

    def next_deadline(self, now: float) -> float:
        """Return when to look again at the latest."""
        times = [self._beat_at + self._beat_s, self._wait_ends, self._liveness.next_deadline(now)]
        return min(one for one in times if one is not None)


def known_as(job: Job, node: str, incarnation: int) -> Node | None:
    """Return a node of the job if it is this incarnation."""
    known = job.nodes.get(node)
    return known if known is not None and known.info.incarnation == incarnation else None


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
        if view is None or view.role is NodeRole.WAITING:
            return True
        return view.role is NodeRole.CLOSED and not view.final

    @property
    def mark(self) -> object:
        """What differs after a change that others may follow."""
        return self.view


class SharedStateNode:
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
        self, phase: NodePhase, generation: int, failure: Failure | None = None, report: bytes = b""
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
        self.say(NodePhase.READY, self.status.generation)

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
                rounds.handle(now, event)
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
            view = None if recovering else views.view_for_node(job, rounds.rank_table, me.info)
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
        if self.status.phase is NodePhase.LEAVING:
            return None
        away_s = 0.0 if self._kept_at is None else now - self._kept_at
        told = rounds.handle(now, msgspec.structs.replace(self.status, away_s=away_s))
        mine = [one for one in told if one.incarnation == self.status.info.incarnation]
        return mine[-1] if mine else None

    def _to_say(self, job: Job, me: Node) -> list[Status]:
        if job.final:
            return []
        unsaid = [one for one in self._unsaid if one.seq > me.seq]
        if job.phase is JobPhase.CLOSED:  # Only the report is still waited for, or its author.
            return [one for one in unsaid if one.failure or one.phase is NodePhase.LEAVING]
        return unsaid

    # What it is told.

    def _take(self, view: View) -> None:
        if (view.term, view.revision) < self._seen:
            return  # A place that many machines keep may show an older state for a while.
        self._seen = (view.term, view.revision)
        member = view.role is NodeRole.MEMBER
        self._restate(
            term=view.term,
            round_term=view.round_term if member else 0,
            round=view.round if member else -1,
            round_key=view.round_key if member else 0,
            assigned_generation=view.generation if member else -1,
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
    waits = view.role is NodeRole.WAITING
    return msgspec.structs.replace(view, term=0, revision=0, present=view.present if waits else 0)
