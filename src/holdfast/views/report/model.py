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
from collections import Counter
from typing import TYPE_CHECKING

from msgspec import Struct

from holdfast.control.history import (
    GenerationEnd,
    NodeEnd,
    RunEnd,
    Stage,
    end_of,
    error_line,
    goodput_of,
    job_end,
    merge,
    node_end,
    note_unrecorded,
    seconds_of,
    spans_of,
    workers_ended_at,
)
from holdfast.control.step_rates import Samples, StepProgress, progress_of
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
"""Increased when the meaning of a key changes, not when a key is added."""
GENERATIONS_SHOWN = 500
"""The limit of generations in a report. Beyond it, the ones in the middle are omitted."""
FAILURES_SHOWN = 200
NODES_SHOWN = 10_000
TEXTS_CHARS_MAX = 2_000_000
"""The total of all tracebacks and ends of stderr."""
LINE_CHARS_MAX = 500
TAILS_SHOWN = 16
NODES_NAMED = 16
"""How many of the nodes without a folder are named."""
STACKS = "[holdfast] stacks (pid "


class OutcomeEntry(Struct, kw_only=True):
    """How the job ended."""

    state: str
    """`succeeded`, `failed`, `stopped` (by signals or a request), `left`, `error`, `standby`, `running` or `lost`."""
    reason: str
    """One line; the first failure of a failed job."""


class NodeEntry(Struct, kw_only=True):
    """One agent."""

    name: str
    host: str
    pid: int
    folder: str
    began_s: float
    ended_s: float
    """When its record ends."""
    state: str
    """A `RunEnd`."""
    reason: str
    generations: list[int]
    ranks: str
    """The ranks of its workers in its last generation."""
    clock_ahead_s: float | None
    """How far its clock was ahead of the first node's; None if unknown."""


class SpanEntry(Struct, kw_only=True):
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


class GenerationEntry(Struct, kw_only=True):
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
    """A `GenerationEnd`."""
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


class FailureEntry(Struct, kw_only=True):
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


class StageCost(Struct, kw_only=True):
    """The total time of one stage."""

    stage: Stage
    seconds: float
    share: float


class OutputTail(Struct, kw_only=True):
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
    outcome: OutcomeEntry
    began: str
    """ISO 8601, UTC, by the first node's clock."""
    duration_s: float
    goodput: float | None
    """None if no workers were started."""
    measure: str
    """`progress`, or `running` if goodput is an upper bound."""
    restarts: int
    max_restarts: int
    world_size: int
    """The number of workers of the last generation."""
    costs: list[StageCost]
    spans: list[SpanEntry]
    generations: list[GenerationEntry]
    nodes: list[NodeEntry]
    node_spans: list[NodeSpan]
    failures: list[FailureEntry]
    progress: StepProgress | None
    tails: list[OutputTail]
    environment: dict[str, str]
    notes: list[str]
    """What is missing, and how clocks were aligned."""


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
        return self.axis_time_of_wall(node, node.wall(at))

    def axis_time_of_wall(self, node: NodeRun, wall: float) -> float:
        return max(0.0, wall + self._shifts[id(node)] - self.zero)


class _Merged:
    """One generation over all its nodes, on the axis."""

    def __init__(self, number: int, axis: _Axis, nodes: Sequence[NodeRun]) -> None:
        self.number = number
        self.axis = axis
        self.nodes = nodes
        self.parts = [(node, node.details[number]) for node in nodes]
        self.members = max((part.started.members for _, part in self.parts), key=len)
        """The nodes by rank; empty if unknown."""
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
    def unrecorded(self) -> list[str]:
        """The nodes of the generation that have no record in this report, if their names are known."""
        known = {node.run.node for node in self.nodes}
        return [name for name in self.members if name not in known]

    def lost(self, following: _Merged) -> list[str]:
        """Return the nodes whose record ends here; if none, those without a record that are not in the next generation."""
        lost = [node.run.node for node in self.nodes if node.generations[self.number].is_lost]
        if not lost and following.members:
            lost = [name for name in self.unrecorded if name not in following.members]
        return lost

    def steps(self, end_s: float) -> Samples:
        """Return the samples of all ranks."""
        over = self.history.stopping_at or end_s
        ended = {rank: self.exits.get(rank, over) for rank in self.samples}
        return Samples(self.samples, ended, self.node_of, self.history.step_s)

    def failures(self) -> list[tuple[NodeRun, WorkerFailure]]:
        found = [(node, one) for node, part in self.parts for one in part.failures]
        found.sort(key=lambda item: (item[1].consequence, self.failed_at(*item)))
        return found

    def failed_at(self, node: NodeRun, one: WorkerFailure) -> float:
        return self.axis.axis_time_of_wall(node, one.wall)


class _Description:
    """Derives the report from the records, step by step."""

    def __init__(self, nodes: Sequence[NodeRun], skipped_jobs: int) -> None:
        self.nodes = sorted(nodes, key=_sort_key)
        self.axis = _Axis(nodes)
        self.notes: list[str] = []
        self.skipped_jobs = skipped_jobs
        numbers = sorted({number for node in nodes for number in node.generations})
        self.merged = [
            _Merged(number, self.axis, [node for node in nodes if number in node.generations])
            for number in numbers
        ]
        note_unrecorded(
            [one.history for one in self.merged], [len(one.nodes) for one in self.merged]
        )
        self.uses_steps = any(one.history.has_steps for one in self.merged)
        self.end_s = max(self._end_of(node) for node in nodes)
        ends = {
            id(node): NodeEnd(node.run_end, max(node.generations, default=-1), self._end_of(node))
            for node in nodes
        }
        newest = self.merged[-1].history if self.merged else None
        self.job_end = job_end([*ends.values()], newest.nodes if newest is not None else 0)
        self.node_ends = {
            node: node_end(end, self.job_end, newest.number if newest is not None else -1)
            for node, end in ends.items()
        }
        self.spans = spans_of(
            [one.history for one in self.merged], 0.0, self.end_s, by_steps=self.uses_steps
        )
        self.spans_of: dict[int | None, list[history.Span]] = {}
        for span in self.spans:
            self.spans_of.setdefault(span.generation, []).append(span)
        self.generations = [self._generation(at) for at in range(len(self.merged))]
        self.texts_left = TEXTS_CHARS_MAX

    def _end_of(self, node: NodeRun) -> float:
        return self.axis.of(node, node.until)

    def report(self) -> Report:
        run = self.axis.first.run
        costs = seconds_of(self.spans)
        goodput = goodput_of(node.history.time(node.until) for node in self.nodes)
        outcome = self._outcome()
        failures = self._failures()
        self._note_missing_data(outcome)
        node_spans = self._node_spans()
        return Report(
            run_id=run.run_id,
            program=run.program,
            outcome=outcome,
            began=_iso(self.axis.zero),
            duration_s=_round(self.end_s),
            goodput=_rounded(goodput.share if goodput is not None else None),
            measure="running" if goodput is None or goodput.is_upper_bound else "progress",
            restarts=max((one.restarts for one in self.generations), default=0),
            max_restarts=run.max_restarts,
            world_size=self.generations[-1].world_size if self.generations else 0,
            costs=[
                StageCost(
                    stage=stage, seconds=_round(took), share=_round(took / (self.end_s or 1.0))
                )
                for stage, took in costs.items()
            ],
            spans=[_span(one) for one in _ends_of(self.spans, GENERATIONS_SHOWN * 8)],
            generations=_ends_of(self.generations, GENERATIONS_SHOWN),
            nodes=[self._node(node) for node in self.nodes[:NODES_SHOWN]],
            node_spans=_ends_of(node_spans, GENERATIONS_SHOWN * 100),
            failures=failures,
            progress=self._progress(),
            tails=self._tails() if outcome.state in ("lost", "running") else [],
            environment=self._environment(),
            notes=self.notes,
        )

    # Generations and spans.

    def _generation(self, at: int) -> GenerationEntry:
        merged = self.merged[at]
        one = merged.history
        following = self.merged[at + 1] if at + 1 < len(self.merged) else None
        spans = self.spans_of.get(one.number, [])
        spent_s = seconds_of(spans)
        end, end_reason = self._end_of_generation(merged, following)

        def stage_s(stage: Stage) -> float | None:
            return _rounded(one.stages.get(stage))

        return GenerationEntry(
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
            useful_s=_round(spent_s[Stage.USEFUL]),
            repeated_s=_round(spent_s[Stage.REPEATED]),
            first_step=one.first_step,
            last_step=one.last_step,
        )

    def _end_of_generation(self, one: _Merged, following: _Merged | None) -> tuple[str, str]:
        """Return how a generation ended, and why, in more words than the history has."""
        later = following.history if following is not None else None
        end, reason = end_of(one.history, later, self.job_end)
        causes = [(node, failed) for node, failed in one.failures() if not failed.consequence]
        if end is GenerationEnd.FAILED and causes:
            node, first = causes[0]
            return end, _summary(node.host.name, first)
        final = self._final()
        if end is GenerationEnd.FAILED and following is None and final is not None:
            return end, _summary(final.first.host, final.first.failure)
        if end is GenerationEnd.LOST and following is not None and not following.history.why:
            lost = one.lost(following)
            reason = f"node {lost[0]} was lost" if lost else reason
        return end, _first_line(reason)

    def _node_spans(self) -> list[NodeSpan]:
        """Return when workers were on each node, in the order of the generations."""
        spans = []
        following: dict[int, _Merged] = {}  # The next generation of each node.
        for one in reversed(self.merged):
            for node in reversed(one.nodes):
                spans.append(self._node_span(one, node, following.get(id(node))))
                following[id(node)] = one
        return spans[::-1]

    def _node_span(self, one: _Merged, node: NodeRun, following: _Merged | None) -> NodeSpan:
        part = one.part(node)
        begun = part.started_at or 0.0
        later = following.part(node) if following is not None else None
        is_newest = one is self.merged[-1]
        end = workers_ended_at(part, later, None if is_newest else one.history, self._end_of(node))
        return NodeSpan(
            node=node.run.node,
            generation=one.number,
            from_s=_round(begun),
            to_s=_round(max(begun, end)),
        )

    # The end of the job.

    def _outcome(self) -> OutcomeEntry:
        last = self.generations[-1] if self.generations else None
        match self.job_end:
            case RunEnd.FAILED:
                final = self._final()
                reason = last.end_reason if last is not None and last.end == "failed" else ""
                if final is not None and (not reason or not self._has_failure(final)):
                    reason = _summary(final.first.host, final.first.failure)
                return OutcomeEntry(state="failed", reason=reason or "workers failed")
            case RunEnd.SUCCEEDED:
                ends = [*self.node_ends.values()]
                left = _of_nodes("; {} left the job", ends.count(RunEnd.LEFT))
                lost = _of_nodes("; lost {}", ends.count(RunEnd.LOST))
                return OutcomeEntry(state="succeeded", reason=f"all workers succeeded{left}{lost}")
            case RunEnd.RUNNING:
                return OutcomeEntry(
                    state="running", reason="the job was running when this report was written"
                )
            case RunEnd.LOST:
                return OutcomeEntry(
                    state="lost",
                    reason="no end is recorded: its agents were killed, or run on other machines",
                )
        one = max(
            (one for one in self.nodes if self.node_ends[id(one)] is self.job_end), key=self._end_of
        )
        reason = _first_line(error_line(one.end.error)) if one.end is not None else ""
        if self.job_end is RunEnd.LEFT:
            reason = (
                f"{one.run.node or one.host.name} left the job: {reason}; no folder shows its end"
            )
        return OutcomeEntry(state=self.job_end, reason=reason)

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

    def _failures(self) -> list[FailureEntry]:
        found = [
            self._failure(
                one.number, node.run.node, node.host.name, one.failed_at(node, failed), failed
            )
            for one in self.merged
            for node, failed in one.failures()
        ]
        final = self._final()
        if final is not None and self.merged and not self._has_failure(final):
            first = self.axis.first
            at = self.axis.axis_time_of_wall(first, final.first.time_ns / 1e9)
            number = self.merged[-1].number
            found.append(self._failure(number, "", final.first.host, at, final.first.failure))
        if len(found) > FAILURES_SHOWN:
            causes = [one for one in found if not one.consequence]
            rest = [one for one in found if one.consequence]
            found = _ends_of(causes, FAILURES_SHOWN)
            found += rest[: FAILURES_SHOWN - len(found)]
            self.notes.append(
                f"This report shows {len(found)} of {len(causes) + len(rest)} failures."
            )
        found.sort(key=lambda one: (one.generation, one.consequence, one.at_s))
        return found

    def _failure(
        self, number: int, node: str, host: str, at: float, one: WorkerFailure
    ) -> FailureEntry:
        before, mark, stacks = one.stderr_tail.rpartition(STACKS)
        return FailureEntry(
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

    def _tails(self) -> list[OutputTail]:
        found = [
            OutputTail(rank=rank, node=node.run.node, stream=stream, text=self._text(text))
            for node in self.nodes
            for (rank, stream), text in node.tails.items()
        ]
        found.sort(key=lambda tail: (tail.stream != "stderr", tail.rank))
        return found[:TAILS_SHOWN]

    # Nodes and what they run on.

    def _node(self, node: NodeRun) -> NodeEntry:
        state = self.node_ends[id(node)]
        reason = "its record has no end" if state is RunEnd.LOST else ""
        if node.end is not None:
            reason = _first_line(error_line(node.end.error))
        last = node.last
        return NodeEntry(
            name=node.run.node,
            host=node.host.name,
            pid=node.host.pid,
            folder=node.folder,
            began_s=_round(self.axis.axis_time_of_wall(node, node.run.wall)),
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

    def _note_missing_data(self, outcome: OutcomeEntry) -> None:
        notes = self.notes
        expected = max((one.history.nodes for one in self.merged), default=0)
        there = max((len(one.parts) for one in self.merged), default=0)
        if expected > there:
            names = sorted({name for one in self.merged for name in one.unrecorded})
            listed = f" ({', '.join(_ends_of(names, NODES_NAMED))})" if names else ""
            notes.append(
                f"The job had up to {expected} nodes, but this report has the folders of only {there}. "
                f"It knows the other nodes{listed} only from these folders."
            )
        shifted = [
            ahead
            for node in self.nodes
            if (ahead := self.axis.ahead[id(node)]) and abs(ahead) > 1e-3
        ]
        if shifted:
            notes.append(
                f"The clocks of hosts differ. The times of {len(shifted)} nodes are shifted by up to "
                f"{max(map(abs, shifted)):.3f} s, so that shared generations start together."
            )
        unknown = sum(self.axis.ahead[id(node)] is None for node in self.nodes)
        if unknown:
            notes.append(
                f"{unknown} nodes share no generation with the first node. Their times are from "
                "their own clocks."
            )
        unreadable = sum(node.unreadable for node in self.nodes)
        if unreadable:
            notes.append(f"{unreadable} lines of the timelines are not readable.")
        if any(node.is_cut for node in self.nodes):
            notes.append("A timeline is too long; the report omits its middle.")
        if any(one.history.goes_back for one in self.merged):
            notes.append(
                "Step numbers decrease within a generation, so they do not show what was repeated "
                "after a restart."
            )
        if any(one.end == "lost" for one in self.generations):
            notes.append(
                "The records do not show when a lost node died. The time until its loss was "
                "detected counts as useful."
            )
        if outcome.state == "lost":
            notes.append(
                "No end of the job is recorded; the report ends with the last entry in these folders."
            )
        if self.skipped_jobs:
            notes.append(
                f"These folders contain {self.skipped_jobs} other jobs; this report is about the newest."
            )

    # Progress.

    def _progress(self) -> StepProgress | None:
        if not self.uses_steps or self.end_s <= 0:
            return None
        ends = [one.ended_s for one in self.generations]
        return progress_of([*map(_Merged.steps, self.merged, ends)], self.end_s)


def _span(one: history.Span) -> SpanEntry:
    return SpanEntry(
        stage=one.stage, from_s=_round(one.begin), to_s=_round(one.end), generation=one.generation
    )


def _sort_key(node: NodeRun) -> tuple[float, float]:
    last = node.last
    rank = last.started.group_rank if last is not None else None
    return (float("inf") if rank is None else rank, node.run.wall)


def _summary(host: str, one: WorkerFailure) -> str:
    why = one.detail or one.message or _last_line(one.traceback)
    who = f"rank {one.global_rank} on {host} failed: {one.ending}"
    return _first_line(f"{who}: {_first_line(why)}" if why.strip() else who)


def _first_line(text: str) -> str:
    return one_line(text.strip().partition("\n")[0], LINE_CHARS_MAX)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _of_nodes(text: str, count: int) -> str:
    """Return a text with a number of nodes; empty if there are none."""
    return text.format(f"{count} {'node' if count == 1 else 'nodes'}") if count else ""


def _most_common(values: list[str], shown: int = 3) -> list[str]:
    counts = Counter(values)
    if len(counts) == 1:
        return [*counts]
    listed = [f"{value} ({count} nodes)" for value, count in counts.most_common(shown)]
    return [*listed, *(["..."] if len(counts) > shown else [])]


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
