"""A viewer's state of a running job: nodes, ranks, generations and events.

`LiveJob` performs no I/O; callers pass in the time, on the viewer's monotonic clock. It receives summaries
(`JobClient.status`), events and histories of nodes. `holdfast top` and the dashboard render it. Its
memory is bounded for jobs of any length.

**Clocks of nodes are never compared.** Rates and CPU shares are differences between reports of one node,
on that node's clock (`NodeReport.elapsed_s`). Receiving a report twice changes nothing.

**Marks.** A rank is `stalled` if it made no step for several times the usual duration of a step, `slow` if
its rate is well below the median, and `behind` if it is several steps behind the fastest rank.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from holdfast.control.history import (
    Generation,
    GenerationEnd,
    NodeEnd,
    RunEnd,
    delays_of,
    end_of,
    goodput_of,
    is_charged,
    job_end,
    merge,
    progress_of,
    restart_stages,
    spans_of,
    stall_limit_s,
    state_of,
)
from holdfast.control.series import (
    Recent,
    Sample,
    Series,
    combined,
    shifted,
)
from holdfast.numa.affinity import format_ranges
from holdfast.wire.messages import EventKind
from holdfast.worker import LEVELS_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.control.history import NodeHistory, Span, Stage
    from holdfast.core.bounded import Loss
    from holdfast.wire.messages import EventRecord, JobSummary, NodeSummary

SAMPLES_MAX = 8
"""Steps to keep per rank, to compute its rate."""
RATE_S = 15.0
"""The period over which a rate is computed, from at least two samples."""
SLOW_SHARE = 0.8
"""A rank is slow if its rate is below this share of the median."""
SLOW_RANKS_MIN = 3
"""With fewer ranks than this, no rank is marked as slow."""
BEHIND_STEPS, BEHIND_S = 3, 2.0
"""A rank is behind if it lags by this many steps, and also by this time at the median rate."""
CLOCK_JUMP_S = 1.0
"""If a node's clock offset changes by more than this, its agent has moved to another host."""
GENERATIONS_MAX = 512
EVENTS_MAX = 1_024
HISTORY_NODES_MAX = 8
"""Members whose histories are requested, from rank 0 on. The histories of all members are nearly the
same, and each may have `GENERATIONS_MAX` generations."""
FAILED_NODES_MAX = 8
"""Nodes with the most recent failures. Their histories are requested too, because only these show when
the problem began."""
CAUSES_SHOWN = 64
DELAYS_SHOWN = 3


class JobHeader(msgspec.Struct, kw_only=True):
    """The job as a whole."""

    run_id: str = ""
    state: str = ""
    """Its phase, or its outcome once it is over."""
    outcome: str = ""
    round: int = -1
    generation: int = -1
    restarts: int = 0
    max_restarts: int = 0
    causes: list[str] = []
    """Causes of the restarts that were charged, the newest last."""
    delay: str = ""
    """What delays the start of the workers; empty if nothing does."""
    why: str = ""
    """The last change of the round or the generation."""
    members: int = 0
    present: int = 0
    min_nodes: int = 0
    max_nodes: int = 0
    ranks: int = 0
    running: int = 0
    """The number of running ranks."""
    elapsed_s: float = 0.0
    goodput: float | None = None
    """See `control.history`; None before workers were started."""
    goodput_is_upper_bound: bool = False
    step_min: int = -1
    step_max: int = -1
    total: int = 0
    eta_s: float | None = None
    loss: Loss | None = None
    """These five as in `control.history.JobProgress`."""
    rate: float | None = None
    """The median of all ranks, in steps per second."""
    measured: int = 0
    """Members whose histories the generations come from; see `HISTORY_NODES_MAX`."""
    marked: int = 0
    """Ranks that are slow, behind or stalled."""
    cpu: float | None = None
    rss_bytes: int = 0
    gpu: float | None = None
    """The mean utilization of all GPUs: 1.0 is 100 %."""


class JobEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of the job."""

    outcome: RunEnd
    why: str
    wall: float | None = None
    """The time of day; None if no event shows it."""


class RankRow(msgspec.Struct, kw_only=True):
    """One rank; changed in place."""

    rank: int = 0
    node: str = ""
    host: str = ""
    local_rank: int = -1
    pid: int = 0
    state: str = ""
    section: str = ""
    step: int = -1
    lag: int = 0
    rate: float | None = None
    """Steps per second."""
    cpu: float | None = None
    """Share of one core: 1.0 is 100 %."""
    heartbeat_age_s: float = -1.0
    """Below 0 if it reports none."""
    step_age_s: float = -1.0
    rss_bytes: int = 0
    total: int = 0
    loss: Loss | None = None
    eta_s: float = -1.0
    """Below 0 if it is unknown."""
    mark: str = ""


REPORTED = (
    "local_rank", "pid", "state", "step", "section", "heartbeat_age_s", "step_age_s", "rss_bytes",
    "total", "loss", "eta_s",
)  # fmt: skip
"""Fields of a rank that are copied from its report."""
SUMMARIZED = (
    "run_id", "outcome", "round", "generation", "restarts", "max_restarts", "why", "members",
    "present", "min_nodes", "max_nodes",
)  # fmt: skip
"""Fields of the header that are copied from the summary."""


class NodeRow(msgspec.Struct, kw_only=True):
    """One node, and the totals of its ranks."""

    node: str
    host: str
    address: str
    state: str
    node_rank: int
    drained: bool
    ranks: list[RankRow]
    ranks_text: str
    size: int
    running: int
    generation: int
    step_min: int = -1
    step_max: int = -1
    rate: float | None = None
    """The lowest rate of its ranks."""
    heartbeat_age_s: float = -1.0
    """The age of the oldest heartbeat of its ranks."""
    cpu: float | None = None
    rss_bytes: int = 0
    gpu: float | None = None
    """The mean utilization of its GPUs."""
    mark: str = ""


class GenerationRow(msgspec.Struct, kw_only=True):
    """One generation, and the restart that led to it."""

    number: int
    started_at: float | None = None
    """On the viewer's clock."""
    ended_at: float | None = None
    ran_s: float | None = None
    end: GenerationEnd = GenerationEnd.RUNNING
    is_over: bool = False
    is_charged: bool = False
    """Whether the restart after it counts against the budget."""
    world_size: int = 0
    why: str = ""
    """Why it was started."""
    ended_by: str = ""
    """What ended it."""
    stages: dict[Stage, float] = {}
    """The known durations of the restart that led to it; see `control.history`."""

    @property
    def down_s(self) -> float:
        """The known duration of the restart that led to this generation."""
        return sum(self.stages.values())


class _Samples:
    """The recent steps of one rank, on its node's clock, and its CPU time."""

    __slots__ = ("cpu_s", "cpu_seen_s", "pid", "steps")

    def __init__(self) -> None:
        self.pid = 0
        self.cpu_s = self.cpu_seen_s = -1.0
        self.steps: deque[tuple[float, int]] = deque(maxlen=SAMPLES_MAX)

    def add(self, at: float, step: int) -> None:
        steps = self.steps
        if steps and step == steps[-1][1]:
            return
        if steps and (step < steps[-1][1] or at < steps[-1][0]):
            steps.clear()
        steps.append((at, step))
        while len(steps) > 2 and at - steps[0][0] > RATE_S:
            steps.popleft()

    def rate(self, now_s: float) -> float | None:
        """Return steps per second; 0 if the rank stalled."""
        if len(self.steps) < 2:
            return None
        (from_s, low), (to_s, high) = self.steps[0], self.steps[-1]
        rate = (high - low) / max(1e-6, to_s - from_s)
        return 0.0 if now_s - to_s > stall_limit_s(1 / rate) else rate


class LiveJob:
    """A viewer's state of one running job."""

    def __init__(self) -> None:
        self.problem = "not connected yet"
        """Why the state is not up to date, in one line; empty while it is."""
        self.version = 0
        """Increases with every change."""
        self._forget()

    def _forget(self) -> None:
        self.header = JobHeader()
        self.nodes: list[NodeRow] = []
        self.ranks: list[RankRow] = []
        """In the order of their ranks."""
        self.events: deque[EventRecord] = deque(maxlen=EVENTS_MAX)
        self.updated_at: float | None = None
        self._job_ended: EventRecord | None = None
        self._told: JobEnd | None = None
        """The end of the job, if the last message of its agent or coordinator told it."""
        self._run_ends: dict[str, EventRecord] = {}
        """How each node's run ended. An empty key is an agent without a node name, which is the job's only agent."""
        self._workers_failed: EventRecord | None = None
        """The last failure of workers."""
        self._broken: set[int] = set()
        """The generations that a failure or a loss ended, according to the coordinator."""
        self._rank_rows: dict[tuple[str, int], RankRow] = {}
        self._samples: dict[tuple[str, int], _Samples] = {}
        self._parts: dict[int, dict[str, Generation]] = {}
        """The records of generations by number and node, on the viewer's clock."""
        self._shifts: dict[str, float] = {}
        self._failed: deque[str] = deque(maxlen=FAILED_NODES_MAX)
        self._first_seen: dict[int, float] = {}
        self._generations: list[GenerationRow] | None = None
        self._generation_mark: object = None
        self._recent = Recent()
        self._node_series: dict[str, Series] = {}
        """On the viewer's clock."""
        self._series: tuple[object, Series] = (None, Series())

    # Input.

    def connected(self) -> None:
        """Note that the job responds."""
        self.problem = ""
        self.version += 1

    def lost(self, problem: str) -> None:
        """Note that the job does not respond, and why."""
        self.problem = problem
        self.version += 1

    def ended(self, outcome: str, why: str, wall: float) -> None:
        """Note the end of the job, from the last message of its agent or coordinator."""
        if self._told is None:
            self._told, self._generations = (
                JobEnd(outcome=_run_end(outcome), why=why, wall=wall),
                None,
            )
            self.version += 1

    def add_summary(self, now: float, job: JobSummary) -> None:
        """Add the state of the job, with the last reports of its nodes."""
        if self._is_another(job):
            problem = self.problem
            self._forget()
            self.problem = problem
        self.version += 1
        self.updated_at = now
        self._drop_nodes({one.node for one in job.nodes})
        self.nodes = [
            self._node_row(one, job.phase)
            for one in sorted(job.nodes, key=lambda one: (one.rank < 0, one.rank, one.node))
        ]
        self.ranks = sorted(
            (row for node in self.nodes for row in node.ranks), key=lambda row: row.rank
        )
        # A report about an older generation says nothing about this one.
        self._mark(
            [row for one in self.nodes if one.generation == job.generation for row in one.ranks]
        )
        for node in self.nodes:
            _update_totals(node)
        self._describe(job)
        self._note_generation(now, job)
        one = self.header
        if any(node.report is not None for node in job.nodes):
            loss = None if one.loss is None else float(one.loss)
            self._recent.add(Sample(now, one.rate, loss, one.rss_bytes or None, one.gpu))

    def add_event(self, event: EventRecord) -> None:
        """Add an event."""
        self.version += 1
        self.events.append(event)
        if event.kind is EventKind.WORKERS_FAILED and event.source not in self._failed:
            self._failed.append(event.source)
        match event.kind:
            case EventKind.WORKERS_FAILED:
                self._workers_failed = event
            case EventKind.JOB_CHANGED if event.is_problem:
                self._broken.add(event.generation)
                self._generations = None
            case EventKind.JOB_ENDED:
                self._job_ended, self._generations = event, None
            case EventKind.RUN_ENDED:
                self._generations = None
                self._run_ends[event.source] = event
            case EventKind.RUN_STARTED:
                self._run_ends.pop(event.source, None)

    def add_history(self, now: float, node: str, parts: Iterable[NodeHistory]) -> None:
        """Add the generations of a node."""
        self.version += 1
        self._generations = None
        for part in parts:
            # The fastest message so far is the best estimate of how the clocks differ.
            by, known = now - part.now, self._shifts.get(node, math.inf)
            self._shifts[node] = by = min(by, known) if abs(by - known) < CLOCK_JUMP_S else by
            for one in part.generations:
                self._parts.setdefault(one.number, {})[node] = one.shifted(by)
            if part.series is not None:
                self._node_series[node] = shifted(part.series, by)
        for number in sorted(self._parts)[:-GENERATIONS_MAX]:
            del self._parts[number]

    # Output.

    @property
    def generations(self) -> list[GenerationRow]:
        """The generations that are known, the newest first."""
        if self._generations is None:
            merged, end = self._merged(), self.end
            self._generations = [
                self._generation_row(at, merged, end) for at in reversed(range(len(merged)))
            ]
        return self._generations

    @property
    def history_sources(self) -> list[NodeRow]:
        """The nodes whose histories a viewer requests."""
        members = [one for one in self.nodes if one.node_rank >= 0]
        rest = members[HISTORY_NODES_MAX:]
        return members[:HISTORY_NODES_MAX] + [one for one in rest if one.node in self._failed]

    @property
    def end(self) -> JobEnd | None:
        """How the job ended, according to the coordinator or to all its nodes; None if it runs."""
        found, told = self._reported_end(), self._told
        if found is None:
            return told
        # The last message has the reason; events have only the outcome.
        has_reason = told is not None and told.outcome is found.outcome and told.why
        return msgspec.structs.replace(found, why=told.why) if told and has_reason else found

    def _reported_end(self) -> JobEnd | None:
        """Return how the job ended, according to its state and its events."""
        header, ended, ends = self.header, self._job_ended, self._run_ends
        if header.outcome or ended is not None:
            return JobEnd(
                outcome=_run_end(header.outcome or (ended.outcome if ended is not None else "")),
                why=header.why if header.outcome or ended is None else ended.text,
                wall=ended.wall if ended is not None else None,
            )
        if "" not in ends and not (self.nodes and all(one.node in ends for one in self.nodes)):
            return None
        last = max(ends.values(), key=lambda one: one.wall)
        found = [
            NodeEnd(_run_end(one.outcome), header.generation, one.wall) for one in ends.values()
        ]
        outcome = job_end(found, len(found))
        cause = self._workers_failed if outcome is RunEnd.FAILED else None
        return JobEnd(outcome=outcome, why=(cause or last).text, wall=last.wall)

    @property
    def is_over(self) -> bool:
        return self.end is not None

    @property
    def spans(self) -> list[Span]:
        """The known spans of the job's time."""
        merged = self._merged()
        starts = [
            at for one in merged[:1] for at in (one.left_at, one.started_at) if at is not None
        ]
        return spans_of(
            merged,
            min(starts, default=0.0),
            self.updated_at or 0.0,
            by_steps=any(one.has_steps for one in merged),
            is_over=self.is_over,
        )

    @property
    def series(self) -> Series:
        """The progress and use of the job over time, on the viewer's clock."""
        now = self.updated_at or 0.0
        # The last interval is as long as the shortest one, so it changes only when it is over.
        mark = (now // LEVELS_S[0], [(node, id(one)) for node, one in self._node_series.items()])
        if self._series[0] != mark:
            members = [one.node for one in self.nodes if one.node_rank >= 0]
            known = [*self._node_series.values()]
            are_all = {*members} == {*self._node_series}
            found = combined(self._recent.series(now), known, now, are_all=are_all)
            self._series = mark, found
        return self._series[1]

    def age_s(self, now: float) -> float | None:
        """The age of the state."""
        return None if self.updated_at is None else now - self.updated_at

    def node_of(self, rank: int) -> str:
        """The node of a rank; empty if there is none."""
        return next((row.node for row in self.ranks if row.rank == rank), "")

    # Internals.

    def _is_another(self, job: JobSummary) -> bool:
        """Whether this is a new job with the name of the previous one."""
        known = self.header
        return bool(known.run_id) and (
            job.run_id != known.run_id
            or job.generation < known.generation
            or (self.is_over and not job.outcome)
        )

    def _drop_nodes(self, present: set[str]) -> None:
        for table in (self._rank_rows, self._samples):
            for key in [key for key in table if key[0] not in present]:
                del table[key]
        for node in [node for node in self._run_ends if node and node not in present]:
            del self._run_ends[node]
        if any(node in present for node in self._node_series):  # Otherwise keep the last of them.
            for node in [node for node in self._node_series if node not in present]:
                del self._node_series[node]

    def _node_row(self, node: NodeSummary, job_phase: str) -> NodeRow:
        report = node.report
        rows: list[RankRow] = []
        if report is not None and node.first_rank >= 0:
            for worker in report.workers:
                key = (node.node, worker.local_rank)
                row = self._rank_rows.setdefault(key, RankRow())
                rows.append(row)
                # Not the reported rank, which may be that of the previous generation.
                row.rank = node.first_rank + max(0, worker.local_rank)
                row.node, row.host = node.node, node.host
                for name in REPORTED:
                    setattr(row, name, getattr(worker, name))
                samples = self._samples.setdefault(key, _Samples())
                now_s = report.elapsed_s
                if samples.pid != worker.pid:
                    samples = self._samples[key] = _Samples()
                    samples.pid = worker.pid
                    row.cpu = None
                elif worker.cpu_s >= samples.cpu_s >= 0 and now_s > samples.cpu_seen_s:
                    row.cpu = (worker.cpu_s - samples.cpu_s) / (now_s - samples.cpu_seen_s)
                samples.cpu_s, samples.cpu_seen_s = worker.cpu_s, now_s
                if worker.step >= 0:
                    samples.add(now_s - max(0.0, worker.step_age_s), worker.step)
                row.rate = samples.rate(now_s) if worker.pid else None
        elif node.first_rank >= 0:
            rows = [self._silent_row(node, at) for at in range(node.size)]
        return NodeRow(
            node=node.node,
            host=node.host,
            address=node.address,
            state=state_of(node, job_phase),
            node_rank=node.rank,
            drained=node.drained,
            ranks=rows,
            ranks_text=format_ranges(row.rank for row in rows),
            size=node.size,
            running=sum(row.state == "running" for row in rows),
            generation=report.generation if report is not None else node.generation,
            gpu=report.gpu if report is not None and report.gpus else None,
        )

    def _silent_row(self, node: NodeSummary, local_rank: int) -> RankRow:
        """Return a rank of a node that has not reported."""
        row = self._rank_rows.setdefault((node.node, local_rank), RankRow())
        row.rank, row.local_rank = node.first_rank + local_rank, local_rank
        row.node, row.host, row.state = node.node, node.host, node.phase
        return row

    def _mark(self, rows: list[RankRow]) -> None:
        for row in self.ranks:
            row.mark, row.lag = "", 0
        furthest = max((row.step for row in rows), default=-1)
        rates = [row.rate for row in rows if row.rate]
        median = statistics.median(rates) if rates else 0.0
        can_be_slow = sum(row.rate is not None for row in rows) >= SLOW_RANKS_MIN
        behind = max(BEHIND_STEPS, BEHIND_S * median)
        for row in rows:
            row.lag = furthest - row.step if row.step >= 0 else 0
            if row.rate == 0.0:
                row.mark = "stalled"
            elif can_be_slow and row.rate is not None and row.rate < SLOW_SHARE * median:
                row.mark = "slow"
            elif row.lag >= behind:
                row.mark = "behind"

    def _describe(self, job: JobSummary) -> None:
        reports = [one.report for one in job.nodes if one.report is not None]
        goodput = goodput_of(reports)
        rates = [row.rate for row in self.ranks if row.rate is not None]
        cpus = [row.cpu for row in self.ranks if row.cpu is not None]
        gpus = sum(one.gpus for one in reports)
        self.header = JobHeader(
            **{name: getattr(job, name) for name in SUMMARIZED},
            state=job.outcome or job.phase,
            delay="; ".join(delays_of(job)[:DELAYS_SHOWN]),
            causes=job.causes[-CAUSES_SHOWN:],
            ranks=len(self.ranks),
            running=sum(node.running for node in self.nodes),
            elapsed_s=max((one.elapsed_s for one in reports), default=0.0),
            goodput=goodput.share if goodput is not None else None,
            goodput_is_upper_bound=goodput is not None and goodput.is_upper_bound,
            **progress_of(self.ranks)._asdict(),
            rate=statistics.median(rates) if rates else None,
            measured=len(self.history_sources),
            marked=sum(bool(row.mark) for row in self.ranks),
            cpu=sum(cpus) if cpus else None,
            rss_bytes=sum(row.rss_bytes for row in self.ranks),
            gpu=sum(one.gpus * one.gpu for one in reports) / gpus if gpus else None,
        )

    def _note_generation(self, now: float, job: JobSummary) -> None:
        mark = (job.generation, job.outcome, job.why)
        if mark != self._generation_mark:
            self._generation_mark, self._generations = mark, None
        for row in self._generations or ():
            if not row.is_over and row.started_at is not None:
                row.ran_s = now - row.started_at
        if job.generation >= 0:
            self._first_seen.setdefault(job.generation, now)
        for number in sorted(self._first_seen)[:-GENERATIONS_MAX]:
            del self._first_seen[number]
        self._broken = {one for one in self._broken if one > job.generation - GENERATIONS_MAX}

    def _merged(self) -> list[Generation]:
        """Return the generations that are known, the oldest first."""
        numbers = sorted({*self._parts, *self._first_seen})[-GENERATIONS_MAX:]
        return [self._merge(number) for number in numbers]

    def _merge(self, number: int) -> Generation:
        parts = [*self._parts.get(number, {}).values()]
        if not parts:
            return Generation(number=number, started_at=self._first_seen[number])
        # A generation starts on all its nodes within the time of a message.
        start = parts[0].started_at or 0.0
        return merge([one.shifted(start - (one.started_at or start)) for one in parts])

    def _generation_row(
        self, at: int, merged: Sequence[Generation], job_end: JobEnd | None
    ) -> GenerationRow:
        one, before = merged[at], merged[at - 1] if at else None
        following = merged[at + 1] if at + 1 < len(merged) else None
        is_newest = following is None
        ending = end_of(
            one,
            following,
            RunEnd.RUNNING if job_end is None else job_end.outcome,
            "" if job_end is None else job_end.why,
        )
        how = ending.how
        if how is GenerationEnd.REGROUPED and one.number in self._broken:
            how = GenerationEnd.LOST  # No worker failed, so a node was lost.
        is_known = how is not GenerationEnd.UNKNOWN
        end = one.stopping_at if ending.is_over else None
        if (
            end is None and is_newest
        ):  # It runs, or nobody reported its end before the job was over.
            end = self.updated_at
        ran_s = None if end is None or one.started_at is None else max(0.0, end - one.started_at)
        return GenerationRow(
            number=one.number,
            started_at=one.started_at,
            ended_at=one.stopping_at,
            ran_s=ran_s,
            end=how,
            is_over=ending.is_over,
            is_charged=is_charged(one, following),
            world_size=one.world_size,
            why=one.why,
            ended_by=ending.why if is_known else "",
            stages=restart_stages(before, one),
        )


def _run_end(text: str) -> RunEnd:
    return next((one for one in RunEnd if one == text), RunEnd.LOST)


def _update_totals(node: NodeRow) -> None:
    """Set the totals of a node's ranks."""
    rows = node.ranks
    steps = [row.step for row in rows if row.step >= 0]
    rates = [row.rate for row in rows if row.rate is not None]
    cpus = [row.cpu for row in rows if row.cpu is not None]
    node.step_min, node.step_max = min(steps, default=-1), max(steps, default=-1)
    node.rate = min(rates, default=None)
    node.heartbeat_age_s = max((row.heartbeat_age_s for row in rows), default=-1.0)
    node.cpu = sum(cpus) if cpus else None
    node.rss_bytes = sum(row.rss_bytes for row in rows)
    marks = {row.mark for row in rows}
    node.mark = next((mark for mark in ("stalled", "slow", "behind") if mark in marks), "")
