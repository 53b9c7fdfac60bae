"""All jobs of one coordinator: which nodes are alive, whose wait is over, what each job decides.

`core.rounds` decides for one job and knows no time; `core.liveness` knows who is silent and no job.
This joins the two for any number of jobs. It is all of a coordinator but its sockets: the server
and the simulator drive the same class. It decides nothing about a job itself.

Use: give every status as `StatusReceived` and every `Heartbeat` as it is, and `ConnectionClosed`
when the connection by which an incarnation last spoke is gone (not for one that a newer connection
has replaced). Give `TICK` no later than `next_deadline`, after whatever has arrived before it. The
effects are messages: send each over the newest connection of the node and incarnation that it
names; one without a connection is dropped, because whatever a node lacks is sent again at its next
heartbeat.

A job that breaks an invariant is closed as failed, and the other jobs go on; with `strict` the
error is raised instead, so that a test sees it.
"""

from __future__ import annotations

import msgspec

from holdfast.core.liveness import STEPS_PER_SILENCE, AttendedClock, Liveness
from holdfast.core.machine import Event, InvalidEvent, Story, Tick
from holdfast.core.protocol import (
    Ack,
    Heartbeat,
    JobOutcome,
    NodePhase,
    NodeRole,
    RefusalReason,
    Status,
    View,
)
from holdfast.core.rounds import (
    CloseRequested,
    Job,
    JobPhase,
    NodeLost,
    NodesLost,
    Rounds,
    WaitEnded,
    close_broken,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.rounds import JobEvent

    Answer = View | Ack
    Peer = tuple[str, str, int]

JOBS_MAX = 1_000
SUCCESSOR_WAIT_S = 1.2  # Nodes that lost their coordinator look for it at least every second.
NO_WAIT = (-1, 0.0, "")
CLOSED_JOB_KEEP_S = 600.0  # Late nodes can learn for so long how a job ended.


class StatusReceived(Event):
    """A node sent its status, from this address as the coordinator sees it."""

    status: Status
    address: str


class ConnectionClosed(Event):
    """A node has no connection any more: without a new one it is soon lost."""

    run_id: str
    node: str
    incarnation: int


class JobCloseRequested(Event):
    """Somebody who may do so asked for the end of a job."""

    run_id: str
    outcome: JobOutcome
    why: str


CoordinatorEvent = StatusReceived | Heartbeat | ConnectionClosed | JobCloseRequested | Tick


class CoordinatorMachine:
    """The jobs of one coordinator by their run ids, from when it starts until it stops."""

    def __init__(
        self,
        now: float,
        *,
        silence_s: float,
        grace_s: float,
        closed_job_keep_s: float = CLOSED_JOB_KEEP_S,
        jobs_max: int = JOBS_MAX,
        coordinator_address: str = "",
        follows_another: bool = False,
        strict: bool = False,
        rounds: Callable[[Job], Rounds] = Rounds,
        name: str = "coordinator",
    ) -> None:
        self.story = Story("coordinator", node=name)
        self.jobs: dict[str, Rounds] = {}
        self.broken: dict[str, str] = {}
        """The jobs that were closed because they broke an invariant, and which."""
        self._liveness: Liveness[Peer] = Liveness(now, silence_s=silence_s, grace_s=grace_s)
        self._clock = AttendedClock(now, silence_s / STEPS_PER_SILENCE)
        self._waits: dict[str, tuple[int, float, str]] = {}  # Number, end (attended), cause.
        self._empty_since: dict[str, float] = {}  # The longest first.
        self._held: dict[str, dict[str, Status]] = {}  # Failures by job and node.
        self._keep_s = closed_job_keep_s
        self._silence_s = silence_s
        self._young_until = now + SUCCESSOR_WAIT_S if follows_another else now
        self._jobs_max = jobs_max
        self._address = coordinator_address
        self._strict = strict
        self._rounds = rounds

    def handle(self, now: float, event: CoordinatorEvent, cause: str = "") -> list[Answer]:
        """Take in one fact; return the messages to send.

        What a job makes of a status is in the story of its `rounds`; here is the rest.
        """
        if type(event) is Heartbeat:  # Nearly all events are.
            return self._heartbeat(now, event)
        match event:
            case Tick():
                return self._tick(now)
            case StatusReceived(status, address):
                answer = self._answer_without_job(now, status)
                if answer is None:
                    return self._status(now, status, address, cause or status.id)
                answers, cause = [answer], cause or status.id
                event = StatusReceived(msgspec.structs.replace(status, report=b""), address)
            case ConnectionClosed(run_id, node, incarnation):
                self._liveness.cut((run_id, node, incarnation), now)
                answers = []
            case JobCloseRequested(run_id, outcome, why):
                rounds = self.jobs.get(run_id)
                closing = CloseRequested(outcome, why)
                answers = self._decide(now, rounds, closing, cause) if rounds is not None else []
            case _:
                raise InvalidEvent(f"{event!r} is not an event of a coordinator")
        self.story.record(now, None, event, answers, cause)
        return answers

    def _answer_without_job(self, now: float, status: Status) -> Answer | None:
        """Answer a status that no job gets to see, or not yet."""
        info, run_id = status.info, status.run_id
        rounds = self.jobs.get(run_id)
        if rounds is not None:
            if not self._may_be_due_to_a_loss(rounds, status):
                return None
            self._held.setdefault(run_id, {})[info.node] = status
            self._liveness.heard((run_id, info.node, info.incarnation), now)
            return _ack(status, status.seq)
        if status.phase is NodePhase.LEAVING:  # Nobody misses it.
            return _ack(status, status.seq)
        return None if self._make_room() else self._no_room(status)

    def _status(self, now: float, status: Status, address: str, cause: str) -> list[Answer]:
        info, run_id = status.info, status.run_id
        rounds = self.jobs.get(run_id) or self._new_job(now, run_id)
        if not info.address and rounds.seq_of(info.node, info.incarnation) < 0:
            info = msgspec.structs.replace(info, address=address)
            status = msgspec.structs.replace(status, info=info)
        answers = self._decide(now, rounds, status, cause)
        peer = (run_id, info.node, info.incarnation)
        seq = rounds.seq_of(info.node, info.incarnation)
        if seq < 0:
            self._liveness.forget(peer)
        else:
            self._liveness.heard(peer, now)
        if not any((view.node, view.incarnation) == peer[1:] for view in answers):
            leaves = status.phase is NodePhase.LEAVING
            answers.append(_ack(status, status.seq if leaves else seq))
        return answers + self._release(now) if self._held else answers

    def _new_job(self, now: float, run_id: str) -> Rounds:
        job = Job(run_id=run_id, coordinator_address=self._address, silence_s=self._silence_s)
        if now < self._young_until:
            # It may be a job that another coordinator had, whose nodes are still to come.
            job.phase, job.waiting, job.wait_seq = JobPhase.RECOVERING, True, 1
        rounds = self.jobs[run_id] = self._rounds(job)
        rounds.story.node = f"{self.story.node}/{run_id}"
        return rounds

    def _heartbeat(self, now: float, beat: Heartbeat) -> list[Answer]:
        run_id, node, incarnation = beat.run_id, beat.node, beat.incarnation
        rounds = self.jobs.get(run_id)
        seq = rounds.seq_of(node, incarnation) if rounds is not None else -1
        answers: list[Answer] = []
        if rounds is not None and seq >= 0:
            self._liveness.heard((run_id, node, incarnation), now)
            view = rounds.behind(beat)
            if view is not None:
                answers.append(view)
            held = self._held.get(run_id, {}).get(node)
            if held is not None and held.info.incarnation == incarnation:
                seq = max(seq, held.seq)
        if not answers or seq < beat.seq:
            answers.append(Ack(run_id=run_id, node=node, incarnation=incarnation, seq=seq))
        return answers + self._release(now) if self._held else answers

    def _tick(self, now: float) -> list[Answer]:
        answers: list[Answer] = []
        lost: dict[str, list[NodeLost]] = {}
        for (run_id, node, incarnation), why in self._liveness.overdue(now).items():
            lost.setdefault(run_id, []).append(NodeLost(node, incarnation, why))
        for run_id, those in lost.items():
            if run_id in self.jobs:
                event = NodesLost(tuple(those))
                answers += self._decide(now, self.jobs[run_id], event, self._cause_of(event))
        answers += self._release(now)
        if self._waits:
            attended = self._clock.look(now)
            ended = [one for one in self._waits.items() if one[1][1] <= attended]
            for run_id, (seq, _at, cause) in ended:
                answers += self._decide(now, self.jobs[run_id], WaitEnded(seq), cause)
        while self._empty_since:
            run_id, since = next(iter(self._empty_since.items()))
            if now - since < self._keep_s:
                break
            self._drop(run_id)
        return answers

    def _cause_of(self, event: NodesLost) -> str:
        """Return the step in which the connection of a lost node closed, if that is why."""
        lost = {(one.node, one.incarnation) for one in event.lost}
        cause = ""
        for step in self.story:
            closed = step.event
            if isinstance(closed, ConnectionClosed) and (closed.node, closed.incarnation) in lost:
                cause = step.id
        return cause

    def next_deadline(self, now: float) -> float | None:
        """Return when `TICK` is wanted next, or None while there is nothing to wait for."""
        deadline = self._liveness.next_deadline(now)
        if self._waits:
            attended = self._clock.look(now)
            rest = min(at for _seq, at, _cause in self._waits.values()) - attended
            # Looking at least every step is what makes the whole of the time count.
            at = now + max(0.0, min(rest, self._clock.step_s))
            deadline = at if deadline is None else min(deadline, at)
        if self._empty_since:
            at = next(iter(self._empty_since.values())) + self._keep_s
            deadline = at if deadline is None else min(deadline, at)
        return deadline

    # Failures that may be another's.

    def _may_be_due_to_a_loss(self, rounds: Rounds, status: Status) -> bool:
        """Whether workers failed while another member's link is cut.

        Workers see the end of a machine before its node counts as lost, and fail of it. What they
        failed of is known when the other node is back, or is not: until then they are not blamed.
        """
        if status.phase is not NodePhase.FAILED or status.generation != rounds.job.generation:
            return False
        node = status.info.node
        if rounds.seq_of(node, status.info.incarnation) < 0:
            return False
        return any(
            run_id == rounds.job.run_id
            and other != node
            and rounds.rank_table.incarnation_of(other) == incarnation
            and other not in rounds.job.succeeded
            for run_id, other, incarnation in self._liveness.cuts()
        )

    def _release(self, now: float) -> list[Answer]:
        """Give the jobs the failures that are held back for no reason any more."""
        answers: list[Answer] = []
        for run_id, held in [*self._held.items()]:
            rounds = self.jobs.get(run_id)
            for node, status in [*held.items()]:
                if rounds is None or rounds.seq_of(node, status.info.incarnation) < 0:
                    del held[node]  # It has left itself.
                elif not self._may_be_due_to_a_loss(rounds, status):
                    del held[node]
                    answers += self._decide(now, rounds, status)
            if not held:
                del self._held[run_id]
        return answers

    # One job.

    def _decide(self, now: float, rounds: Rounds, event: JobEvent, cause: str = "") -> list[Answer]:
        """Give a job an event, and note what it waits for and whether any node is in it."""
        job = rounds.job
        run_id = job.run_id
        views: list[View]
        try:
            views = rounds.handle(now, event, cause)
            if run_id not in self.broken:
                rounds.check()
        except Exception as error:  # (The other jobs must not suffer from one that is broken)
            if self._strict:
                raise
            self.broken[run_id] = what = f"{type(error).__name__}: {error}"
            views, rounds = close_broken(now, rounds, what, self._rounds)
            self.jobs[run_id] = rounds
            job = rounds.job
        wait = rounds.wait if job.waiting else None
        if wait is None:
            self._waits.pop(run_id, None)
        elif self._waits.get(run_id, NO_WAIT)[0] != wait.seq:
            at = self._clock.look(now) + wait.delay_s
            self._waits[run_id] = (wait.seq, at, rounds.story.last)
        if job.nodes:
            self._empty_since.pop(run_id, None)
        else:
            self._empty_since.setdefault(run_id, now)
        return [*views]

    # How many jobs there are.

    def _make_room(self) -> bool:
        """Forget the job that has been empty for longest, if there are too many."""
        while len(self.jobs) >= self._jobs_max and self._empty_since:
            closed = (one for one in self._empty_since if self.jobs[one].job.outcome is not None)
            self._drop(next(closed, next(iter(self._empty_since))))
        return len(self.jobs) < self._jobs_max

    def _drop(self, run_id: str) -> None:
        del self.jobs[run_id], self._empty_since[run_id]
        self._waits.pop(run_id, None)
        self.broken.pop(run_id, None)

    def _no_room(self, status: Status) -> View:
        return View(
            run_id=status.run_id,
            node=status.info.node,
            incarnation=status.info.incarnation,
            term=status.term + 1,  # Newer than whatever view it has.
            revision=1,
            role=NodeRole.REFUSED,
            refusal=RefusalReason.TOO_MANY_JOBS,
            why=f"the coordinator has {self._jobs_max} jobs already; use another, or end some",
        )


def _ack(status: Status, seq: int) -> Ack:
    info = status.info
    return Ack(run_id=status.run_id, node=info.node, incarnation=info.incarnation, seq=seq)
