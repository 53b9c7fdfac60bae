"""A job as a report shows it: one typed, bounded value, made of its nodes' records and nothing else.

`describe` is pure. What it returns is the JSON of `holdfast report --json`, to the key; pages and views
are made of it (docs/guides/report.md explains the keys). All times are seconds from the beginning of
the job, on one axis for all nodes.

**One axis.** Clocks of hosts differ, so they are not compared. A generation starts on all its nodes
within the time of a message: each node is shifted so that the generations it shares with the first one
start together. Nodes on one machine have one clock and are not shifted.

**Where the time went.** The job's time is cut into spans, each of one kind, without gaps:

===========  ================================================================================
`gather`     from the start of the first agent until the nodes of the first generation had met
`start`      processes of workers being started
`warm-up`    workers run, but have not all reported a first step; only where steps are reported
`useful`     see below
`repeated`   steps that a later generation did once more
`detect`     something was wrong already: until the stop began
`stop`       workers being stopped
`regroup`    until the nodes had met again
`end`        after the last worker
===========  ================================================================================

**Goodput** is the share of `useful`. Where workers report steps (`holdfast.worker.progress`), that is
the time in which steps were made that no later generation repeated. Where they do not, it is the time
in which all workers of a generation ran, and so an upper bound: what was done again from a checkpoint
is not known.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from msgspec import Struct

from holdfast.control.history import STALL_S, STALL_STEPS
from holdfast.core.supervision import StopReason
from holdfast.numa.affinity import format_ranges
from holdfast.printable import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeVar

    from holdfast.views.report import records
    from holdfast.views.report.records import FailedWorker, NodeRun

    T = TypeVar("T")

VERSION = 1
"""Raised when the meaning of a key changes, not when a key is added."""
BUCKETS = 160
"""The points of a plot, from the beginning of the job to its end."""
COVERED_MIN = 0.2
"""Of a bucket's time, for a rate to be told from it."""
RANKS_SHOWN = 64
"""Of more ranks, plots have the slowest few and the range of all."""
SLOWEST_SHOWN = 8
RANKS_MAX = 100_000
GENERATIONS_SHOWN = 500
"""Of more, the first and the last half."""
FAILURES_SHOWN = 200
NODES_SHOWN = 10_000
TEXTS_CHARS_MAX = 2_000_000
"""All tracebacks and ends of stderr together."""
LINE_CHARS_MAX = 500
TAILS_SHOWN = 16
QUIET_S = 0.5
"""A shorter time without a step is not drawn as standing still."""
STACKS = "[holdfast] stacks (pid "


class Outcome(Struct, kw_only=True):
    """How the job ended."""

    state: str
    """`succeeded`, `failed`, `stopped` (by a signal or by somebody), `error`, `running` or `killed`."""
    reason: str
    """In one line; of a failed job, its first failure."""


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
    """How far its clock was ahead of the first node's; None if that cannot be told."""


class Span(Struct, kw_only=True):
    """A piece of the job's time."""

    kind: str
    from_s: float
    to_s: float
    generation: int | None


class NodeSpan(Struct, kw_only=True):
    """How long workers of a generation were on a node."""

    node: str
    generation: int
    from_s: float
    to_s: float


class Generation(Struct, kw_only=True):
    """One start of all workers, and what became of it."""

    number: int
    started_s: float
    ended_s: float
    nodes: list[str]
    world_size: int
    restarts: int
    why: str
    """Why it was started, if that is recorded."""
    end: str
    """`succeeded`, `failed`, `lost`, `regrouped`, `stopped` or `unknown`."""
    end_reason: str
    detect_s: float | None
    stop_s: float | None
    regroup_s: float | None
    """From the end of the last one until the nodes had met for this one; so too the next two."""
    start_s: float | None
    first_step_s: float | None
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
    """Of a worker that a watchdog ended, where it was."""


class Cost(Struct, kw_only=True):
    """All spans of one kind."""

    kind: str
    seconds: float
    share: float


class RankSeries(Struct, kw_only=True):
    """One rank's steps and rate at the times of `Progress.times_s`; None where it did not run."""

    rank: int
    steps: list[int | None]
    rates: list[float | None]


class RankSummary(Struct, kw_only=True):
    """How far one rank is."""

    rank: int
    node: str
    last_step: int
    last_step_s: float
    behind: int
    """Steps behind the first one at the end."""
    rate: float
    """Steps per second, over its last generation."""


class Progress(Struct, kw_only=True):
    """What workers reported by `holdfast.worker.progress`."""

    times_s: list[float]
    ranks: list[RankSeries]
    """All of them if they are few, else the slowest."""
    rate_min: list[float | None]
    rate_median: list[float | None]
    rate_max: list[float | None]
    step_min: list[int | None]
    step_max: list[int | None]
    heat: list[list[float | None]]
    """Rates relative to the median of that time: a row for each of `heat_ranks`."""
    heat_ranks: list[str]
    """A rank, or a range of ranks, whose row is the slowest of them."""
    slowest: list[RankSummary]
    reporting: int


class Tail(Struct, kw_only=True):
    """The end of what a worker wrote, in a job that has no recorded end."""

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
    """What `useful` means here: `progress` or `running`, see above."""
    restarts: int
    max_restarts: int
    world_size: int
    """Of the last generation."""
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
    """What a reader must know of how this was made: clocks, what is missing."""


NODE_STATES = ("succeeded", "failed", "stopped", "error", "standby")
KINDS = (
    "useful", "repeated", "warm-up", "detect", "stop", "regroup", "start", "gather", "end",
)  # fmt: skip


def describe(nodes: Sequence[NodeRun], skipped_jobs: int = 0) -> Report:
    """Return the report of one job, from the records of as many of its nodes as there are."""
    return _Description(nodes, skipped_jobs).report()


class _Axis:
    """The times of all nodes on one axis, in seconds from the beginning of the job."""

    def __init__(self, nodes: Sequence[NodeRun]) -> None:
        # The one that was in most generations; of equals, the one that began first.
        self.first = max(nodes, key=lambda node: (len(node.generations), -node.run.wall))
        self._shifts: dict[int, float] = {}
        self.ahead: dict[int, float | None] = {}
        for node in nodes:
            self._shifts[id(node)], self.ahead[id(node)] = self._shift_of(node)
        self.zero = min(node.run.wall + self._shifts[id(node)] for node in nodes)

    def _shift_of(self, node: NodeRun) -> tuple[float, float | None]:
        """Return what to add to a node's time of day, and how far it is ahead as far as known."""
        first = self.first
        if node is first:
            return 0.0, 0.0
        if node.run.boot and node.run.boot == first.run.boot:
            return first.wall(node.run.at) - node.run.wall, 0.0
        common = [
            first.wall(first.generations[number].started.at) - node.wall(one.started.at)
            for number, one in node.generations.items()
            if number in first.generations
            and one.started.fence == first.generations[number].started.fence > 0
        ]
        if not common:
            return 0.0, None
        shift = statistics.median(common)
        return shift, -shift

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
        self.parts = [(node, node.generations[number]) for node in nodes]
        self.started = max(axis.of(node, part.started.at) for node, part in self.parts)
        self.restarts = max(part.started.restarts for _, part in self.parts)
        self.size = max(part.started.nodes or 0 for _, part in self.parts)
        ready = [axis.of(node, part.ready_at) for node, part in self.parts if part.ready_at]
        self.ready = max(ready) if ready else None
        # Nodes whose workers are done wait for the others'; any other reason to stop is all nodes'.
        done = StopReason.SUCCEEDED.value
        stops = [(part.stopping, node) for node, part in self.parts if part.stopping]
        early = [axis.of(node, one.at) for one, node in stops if one.reason != done]
        late = [axis.of(node, one.at) for one, node in stops if one.reason == done]
        self.stopping = min(early) if early else max(late, default=None)
        self.stopped = max(
            (axis.of(node, part.stopped.at) for node, part in self.parts if part.stopped),
            default=None,
        )
        self.samples: dict[int, list[tuple[float, int]]] = {}
        self.node_of: dict[int, str] = {}
        self.exits = {
            line.rank: axis.of(node, line.at) for node, part in self.parts for line in part.exits
        }
        for node, part in self.parts:
            for rank, _, _ in part.started.workers:
                self.node_of[rank] = node.run.node
            for rank, found in part.samples.items():
                self.samples[rank] = [(axis.of(node, at), step) for at, step in found]
        firsts = [found[0][0] for found in self.samples.values()]
        self.first_step_at = max(firsts) if firsts else None
        lasts = [found[-1][0] for found in self.samples.values()]
        self.last_step_at = max(lasts) if lasts else None
        self.first_step = min((found[0][1] for found in self.samples.values()), default=None)
        self.last_step = max((found[-1][1] for found in self.samples.values()), default=None)

    def failures(self) -> list[tuple[NodeRun, FailedWorker]]:
        found = [(node, one) for node, part in self.parts for one in part.failures]
        found.sort(key=lambda item: (item[1].consequence, self.happened(*item)))
        return found

    def happened(self, node: NodeRun, one: FailedWorker) -> float:
        return self.axis.of_wall(node, one.wall)

    def reasons(self) -> list[records.Stopping]:
        """Return why nodes stopped, those that decided it themselves first."""
        found = [part.stopping for _, part in self.parts if part.stopping]
        told = (StopReason.COORDINATOR.value, StopReason.SUCCEEDED.value)
        return sorted(found, key=lambda one: (one.reason in told, one.at))

    @cached_property
    def goes_back(self) -> bool:
        """Whether the steps of a worker are not in order, so that equal ones are not the same."""
        return any(
            later[1] < earlier[1]
            for found in self.samples.values()
            for earlier, later in pairwise(found)
        )

    @cached_property
    def usual_step_s(self) -> float:
        times = [
            (found[-1][0] - found[0][0]) / (found[-1][1] - found[0][1])
            for found in self.samples.values()
            if found[-1][1] > found[0][1]
        ]
        return statistics.median(times) if times else 0.0

    def time_of_step(self, step: int) -> float | None:
        """Return when the first worker had made a step; between samples, by their rate."""
        times = []
        for found in self.samples.values():
            at = bisect_right(found, step, key=lambda sample: sample[1])
            if at == 0:
                return found[0][0]
            if at < len(found):
                (from_s, low), (to_s, high) = found[at - 1], found[at]
                times.append(from_s + (to_s - from_s) * (step - low) / max(1, high - low))
        return min(times, default=None)


class _Description:
    """What is found out of the records, step by step."""

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
        self.uses_steps = any(one.samples for one in self.merged)
        self.first_later: dict[int, int | None] = {}  # The first step of any later generation.
        first: int | None = None
        for one in reversed(self.merged):
            self.first_later[one.number] = first
            if one.first_step is not None:
                first = one.first_step if first is None else min(first, one.first_step)
        self.end_s = max(self._end_of(node) for node in nodes)
        self.spans: list[Span] = []
        self.generations: list[Generation] = []
        self.texts_left = TEXTS_CHARS_MAX

    def _end_of(self, node: NodeRun) -> float:
        end = self.axis.of(node, node.last_at)
        if node.end is None and node.last_output_wall is not None:
            end = max(end, self.axis.of_wall(node, node.last_output_wall))
        return end

    def report(self) -> Report:
        for at in range(len(self.merged)):
            self._add_generation(at)
        begun = self.spans[-1].to_s if self.spans else 0.0
        self._add_span("end" if self.merged else "gather", begun, self.end_s, None)
        run = self.axis.first.run
        costs = self._costs()
        useful = sum(span.to_s - span.from_s for span in self.spans if span.kind == "useful")
        outcome = self._outcome()
        failures = self._failures()
        self._note_what_is_missing(outcome)
        last = self.merged[-1].parts[0][1].started if self.merged else None
        node_spans = [self._node_span(one, node) for one in self.merged for node, _ in one.parts]
        return Report(
            run_id=run.run_id,
            program=run.program,
            outcome=outcome,
            began=_iso(self.axis.zero),
            duration_s=_round(self.end_s),
            goodput=_round(useful / self.end_s) if self.end_s > 0 else 0.0,
            measure="progress" if self.uses_steps else "running",
            restarts=max((one.restarts for one in self.merged), default=0),
            max_restarts=run.max_restarts,
            world_size=last.world_size if last else 0,
            costs=costs,
            spans=_ends_of(self.spans, GENERATIONS_SHOWN * 8),
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

    def _add_generation(self, at: int) -> None:
        one = self.merged[at]
        following = self.merged[at + 1] if at + 1 < len(self.merged) else None
        begun = self.spans[-1].to_s if self.spans else 0.0
        last = self._last_sign(one, following)
        stop = min(last, one.stopping) if one.stopping is not None else last
        good_end = self._good_end(one, stop)
        marks = [
            ("gather" if at == 0 else "regroup", one.ready),
            ("start", one.started),
            ("warm-up", one.first_step_at if self.uses_steps else None),
            ("useful", good_end),
            ("detect", stop),
            ("stop", one.stopped if one.stopped is not None else last),
        ]
        if self.uses_steps and one.first_step_at is None:
            marks[3] = ("warm-up", good_end)  # No step was ever made.
        took = dict.fromkeys(KINDS, 0.0)
        for kind, mark in marks:
            end = max(begun, min(mark if mark is not None else begun, self.end_s))
            took[kind] += end - begun
            if kind == "useful":
                took["repeated"] = self._add_useful(one, begun, end)
            else:
                self._add_span(kind, begun, end, one.number)
            begun = end
        kind, reason = self._end_of_generation(one, following)
        is_last = one.stopping is None and following is None
        self.generations.append(
            Generation(
                number=one.number,
                started_s=_round(one.started),
                ended_s=_round(begun),
                nodes=[node.run.node for node, _ in one.parts][:NODES_SHOWN],
                world_size=max(part.started.world_size for _, part in one.parts),
                restarts=one.restarts,
                why=_first_line(next((p.started.why for _, p in one.parts if p.started.why), "")),
                end=kind,
                end_reason=reason,
                detect_s=None if is_last or kind == "lost" else _round(took["detect"]),
                stop_s=None if one.stopped is None else _round(took["stop"]),
                regroup_s=_round(took["gather" if at == 0 else "regroup"]),
                start_s=_round(took["start"]),
                first_step_s=_round(took["warm-up"]) if one.first_step_at is not None else None,
                useful_s=_round(took["useful"] - took["repeated"]),
                repeated_s=_round(took["repeated"]),
                first_step=one.first_step,
                last_step=one.last_step,
            )
        )

    def _last_sign(self, one: _Merged, following: _Merged | None) -> float:
        """Return when a generation was over, at the latest."""
        if one.stopped is not None:
            return one.stopped
        if following is not None:
            return following.ready if following.ready is not None else following.started
        return self.end_s

    def _good_end(self, one: _Merged, stop: float) -> float:
        """Return until when all was well."""
        causes = [item for item in one.failures() if not item[1].consequence]
        good = min([stop, *(max(one.started, one.happened(*item)) for item in causes)])
        unhealthy = any(reason.detail for reason in one.reasons())
        if one.last_step_at is None or not (causes or unhealthy or self._lost_in(one)):
            return good
        # Whoever failed may have hung before; of all others, nobody knows whom they waited for.
        lasts = [one.samples[item.rank][-1][0] for _, item in causes if item.rank in one.samples]
        last = min(lasts, default=one.last_step_at)
        return last if good - last > max(STALL_STEPS * one.usual_step_s, STALL_S) else good

    def _add_useful(self, one: _Merged, begun: float, end: float) -> float:
        """Add what was of use, and return the seconds of what a later generation repeated."""
        again = self.first_later[one.number]
        if again is None or one.last_step is None or one.goes_back or again > one.last_step:
            self._add_span("useful", begun, end, one.number)
            return 0.0
        kept = one.time_of_step(again - 1)
        middle = end if kept is None else min(end, max(begun, kept))
        if one.first_step is not None and again <= one.first_step:
            middle = begun
        self._add_span("useful", begun, middle, one.number)
        self._add_span("repeated", middle, end, one.number)
        return end - middle

    def _add_span(self, kind: str, begun: float, end: float, number: int | None) -> None:
        if end > begun:
            self.spans.append(
                Span(kind=kind, from_s=_round(begun), to_s=_round(end), generation=number)
            )

    def _end_of_generation(self, one: _Merged, following: _Merged | None) -> tuple[str, str]:
        """Return how a generation ended, and why, in words."""
        causes = [(node, failed) for node, failed in one.failures() if not failed.consequence]
        reasons = one.reasons()
        said = reasons[0].reason if reasons else ""
        detail = next((reason.detail for reason in reasons if reason.detail), "")
        why = ""
        if following is not None:
            why = next((part.started.why for _, part in following.parts if part.started.why), "")
        if said == StopReason.SIGNAL.value:
            return "stopped", said
        if causes:
            node, first = causes[0]
            return "failed", _summary(node.run.host, first)
        if detail:
            return "failed", _first_line(detail)
        lost = self._lost_in(one)
        if lost and following is not None:
            return "lost", _first_line(why or f"node {lost[0].run.node} was lost")
        ends = {node.end.state for node, _ in one.parts if node.end is not None}
        if following is None and "succeeded" in ends and "failed" not in ends:
            return "succeeded", said or StopReason.SUCCEEDED.value
        if following is not None:
            kind = "regrouped"
            if following.restarts > one.restarts:
                kind = "failed"
            elif (
                following.size < one.size > len(one.parts)
            ):  # Of who is missing, no record is here.
                kind = "lost"
            return kind, _first_line(why or said or "another generation was started")
        final = self._final()
        if final is not None and said:
            return "failed", _summary(final.first.host, final.first)
        return ("failed", said) if said else ("unknown", "no end is recorded")

    def _lost_in(self, one: _Merged) -> list[NodeRun]:
        """Return the nodes whose record ends in a generation."""
        return [
            node
            for node, part in one.parts
            if node.end is None and part.stopped is None and part is node.last_generation
        ]

    def _node_span(self, one: _Merged, node: NodeRun) -> NodeSpan:
        part = node.generations[one.number]
        begun = self.axis.of(node, part.started.at)
        end = self._end_of(node)
        if part.stopped is not None:
            end = self.axis.of(node, part.stopped.at)
        elif part is not node.last_generation:
            later = min(number for number in node.generations if number > one.number)
            end = self.axis.of(node, node.generations[later].started.at)
        elif one is not self.merged[-1]:
            # The record ends: it may have run until the others noticed.
            end = max(end, one.stopping if one.stopping is not None else end)
        name = node.run.node
        return NodeSpan(
            node=name, generation=one.number, from_s=_round(begun), to_s=_round(max(begun, end))
        )

    def _costs(self) -> list[Cost]:
        seconds = dict.fromkeys(KINDS, 0.0)
        for span in self.spans:
            seconds[span.kind] += span.to_s - span.from_s
        whole = self.end_s or 1.0
        return [
            Cost(kind=kind, seconds=_round(took), share=_round(took / whole))
            for kind, took in seconds.items()
        ]

    # The end of the job.

    def _outcome(self) -> Outcome:
        ends = [node.end for node in self.nodes if node.end is not None]
        states = [end.state for end in ends]
        last = self.generations[-1] if self.generations else None
        if "failed" in states:
            final = self._final()
            reason = last.end_reason if last is not None and last.end == "failed" else ""
            if final is not None and (not reason or not self._has_failure(final)):
                reason = _summary(final.first.host, final.first)
            return Outcome(state="failed", reason=reason or "workers failed")
        if "succeeded" in states:
            gone = sum(node.end is None for node in self.nodes)
            lost = "one of its nodes was" if gone == 1 else f"{gone} of its nodes were"
            more = f"; {lost} lost on the way" if gone else ""
            return Outcome(state="succeeded", reason=f"all workers succeeded{more}")
        for state in ("stopped", "error", "standby"):
            reasons = [_error_line(end.error) for end in ends if end.state == state]
            if reasons:
                return Outcome(
                    state="stopped" if state == "stopped" else "error", reason=reasons[0]
                )
        if any(node.is_alive for node in self.nodes):
            return Outcome(state="running", reason="it was running when this report was made")
        return Outcome(
            state="killed",
            reason="no end is recorded: its agents were killed, or run where this cannot be seen",
        )

    def _final(self) -> records.FinalReport | None:
        return next((node.final for node in self.nodes if node.final is not None), None)

    def _has_failure(self, final: records.FinalReport) -> bool:
        wanted = (final.first.rank, final.first.pid)
        return any(
            (failed.rank, failed.pid) == wanted
            for one in self.merged[-1:]
            for _, failed in one.failures()
        )

    # Failures.

    def _failures(self) -> list[Failure]:
        found = [
            self._failure(
                one.number, node.run.node, node.run.host, one.happened(node, failed), failed
            )
            for one in self.merged
            for node, failed in one.failures()
        ]
        final = self._final()
        if final is not None and self.merged and not self._has_failure(final):
            first = self.axis.first
            at = self.axis.of_wall(first, final.first.time_ns / 1e9)
            number = self.merged[-1].number
            found.append(self._failure(number, "", final.first.host, at, final.first))
        if len(found) > FAILURES_SHOWN:
            causes = [one for one in found if not one.consequence]
            rest = [one for one in found if one.consequence]
            found = _ends_of(causes, FAILURES_SHOWN)
            found += rest[: FAILURES_SHOWN - len(found)]
            self.notes.append(f"Of {len(causes) + len(rest)} failures {len(found)} are shown.")
        found.sort(key=lambda one: (one.generation, one.consequence, one.at_s))
        return found

    def _failure(self, number: int, node: str, host: str, at: float, one: FailedWorker) -> Failure:
        before, mark, stacks = one.stderr_tail.rpartition(STACKS)
        return Failure(
            generation=number,
            node=node,
            host=host,
            rank=one.rank,
            local_rank=one.local_rank,
            pid=one.pid,
            exitcode=one.exitcode,
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
        """Return a text, or what is left of the room for all of them."""
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
            state = node.end.state if node.end.state in NODE_STATES else "ended"
            reason = _error_line(node.end.error)
        last = node.last_generation
        return Node(
            name=node.run.node,
            host=node.run.host,
            pid=node.run.pid,
            folder=node.folder,
            began_s=_round(self.axis.of_wall(node, node.run.wall)),
            ended_s=_round(self._end_of(node)),
            state=state,
            reason=reason,
            generations=sorted(node.generations)[-GENERATIONS_SHOWN:],
            ranks=format_ranges(rank for rank, _, _ in last.started.workers) if last else "",
            clock_ahead_s=_rounded(self.axis.ahead[id(node)]),
        )

    def _environment(self) -> dict[str, str]:
        runs = [node.run for node in self.nodes]
        facts = {
            "Holdfast": [run.holdfast for run in runs],
            "Python": [run.python for run in runs],
            "system": [run.system for run in runs],
            "CPUs of a host": [str(run.cpus) for run in runs],
            "workers of a node": [str(run.local_world_size) for run in runs],
            "rendezvous": [run.backend for run in runs],
            "role": [run.role for run in runs],
        }
        return {key: ", ".join(_most_common(values)) for key, values in facts.items()}

    def _note_what_is_missing(self, outcome: Outcome) -> None:
        notes = self.notes
        expected = max((one.size for one in self.merged), default=0)
        there = max((len(one.parts) for one in self.merged), default=0)
        if expected > there:
            notes.append(
                f"The job had up to {expected} nodes, and this report is made from the folders of "
                f"{there}: what happened on the others is only known as far as these were informed."
            )
        shifted = [
            ahead
            for node in self.nodes
            if (ahead := self.axis.ahead[id(node)]) and abs(ahead) > 1e-3
        ]
        if shifted:
            notes.append(
                f"Clocks of hosts are not compared: {len(shifted)} nodes are shifted, by up to "
                f"{max(map(abs, shifted)):.3f} s, so that the generations they share start together."
            )
        unknown = sum(self.axis.ahead[id(node)] is None for node in self.nodes)
        if unknown:
            notes.append(
                f"{unknown} nodes share no generation with the first one: they are where their "
                "own clocks put them."
            )
        unreadable = sum(node.unreadable for node in self.nodes)
        if unreadable:
            notes.append(f"{unreadable} lines of the timelines could not be read.")
        if any(node.is_cut for node in self.nodes):
            notes.append("A timeline was too long: its middle was left out.")
        if any(one.goes_back for one in self.merged):
            notes.append(
                "Step numbers go back within a generation, so they do not say what was "
                "repeated after a restart."
            )
        if any(one.end == "lost" for one in self.generations):
            notes.append(
                "When a lost node died is not recorded anywhere: the time until the others knew "
                "counts as useful."
            )
        if outcome.state == "killed":
            notes.append("The job ends here with the last sign of life in these folders.")
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
            if at and 0 < 2 * len(column) < len(ranks):  # A few are compared with all before them.
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
            # A point for each sample, at the end of the bucket that it falls into.
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
            # It may hang, or only not be done with the next step: to be judged by the usual time of one.
            over = one.exits.get(rank, one.stopping if one.stopping is not None else self.end_s)
            quiet = over - found[-1][0]
            if quiet > max(STALL_STEPS * one.usual_step_s, QUIET_S, width):
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


def _place_of(node: NodeRun) -> tuple[float, float]:
    last = node.last_generation
    rank = last.started.node_rank if last is not None else None
    return (float("inf") if rank is None else rank, node.run.wall)


def _spread(
    made: list[float], ran: list[float], from_s: float, to_s: float, rate: float, width: float
) -> None:
    """Add steps of one rate, and their time, to the buckets in which they were made."""
    for at in range(int(from_s / width), min(BUCKETS - 1, int(to_s / width)) + 1):
        inside = min(to_s, (at + 1) * width) - max(from_s, at * width)
        if inside > 0:
            made[at] += rate * inside
            ran[at] += inside


def _heat(
    ranks: list[int], series: dict[int, RankSeries], median: list[float | None]
) -> tuple[list[list[float | None]], list[str]]:
    """Return how fast ranks were relative to the median, the slowest of as many as share a row."""
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


def _summary(host: str, one: FailedWorker) -> str:
    why = one.detail or one.message or _last_line(one.traceback)
    who = f"rank {one.rank} on {host} failed: {one.ending}"
    return _first_line(f"{who}: {_first_line(why)}" if why.strip() else who)


def _first_line(text: str) -> str:
    return one_line(text.strip().partition("\n")[0], LINE_CHARS_MAX)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _error_line(error: str) -> str:
    """Return what a traceback says in the end, without the name of the class."""
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
    """Return a list, or its first and its last half as far as the limit allows."""
    return items if len(items) <= limit else items[: limit // 2] + items[-(limit // 2) :]


def _iso(wall: float) -> str:
    whole = int(wall)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{int((wall - whole) * 1000):03d}Z"


def _round(value: float) -> float:
    return round(value, 4)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
