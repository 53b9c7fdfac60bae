"""The model of a report: one typed, bounded value, made from the records of a job's nodes.

`describe` is pure. Its value is the JSON of `holdfast report --json`, key by key
(docs/reference/report-json.md). Generations, stages and goodput come from `control.history`. All times
are seconds since the job began, on one axis for all nodes.

**One axis.** Clocks of hosts differ, so they are not compared. A generation starts on all its nodes
within the time of a message. Each node is shifted so that the generations it shares with the first node
start together. Nodes on one machine share its clock and are not shifted.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import TYPE_CHECKING

from msgspec import Struct

from holdfast.control.history import (
    STALL_STEPS,
    Stage,
    end_of,
    merge,
    spans_of,
    useful_s,
)
from holdfast.core.supervision import StopReason
from holdfast.numa.affinity import format_ranges
from holdfast.printable import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeVar

    from holdfast.control import history
    from holdfast.observe.lifecycle import WorkerFailure
    from holdfast.views.report import records
    from holdfast.views.report.records import NodeRun

    T = TypeVar("T")

VERSION = 1
"""Raised when the meaning of a key changes, not when a key is added."""
BUCKETS = 160
"""Points of a plot, from the beginning of the job to its end."""
COVERED_MIN = 0.2
"""The share of a bucket that must be covered for a rate."""
RANKS_SHOWN = 64
"""Ranks in a plot; of more, the slowest few and the range of all."""
SLOWEST_SHOWN = 8
RANKS_MAX = 100_000
GENERATIONS_SHOWN = 500
"""Generations in a report; of more, the first and the last half."""
FAILURES_SHOWN = 200
NODES_SHOWN = 10_000
TEXTS_CHARS_MAX = 2_000_000
"""The total of all tracebacks and ends of stderr."""
LINE_CHARS_MAX = 500
TAILS_SHOWN = 16
QUIET_S = 0.5
"""A shorter time without a step is not drawn as a stall."""
STACKS = "[holdfast] stacks (pid "


class Outcome(Struct, kw_only=True):
    """How the job ended."""

    state: str
    """`succeeded`, `failed`, `stopped` (by a signal or a request), `error`, `running` or `killed`."""
    reason: str
    """One line; the first failure of a failed job."""


class Node(Struct, kw_only=True):
    """One agent."""

    name: str
    host: str
    pid: int
    folder: str
    began_s: float
    ended_s: float
    """When its record ends."""
    state: str
    """One of `NODE_STATES`, `running`, or `lost` if its record has no end."""
    reason: str
    generations: list[int]
    ranks: str
    """The ranks of its workers in its last generation."""
    clock_ahead_s: float | None
    """How far its clock was ahead of the first node's; None if unknown."""


class Span(Struct, kw_only=True):
    """A piece of the job's time."""

    stage: Stage
    from_s: float
    to_s: float
    generation: int | None


class NodeSpan(Struct, kw_only=True):
    """When workers of a generation were on a node."""

    node: str
    generation: int
    from_s: float
    to_s: float


class Generation(Struct, kw_only=True):
    """One start of all workers, and how it ended."""

    number: int
    started_s: float
    ended_s: float
    nodes: list[str]
    world_size: int
    restarts: int
    why: str
    """Why it was started, if recorded."""
    end: str
    """`succeeded`, `failed`, `lost`, `regrouped`, `stopped` or `unknown`."""
    end_reason: str
    detect_s: float | None
    stop_s: float | None
    regroup_s: float | None
    """The stages of `control.history`; None if unknown."""
    start_s: float | None
    warmup_s: float | None
    useful_s: float
    repeated_s: float
    first_step: int | None
    last_step: int | None


class Failure(Struct, kw_only=True):
    """A worker that failed."""

    generation: int
    node: str
    host: str
    rank: int
    local_rank: int
    pid: int
    exitcode: int
    at_s: float
    consequence: bool
    ending: str
    detail: str
    message: str
    traceback: str
    stderr_tail: str
    stacks: str
    """The stacks of a worker that a watchdog killed."""


class Cost(Struct, kw_only=True):
    """The total time of one stage."""

    stage: Stage
    seconds: float
    share: float


class RankSeries(Struct, kw_only=True):
    """Steps and rates of one rank at `Progress.times_s`; None while it did not run."""

    rank: int
    steps: list[int | None]
    rates: list[float | None]


class RankSummary(Struct, kw_only=True):
    """The progress of one rank."""

    rank: int
    node: str
    last_step: int
    last_step_s: float
    behind: int
    """Steps behind the fastest rank at the end."""
    rate: float
    """Steps per second in its last generation."""


class Progress(Struct, kw_only=True):
    """Steps that workers reported with `holdfast.worker.progress`."""

    times_s: list[float]
    ranks: list[RankSeries]
    """All ranks, or the slowest of many."""
    rate_min: list[float | None]
    rate_median: list[float | None]
    rate_max: list[float | None]
    step_min: list[int | None]
    step_max: list[int | None]
    heat: list[list[float | None]]
    """Rates relative to the median at that time: a row for each of `heat_ranks`."""
    heat_ranks: list[str]
    """A rank, or a range of ranks, whose row is that of the slowest."""
    slowest: list[RankSummary]
    reporting: int


class Tail(Struct, kw_only=True):
    """The end of a worker's output, in a job without a recorded end."""

    rank: int
    node: str
    stream: str
    text: str


class Report(Struct, kw_only=True):
    """One job."""

    version: int = VERSION
    run_id: str
    program: str
    outcome: Outcome
    began: str
    """ISO 8601, UTC, by the first node's clock."""
    duration_s: float
    goodput: float
    measure: str
    """`progress`, or `running` if goodput is an upper bound."""
    restarts: int
    max_restarts: int
    world_size: int
    """The number of workers of the last generation."""
    costs: list[Cost]
    spans: list[Span]
    generations: list[Generation]
    nodes: list[Node]
    node_spans: list[NodeSpan]
    failures: list[Failure]
    progress: Progress | None
    tails: list[Tail]
    environment: dict[str, str]
    notes: list[str]
    """What is missing, and how clocks were aligned."""


NODE_STATES = ("succeeded", "failed", "stopped", "error", "standby")


def describe(nodes: Sequence[NodeRun], skipped_jobs: int = 0) -> Report:
    """Return the report of one job, from the records of some or all of its nodes."""
    return _Description(nodes, skipped_jobs).report()


class _Axis:
    """The times of all nodes on one axis, in seconds from the beginning of the job."""

    def __init__(self, nodes: Sequence[NodeRun]) -> None:
        # The node with the most generations; the first to start among equals.
        self.first = max(nodes, key=lambda node: (len(node.generations), -node.run.wall))
        self._shifts: dict[int, float] = {}
        self.ahead: dict[int, float | None] = {}
        for node in nodes:
            self._shifts[id(node)], self.ahead[id(node)] = self._shift_of(node)
        self.zero = min(node.run.wall + self._shifts[id(node)] for node in nodes)

    def _shift_of(self, node: NodeRun) -> tuple[float, float | None]:
        """Return the offset of a node's time of day, and how far it is ahead, if known."""
        first = self.first
        if node is first:
            return 0.0, 0.0
        if node.host.boot and node.host.boot == first.host.boot:
            return first.wall(node.run.at) - node.run.wall, 0.0
        common = [
            first.wall(known.started_at or 0.0) - node.wall(one.started_at or 0.0)
            for number, one in node.generations.items()
            if (known := first.generations.get(number)) and one.fence == known.fence > 0
        ]
        if not common:
            return 0.0, None
        shift = statistics.median(common)
        return shift, -shift

    def offset(self, node: NodeRun) -> float:
        """Return what to add to a node's monotonic clock."""
        return node.run.wall - node.run.at + self._shifts[id(node)] - self.zero

    def of(self, node: NodeRun, at: float) -> float:
        """Return a time of a node's monotonic clock on the axis."""
        return self.of_wall(node, node.wall(at))

    def of_wall(self, node: NodeRun, wall: float) -> float:
        return max(0.0, wall + self._shifts[id(node)] - self.zero)


class _Merged:
    """One generation over all its nodes, on the axis."""

    def __init__(self, number: int, axis: _Axis, nodes: Sequence[NodeRun]) -> None:
        self.number = number
        self.axis = axis
        self.nodes = nodes
        self.parts = [(node, node.details[number]) for node in nodes]
        self.history = merge([self.part(node) for node in nodes])
        self.samples: dict[int, list[tuple[float, int]]] = {}
        self.node_of: dict[int, str] = {}
        self.exits = {
            end.worker.global_rank: axis.of(node, end.at)
            for node, part in self.parts
            for end in part.exits
        }
        for node, part in self.parts:
            for worker in part.started.workers:
                self.node_of[worker.global_rank] = node.run.node
            for rank, found in part.samples.items():
                self.samples[rank] = [(axis.of(node, at), step) for at, step in found]

    def part(self, node: NodeRun) -> history.Generation:
        """Return the generation as a node saw it."""
        return node.generations[self.number].shifted(self.axis.offset(node))

    @property
    def lost(self) -> list[NodeRun]:
        """The nodes whose record ends in this generation."""
        return [
            node
            for node, part in self.parts
            if node.end is None
            and node.generations[self.number].stopped_at is None
            and part is node.last
        ]

    def failures(self) -> list[tuple[NodeRun, WorkerFailure]]:
        found = [(node, one) for node, part in self.parts for one in part.failures]
        found.sort(key=lambda item: (item[1].consequence, self.happened(*item)))
        return found

    def happened(self, node: NodeRun, one: WorkerFailure) -> float:
        return self.axis.of_wall(node, one.wall)


class _Description:
    """Derives the report from the records, step by step."""

    def __init__(self, nodes: Sequence[NodeRun], skipped_jobs: int) -> None:
        self.nodes = sorted(nodes, key=_place_of)
        self.axis = _Axis(nodes)
        self.notes: list[str] = []
        self.skipped_jobs = skipped_jobs
        numbers = sorted({number for node in nodes for number in node.generations})
        self.merged = [
            _Merged(number, self.axis, [node for node in nodes if number in node.generations])
            for number in numbers
        ]
        for one, following in pairwise([*self.merged, None]):
            assert one is not None
            is_smaller = (
                following is not None
                and following.history.restarts == one.history.restarts
                and following.history.nodes < one.history.nodes > len(one.nodes)
            )  # No record of the missing node is here.
            one.history.is_lost = bool(one.lost) or is_smaller
        self.uses_steps = any(one.history.has_steps for one in self.merged)
        self.end_s = max(self._end_of(node) for node in nodes)
        self.spans = spans_of(
            [one.history for one in self.merged], 0.0, self.end_s, by_steps=self.uses_steps
        )
        self.generations = [self._generation(at) for at in range(len(self.merged))]
        self.texts_left = TEXTS_CHARS_MAX

    def _end_of(self, node: NodeRun) -> float:
        end = self.axis.of(node, node.last_at)
        if node.end is None and node.last_output_wall is not None:
            end = max(end, self.axis.of_wall(node, node.last_output_wall))
        return end

    def report(self) -> Report:
        run = self.axis.first.run
        costs = self._costs()
        outcome = self._outcome()
        failures = self._failures()
        self._note_what_is_missing(outcome)
        node_spans = [self._node_span(one, node) for one in self.merged for node in one.nodes]
        return Report(
            run_id=run.run_id,
            program=run.program,
            outcome=outcome,
            began=_iso(self.axis.zero),
            duration_s=_round(self.end_s),
            goodput=_round(useful_s(self.spans) / self.end_s) if self.end_s > 0 else 0.0,
            measure="progress" if self.uses_steps else "running",
            restarts=max((one.restarts for one in self.generations), default=0),
            max_restarts=run.max_restarts,
            world_size=self.generations[-1].world_size if self.generations else 0,
            costs=costs,
            spans=[_span(one) for one in _ends_of(self.spans, GENERATIONS_SHOWN * 8)],
            generations=_ends_of(self.generations, GENERATIONS_SHOWN),
            nodes=[self._node(node) for node in self.nodes[:NODES_SHOWN]],
            node_spans=_ends_of(node_spans, GENERATIONS_SHOWN * 100),
            failures=failures,
            progress=self._progress(),
            tails=self._tails() if outcome.state in ("killed", "running") else [],
            environment=self._environment(),
            notes=self.notes,
        )

    # Generations and spans.

    def _generation(self, at: int) -> Generation:
        merged = self.merged[at]
        one = merged.history
        following = self.merged[at + 1] if at + 1 < len(self.merged) else None
        spans = [span for span in self.spans if span.generation == one.number]
        end, end_reason = self._end_of_generation(merged, following)

        def stage_s(stage: Stage) -> float | None:
            return _rounded(one.stages.get(stage))

        def spent_s(stage: Stage) -> float:
            return _round(sum(span.end - span.begin for span in spans if span.stage is stage))

        return Generation(
            number=one.number,
            started_s=_round(one.started_at or 0.0),
            ended_s=_round(spans[-1].end if spans else one.started_at or 0.0),
            nodes=[node.run.node for node in merged.nodes][:NODES_SHOWN],
            world_size=one.world_size,
            restarts=one.restarts,
            why=_first_line(one.why),
            end=end,
            end_reason=end_reason,
            detect_s=stage_s(Stage.DETECT),
            stop_s=stage_s(Stage.STOP),
            regroup_s=stage_s(Stage.REGROUP),
            start_s=stage_s(Stage.START),
            warmup_s=stage_s(Stage.WARMUP),
            useful_s=spent_s(Stage.USEFUL),
            repeated_s=spent_s(Stage.REPEATED),
            first_step=one.first_step,
            last_step=one.last_step,
        )

    def _end_of_generation(self, one: _Merged, following: _Merged | None) -> tuple[str, str]:
        """Return how a generation ended, and why, in words."""
        end, reason = end_of(one.history, following.history if following is not None else None)
        causes = [(node, failed) for node, failed in one.failures() if not failed.consequence]
        if end == "stopped":
            return end, reason
        if causes:
            node, first = causes[0]
            return "failed", _summary(node.host.name, first)
        if following is not None:
            if end == "lost" and one.lost and not following.history.why:
                reason = f"node {one.lost[0].run.node} was lost"
            return end, _first_line(reason)
        ends = {node.end_state for node in one.nodes if node.end is not None}
        if "succeeded" in ends and "failed" not in ends:
            return "succeeded", one.history.reason or StopReason.SUCCEEDED.value
        final = self._final()
        if final is not None and one.history.reason:
            return "failed", _summary(final.first.host, final.first.failure)
        return end, _first_line(reason)

    def _node_span(self, one: _Merged, node: NodeRun) -> NodeSpan:
        part = one.part(node)
        begun = part.started_at or 0.0
        end = self._end_of(node)
        later = [number for number in node.generations if number > one.number]
        if part.stopped_at is not None:
            end = part.stopped_at
        elif later:
            following = node.generations[min(later)]
            end = self.axis.of(node, following.started_at or 0.0)
        elif one is not self.merged[-1]:
            # The node was lost: it may have run until the others noticed.
            end = max(end, one.history.stopping_at or end)
        return NodeSpan(
            node=node.run.node,
            generation=one.number,
            from_s=_round(begun),
            to_s=_round(max(begun, end)),
        )

    def _costs(self) -> list[Cost]:
        seconds = dict.fromkeys(Stage, 0.0)
        for span in self.spans:
            seconds[span.stage] += span.end - span.begin
        whole = self.end_s or 1.0
        return [
            Cost(stage=stage, seconds=_round(took), share=_round(took / whole))
            for stage, took in seconds.items()
        ]

    # The end of the job.

    def _outcome(self) -> Outcome:
        ends = [node.end for node in self.nodes if node.end is not None]
        states = [node.end_state for node in self.nodes if node.end is not None]
        last = self.generations[-1] if self.generations else None
        if "failed" in states:
            final = self._final()
            reason = last.end_reason if last is not None and last.end == "failed" else ""
            if final is not None and (not reason or not self._has_failure(final)):
                reason = _summary(final.first.host, final.first.failure)
            return Outcome(state="failed", reason=reason or "workers failed")
        if "succeeded" in states:
            gone = sum(node.end is None for node in self.nodes)
            more = f"; {gone} {'node was' if gone == 1 else 'nodes were'} lost" if gone else ""
            return Outcome(state="succeeded", reason=f"all workers succeeded{more}")
        for state in ("stopped", "error", "standby"):
            reasons = [
                _error_line(end.error) for end in ends if (end.state or end.cut_short) == state
            ]
            if reasons:
                return Outcome(
                    state="stopped" if state == "stopped" else "error", reason=reasons[0]
                )
        if any(node.is_alive for node in self.nodes):
            return Outcome(
                state="running", reason="the job was running when this report was written"
            )
        return Outcome(
            state="killed",
            reason="no end is recorded: its agents were killed, or run on other machines",
        )

    def _final(self) -> records.FinalReport | None:
        return next((node.final for node in self.nodes if node.final is not None), None)

    def _has_failure(self, final: records.FinalReport) -> bool:
        wanted = (final.first.rank, final.first.pid)
        return any(
            (failed.global_rank, failed.pid) == wanted
            for one in self.merged[-1:]
            for _, failed in one.failures()
        )

    # Failures.

    def _failures(self) -> list[Failure]:
        found = [
            self._failure(
                one.number, node.run.node, node.host.name, one.happened(node, failed), failed
            )
            for one in self.merged
            for node, failed in one.failures()
        ]
        final = self._final()
        if final is not None and self.merged and not self._has_failure(final):
            first = self.axis.first
            at = self.axis.of_wall(first, final.first.time_ns / 1e9)
            number = self.merged[-1].number
            found.append(self._failure(number, "", final.first.host, at, final.first.failure))
        if len(found) > FAILURES_SHOWN:
            causes = [one for one in found if not one.consequence]
            rest = [one for one in found if one.consequence]
            found = _ends_of(causes, FAILURES_SHOWN)
            found += rest[: FAILURES_SHOWN - len(found)]
            self.notes.append(f"Of {len(causes) + len(rest)} failures {len(found)} are shown.")
        found.sort(key=lambda one: (one.generation, one.consequence, one.at_s))
        return found

    def _failure(self, number: int, node: str, host: str, at: float, one: WorkerFailure) -> Failure:
        before, mark, stacks = one.stderr_tail.rpartition(STACKS)
        return Failure(
            generation=number,
            node=node,
            host=host,
            rank=one.global_rank,
            local_rank=one.local_rank,
            pid=one.pid,
            exitcode=one.exit_code,
            at_s=_round(min(at, self.end_s)),
            consequence=one.consequence,
            ending=_first_line(one.ending),
            detail=one.detail[:LINE_CHARS_MAX],
            message=self._text(one.message),
            traceback=self._text(one.traceback),
            stderr_tail=self._text(before if mark else one.stderr_tail),
            stacks=self._text(mark + stacks) if mark else "",
        )

    def _text(self, text: str) -> str:
        """Return the end of a text that still fits into the report."""
        text = text[-self.texts_left :] if self.texts_left else ""
        self.texts_left -= len(text)
        return text

    def _tails(self) -> list[Tail]:
        found = [
            Tail(rank=rank, node=node.run.node, stream=stream, text=self._text(text))
            for node in self.nodes
            for (rank, stream), text in node.tails.items()
        ]
        found.sort(key=lambda tail: (tail.stream != "stderr", tail.rank))
        return found[:TAILS_SHOWN]

    # Nodes and what they run on.

    def _node(self, node: NodeRun) -> Node:
        state, reason = "lost", "its record has no end"
        if node.is_alive:
            state, reason = "running", ""
        elif node.end is not None:
            state = node.end_state if node.end_state in NODE_STATES else "ended"
            reason = _error_line(node.end.error)
        last = node.last
        return Node(
            name=node.run.node,
            host=node.host.name,
            pid=node.host.pid,
            folder=node.folder,
            began_s=_round(self.axis.of_wall(node, node.run.wall)),
            ended_s=_round(self._end_of(node)),
            state=state,
            reason=reason,
            generations=sorted(node.generations)[-GENERATIONS_SHOWN:],
            ranks=format_ranges(one.global_rank for one in last.started.workers) if last else "",
            clock_ahead_s=_rounded(self.axis.ahead[id(node)]),
        )

    def _environment(self) -> dict[str, str]:
        runs = [node.run for node in self.nodes]
        hosts = [node.host for node in self.nodes]
        facts = {
            "Holdfast": [host.holdfast for host in hosts],
            "Python": [host.python for host in hosts],
            "system": [host.system for host in hosts],
            "CPUs of a host": [str(host.cpus) for host in hosts],
            "workers of a node": [str(run.local_world_size) for run in runs],
            "rendezvous": [run.backend for run in runs],
            "role": [run.role for run in runs],
        }
        return {key: ", ".join(_most_common(values)) for key, values in facts.items()}

    def _note_what_is_missing(self, outcome: Outcome) -> None:
        notes = self.notes
        expected = max((one.history.nodes for one in self.merged), default=0)
        there = max((len(one.parts) for one in self.merged), default=0)
        if expected > there:
            notes.append(
                f"The job had up to {expected} nodes, and this report covers the folders of {there}. "
                "Of the other nodes it has only what these knew."
            )
        shifted = [
            ahead
            for node in self.nodes
            if (ahead := self.axis.ahead[id(node)]) and abs(ahead) > 1e-3
        ]
        if shifted:
            notes.append(
                f"Clocks of hosts are not compared. {len(shifted)} nodes are shifted by up to "
                f"{max(map(abs, shifted)):.3f} s, so that shared generations start together."
            )
        unknown = sum(self.axis.ahead[id(node)] is None for node in self.nodes)
        if unknown:
            notes.append(
                f"{unknown} nodes share no generation with the first node. Their times are those of "
                "their own clocks."
            )
        unreadable = sum(node.unreadable for node in self.nodes)
        if unreadable:
            notes.append(f"{unreadable} lines of the timelines are not readable.")
        if any(node.is_cut for node in self.nodes):
            notes.append("The middle of a timeline that is too long is left out.")
        if any(one.history.goes_back for one in self.merged):
            notes.append(
                "Step numbers decrease within a generation, so they do not show what was repeated "
                "after a restart."
            )
        if any(one.end == "lost" for one in self.generations):
            notes.append(
                "The time of a lost node's death is not recorded. The time until its loss was "
                "detected counts as useful."
            )
        if outcome.state == "killed":
            notes.append("The job ends with the last entry in these folders.")
        if self.skipped_jobs:
            notes.append(f"These folders have {self.skipped_jobs} other jobs; this is the newest.")

    # Progress.

    def _progress(self) -> Progress | None:
        if not self.uses_steps or self.end_s <= 0:
            return None
        width = self.end_s / BUCKETS
        times = [width * (at + 1) for at in range(BUCKETS)]
        ranks = sorted({rank for one in self.merged for rank in one.samples})[:RANKS_MAX]
        series = {rank: self._series(rank, width) for rank in ranks}
        rates = [[series[rank].rates[at] for rank in ranks] for at in range(BUCKETS)]
        known = [sorted(rate for rate in column if rate is not None) for column in rates]
        steps = [
            [step for rank in ranks if (step := series[rank].steps[at]) is not None]
            for at in range(BUCKETS)
        ]
        summaries = self._summaries()
        shown = ranks
        if len(ranks) > RANKS_SHOWN:
            shown = sorted(one.rank for one in summaries[:SLOWEST_SHOWN])
        median = [_rounded(column[len(column) // 2]) if column else None for column in known]
        usual = [*median]
        for at, column in enumerate(known):
            if at and 0 < 2 * len(column) < len(
                ranks
            ):  # If few ranks run, they are compared with the previous median.
                usual[at] = usual[at - 1] or usual[at]
        heat, heat_ranks = _heat(ranks, series, usual)
        return Progress(
            times_s=[_round(at) for at in times],
            ranks=[series[rank] for rank in shown],
            rate_min=[_rounded(column[0]) if column else None for column in known],
            rate_median=median,
            rate_max=[_rounded(column[-1]) if column else None for column in known],
            step_min=[min(column, default=None) for column in steps],
            step_max=[max(column, default=None) for column in steps],
            heat=heat,
            heat_ranks=heat_ranks,
            slowest=summaries[:SLOWEST_SHOWN],
            reporting=len(ranks),
        )

    def _series(self, rank: int, width: float) -> RankSeries:
        steps: list[int | None] = [None] * BUCKETS
        made, ran = [0.0] * BUCKETS, [0.0] * BUCKETS
        for one in self.merged:
            found = one.samples.get(rank)
            if not found:
                continue
            # A point for each sample, at the end of its bucket.
            for at, step in found:
                steps[min(BUCKETS - 1, int(at / width))] = step
            for (from_s, low), (to_s, high) in pairwise(found):
                if to_s > from_s:
                    rate = max(0, high - low) / (to_s - from_s)
                    _spread(made, ran, from_s, to_s, rate, width)
            first, last = int(found[0][0] / width), min(BUCKETS - 1, int(found[-1][0] / width))
            for at in range(first + 1, last + 1):
                if steps[at] is None:
                    steps[at] = steps[at - 1]
            # Whether it stalled or only works on its next step depends on the usual time of one.
            over = one.exits.get(rank, one.history.stopping_at or self.end_s)
            quiet = over - found[-1][0]
            if quiet > max(STALL_STEPS * one.history.step_s, QUIET_S, width):
                _spread(made, ran, found[-1][0], over, 0.0, width)
                for at in range(last + 1, min(BUCKETS, int(over / width) + 1)):
                    steps[at] = steps[at - 1]
        rates = [
            _round(count / time_s) if time_s > COVERED_MIN * width else None
            for count, time_s in zip(made, ran, strict=True)
        ]
        return RankSeries(rank=rank, steps=steps, rates=rates)

    def _summaries(self) -> list[RankSummary]:
        """Return how far each rank of the last generation is, the slowest first."""
        with_steps = [one for one in self.merged if one.samples]
        if not with_steps:
            return []
        last = with_steps[-1]
        farthest = max(found[-1][1] for found in last.samples.values())
        summaries = []
        for rank, found in last.samples.items():
            took = found[-1][0] - found[0][0]
            summaries.append(
                RankSummary(
                    rank=rank,
                    node=last.node_of.get(rank, ""),
                    last_step=found[-1][1],
                    last_step_s=_round(found[-1][0]),
                    behind=farthest - found[-1][1],
                    rate=_round((found[-1][1] - found[0][1]) / took) if took > 0 else 0.0,
                )
            )
        summaries.sort(key=lambda one: (-one.behind, one.rate, one.rank))
        return summaries


def _span(one: history.Span) -> Span:
    return Span(
        stage=one.stage, from_s=_round(one.begin), to_s=_round(one.end), generation=one.generation
    )


def _place_of(node: NodeRun) -> tuple[float, float]:
    last = node.last
    rank = last.started.group_rank if last is not None else None
    return (float("inf") if rank is None else rank, node.run.wall)


def _spread(
    made: list[float], ran: list[float], from_s: float, to_s: float, rate: float, width: float
) -> None:
    """Add steps of one rate, and their time, to the buckets that they cover."""
    for at in range(int(from_s / width), min(BUCKETS - 1, int(to_s / width)) + 1):
        inside = min(to_s, (at + 1) * width) - max(from_s, at * width)
        if inside > 0:
            made[at] += rate * inside
            ran[at] += inside


def _heat(
    ranks: list[int], series: dict[int, RankSeries], median: list[float | None]
) -> tuple[list[list[float | None]], list[str]]:
    """Return rates relative to the median, a row for each group of ranks."""
    together = -(-len(ranks) // RANKS_SHOWN)
    heat, names = [], []
    for first in range(0, len(ranks), together):
        group = ranks[first : first + together]
        row: list[float | None] = []
        for at, usual in enumerate(median):
            rates = [rate for rank in group if (rate := series[rank].rates[at]) is not None]
            row.append(_round(min(rates) / usual) if rates and usual else None)
        heat.append(row)
        names.append(format_ranges(group))
    return heat, names


def _summary(host: str, one: WorkerFailure) -> str:
    why = one.detail or one.message or _last_line(one.traceback)
    who = f"rank {one.global_rank} on {host} failed: {one.ending}"
    return _first_line(f"{who}: {_first_line(why)}" if why.strip() else who)


def _first_line(text: str) -> str:
    return one_line(text.strip().partition("\n")[0], LINE_CHARS_MAX)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _error_line(error: str) -> str:
    """Return the message of a traceback, without the name of the class."""
    head, colon, rest = _last_line(error).partition(": ")
    return _first_line(rest if colon and " " not in head else head + colon + rest)


def _most_common(values: list[str], shown: int = 3) -> list[str]:
    counts = {value: values.count(value) for value in dict.fromkeys(values)}
    ordered = sorted(counts, key=lambda value: -counts[value])
    if len(ordered) == 1:
        return ordered
    listed = [f"{value} ({counts[value]} nodes)" for value in ordered[:shown]]
    return [*listed, *(["..."] if len(ordered) > shown else [])]


def _ends_of(items: list[T], limit: int) -> list[T]:
    """Return a list, or its beginning and its end if it exceeds the limit."""
    return items if len(items) <= limit else items[: limit // 2] + items[-(limit // 2) :]


def _iso(wall: float) -> str:
    whole = int(wall)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{int((wall - whole) * 1000):03d}Z"


def _round(value: float) -> float:
    return round(value, 4)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
