"""One node's part in a job whose nodes share the state: what it says, and what it makes of theirs.

There is no coordinator here. Each node, when it looks at the state, gives `core.rounds` the events
that it can vouch for: its own status, that a wait has lasted, that another node's counter stands
still. Two writes that say the same do no harm, since the machine passes over what it knows.

::

    ABSENT ── ask_round ──► JOIN ── a round is complete ──► STAY ── ask_round ──► JOIN ...
                             └──────── ask_leave ────────────┴──► LEAVE

The one thing to know: a round is returned to the agent only when all of its members have taken
their rank_table (`RUNNING` in its generation). A member that does not come is put out after `ATTEND_S`,
so one that lives but does not cooperate cannot hold up the others. Times are the caller's monotonic
clock; this module performs no I/O and reads no clock.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from holdfast.core import rounds as views
from holdfast.core.protocol import (
    JobOutcome,
    JobSettings,
    NodeInfo,
    NodePhase,
    NodeRole,
    Status,
    View,
)
from holdfast.core.rounds import (
    CloseRequested,
    Job,
    JobEvent,
    JobPhase,
    Node,
    NodeLost,
    NodesLost,
    Rounds,
)
from holdfast.core.shared_state import Observer, known_as

if TYPE_CHECKING:
    from collections.abc import Callable

ATTEND_S = 60.0
"""How long a round waits for a member that lives but does not come. Workers have 30 s to stop."""
STATEMENTS_MAX = 4
"""A node says at most so much in one write: that it is new, ready, and has taken its seat."""


class Goal(Enum):
    """What a node wants."""

    ABSENT = "absent"
    JOIN = "join"
    STAY = "stay"
    LEAVE = "leave"


class Mine(msgspec.Struct, frozen=True):
    """What a node says of itself. It counts once it is stored."""

    incarnation: int
    phase: NodePhase = NodePhase.READY
    generation: int = -1
    seat: View | None = None
    """The round it takes part in; none while it asks for one."""


class PolledStanding(msgspec.Struct, frozen=True, kw_only=True):
    """How a node stands, as of its last look."""

    goal: Goal
    role: NodeRole | None = None
    seat: View | None = None
    """The round, once all members are there, until another is asked for."""
    seat_key: str = ""
    """Names this round among all that any job of this run id ever had."""
    regroup: int = 0
    """Above 0 if the round is over and another must be asked for."""
    closed: bool = False
    in_job: bool = False
    refusal: str = ""
    why: str = ""
    present: int = 0
    needed: int = 0
    was_standby: bool = False

    @property
    def rests(self) -> bool:
        """Whether the node wants nothing of the job."""
        return self.goal in (Goal.ABSENT, Goal.LEAVE)

    @property
    def hurries(self) -> bool:
        """Whether a round is being waited for."""
        return self.goal is Goal.JOIN

    @property
    def mark(self) -> object:
        """What differs after a change that others are likely to follow."""
        return self.goal, self.role


class Participant:
    """Turns looks at the state into events for the machine, and its decisions into a standing."""

    def __init__(
        self,
        now: float,
        *,
        run_id: str,
        info: NodeInfo,
        settings: JobSettings,
        interval_s: float,
        lost_after_s: float,
        new_incarnation: Callable[[], int],
        attend_s: float = ATTEND_S,
    ) -> None:
        self._run_id = run_id
        self._info = info
        self._settings = settings
        self._attend_s = attend_s
        self._new_incarnation = new_incarnation
        self._mine = Mine(new_incarnation())
        self._goal = Goal.ABSENT
        self._close_why = ""
        self._term = 0
        self._refusal = ""
        self._was_standby = False
        self._seat_key = ""
        self._rounds: Rounds | None = None  # That of the last step: making one takes a while.
        self._observer = Observer(now, info.node, interval_s=interval_s, lost_after_s=lost_after_s)
        self._attending: tuple[int, float] = (-1, now)
        self.standing = PolledStanding(goal=Goal.ABSENT, needed=settings.min_nodes)

    # What the handler asks for.

    def ask_round(self) -> None:
        """Want to be in a round, another one than so far."""
        self._goal = Goal.JOIN
        self._mine = msgspec.structs.replace(self._mine, phase=NodePhase.READY, seat=None)
        self._was_standby = False

    def ask_leave(self) -> None:
        """Want to be out of the job."""
        self._goal = Goal.LEAVE

    def ask_close(self, why: str) -> None:
        """Want the job to be over for all."""
        self._close_why = why

    # One look at the state.

    def step(self, now: float, job: Job) -> tuple[Mine, bool]:
        """Change the job by what this node knows.

        Returns what `keep` wants once the job is stored, and whether there is anything to store.
        """
        rounds = self._rounds = Rounds(job)
        self._observer.observe(now, rounds)
        self._refusal = ""
        events: list[JobEvent] = []
        if self._close_why and job.phase is not JobPhase.CLOSED:
            events.append(CloseRequested(JobOutcome.STOPPED, self._close_why))
        elif self._is_in(job) and self._goal is not Goal.LEAVE:
            events += self._absent(now, job)
            events += self._observer.judge(now, rounds)
        for event in events:
            rounds.handle(now, event)
        mine, spoke = self._speak(now, rounds)
        rounds.check()
        known = known_as(job, self._info.node, mine.incarnation)
        if known is not None and (events or spoke or self._observer.is_beat_due(now)):
            known.beat += 1
            return mine, True
        return mine, bool(events or spoke)

    def keep(self, now: float, job: Job, mine: Mine) -> PolledStanding:
        """Take in the job as it is stored, with what this node said; return how it stands."""
        known = known_as(job, self._info.node, mine.incarnation)
        if known is not None:
            self._observer.note_own(now, known)
        self._mine = mine
        self._term = max(self._term, job.term)
        rounds = self._rounds if self._rounds and self._rounds.job is job else Rounds(job)
        self._observer.observe(now, rounds)
        view = views.view_for_node(job, rounds.rank_table, known.info) if known else None
        if self._goal is Goal.JOIN and view is not None:
            if view.role is not NodeRole.CLOSED:
                self._was_standby = view.role is NodeRole.STANDBY
            if self._has_seat(view) and not absentees(job, view.generation):
                self._goal, self._seat_key = Goal.STAY, seat_key(job)
        self.standing = self._judge_standing(job, view)
        if self.standing.refusal:
            self._goal = Goal.ABSENT  # Until it is told to try again.
        return self.standing

    def next_deadline(self, now: float) -> float | None:
        """Return when this node must look again, or None if it is not in the job."""
        if not self.standing.in_job or self._goal is Goal.LEAVE:
            return None
        return self._observer.next_deadline(now)

    def _absent(self, now: float, job: Job) -> list[JobEvent]:
        """Return that members did not come who have been waited for long enough."""
        if job.phase is JobPhase.CLOSED:
            return []
        attends = self._goal is Goal.JOIN and self._mine.generation == job.generation
        if not attends or self._attending[0] != job.generation:
            self._attending = (job.generation, now)
            return []
        if now - self._attending[1] < self._attend_s:
            return []
        why = f"it did not come to generation {job.generation} in {self._attend_s:g} s"
        away = tuple(
            NodeLost(info.node, info.incarnation, why) for info in absentees(job, job.generation)
        )
        return [NodesLost(away)] if away else []

    # What it says.

    def _speak(self, now: float, rounds: Rounds) -> tuple[Mine, bool]:
        mine, spoke = self._mine, False
        for _ in range(STATEMENTS_MAX):
            mine, status = self._next_statement(rounds, mine)
            if status is None:
                break
            for view in rounds.handle(now, status):
                if view.incarnation == mine.incarnation and view.role is NodeRole.REFUSED:
                    self._refusal = view.why
            if self._refusal:
                return mine, False  # There is nothing to store of a node that is not let in.
            spoke = True
        return mine, spoke

    def _next_statement(self, rounds: Rounds, mine: Mine) -> tuple[Mine, Status | None]:
        job = rounds.job
        me = known_as(job, self._info.node, mine.incarnation)
        if self._goal is Goal.ABSENT or (self._goal is Goal.LEAVE and me is None):
            return mine, None
        if self._goal is Goal.LEAVE:
            return mine, self._status(mine, me, NodePhase.LEAVING)
        if job.phase is JobPhase.CLOSED:
            return mine, None
        if me is None:
            fate = job.retired.get(mine.incarnation)
            if fate is not None and (fate.superseded or self._goal is Goal.STAY):
                return mine, None
            if fate is not None:
                mine = Mine(self._new_incarnation(), NodePhase.READY, mine.generation)
            return mine, self._status(mine, None, mine.phase)
        if self._goal is Goal.JOIN:
            view = views.view_for_node(job, rounds.rank_table, me.info)
            if view.role is NodeRole.MEMBER and view.generation > mine.generation:
                mine = Mine(mine.incarnation, NodePhase.RUNNING, view.generation, view)
        if (me.phase, me.generation) == (mine.phase, mine.generation):
            return mine, None
        return mine, self._status(mine, me, mine.phase)

    def _status(self, mine: Mine, me: Node | None, phase: NodePhase) -> Status:
        seat = mine.seat
        return Status(
            seq=me.seq + 1 if me else 0,
            run_id=self._run_id,
            info=msgspec.structs.replace(self._info, incarnation=mine.incarnation),
            settings=self._settings,
            phase=phase,
            generation=mine.generation,
            assigned_generation=mine.generation,
            term=self._term,
            round_term=seat.round_term if seat else 0,
            round=seat.round if seat else -1,
            round_key=seat.round_key if seat else 0,
            rank=seat.rank if seat else -1,
            size=seat.size if seat else 0,
        )

    # How it stands.

    def _is_in(self, job: Job) -> bool:
        return known_as(job, self._info.node, self._mine.incarnation) is not None

    def _has_seat(self, view: View) -> bool:
        return (
            view.role is NodeRole.MEMBER
            and self._mine.phase is NodePhase.RUNNING
            and self._mine.generation == view.generation
        )

    def _judge_standing(self, job: Job, view: View | None) -> PolledStanding:
        closed = job.phase is JobPhase.CLOSED
        fate = job.retired.get(self._mine.incarnation) if self._goal is Goal.JOIN else None
        staying = self._goal is Goal.STAY
        # Workers of a job that somebody closed are of no use: when it comes again, it is told so.
        over = staying and job.phase is not JobPhase.RECOVERING
        if over and not closed and view is not None:
            over = not self._has_seat(view)
        superseded = fate.why if fate is not None and fate.superseded else ""
        return PolledStanding(
            goal=self._goal,
            role=view.role if view else None,
            seat=self._mine.seat if staying else None,
            seat_key=self._seat_key,
            regroup=max(1, self._newcomers(job)) if over else 0,
            closed=closed,
            in_job=view is not None,
            refusal=self._refusal or superseded,
            why=job.why,
            present=len(job.nodes),
            needed=self._settings.min_nodes,
            was_standby=self._was_standby,
        )

    def _newcomers(self, job: Job) -> int:
        size = self._mine.seat.size if self._mine.seat else 0
        return len(job.nodes) - size


def absentees(job: Job, generation: int) -> list[NodeInfo]:
    """Return the members of the round who have not taken their rank_table in this generation."""
    return [
        info
        for info in job.members
        if (known := known_as(job, info.node, info.incarnation)) is not None
        and known.generation < generation
    ]


def seat_key(job: Job) -> str:
    """Return a name that no other round has, not even one of an earlier job of the same id."""
    import zlib

    who = ",".join(f"{info.node}/{info.incarnation}" for info in job.members)
    return f"{job.generation}.{zlib.crc32(who.encode()):08x}"
