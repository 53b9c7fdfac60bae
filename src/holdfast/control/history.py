"""The history of a job, computed from its lifecycle events.

::

    lifecycle events ──┐               ┌─► Generation ─► merge ─► spans_of, end_of
                       ├─► History.add ┤
    recorded timeline ─┘   (one node)  └─► time ──────► goodput_of
                                                   (all nodes)

`History` folds the events of one node. A recorded timeline contains the same events and gives the same
history. `merge` combines the records that several nodes have of one generation. `end_of` decides how a
generation ended, `job_end` how the job did. Metrics, `status`, `top`, the dashboard and the report render
these values; none of them computes its own.

The fold is pure: it uses no I/O and no clock. All times are seconds on the node's clock. A caller that
combines nodes first shifts their times onto one axis. Memory is bounded for jobs of any length.

docs/internals/glossary.md, Time, defines the stages and goodput.
"""

from __future__ import annotations

from bisect import bisect_right
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from holdfast.control.series import Series, json_loss, mean_loss
from holdfast.core.bounded import ClockTime, Count, Loss, Name, Number, Seconds, Why
from holdfast.core.limits import WHY_CHARS_MAX
from holdfast.core.rounds import JobPhase
from holdfast.core.supervision import StopReason
from holdfast.observe import lifecycle
from holdfast.printable import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.wire.messages import JobSummary, NodeSummary

GENERATIONS_MAX = 512
"""Generations to keep per node. Of older generations, only the useful time is kept."""
PROGRESS_MAX = 32
"""Generations whose steps are kept, to detect the steps that a later generation repeats."""
CURVE_POINTS_MAX = 128
"""Points in a generation's curve of steps over time. Beyond that, every other point is dropped."""
GENERATIONS_AT_ONCE = 32
"""Generations in one message. Even with the longest texts, they fit into a frame."""
STALL_STEPS, STALL_S = 5.0, 2.0
"""A failure is dated back to the last step if, before it, no step was made for at least `STALL_S`
seconds and for `STALL_STEPS` times the median duration of a step."""


class Stage(StrEnum):
    """What a job spent a span of time on."""

    USEFUL = "useful"
    REPEATED = "repeated"
    """Steps that a later generation repeated."""
    WARMUP = "warmup"
    DETECT = "detect"
    STOP = "stop"
    REGROUP = "regroup"
    START = "start"
    END = "end"
    """After the last worker exited."""


def stall_limit_s(step_s: float) -> float:
    """Return how long a worker may go without a step before it counts as stalled.

    `step_s` is the usual duration of a step.
    """
    return max(STALL_STEPS * step_s, STALL_S)


def eta_s(
    step: int | None, total: int | None, pace: float | None, step_age_s: float
) -> float | None:
    """Return the estimated remaining time of a worker. None if it is unknown or the worker has stalled."""
    if step is None or total is None or not pace:
        return None
    step_s = 1 / pace
    if step_age_s > stall_limit_s(step_s):
        return None
    left = (total - step) * step_s
    # The estimate decreases between two steps too, but not during a step that takes unusually long.
    return max(0.0, left - min(step_age_s, step_s))


class ReportedProgress(Protocol):
    """The progress of a worker: a `WorkerReport` or a `RankRow`."""

    @property
    def state(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def loss(self) -> Loss | None: ...
    @property
    def eta_s(self) -> float: ...


class JobProgress(NamedTuple):
    """The progress of all workers of a job."""

    step_min: int
    step_max: int
    """Below 0 if no worker reports steps."""
    total: int
    """The number of steps; 0 if no worker reports it."""
    eta_s: float | None
    """The longest of all workers. None if a worker that reports `total` does not know its own."""
    loss: Loss | None
    """The mean of the workers that report one."""


def progress_of(workers: Iterable[ReportedProgress]) -> JobProgress:
    """Return the progress of a job."""
    found = [*workers]
    steps = [one.step for one in found if one.step >= 0]
    left = [one.eta_s for one in found if one.total > 0 and one.state == WorkerState.RUNNING]
    losses = [None if one.loss is None else float(one.loss) for one in found]
    return JobProgress(
        step_min=min(steps, default=-1),
        step_max=max(steps, default=-1),
        total=max((one.total for one in found), default=0),
        eta_s=max(left) if left and min(left) >= 0.0 else None,
        loss=json_loss(mean_loss(losses)),
    )


ENDING_STAGES = (Stage.DETECT, Stage.STOP)
"""The stages of a restart that end a generation."""
STARTING_STAGES = (Stage.REGROUP, Stage.START, Stage.WARMUP)
"""The stages of a restart that start the next generation."""
RESTART_STAGES = ENDING_STAGES + STARTING_STAGES


class NodeState(StrEnum):
    """What a node is doing."""

    JOINING = "joining"
    PRELOADING = "preloading"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    LEAVING = "leaving"
    DONE = "done"
    STANDBY = "standby"
    DRAINED = "drained"
    STUCK = "stuck"
    """Its agent's loop does not respond."""


class JobState(StrEnum):
    """What a job is doing, from the view of one node."""

    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    """By an operator; or a signal stopped this agent, which cannot know whether other nodes continue."""


class WorkerState(StrEnum):
    """What a worker is doing, or how it ended."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TERMINATED = "terminated"


class RunEnd(StrEnum):
    """How the run of one node ended, or how the job ended."""

    FAILED = "failed"
    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    """By an operator's request, or by signals to all agents."""
    LEFT = "left"
    """A signal stopped this agent. The other nodes of its job may have continued."""
    ERROR = "error"
    STANDBY = "standby"
    RUNNING = "running"
    LOST = "lost"
    """Its timeline has no end."""


ENDS = (
    RunEnd.FAILED, RunEnd.SUCCEEDED, RunEnd.STOPPED, RunEnd.LEFT, RunEnd.ERROR, RunEnd.STANDBY,
)  # fmt: skip
"""The ends that a node records."""
JOB_ENDS = (RunEnd.FAILED, RunEnd.SUCCEEDED, RunEnd.STOPPED, RunEnd.RUNNING)
"""If the run of any node ended in one of these ways, or is running, the same holds for the job. If several
apply, the first in this list decides."""


class NodeEnd(NamedTuple):
    """The end of one node's record."""

    run_end: RunEnd
    generation: int = -1
    """The newest one on this node."""
    at: float = 0.0
    """Only the order of these times is used."""


class GenerationEnd(StrEnum):
    """How a generation ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"
    """The record of one of its nodes has no end."""
    REGROUPED = "regrouped"
    STOPPED = "stopped"
    RUNNING = "running"
    """It has not ended."""
    UNKNOWN = "unknown"


class Ending(NamedTuple):
    """How a generation ended, and why."""

    how: GenerationEnd
    why: str

    @property
    def is_over(self) -> bool:
        return self.how is not GenerationEnd.RUNNING


JOB_STATES = {
    RunEnd.FAILED: JobState.FAILED,
    RunEnd.SUCCEEDED: JobState.SUCCEEDED,
    RunEnd.STOPPED: JobState.STOPPED,
    RunEnd.LEFT: JobState.STOPPED,
    RunEnd.ERROR: JobState.FAILED,
}
"""The state of the job after a run of this node; an unused standby does not know it."""


class RestartReason(StrEnum):
    """Why workers were restarted."""

    WORKER_FAILED = "worker_failed"
    UNHEALTHY = "unhealthy"
    NODES_WAITING = "nodes_waiting"
    COORDINATOR = "coordinator"
    REQUESTED = "requested"
    NODES_LOST = "nodes_lost"
    OTHER = "other"


REASONS = {
    StopReason.WORKER_FAILED: RestartReason.WORKER_FAILED,
    StopReason.UNHEALTHY: RestartReason.UNHEALTHY,
    StopReason.REGROUP: RestartReason.NODES_WAITING,
    StopReason.GENERATION_CHANGED: RestartReason.COORDINATOR,
    StopReason.REQUESTED: RestartReason.REQUESTED,
}
REGROUPING = (
    StopReason.REGROUP.value, StopReason.GENERATION_CHANGED.value, StopReason.REQUESTED.value,
)  # fmt: skip
"""A generation that stopped for one of these reasons did not fail, even if no other one followed."""
NO_RESTART = (StopReason.SUCCEEDED.value, StopReason.SIGNAL.value)


class Generation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One start of all workers: the time of each event, as recorded by one node or by all nodes."""

    number: Number
    is_first: bool = False
    """Whether this is the node's first generation."""
    left_at: ClockTime | None = None
    """When the workers of the previous generation had exited; for the first one, when the run started."""
    met_at: ClockTime | None = None
    """When the nodes had formed a round."""
    started_at: ClockTime | None = None
    warm_at: ClockTime | None = None
    """When the latest worker so far made its first step, or sent its first heartbeat."""
    has_steps: bool = False
    """Whether `warm_at` is the time of a step."""
    is_warm: bool = False
    """Whether all workers have made a step or sent a heartbeat."""
    failed_at: ClockTime | None = None
    """When the first worker failed, not counting workers that the agent stopped."""
    cause_step_at: ClockTime | None = None
    """When a failed worker had made its last step."""
    last_step_at: ClockTime | None = None
    step_s: Seconds = 0.0
    """The median duration of a step."""
    stopping_at: ClockTime | None = None
    stopped_at: ClockTime | None = None
    repeated_at: ClockTime | None = None
    """A later generation repeated the steps that were made after this time."""
    first_step: int | None = None
    last_step: int | None = None
    goes_back: bool = False
    """Whether a worker reported a lower step after a higher one. Its steps then cannot be compared."""
    is_lost: bool = False
    """Whether the record of a node ends in this generation, without an end of its run."""
    may_be_lost: bool = False
    """Whether the job continued without a node that has no record at all."""
    restarts: Count = 0
    nodes: Count = 0
    world_size: Count = 0
    fence: Count = 0
    why: Why = ""
    """Why the coordinator started this generation."""
    reason: Name = ""
    """Why the agent stopped the workers: the value of a `StopReason`."""
    detail: Why = ""
    """The problem with the workers, or the request that stopped them."""
    cause: Why = ""
    """The failure that ended this generation."""

    @property
    def is_over(self) -> bool:
        return self.stopping_at is not None

    def healthy_until(self, end: float) -> float:
        """Return when the first problem began, at most `end`."""
        good = end
        if self.failed_at is not None:
            good = min(end, max(self.failed_at, self.started_at or 0.0))
        is_unhealthy = self.reason == StopReason.UNHEALTHY.value
        if self.last_step_at is None or not (
            self.failed_at or is_unhealthy or self.is_lost or self.may_be_lost
        ):
            return good
        # Prefer the last step of a worker that failed: the others may have been waiting for it.
        last = self.last_step_at if self.cause_step_at is None else self.cause_step_at
        return last if good - last > stall_limit_s(self.step_s) else good

    @property
    def problem_at(self) -> float | None:
        """When the problem that ended this generation began.

        None if the generation still runs, or if only another node knows.
        """
        if self.stopping_at is None:
            return None
        healthy = self.healthy_until(self.stopping_at)
        is_elsewhere = self.reason == StopReason.GENERATION_CHANGED.value and self.failed_at is None
        return None if is_elsewhere and healthy == self.stopping_at else healthy

    @property
    def stages(self) -> dict[Stage, float]:
        """The known durations of the stages that started this generation and that ended it."""
        ready = _latest(self.left_at, self.met_at)
        return {
            stage: max(0.0, to - since)
            for stage, since, to in (
                (Stage.DETECT, self.problem_at, self.stopping_at),
                (Stage.STOP, self.stopping_at, self.stopped_at),
                (Stage.REGROUP, self.left_at, ready if self.met_at is not None else None),
                (Stage.START, ready, self.started_at),
                (Stage.WARMUP, self.started_at, self.warm_at),
            )
            if since is not None and to is not None
        }

    def shifted(self, by: float) -> Generation:
        """Return this generation with all times shifted by `by` seconds."""
        times = {name: at + by for name in TIMES if (at := getattr(self, name)) is not None}
        return msgspec.structs.replace(self, **times)


TIMES = tuple(name for name in Generation.__struct_fields__ if name.endswith("_at"))


class NodeHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The newest generations of a node, as a message to clients."""

    now: ClockTime
    """The time of sending, on the node's clock."""
    generations: list[Generation] = []
    series: Series | None = None
    """Progress and use of the node over time, in one of the messages."""


def restart_stages(ended: Generation | None, started: Generation) -> dict[Stage, float]:
    """Return the known durations of the stages of the restart between two generations."""
    before = ended.stages if ended is not None and ended.number == started.number - 1 else {}
    of = {stage: before if stage in ENDING_STAGES else started.stages for stage in RESTART_STAGES}
    return {stage: found[stage] for stage, found in of.items() if stage in found}


def outage_s(ended: Generation, started: Generation) -> float:
    """Return the time from the problem that ended a generation until all workers had restarted."""
    began = ended.stopping_at if ended.problem_at is None else ended.problem_at
    return (started.started_at or 0.0) - (began or 0.0)


def restart_reason(ended: Generation, started: Generation) -> RestartReason | None:
    """Return why a generation was replaced; None if its end was not a restart.

    If the coordinator replaced it, the next generation shows why.
    """
    if ended.reason in NO_RESTART:
        return None
    reason = StopReason(ended.reason)
    if reason is not StopReason.GENERATION_CHANGED:
        return REASONS.get(reason, RestartReason.OTHER)
    if is_charged(ended, started):
        return RestartReason.WORKER_FAILED
    if started.nodes != ended.nodes:
        is_larger = started.nodes > ended.nodes
        return RestartReason.NODES_WAITING if is_larger else RestartReason.NODES_LOST
    return RestartReason.COORDINATOR


def is_charged(one: Generation, following: Generation | None) -> bool:
    """Whether the restart after a generation counts against the budget."""
    return following is not None and following.restarts > one.restarts


def is_smaller(one: Generation, following: Generation | None) -> bool:
    """Whether the job continued with fewer nodes, and no worker had failed."""
    return (
        following is not None and following.restarts == one.restarts and following.nodes < one.nodes
    )


def note_unrecorded(merged: Sequence[Generation], records: Sequence[int]) -> None:
    """Mark the generations after which the job continued without a node that has no record.

    `merged` has the generations of all nodes, `records` the number of nodes with a record of each.
    """
    for one, following, known in zip(merged, [*merged[1:], None], records, strict=False):
        one.may_be_lost |= one.nodes > known and is_smaller(one, following)


def over_at(one: Generation, following: Generation | None) -> float | None:
    """Return when all workers of a generation had exited; None if it runs, or the record ends before.

    Without a record of that time, it is the time of the next rendezvous.
    """
    over = one.stopped_at
    if over is None and following is not None:
        over = _earliest(following.met_at, following.started_at)
    return over


def workers_ended_at(
    part: Generation, following: Generation | None, merged: Generation | None, end: float
) -> float:
    """Return when the workers of one node's generation had exited.

    `following` is the node's next generation, `end` the end of its record. If the node was lost, its
    workers may have run until the other nodes noticed, as recorded in `merged`.
    """
    over = over_at(part, following)
    if over is not None:
        return over
    noticed = merged.stopping_at if merged is not None else None
    return end if noticed is None else max(end, noticed)


def job_end(ends: Sequence[NodeEnd], nodes: int) -> RunEnd:
    """Return how a job ended, from the ends of its nodes; `nodes` were in its newest generation.

    Failure, success and an operator's stop apply to all nodes. Otherwise the job ended as the last of
    its members did. If the last member left, the job was stopped, unless other members have no record.
    """
    found = {one.run_end for one in ends}
    for end in JOB_ENDS:
        if end in found:
            return end
    last = max(
        ends,
        key=lambda one: (one.run_end is not RunEnd.STANDBY, one.generation, one.at),
        default=NodeEnd(RunEnd.LOST),
    )
    if last.run_end is not RunEnd.LEFT:
        return last.run_end
    members = sum(one.generation == last.generation for one in ends)
    return RunEnd.STOPPED if last.generation < 0 or members >= nodes else RunEnd.LEFT


def node_end(one: NodeEnd, job: RunEnd, newest: int) -> RunEnd:
    """Return how a node's run ended; `newest` is the job's newest generation.

    If signals stopped all nodes of a job, none of them left it.
    """
    is_stop = one.run_end is RunEnd.LEFT and job is RunEnd.STOPPED and one.generation == newest
    return RunEnd.STOPPED if is_stop else one.run_end


def end_of(
    one: Generation,
    following: Generation | None,
    job: RunEnd = RunEnd.LOST,
    job_why: str = "",
) -> Ending:
    """Return how a generation ended, and why.

    `job` is how the job ended, and `job_why` the reason, if known. The newest generation ended as the
    job did, unless the generation's own record shows how it ended.
    """
    ending = _own_end(one, following) or (
        _end_with(one, job) if following is None else _end_before(one, following)
    )
    is_explained = following is not None or not job_why or bool(one.cause)
    return ending if is_explained or not ending.is_over else Ending(ending.how, job_why)


def _own_end(one: Generation, following: Generation | None) -> Ending | None:
    """Return how a generation ended, if its own record shows it."""
    if one.reason == StopReason.SIGNAL.value:
        if following is None:
            return Ending(GenerationEnd.STOPPED, one.reason)
        return Ending(GenerationEnd.REGROUPED, following.why or "a node left")
    if one.cause:
        is_known = following is not None and following.why and is_charged(one, following)
        text = following.why if following is not None and is_known else one.cause
        return Ending(GenerationEnd.FAILED, text)
    if one.reason == StopReason.REQUESTED.value and one.detail:
        how = GenerationEnd.STOPPED if following is None else GenerationEnd.REGROUPED
        return Ending(how, one.detail)
    return Ending(GenerationEnd.FAILED, one.detail) if one.detail else None


def _end_with(one: Generation, job: RunEnd) -> Ending:
    """Return how the newest generation ended, from the end of the job."""
    if job is RunEnd.RUNNING and not one.is_over:
        return Ending(GenerationEnd.RUNNING, "")
    if job is RunEnd.SUCCEEDED or one.reason == StopReason.SUCCEEDED.value:
        return Ending(GenerationEnd.SUCCEEDED, StopReason.SUCCEEDED.value)
    if job is RunEnd.STOPPED:
        return Ending(GenerationEnd.STOPPED, "the job was stopped")
    if job is not RunEnd.FAILED and one.reason in REGROUPING:
        return Ending(GenerationEnd.REGROUPED, one.reason)
    if job is RunEnd.FAILED or one.reason:
        return Ending(GenerationEnd.FAILED, one.reason or "workers failed")
    return Ending(GenerationEnd.UNKNOWN, "no end is recorded")


def _end_before(one: Generation, following: Generation) -> Ending:
    """Return how a generation ended, if another one replaced it."""
    why = following.why or one.reason or "another generation was started"
    if one.is_lost or (one.may_be_lost and not following.why):
        return Ending(GenerationEnd.LOST, why)
    is_failure = is_charged(one, following)
    return Ending(GenerationEnd.FAILED if is_failure else GenerationEnd.REGROUPED, why)


LATEST = (
    "met_at", "started_at", "last_step_at", "stopped_at", "last_step", "restarts", "nodes",
    "world_size", "fence", "goes_back", "is_lost", "may_be_lost", "why",
)  # fmt: skip
EARLIEST = ("failed_at", "cause_step_at", "repeated_at", "first_step")
"""For these fields, a merged generation has the maximum (`LATEST`) or minimum of its parts."""


def merge(parts: Sequence[Generation]) -> Generation:
    """Return one generation from the records of all nodes, whose times are on one axis."""
    # A node whose workers succeeded waits for the others. Any other stop applies to all nodes.
    done = StopReason.SUCCEEDED.value
    stops = [one for one in parts if one.stopping_at is not None]
    stops.sort(
        key=lambda one: (one.reason in (StopReason.GENERATION_CHANGED.value, done), one.stopping_at)
    )
    early = [one.stopping_at for one in stops if one.reason != done]
    left = [one for one in parts if not one.is_first]
    stepped = [one for one in parts if one.has_steps]
    usual = sorted(one.step_s for one in parts if one.step_s)
    causes = sorted((one for one in parts if one.cause), key=lambda one: one.failed_at or 0.0)
    merged = Generation(
        number=parts[0].number,
        is_first=not left,
        left_at=_latest(*(one.left_at for one in left))
        if left
        else _earliest(*(one.left_at for one in parts)),
        warm_at=_latest(*(one.warm_at for one in stepped or parts)),
        has_steps=bool(stepped),
        is_warm=all(one.is_warm for one in parts),
        step_s=usual[len(usual) // 2] if usual else 0.0,
        stopping_at=_earliest(*early) if early else _latest(*(one.stopping_at for one in stops)),
        reason=stops[0].reason if stops else "",
        detail=next((one.detail for one in stops if one.detail), ""),
        cause=causes[0].cause if causes else "",
    )
    for name in LATEST:
        setattr(merged, name, _latest(*(getattr(one, name) for one in parts)))
    for name in EARLIEST:
        setattr(merged, name, _earliest(*(getattr(one, name) for one in parts)))
    return merged


def _latest(*times: Any) -> Any:
    return max((at for at in times if at is not None), default=None)


def _earliest(*times: Any) -> Any:
    return min((at for at in times if at is not None), default=None)


class _Progress:
    """The steps that the workers of one generation made on one node."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.heartbeats: dict[int, float] = {}
        self.firsts: dict[int, tuple[float, int]] = {}
        """By rank, the time and number of its first step, unless it was first reported after the stop began."""
        self.lasts: dict[int, tuple[float, int]] = {}
        self.curve: list[tuple[float, int]] = []
        """Steps and the time at which the first worker had made each."""

    def add(self, one: Generation, rank: int, step: int, at: float) -> None:
        before = self.lasts.get(rank)
        if before is not None and step < before[1]:
            one.goes_back = True
        self.lasts[rank] = at, step
        if one.stopping_at is None:
            self.firsts.setdefault(rank, (at, step))
        one.last_step_at = max(at, one.last_step_at or 0.0)
        one.last_step = step if one.last_step is None else max(step, one.last_step)
        if not any(known >= step and since <= at for since, known in self.curve):
            later = [point for point in self.curve if point[0] < at or point[1] > step]
            self.curve = sorted([*later, (at, step)])
        if len(self.curve) > CURVE_POINTS_MAX:
            del self.curve[1:-1:2]

    def update_first_steps(self, one: Generation) -> None:
        """Update the times of the first steps."""
        if not self.firsts:
            one.warm_at = max(self.heartbeats.values(), default=None)
            one.is_warm = len(self.heartbeats) >= self.workers
            return
        one.has_steps = True
        one.warm_at = max(at for at, _ in self.firsts.values())
        one.is_warm = len(self.firsts) >= self.workers
        one.first_step = min(step for _, step in self.firsts.values())
        times = sorted(
            (at - self.firsts[rank][0]) / (step - self.firsts[rank][1])
            for rank, (at, step) in self.lasts.items()
            if rank in self.firsts and step > self.firsts[rank][1]
        )
        one.step_s = max(0.0, times[len(times) // 2]) if times else 0.0

    def time_of(self, step: int) -> float | None:
        """Return when the first worker had made a step, interpolated between samples."""
        at = bisect_right(self.curve, step, key=lambda point: point[1])
        if at == 0:
            return self.curve[0][0] if self.curve else None
        if at == len(self.curve):
            return None
        (since, low), (to, high) = self.curve[at - 1], self.curve[at]
        return since + (to - since) * (step - low) / (high - low)


class History:
    """The history of one node's newest run. Not thread-safe.

    `began_at` is the start of the run, in case its first event is missing.
    """

    def __init__(self, began_at: float = 0.0, *, generations_max: int = GENERATIONS_MAX) -> None:
        self._generations_max = generations_max
        self._begin(began_at)

    def _begin(self, began_at: float) -> None:
        self.began_at = began_at
        self.ended_at: float | None = None
        self.run_end = RunEnd.LOST
        self.end_error = ""
        """The error that the agent raised at the end of its run, in one line."""
        self.generations: dict[int, Generation] = {}
        """The newest generations by number, in the order of their starts."""
        self.node_state = NodeState.JOINING
        self.job_state = JobState.STARTING
        self.workers: dict[int, tuple[lifecycle.WorkerInfo, WorkerState]] = {}
        """The workers of the newest generation, by local rank."""
        self.counts_steps = False
        """Whether workers report steps. Otherwise, goodput is an upper bound."""
        self._run: lifecycle.RunStarted | None = None
        self._progress: dict[int, _Progress] = {}
        self._left_at: float | None = began_at
        self._met_at: float | None = None
        self._requested = ""
        self._dropped_useful_s, self._dropped_until = 0.0, began_at
        self._standby_s = 0.0
        self._standby_since: float | None = None

    @property
    def newest(self) -> Generation | None:
        return next(reversed(self.generations.values()), None)

    # Events.

    def add(self, event: lifecycle.LifecycleEvent) -> None:
        """Fold an event into the history."""
        match event:
            case lifecycle.RunStarted():
                self._begin(event.at)
                self._run = event
            case lifecycle.StandbyChanged():
                self._standby_s = self.standby_s(event.at)
                self._standby_since = event.at if event.is_standby else None
            case lifecycle.RendezvousEnded():
                if not event.error:
                    self._met_at, self.node_state = event.at, NodeState.STARTING
            case lifecycle.GenerationStarted():
                self._started(event)
            case lifecycle.FirstHeartbeat():
                one, progress = self._generation_of(event.generation)
                progress.heartbeats.setdefault(event.worker.global_rank, event.at)
                progress.update_first_steps(one)
            case lifecycle.ProgressSampled():
                self._sampled(event)
            case lifecycle.WorkerEnded():
                self._worker_ended(event)
            case lifecycle.GenerationStopping():
                self._stopping(event)
            case lifecycle.GenerationStopped():
                self._stopped(event)
            case lifecycle.WorkersFailed():
                self._failed(event)
            case lifecycle.RequestCarriedOut():
                self._requested = one_line(event.what, WHY_CHARS_MAX)
                newest = self.newest
                if newest is not None and newest.reason == StopReason.REQUESTED.value:
                    newest.detail = self._requested
            case lifecycle.RunEnded():
                self._ended(event)

    def end_record(self) -> None:
        """Note that no event follows: a run that has no end was lost in its newest generation."""
        newest = self.newest
        if self.ended_at is None and newest is not None and newest.stopped_at is None:
            newest.is_lost = True

    def _generation_of(self, number: int) -> tuple[Generation, _Progress]:
        """Return a generation. If its start is missing, it starts with the run."""
        one = self.generations.get(number)
        if one is None:
            one = self._add(Generation(number=number, started_at=self.began_at), workers=1)
        return one, self._progress.setdefault(number, _Progress(1))

    def _add(self, one: Generation, workers: int) -> Generation:
        self.generations[one.number] = one
        self._progress[one.number] = _Progress(workers)
        while len(self._progress) > PROGRESS_MAX:
            del self._progress[next(iter(self._progress))]
        while len(self.generations) > self._generations_max:
            self._drop()
        return one

    def _drop(self) -> None:
        """Remove the oldest generation, but keep its useful time."""
        oldest, following, *_ = self.generations.values()
        end = following.started_at or self._dropped_until
        spans = spans_of([oldest, following], self._dropped_until, end, by_steps=self.counts_steps)
        own = [one for one in spans if one.generation == oldest.number]
        self._dropped_useful_s += useful_s(own)
        self._dropped_until = own[-1].end if own else self._dropped_until
        del self.generations[oldest.number]

    def _started(self, event: lifecycle.GenerationStarted) -> None:
        known = self.generations.pop(event.generation, None)
        self._add(
            Generation(
                number=event.generation,
                is_first=known is None and not self.generations,
                left_at=self._left_at,
                met_at=self._met_at,
                started_at=event.at,
                restarts=event.restart_count,
                nodes=event.group_world_size or 0,
                world_size=event.world_size,
                fence=event.fence,
                why=one_line(event.why, WHY_CHARS_MAX),
            ),
            len(event.workers),
        )
        self._left_at = self._met_at = None
        self._requested = ""
        self.job_state, self.node_state = JobState.RUNNING, NodeState.RUNNING
        self.workers = {one.local_rank: (one, WorkerState.RUNNING) for one in event.workers}

    def _sampled(self, event: lifecycle.ProgressSampled) -> None:
        one, progress = self._generation_of(event.generation)
        first_step = one.first_step
        for rank, step, at in event.steps:
            progress.add(one, rank, step, at)
        progress.update_first_steps(one)
        self.counts_steps |= one.has_steps
        if one.first_step != first_step and one.first_step is not None:
            self._repeat(one.number, one.first_step)

    def _repeat(self, number: int, first_step: int) -> None:
        """Mark the steps of earlier generations that this generation repeats."""
        for before, progress in self._progress.items():
            one = self.generations.get(before)
            if before >= number or one is None or one.goes_back or one.last_step is None:
                continue
            if first_step <= one.last_step:
                is_all = one.first_step is not None and first_step <= one.first_step
                at = one.started_at if is_all else progress.time_of(first_step - 1)
                one.repeated_at = _earliest(one.repeated_at, at)

    def _worker_ended(self, event: lifecycle.WorkerEnded) -> None:
        one, _ = self._generation_of(event.generation)
        state = WorkerState.FAILED if event.failed else WorkerState.SUCCEEDED
        if one.stopping_at is None and event.failed:
            one.failed_at = _earliest(one.failed_at, event.at)
            self.job_state = JobState.RECOVERING
        elif event.failed:
            state = WorkerState.TERMINATED  # The agent stopped it.
        self.workers[event.worker.local_rank] = event.worker, state

    def _stopping(self, event: lifecycle.GenerationStopping) -> None:
        one, _ = self._generation_of(event.generation)
        if one.is_over:
            return
        one.stopping_at, one.reason = event.at, event.reason.value
        is_requested = event.reason is StopReason.REQUESTED
        one.detail = self._requested if is_requested else one_line(event.detail, WHY_CHARS_MAX)
        self.node_state = NodeState.STOPPING
        # After a success here, other nodes' workers may still be running.
        if event.reason is not StopReason.SUCCEEDED:
            self.job_state = JobState.RECOVERING

    def _stopped(self, event: lifecycle.GenerationStopped) -> None:
        one, _ = self._generation_of(event.generation)
        one.stopped_at = self._left_at = event.at
        is_done = one.reason == StopReason.SUCCEEDED.value
        self.node_state = NodeState.LEAVING if is_done else NodeState.JOINING
        for rank, (worker, state) in self.workers.items():
            if state is WorkerState.RUNNING:
                self.workers[rank] = worker, WorkerState.TERMINATED

    def _failed(self, event: lifecycle.WorkersFailed) -> None:
        causes = [failure for failure in event.failures if not failure.consequence]
        if not causes:
            return
        one, progress = self._generation_of(event.generation)
        first = causes[0]
        what = first.detail or first.message or first.traceback.strip().rpartition("\n")[2]
        texts = (f"rank {first.global_rank} failed", first.ending, what.strip().partition("\n")[0])
        one.cause = one_line(": ".join(text for text in texts if text), WHY_CHARS_MAX)
        lasts = [progress.lasts.get(failure.global_rank) for failure in causes]
        one.cause_step_at = min((last[0] for last in lasts if last is not None), default=None)
        if one.failed_at is None and self._run is not None:
            wall = min(failure.wall for failure in causes)
            one.failed_at = max(0.0, self._run.at + wall - self._run.wall)

    def _ended(self, event: lifecycle.RunEnded) -> None:
        self.ended_at = event.at
        self._standby_s, self._standby_since = self.standby_s(event.at), None
        how = event.state or event.cut_short
        self.run_end = RunEnd(how) if how in ENDS else RunEnd.ERROR
        self.end_error = error_line(event.error)
        self.job_state = JOB_STATES.get(self.run_end, self.job_state)
        self.node_state = NodeState.DONE
        for end in event.outcomes:
            self.workers[end.worker.local_rank] = end.worker, WorkerState(end.state)

    # Totals.

    def standby_s(self, now: float) -> float:
        """Return how long the node was a standby."""
        since = self._standby_since
        return self._standby_s + (max(0.0, now - since) if since is not None else 0.0)

    def parts(self, now: float) -> list[NodeHistory]:
        """Return the generations, oldest first, split into messages."""
        found = [*self.generations.values()]
        return [
            NodeHistory(now=now, generations=found[at : at + GENERATIONS_AT_ONCE])
            for at in range(0, max(1, len(found)), GENERATIONS_AT_ONCE)
        ]

    def elapsed_s(self, now: float) -> float:
        """Return the duration of the run so far."""
        return max(0.0, (now if self.ended_at is None else self.ended_at) - self.began_at)

    def useful_s(self, now: float) -> float:
        """Return how much of that time was useful."""
        end = now if self.ended_at is None else self.ended_at
        generations = [*self.generations.values()]
        newest = generations[-1] if generations else None
        if newest is not None and newest.nodes != 1 and newest.reason == StopReason.SUCCEEDED.value:
            # This node's workers succeeded; those of other nodes, if there are any, may still run.
            replace = msgspec.structs.replace
            generations[-1] = replace(newest, stopping_at=None, stopped_at=None)
        spans = spans_of(generations, self._dropped_until, end, by_steps=self.counts_steps)
        return self._dropped_useful_s + useful_s(spans)

    def time(self, now: float) -> NodeTime:
        """Return how the node has spent its time."""
        return NodeTime(
            generation=max(self.generations, default=-1),
            elapsed_s=self.elapsed_s(now),
            standby_s=self.standby_s(now),
            useful_s=self.useful_s(now),
            counts_steps=self.counts_steps,
        )


class Span(NamedTuple):
    """A span of a job's time."""

    stage: Stage
    begin: float
    end: float
    generation: int | None


def spans_of(
    generations: Sequence[Generation],
    begin: float,
    end: float,
    *,
    by_steps: bool,
    is_over: bool = True,
) -> list[Span]:
    """Return the spans from `begin` to `end`, without gaps.

    `by_steps`: a worker has reported steps. `is_over`: no generation follows.
    """
    spans: list[Span] = []

    def add(stage: Stage, until: float | None, number: int | None) -> None:
        since = spans[-1].end if spans else begin
        if until is not None and (until := min(until, end)) > since:
            spans.append(Span(stage, since, until, number))

    for one, following in pairwise([*generations, None]):
        assert one is not None
        number, over = one.number, over_at(one, following)
        over = end if over is None else over
        stop = min(over, one.stopping_at) if one.stopping_at is not None else over
        good = one.healthy_until(stop)
        add(Stage.REGROUP, one.met_at, number)
        add(Stage.START, one.started_at, number)
        if by_steps:
            add(Stage.WARMUP, one.warm_at if one.has_steps else good, number)
        add(Stage.USEFUL, _earliest(good, one.repeated_at), number)
        add(Stage.REPEATED, good, number)
        add(Stage.DETECT, stop, number)
        add(Stage.STOP, over, number)
    add(Stage.END if generations and is_over else Stage.REGROUP, end, None)
    return spans


def seconds_of(spans: Iterable[Span]) -> dict[Stage, float]:
    """Return the total time of each stage."""
    found = dict.fromkeys(Stage, 0.0)
    for one in spans:
        found[one.stage] += one.end - one.begin
    return found


def useful_s(spans: Iterable[Span]) -> float:
    """Return the total length of the useful spans."""
    return seconds_of(spans)[Stage.USEFUL]


class Goodput(NamedTuple):
    """The share of time that was useful."""

    share: float
    is_upper_bound: bool
    """Whether no worker reports steps, so that repeated work is unknown."""

    @property
    def name(self) -> str:
        return "goodput (upper bound)" if self.is_upper_bound else "goodput"


class SpentTime(Protocol):
    """How a node has spent its time: a `NodeTime` or a `NodeReport`."""

    @property
    def generation(self) -> int: ...
    @property
    def elapsed_s(self) -> float: ...
    @property
    def standby_s(self) -> float: ...
    @property
    def useful_s(self) -> float: ...
    @property
    def counts_steps(self) -> bool: ...


class NodeTime(NamedTuple):
    """How a node has spent its time, by its own record."""

    generation: int
    """Its newest one; -1 until it has started workers."""
    elapsed_s: float
    standby_s: float
    useful_s: float
    counts_steps: bool


def goodput_of(nodes: Iterable[SpentTime]) -> Goodput | None:
    """Return the goodput of a job from the times of its nodes; None before it has started workers.

    The nodes in the newest generation count; if some of them have workers that report steps, only those.
    The job lost as much time as the node that lost most: only the node whose workers hung may know when
    that began.
    """
    found = [*nodes]
    newest = max((one.generation for one in found), default=-1)
    found = [one for one in found if one.generation == newest]
    by_steps = [one for one in found if one.counts_steps]
    times = [(one.elapsed_s - one.standby_s, one.useful_s) for one in by_steps or found]
    longest_s = max((wanted_s for wanted_s, _ in times), default=0.0)
    if newest < 0 or longest_s <= 0.0:
        return None
    lost_s = max(wanted_s - useful_s for wanted_s, useful_s in times)
    share = min(1.0, max(0.0, 1.0 - lost_s / longest_s))  # A damaged record may contradict itself.
    return Goodput(share, not by_steps)


def error_line(error: str) -> str:
    """Return the last line of a traceback, without the name of the class."""
    line = error.strip().rpartition("\n")[2]
    head, colon, rest = line.partition(": ")
    return rest if colon and " " not in head else line


def delays_of(job: JobSummary) -> list[str]:
    """Return what delays the start of a job's workers, one line each."""
    if job.outcome:
        return []
    lines = []
    if job.phase == JobPhase.FORMING.value:
        lines.append(f"waiting for nodes: {job.present} of {job.min_nodes}")
    reports = (one.report for one in job.nodes if one.report is not None and one.report.activity)
    return [*lines, *(f"{one.node}: {one.activity}" for one in reports)]


def state_of(node: NodeSummary, job_phase: str) -> str:
    """Return what a node is doing: a `NodeState`, or its phase until its first report."""
    if node.drained:
        return NodeState.DRAINED
    if node.report is not None and node.report.state == NodeState.PRELOADING:
        return NodeState.PRELOADING
    if node.rank < 0:
        return NodeState.JOINING if job_phase == JobPhase.FORMING.value else NodeState.STANDBY
    return node.report.state if node.report is not None else node.phase
