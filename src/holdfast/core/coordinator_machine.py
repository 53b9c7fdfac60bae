"""The machine of one coordinator with all its jobs: it combines liveness, timers and decisions.

`core.rounds` decides about one job and has no clock; `core.liveness` detects silent nodes and does not know
about jobs. This machine combines them for any number of jobs and leaves all decisions about a job to
`core.rounds`. It has no sockets: the server and the simulator drive the same class.

Use: pass every status as `StatusReceived`, and every `Heartbeat` unchanged. Pass `ConnectionClosed` when
the newest connection of an incarnation closes (not when a newer one has replaced it). Pass `TICK` no
later than `next_deadline`, after all messages that arrived before it. The effects are messages: send
each over the newest connection of the node and incarnation that it names. If there is no connection,
drop the message: after the next heartbeat the coordinator sends it again.

**Roll calls.** A failure is held until all other members have responded (`core.failure_hold`). The
coordinator sends each an acknowledgement with the number of the roll call, and the member immediately
responds with a heartbeat that carries this number. Usually all members are alive, and this takes one
round trip, while the failed node stops its workers.

**Endpoints.** Agents may have a list of endpoints. The coordinator runs at the first one, endpoint 0, until an
operator knows that it is dead and starts another one at a later endpoint. All terms of a later endpoint are
higher than those of earlier endpoints, so nodes that obeyed the later coordinator never obey an earlier one
again. If a node knows a term of a later endpoint, the coordinator refuses the node and keeps its own term.

If a job breaks an invariant, the coordinator closes it as failed, and the other jobs continue. With
`strict` the machine raises the error instead, for tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.core.failure_hold import FailureHold, must_hold
from holdfast.core.first_failure import with_local_times
from holdfast.core.limits import TERMS_PER_ENDPOINT
from holdfast.core.liveness import CLOSED, STEPS_PER_SILENCE, AwakeClock, Liveness
from holdfast.core.machine import Event, InvalidEvent, Story, Tick
from holdfast.core.phases import JobOutcome, NodePhase, NodeRole, RefusalReason
from holdfast.core.protocol import (
    Ack,
    Heartbeat,
    NodeInfo,
    Request,
    RequestAnswer,
    Status,
    View,
    reason,
)
from holdfast.core.quotas import JOB_NODES_MAX, JOBS_MAX, SAVED_JOBS_MAX, AddressShares
from holdfast.core.requests import RequestRefusal
from holdfast.core.rounds import (
    RECOVER_S_MAX,
    Change,
    CloseRequested,
    Job,
    JobPhase,
    NodeLost,
    NodesLost,
    Rounds,
    WaitTimers,
    close_broken,
    reports_round,
)
from holdfast.core.saved_jobs import SavedJob, restore_job, snapshot_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.core.rounds import JobEvent

    Answer = View | Ack
    NodeKey = tuple[str, str, int]
    """Run id, node and incarnation."""

SUCCESSOR_WAIT_S = 1.2  # Nodes without a coordinator retry at least every second.
CALLS_MAX = 1 << 20
"""Roll calls per term. The number of a roll call contains the term; otherwise a late response to an
earlier coordinator's roll call could match a new one."""
CLOSED_JOB_KEEP_S = 600.0  # For this long, late nodes can learn how a job ended.


class StatusReceived(Event):
    """A node sent its status. The address is that of its connection."""

    status: Status
    address: str
    local_address: str = ""
    """The coordinator's own address on this connection, if the node is on another host."""


class ConnectionClosed(Event):
    """The newest connection of a node closed. If the node does not reconnect, it is soon lost."""

    run_id: str
    node: str
    incarnation: int


class JobCloseRequested(Event):
    """An authorized peer closed a job."""

    run_id: str
    outcome: JobOutcome
    why: str


class RequestReceived(Event):
    """An authorized operator sent a request to a job."""

    run_id: str
    request: Request


class RecordFound(Event):
    """The server found the record of a job by an earlier coordinator, before it passes on the job's first status."""

    saved: SavedJob


class RollCall:
    """The held failures of one job, and the roll call to which its members must respond."""

    def __init__(self) -> None:
        self.hold = FailureHold()
        self.number = 0
        self.started_at = 0.0


CoordinatorEvent = (
    StatusReceived
    | Heartbeat
    | ConnectionClosed
    | RecordFound
    | JobCloseRequested
    | RequestReceived
    | Tick
)


class CoordinatorMachine:
    """The jobs of one coordinator by run id."""

    def __init__(
        self,
        now: float,
        *,
        silence_s: float,
        grace_s: float,
        closed_job_keep_s: float = CLOSED_JOB_KEEP_S,
        jobs_max: int = JOBS_MAX,
        nodes_max: int = JOB_NODES_MAX,
        coordinator_address: str = "",
        follows_another: bool = False,
        endpoint_index: int = 0,
        saved_jobs: Iterable[SavedJob] | None = None,
        recover_s: float | None = None,
        fence_floor: int = 0,
        host: str = "",
        strict: bool = False,
        rounds: Callable[[Job], Rounds] = Rounds,
        name: str = "coordinator",
    ) -> None:
        self.story = Story("coordinator", node=name)
        self.jobs: dict[str, Rounds] = {}
        self.broken: dict[str, str] = {}
        """The jobs that were closed because they broke an invariant, each with the error."""
        self.decisions: list[tuple[JobEvent, Job]] | None = None
        """Events and the job after each. An observer sets this to a list and empties it."""
        self._liveness: Liveness[NodeKey] = Liveness(now, silence_s=silence_s, grace_s=grace_s)
        self._clock = AwakeClock(now, silence_s / STEPS_PER_SILENCE)
        self._waits: dict[str, WaitTimers] = {}  # Of waiting jobs, by the awake clock.
        self._empty_since: dict[str, float] = {}  # Ordered: the longest-empty job first.
        self._calls: dict[str, RollCall] = {}  # By job, while failures are held.
        self._calls_made = 0
        self._keep_s = closed_job_keep_s
        self._silence_s = silence_s
        self._successor_until = now + SUCCESSOR_WAIT_S if follows_another else now
        self._endpoint_index = endpoint_index
        self._recover_s = recover_s
        # A list of saved jobs, even an empty one, has all earlier jobs.
        self._recover_until = now + (recover_s or 0.0) if saved_jobs is None else now
        self._fence_floor = fence_floor
        self._host = host
        self._jobs_max, self._nodes_max = jobs_max, nodes_max
        self._shares = AddressShares(jobs_max)
        self._created_from: dict[str, str] = {}  # By job, the address of its first node.
        self._address = coordinator_address
        self._strict = strict
        self._rounds = rounds
        self._saved_jobs: dict[str, SavedJob] = {}  # Of jobs that are not in `jobs`.
        for saved in saved_jobs or ():
            if saved.outcome is None:
                self._saved_jobs[saved.run_id] = saved
            else:
                self._add_job(restore_job(saved, patience_s=0.0))
                self._empty_since[saved.run_id] = now

    def handle(self, now: float, event: CoordinatorEvent, cause: str = "") -> list[Answer]:
        """Handle one event; return the messages to send.

        The story of `rounds` records the steps of a job; this story records the rest.
        """
        if type(event) is Heartbeat:  # Nearly all events are.
            return self._heartbeat(now, event)
        match event:
            case Tick():
                return self._tick(now)
            case StatusReceived(status, address, local_address):
                cause = cause or status.id
                status = self._without_early_failure(with_local_times(now, status))
                answer = self._answer_without_job(status, address)
                rounds = self.jobs.get(status.run_id)
                call = self._calls.get(status.run_id)
                if rounds is not None and _should_hold(rounds, status):
                    answers = self._hold(now, rounds, status)
                elif call is not None and call.hold.must_hold_departure(status):
                    call.hold.hold_departure(status)
                    answers = [_ack(status, status.seq)]
                elif answer is None:
                    return self._status(now, status, address, cause, local_address)
                else:
                    answers = [answer]
                event = StatusReceived(msgspec.structs.replace(status, report=b""), address)
            case ConnectionClosed(run_id, node, incarnation):
                self._liveness.disconnected((run_id, node, incarnation), now)
                answers = []
            case RecordFound(saved):
                if saved.run_id not in self.jobs:
                    self._keep_saved(saved)
                answers = []
            case JobCloseRequested(run_id, outcome, why):
                rounds = self.jobs.get(run_id)
                closing = CloseRequested(outcome, why)
                answers = self._decide(now, rounds, closing, cause) if rounds is not None else []
            case RequestReceived(run_id, request):
                rounds = self.jobs.get(run_id)
                answers = self._decide(now, rounds, request, cause) if rounds is not None else []
                # The request may have ended the generation of the held failures.
                answers += self._release(now)
            case _:
                raise InvalidEvent(f"{event!r} is not an event of a coordinator")
        self.story.record(now, None, event, answers, cause)
        return answers

    def _answer_without_job(self, status: Status, address: str) -> Answer | None:
        """Return the answer to a status that no job handles; None if a job must handle it."""
        rounds = self.jobs.get(status.run_id)
        if status.endpoint_index > self._endpoint_index:
            why = (
                f"the node obeyed a coordinator at entry {status.endpoint_index + 1} of --rdzv-endpoint, and this "
                f"coordinator is at entry {self._endpoint_index + 1}: give all nodes the same list"
            )
            return _refused(status, RefusalReason.SETTINGS, why)
        if rounds is not None:
            if not self._is_full(rounds.job, status.info):
                return None
            why = f"the job already has {self._nodes_max} nodes"
            return _refused(status, RefusalReason.TOO_MANY_NODES, why)
        if status.phase is NodePhase.LEAVING or status.stuck:  # A leaving node creates no job.
            return _ack(status, status.seq)
        if not self._make_room():
            why = (
                f"the coordinator already has {self._jobs_max} jobs; use another coordinator, "
                "or end some jobs"
            )
        elif self._shares.is_over(address):
            created = self._shares.taken_by(address)
            why = (
                f"the coordinator can accept few more jobs, and {address} already created {created}; "
                "use another coordinator, or end some jobs"
            )
        else:
            return None
        return _refused(status, RefusalReason.TOO_MANY_JOBS, why)

    def _is_full(self, job: Job, info: NodeInfo) -> bool:
        """Whether a job has no room for this node."""
        is_known = info.node in job.nodes or info.incarnation in job.retired
        is_over = len(job.nodes) + len(job.departed) >= self._nodes_max
        return is_over and not is_known and job.phase is not JobPhase.CLOSED

    def _status(
        self, now: float, status: Status, address: str, cause: str, local_address: str = ""
    ) -> list[Answer]:
        info, run_id = status.info, status.run_id
        rounds = self.jobs.get(run_id) or self._new_job(now, run_id, address)
        if not info.address:
            info = msgspec.structs.replace(info, address=address)
            status = msgspec.structs.replace(status, info=info)
        is_located = bool(rounds.job.coordinator_address)
        if not is_located:
            rounds.job.coordinator_address = local_address  # This status may already form a round.
        answers = self._decide(now, rounds, status, cause)
        key = (run_id, info.node, info.incarnation)
        seq = rounds.seq_of(info.node, info.incarnation)
        if seq < 0:
            if not is_located:  # A node outside the job does not determine the address.
                rounds.job.coordinator_address = ""
            self._liveness.forget(key)
        else:
            self._liveness.received(key, now)
        if not any((view.node, view.incarnation) == key[1:] for view in answers):
            leaves = status.phase is NodePhase.LEAVING
            answers.append(_ack(status, status.seq if leaves else seq))
        if run_id in self._calls:
            self._responded(now, run_id, key[1:], status.call)
            answers += self._call(rounds, key[1:])
        return _newest(answers + self._release(now)) if self._calls else answers

    def _new_job(self, now: float, run_id: str, address: str) -> Rounds:
        self._created_from[run_id] = address
        self._shares.take(address)
        saved = self._saved_jobs.pop(run_id, None)
        if saved is not None:
            # A stopped agent's workers exit within the silence limit.
            patience_s = self._recover_s or max(RECOVER_S_MAX, self._silence_s)
            return self._add_job(restore_job(saved, patience_s=patience_s))
        job = Job(run_id=run_id)
        if self._endpoint_index:  # Nodes try earlier endpoints first, which may time out.
            job.recover_s = RECOVER_S_MAX
        if self._endpoint_index or now < max(self._successor_until, self._recover_until):
            # Another coordinator may have had this job, and its nodes have yet to reconnect.
            job.phase, job.waiting, job.wait_seq = JobPhase.RECOVERING, True, 1
        if now < self._recover_until:
            job.patience_s = self._recover_until - now
            job.why = (
                f"no record of an earlier coordinator: waiting up to {job.patience_s:.0f} s "
                "for its nodes"
            )
        return self._add_job(job)

    def _add_job(self, job: Job) -> Rounds:
        job.coordinator_address, job.silence_s = self._address, self._silence_s
        job.term = max(job.term, self._endpoint_index * TERMS_PER_ENDPOINT)
        job.fence_floor = self._fence_floor
        rounds = self.jobs[job.run_id] = self._rounds(job)
        rounds.story.node = f"{self.story.node}/{job.run_id}"
        if job.why:
            rounds.history.append(Change(f"{job.phase.value}: {job.why}", why=job.why))
        return rounds

    @property
    def is_holding_failure(self) -> bool:
        """Whether a failure is held, which may end its job later."""
        return bool(self._calls)

    def answer_to(self, run_id: str, request_id: str) -> RequestAnswer:
        """Return the answer to an earlier `RequestReceived`."""
        rounds = self.jobs.get(run_id)
        answer = rounds.answer_to(request_id) if rounds is not None else None
        if answer is not None:
            return answer
        why = f"this coordinator has no job {run_id!r}"
        return RequestAnswer(
            id=request_id, refusal=RequestRefusal.NO_SUCH_JOB.value, why=reason(why)
        )

    def saved_jobs(self) -> list[SavedJob]:
        """Return the state of all jobs that must survive this coordinator."""
        jobs = (snapshot_job(rounds.job, self._host) for rounds in self.jobs.values())
        return [*self._saved_jobs.values(), *jobs]

    def saved_job(self, run_id: str) -> SavedJob:
        """Return the state of one job that must survive this coordinator."""
        return snapshot_job(self.jobs[run_id].job, self._host)

    def _heartbeat(self, now: float, beat: Heartbeat) -> list[Answer]:
        run_id, node, incarnation = beat.run_id, beat.node, beat.incarnation
        rounds = self.jobs.get(run_id)
        seq = rounds.seq_of(node, incarnation) if rounds is not None else -1
        answers: list[Answer] = []
        if rounds is not None and seq >= 0:
            self._liveness.received((run_id, node, incarnation), now)
            self._liveness.be_patient((run_id, node, incarnation), beat.patience)
            view = rounds.missing_view(beat)
            if view is not None:
                answers.append(view)
        call = self._calls.get(run_id)
        number = 0
        if call is not None:
            held = call.hold.held(node, incarnation)
            if held is not None and seq >= 0:
                seq = max(seq, held.seq)
            self._responded(now, run_id, (node, incarnation), beat.call)
            if (node, incarnation) in call.hold.awaited:
                number = call.number
        if not answers or seq < beat.seq or number:
            ack = Ack(
                run_id=run_id,
                node=node,
                incarnation=incarnation,
                seq=seq,
                call=number,
                sent_at=beat.sent_at,
                # Another coordinator would not know of a promise to a node that fences itself.
                patience=0
                if rounds is None or rounds.fences_itself(node, incarnation)
                else beat.patience,
            )
            answers.append(ack)
        return _newest(answers + self._release(now)) if self._calls else answers

    def _tick(self, now: float) -> list[Answer]:
        answers: list[Answer] = []
        lost: dict[str, list[NodeLost]] = {}
        for (run_id, node, incarnation), why in self._liveness.expired(now).items():
            call = self._calls.get(run_id)
            if call is not None and (node, incarnation) in call.hold.leaving:
                continue
            one = NodeLost(node, incarnation, why, is_silent=why is not CLOSED)
            lost.setdefault(run_id, []).append(one)
        for run_id, nodes in lost.items():
            rounds = self.jobs.get(run_id)
            if rounds is not None:
                event = NodesLost(tuple(nodes))
                answers += self._decide(now, rounds, event, self._cause_of(event))
            for one in nodes:
                if rounds is None or rounds.seq_of(one.node, one.incarnation) < 0:
                    self._liveness.forget((run_id, one.node, one.incarnation))
        answers += self._release(now)
        if self._waits:
            awake_s = self._clock.read(now)
            for run_id, timers in [*self._waits.items()]:
                for ended, cause in timers.ended(awake_s):
                    answers += self._decide(now, self.jobs[run_id], ended, cause)
        while self._empty_since:
            run_id, since = next(iter(self._empty_since.items()))
            if now - since < self._keep_s:
                break
            self._drop(run_id)
        return answers

    def _cause_of(self, event: NodesLost) -> str:
        """Return the step in which the connection of a lost node closed, if it did."""
        lost = {(one.node, one.incarnation) for one in event.lost}
        cause = ""
        for step in self.story:
            closed = step.event
            if isinstance(closed, ConnectionClosed) and (closed.node, closed.incarnation) in lost:
                cause = step.id
        return cause

    def next_deadline(self, now: float) -> float | None:
        """Return when the next `TICK` is due, or None if nothing has a deadline."""
        deadline = self._liveness.next_deadline(now)
        if self._waits:
            awake_s = self._clock.read(now)
            ends = [at for one in self._waits.values() if (at := one.next_end) is not None]
            rest = min(ends) - awake_s
            # The clock counts the whole time only if it is read at least every `step_s`.
            at = now + max(0.0, min(rest, self._clock.step_s))
            deadline = at if deadline is None else min(deadline, at)
        if self._empty_since:
            at = next(iter(self._empty_since.values())) + self._keep_s
            deadline = at if deadline is None else min(deadline, at)
        return deadline

    # Held failures.

    def _without_early_failure(self, status: Status) -> Status:
        """Return a status without its failure if its round has not been recovered yet.

        If another coordinator formed the round, a roll call has to wait until all members have
        reconnected. Until then the report is not acknowledged, so the node repeats it.
        """
        rounds = self.jobs.get(status.run_id)
        is_known = rounds is not None and (
            rounds.job.round_term > 0 or rounds.job.phase is JobPhase.CLOSED
        )
        if status.phase is not NodePhase.FAILED or not reports_round(status) or is_known:
            return status
        return msgspec.structs.replace(
            status, seq=status.seq - 1, phase=NodePhase.RUNNING, failure=None, report=b""
        )

    def _hold(self, now: float, rounds: Rounds, status: Status) -> list[Answer]:
        job, info = rounds.job, status.info
        answers: list[Answer] = [_ack(status, status.seq)]
        self._liveness.received((job.run_id, info.node, info.incarnation), now)
        call = self._calls.setdefault(job.run_id, RollCall())
        if call.hold.hold(job, status):
            self._calls_made += 1
            call.number = job.term % CALLS_MAX * CALLS_MAX + self._calls_made % CALLS_MAX
            call.started_at = self._clock.read(now)
            for one in job.members:
                answers += self._call(rounds, (one.node, one.incarnation))
        return answers + self._release(now)

    def _call(self, rounds: Rounds, peer: tuple[str, int]) -> list[Answer]:
        """Send the roll call to a member that has yet to respond."""
        call = self._calls[rounds.job.run_id]
        if peer not in call.hold.awaited:
            return []
        seq = rounds.seq_of(*peer)
        return [
            Ack(
                run_id=rounds.job.run_id,
                node=peer[0],
                incarnation=peer[1],
                seq=seq,
                call=call.number,
            )
        ]

    def _responded(self, now: float, run_id: str, peer: tuple[str, int], number: int) -> None:
        """Note a message from a member, with the number of the newest roll call that the member received.

        A message without the current number may have been sent before the roll call. After half of the
        silence limit this is no longer possible, and any message counts as a response.
        """
        call = self._calls[run_id]
        if peer not in call.hold.awaited:
            return
        if number == call.number or self._clock.read(now) - call.started_at >= self._silence_s / 2:
            call.hold.responded(*peer)

    def _release(self, now: float) -> list[Answer]:
        """Pass the failures whose hold is over to their jobs."""
        answers: list[Answer] = []
        for run_id, call in [*self._calls.items()]:
            rounds = self.jobs.get(run_id)
            failures, departures = call.hold.release(rounds.job if rounds is not None else None)
            if call.hold:
                continue
            del self._calls[run_id]
            if rounds is None:
                continue
            for status in failures:
                if rounds.seq_of(status.info.node, status.info.incarnation) >= 0:
                    answers += self._decide(now, rounds, status)
            for departure in departures:
                if isinstance(departure, Status):
                    answers += self._status(now, departure, "", departure.id)
        return answers

    # One job.

    def _decide(self, now: float, rounds: Rounds, event: JobEvent, cause: str = "") -> list[Answer]:
        """Pass an event to a job; then update its timers and whether it is empty."""
        job = rounds.job
        run_id = job.run_id
        views: list[View]
        try:
            views = rounds.handle(now, event, cause)
            if run_id not in self.broken:
                rounds.check()
        except Exception as error:  # One broken job must not stop the others.
            if self._strict:
                raise
            self.broken[run_id] = what = f"{type(error).__name__}: {error}"
            views, rounds = close_broken(now, rounds, what, self._rounds)
            self.jobs[run_id] = rounds
            job = rounds.job
        if rounds.waits:
            timers = self._waits.setdefault(run_id, WaitTimers())
            timers.observe(self._clock.read(now), rounds)
        else:
            self._waits.pop(run_id, None)
        if job.nodes:
            self._empty_since.pop(run_id, None)
        else:
            self._empty_since.setdefault(run_id, now)
        if self.decisions is not None:
            self.decisions.append((event, msgspec.structs.replace(job, nodes=dict(job.nodes))))
        return [*views]

    # The number of jobs.

    def _make_room(self) -> bool:
        """If there are too many jobs, drop those that have been empty for longest."""
        while len(self.jobs) >= self._jobs_max and self._empty_since:
            closed = (one for one in self._empty_since if self.jobs[one].job.outcome is not None)
            self._drop(next(closed, next(iter(self._empty_since))))
        return len(self.jobs) < self._jobs_max

    def _drop(self, run_id: str) -> None:
        job = self.jobs.pop(run_id).job
        del self._empty_since[run_id]
        if run_id in self._created_from:
            self._shares.release(self._created_from.pop(run_id))
        self._fence_floor = max(self._fence_floor, job.fence)
        if job.outcome is None:
            self._keep_saved(snapshot_job(job))
        self._waits.pop(run_id, None)
        self.broken.pop(run_id, None)

    def _keep_saved(self, saved: SavedJob) -> None:
        self._saved_jobs[saved.run_id] = saved
        if len(self._saved_jobs) > SAVED_JOBS_MAX:
            del self._saved_jobs[next(iter(self._saved_jobs))]


def _newest(answers: list[Answer]) -> list[Answer]:
    """Return the answers without those views that a later view for the same node replaces."""
    last = {(one.run_id, one.node, one.incarnation): one for one in answers if type(one) is View}
    return [
        one
        for one in answers
        if type(one) is not View or last[one.run_id, one.node, one.incarnation] is one
    ]


def _should_hold(rounds: Rounds, status: Status) -> bool:
    """Whether to hold a failure. This is unnecessary if no other member has workers."""
    others = len(rounds.job.members) - len(rounds.job.succeeded) > 1
    return others and must_hold(rounds, status)


def _refused(status: Status, refusal: RefusalReason, why: str) -> View:
    return View(
        run_id=status.run_id,
        node=status.info.node,
        incarnation=status.info.incarnation,
        term=status.term + 1,  # Newer than any view of the node.
        revision=1,
        role=NodeRole.REFUSED,
        refusal=refusal,
        why=why,
    )


def _ack(status: Status, seq: int) -> Ack:
    info = status.info
    return Ack(run_id=status.run_id, node=info.node, incarnation=info.incarnation, seq=seq)
