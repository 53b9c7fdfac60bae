"""The steps and rates of all ranks over the time of a job, at equal intervals, for plots.

`progress_of` is pure. Times are seconds since the job began, on one axis for all nodes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from holdfast.control.history import stall_limit_s
from holdfast.numa.affinity import format_ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

INTERVALS = 160
"""Points of a plot, from the beginning of the job to its end."""
COVERED_MIN = 0.2
"""The share of an interval that samples must cover to give a rate."""
RANKS_SHOWN = 64
"""Ranks in a plot. With more ranks, the plot has the slowest few and the range of all."""
SLOWEST_SHOWN = 8
RANKS_MAX = 100_000


class RankSeries(Struct, kw_only=True):
    """Steps and rates of one rank at `StepProgress.times_s`; None while it did not run."""

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


class StepProgress(Struct, kw_only=True):
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
    """The names of the rows: a rank, or a range of ranks, whose row shows the slowest of them."""
    slowest: list[RankSummary]
    reporting: int


class Samples(NamedTuple):
    """The samples of all ranks in one generation."""

    of: dict[int, list[tuple[float, int]]]
    """By rank, times and the steps that were made by then."""
    ended: dict[int, float]
    """By rank, when the worker exited or was stopped."""
    node_of: dict[int, str]
    step_s: float
    """The median duration of a step."""


def progress_of(generations: Sequence[Samples], end_s: float) -> StepProgress:
    """Return the steps and rates until `end_s`; the generations are in order."""
    width = end_s / INTERVALS
    ranks = sorted({rank for one in generations for rank in one.of})[:RANKS_MAX]
    series = {rank: _series(rank, generations, width, end_s) for rank in ranks}
    rates = [[series[rank].rates[at] for rank in ranks] for at in range(INTERVALS)]
    known = [sorted(rate for rate in column if rate is not None) for column in rates]
    steps = [
        [step for rank in ranks if (step := series[rank].steps[at]) is not None]
        for at in range(INTERVALS)
    ]
    summaries = _summaries(generations)
    shown = ranks
    if len(ranks) > RANKS_SHOWN:
        shown = sorted(one.rank for one in summaries[:SLOWEST_SHOWN])
    median = [_round(column[len(column) // 2]) if column else None for column in known]
    usual = [*median]
    for at, column in enumerate(known):
        if at and 0 < 2 * len(column) < len(ranks):
            # If few ranks run, compare them with the previous median.
            usual[at] = usual[at - 1] or usual[at]
    heat, heat_ranks = _relative_rates(ranks, series, usual)
    return StepProgress(
        times_s=[_round(width * (at + 1)) for at in range(INTERVALS)],
        ranks=[series[rank] for rank in shown],
        rate_min=[_round(column[0]) if column else None for column in known],
        rate_median=median,
        rate_max=[_round(column[-1]) if column else None for column in known],
        step_min=[min(column, default=None) for column in steps],
        step_max=[max(column, default=None) for column in steps],
        heat=heat,
        heat_ranks=heat_ranks,
        slowest=summaries[:SLOWEST_SHOWN],
        reporting=len(ranks),
    )


def _series(rank: int, generations: Sequence[Samples], width: float, end_s: float) -> RankSeries:
    steps: list[int | None] = [None] * INTERVALS
    made, ran = [0.0] * INTERVALS, [0.0] * INTERVALS
    for one in generations:
        found = one.of.get(rank)
        if not found:
            continue
        # A point for each sample, at the end of its interval.
        for at, step in found:
            steps[min(INTERVALS - 1, int(at / width))] = step
        for (from_s, low), (to_s, high) in pairwise(found):
            if to_s > from_s:
                rate = max(0, high - low) / (to_s - from_s)
                _add_to_intervals(made, ran, from_s, to_s, rate, width)
        first, last = int(found[0][0] / width), min(INTERVALS - 1, int(found[-1][0] / width))
        for at in range(first + 1, last + 1):
            if steps[at] is None:
                steps[at] = steps[at - 1]
        over = one.ended.get(rank, end_s)
        if over - found[-1][0] > max(stall_limit_s(one.step_s), width):
            _add_to_intervals(made, ran, found[-1][0], over, 0.0, width)
            for at in range(last + 1, min(INTERVALS, int(over / width) + 1)):
                steps[at] = steps[at - 1]
    rates = [
        _round(count / time_s) if time_s > COVERED_MIN * width else None
        for count, time_s in zip(made, ran, strict=True)
    ]
    return RankSeries(rank=rank, steps=steps, rates=rates)


def _add_to_intervals(
    made: list[float], ran: list[float], from_s: float, to_s: float, rate: float, width: float
) -> None:
    """Add steps of one rate, and their time, to the intervals that they cover."""
    for at in range(int(from_s / width), min(INTERVALS - 1, int(to_s / width)) + 1):
        inside = min(to_s, (at + 1) * width) - max(from_s, at * width)
        if inside > 0:
            made[at] += rate * inside
            ran[at] += inside


def _summaries(generations: Sequence[Samples]) -> list[RankSummary]:
    """Return the progress of each rank in the last generation, the slowest first."""
    last = next((one for one in reversed(generations) if one.of), None)
    if last is None:
        return []
    farthest = max(found[-1][1] for found in last.of.values())
    summaries = []
    for rank, found in last.of.items():
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


def _relative_rates(
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


def _round(value: float) -> float:
    return round(value, 4)
