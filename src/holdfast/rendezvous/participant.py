"""One node's part in a job whose nodes share the state: what it says, and what it makes of theirs.

There is no coordinator here. Each node, when it looks at the state, gives `core.rounds` the events
that it can vouch for: its own status, that a wait has lasted, that another node's counter stands
still. Two writes that say the same do no harm, since the machine passes over what it knows.

::

    ABSENT ── ask_round ──► JOIN ── a round is complete ──► STAY ── ask_round ──► JOIN ...
                             └──────── ask_leave ────────────┴──► LEAVE

The one thing to know: a round is returned to the agent only when all of its members have taken
their seats (`RUNNING` in its generation). A member that does not come is put out after `ATTEND_S`,
so one that lives but does not cooperate cannot hold up the others. Times are the caller's monotonic
clock; this module performs no I/O and reads no clock.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from holdfast.core import views
from holdfast.core.job import CloseJob, Job, JobPhase, Node, NodeLost, TimeUp
from holdfast.core.liveness import Liveness
from holdfast.core.news import Ending, JobSettings, NodeInfo, Phase, Role, Status, View
from holdfast.core.rounds import Event, Rounds

if TYPE_CHECKING:
    from collections.abc import Callable

ATTEND_S = 60.0
"""How long a round waits for a member that lives but does not come. Workers have 30 s to stop."""
BEAT_S_PER_NODE = 0.02
"""All nodes together write fifty signs of life a second at most: each write makes others fail."""
BEATS_PER_SILENCE_MIN = 3
"""However many nodes there are, each has so many chances to be heard before it counts as lost."""
STATEMENTS_MAX = 4
"""A node says at most so much in one write: that it is new, ready, and has taken its seat."""


Peer = tuple[str, int]  # Node and incarnation.


class Goal(Enum):
    """What a node wants."""

    ABSENT = "absent"
    JOIN = "join"
    STAY = "stay"
    LEAVE = "leave"


class Mine(msgspec.Struct, frozen=True):
    """What a node says of itself. It counts once it is stored."""

    incarnation: int
    phase: Phase = Phase.READY
    generation: int = -1
    seat: View | None = None
    """The round it takes part in; none while it asks for one."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How a node stands, as of its last look."""

    goal: Goal
    role: Role | None = None
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
        self._interval_s = interval_s
        self._lost_after_s = lost_after_s
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
        self._beats: dict[Peer, int] = {}
        self._lost: dict[Peer, str] = {}
        self._liveness: Liveness[Peer] = Liveness(now, silence_s=lost_after_s, grace_s=lost_after_s)
        self._wait: tuple[object, float] = (None, now)
        self._wait_ends: float | None = None
        self._attending: tuple[int, float] = (-1, now)
        self._my_beat, self._beat_at, self._beat_s = 0, now, interval_s
        self.standing = Standing(goal=Goal.ABSENT)

    # What the handler asks for.

    def ask_round(self) -> None:
        """Want to be in a round, another one than so far."""
        self._goal = Goal.JOIN
        self._mine = msgspec.structs.replace(self._mine, phase=Phase.READY, seat=None)
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
        self._observe(now, rounds)
        self._refusal = ""
        events: list[Event] = []
        if self._close_why and job.phase is not JobPhase.CLOSED:
            events.append(CloseJob(Ending.STOPPED, self._close_why))
        elif self._is_in(job) and self._goal is not Goal.LEAVE:
            events += self._judged(now, rounds)
        for event in events:
            rounds.handle(event)
        mine, spoke = self._speak(rounds)
        rounds.check()
        known = known_as(job, self._info.node, mine.incarnation)
        self._beat_s = self._pace_of_beats(len(job.nodes))
        is_due = now - self._beat_at >= self._beat_s
        if known is not None and (events or spoke or is_due):
            known.beat += 1
            return mine, True
        return mine, bool(events or spoke)

    def keep(self, now: float, job: Job, mine: Mine) -> Standing:
        """Take in the job as it is stored, with what this node said; return how it stands."""
        known = known_as(job, self._info.node, mine.incarnation)
        if known is not None and known.beat != self._my_beat:
            self._my_beat, self._beat_at = known.beat, now
        self._mine = mine
        self._term = max(self._term, job.term)
        rounds = self._rounds if self._rounds and self._rounds.job is job else Rounds(job)
        self._observe(now, rounds)
        view = views.to_node(job, rounds.seats, known.info) if known else None
        if self._goal is Goal.JOIN and view is not None:
            if view.role is not Role.CLOSED:
                self._was_standby = view.role is Role.STANDBY
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
        times = [self._beat_at + self._beat_s, self._wait_ends]
        times.append(self._liveness.next_deadline(now))
        return min(one for one in times if one is not None)

    def _pace_of_beats(self, nodes: int) -> float:
        slowest = max(self._interval_s, self._lost_after_s / BEATS_PER_SILENCE_MIN)
        return min(slowest, max(self._interval_s, BEAT_S_PER_NODE * nodes))

    # What it can vouch for.

    def _observe(self, now: float, rounds: Rounds) -> None:
        job = rounds.job
        there = set()
        for node in job.nodes.values():
            peer = (node.info.node, node.info.incarnation)
            if node.info.node == self._info.node:
                continue
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

    def _judged(self, now: float, rounds: Rounds) -> list[Event]:
        job = rounds.job
        if job.phase is JobPhase.CLOSED:
            return []
        events: list[Event] = [
            NodeLost(node.info.node, node.info.incarnation, why)
            for node in (job.nodes.values() if self._lost else ())
            if (why := self._lost.get((node.info.node, node.info.incarnation)))
        ]
        attends = self._goal is Goal.JOIN and self._mine.generation == job.generation
        if attends and self._attending[0] == job.generation:
            if now - self._attending[1] >= self._attend_s:
                why = f"it did not come to generation {job.generation} in {self._attend_s:g} s"
                events += [
                    NodeLost(info.node, info.incarnation, why)
                    for info in absentees(job, job.generation)
                ]
        else:
            self._attending = (job.generation, now)
        wait = rounds.wait
        if wait is not None and self._wait_ends is not None and now >= self._wait_ends:
            events.append(TimeUp(wait.seq))
        return events

    # What it says.

    def _speak(self, rounds: Rounds) -> tuple[Mine, bool]:
        mine, spoke = self._mine, False
        for _ in range(STATEMENTS_MAX):
            mine, status = self._next_statement(rounds, mine)
            if status is None:
                break
            for view in rounds.handle(status):
                if view.incarnation == mine.incarnation and view.role is Role.REFUSED:
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
            return mine, self._status(mine, me, Phase.LEAVING)
        if job.phase is JobPhase.CLOSED:
            return mine, None
        if me is None:
            fate = job.retired.get(mine.incarnation)
            if fate is not None and (fate.superseded or self._goal is Goal.STAY):
                return mine, None
            if fate is not None:
                mine = Mine(self._new_incarnation(), Phase.READY, mine.generation)
            return mine, self._status(mine, None, mine.phase)
        if self._goal is Goal.JOIN:
            view = views.to_node(job, rounds.seats, me.info)
            if view.role is Role.MEMBER and view.generation > mine.generation:
                mine = Mine(mine.incarnation, Phase.RUNNING, view.generation, view)
        if (me.phase, me.generation) == (mine.phase, mine.generation):
            return mine, None
        return mine, self._status(mine, me, mine.phase)

    def _status(self, mine: Mine, me: Node | None, phase: Phase) -> Status:
        seat = mine.seat
        return Status(
            seq=me.seq + 1 if me else 0,
            run_id=self._run_id,
            info=msgspec.structs.replace(self._info, incarnation=mine.incarnation),
            settings=self._settings,
            phase=phase,
            generation=mine.generation,
            told_generation=mine.generation,
            term=self._term,
            round_term=seat.round_term if seat else 0,
            round=seat.round if seat else -1,
            rank=seat.rank if seat else -1,
            size=seat.size if seat else 0,
        )

    # How it stands.

    def _is_in(self, job: Job) -> bool:
        return known_as(job, self._info.node, self._mine.incarnation) is not None

    def _has_seat(self, view: View) -> bool:
        return (
            view.role is Role.MEMBER
            and self._mine.phase is Phase.RUNNING
            and self._mine.generation == view.generation
        )

    def _judge_standing(self, job: Job, view: View | None) -> Standing:
        closed = job.phase is JobPhase.CLOSED
        fate = job.retired.get(self._mine.incarnation) if self._goal is Goal.JOIN else None
        staying = self._goal is Goal.STAY
        # Workers of a job that somebody closed are of no use: when it comes again, it is told so.
        over = staying and job.phase is not JobPhase.RECOVERING
        if over and not closed and view is not None:
            over = not self._has_seat(view)
        superseded = fate.why if fate is not None and fate.superseded else ""
        return Standing(
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


def known_as(job: Job, node: str, incarnation: int) -> Node | None:
    """Return a node of the job if it is this incarnation."""
    known = job.nodes.get(node)
    return known if known is not None and known.info.incarnation == incarnation else None


def absentees(job: Job, generation: int) -> list[NodeInfo]:
    """Return the members of the round who have not taken their seats in this generation."""
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
