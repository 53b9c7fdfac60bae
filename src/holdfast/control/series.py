"""Values over the time of a job: steps per second, loss, memory and GPU utilization.

::

    pages of workers ─► CurvePoint ─► series_of_node ─┐
    reports while somebody watches ─► Recent.series ──┴─► combined ─► JobSeries, for plots

The functions are pure. Times are seconds on one clock; a caller that combines nodes first shifts theirs.

A series has up to `POINTS_MAX` values, each of which stands for an interval. Intervals become longer with
their age: `LEVELS_S` and `LEVEL_POINTS`, which the pages of workers use too. So a series is small for jobs
of any length, and shows the last minutes in detail.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
from msgspec import Meta

from holdfast.core.bounded import ClockTime, Count, Loss
from holdfast.worker import LEVEL_POINTS, LEVELS_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.processes.workers.pages import CurvePoint

POINTS_MAX = LEVEL_POINTS * len(LEVELS_S)
RATE_MAX = 1e15
WATCH_GAP_S = 15.0
"""If two samples are further apart, nobody watched between them."""

Edges = Annotated[list[ClockTime], Meta(max_length=POINTS_MAX + 1)]
Rates = Annotated[list[Annotated[float, Meta(ge=0.0, le=RATE_MAX)] | None], Meta(max_length=POINTS_MAX)]  # fmt: skip
Losses = Annotated[list[float | None], Meta(max_length=POINTS_MAX)]
Sizes = Annotated[list[Count | None], Meta(max_length=POINTS_MAX)]
Shares = Annotated[list[Annotated[float, Meta(ge=0.0, le=1.0)] | None], Meta(max_length=POINTS_MAX)]


class Series(msgspec.Struct, kw_only=True):
    """Values over time. Value `i` stands for the interval from `edges[i]` to `edges[i + 1]`."""

    edges: Edges = []
    rates: Rates = []
    """Steps per second: the median of the ranks."""
    losses: Losses = []
    """The mean of the ranks that report one; may contain NaN and infinities."""
    rss: Sizes = []
    """Bytes of memory."""
    gpu: Shares = []
    """Utilization: the mean of the GPUs."""


class Sample(NamedTuple):
    """The values at one moment."""

    at: float
    rate: float | None = None
    loss: float | None = None
    rss: float | None = None
    gpu: float | None = None


class Interval(NamedTuple):
    """A value for some time."""

    since: float
    until: float
    value: float | None


def json_loss(loss: float | None) -> Loss | None:
    """Return a loss as JSON can represent it."""
    if loss is None or math.isfinite(loss):
        return loss
    return "nan" if math.isnan(loss) else "inf" if loss > 0 else "-inf"


def mean_loss(losses: Iterable[float | None]) -> float | None:
    """Return the mean of the losses that are known. One NaN makes it NaN, as in the training itself."""
    known = [one for one in losses if one is not None]
    return sum(known) / len(known) if known else None


class Recent:
    """The samples of a process that watches, as many for each level as a page of a worker has."""

    def __init__(self) -> None:
        # Each sample with the time since when somebody has watched without a gap.
        self._levels: list[deque[tuple[Sample, float]]] = [
            deque(maxlen=LEVEL_POINTS) for _ in LEVELS_S
        ]
        self._last: tuple[Sample, float] | None = None

    def add(self, sample: Sample) -> None:
        """Keep a sample until the next one; each level also keeps it if the level's last one is old enough."""
        watched_since = sample.at - LEVELS_S[0]
        if self._last is not None and 0.0 <= sample.at - self._last[0].at <= WATCH_GAP_S:
            watched_since = self._last[1]
        self._last = (sample, watched_since)
        for samples, interval_s in zip(self._levels, LEVELS_S, strict=True):
            if samples and 0.0 <= sample.at - samples[-1][0].at < interval_s:
                break
            samples.append(self._last)

    def series(self, now: float) -> Series:
        """Return the values over time."""
        kept = [one for samples in self._levels for one in samples]
        if self._last is not None:
            kept.append(self._last)
        found = sorted({one[0].at: one for one in kept}.values(), key=lambda one: one[0].at)
        samples = [one for one, _ in found]
        before = [-math.inf, *(one.at for one in samples)]
        since = [max(at, watched) for at, (_, watched) in zip(before, found, strict=False)]
        edges = edges_between(min(since, default=now), now)

        def values(of: Iterable[float | None]) -> list[float | None]:
            return spread(edges, map(Interval, since, (one.at for one in samples), of))

        return Series(
            edges=edges,
            rates=values(one.rate for one in samples),
            losses=values(one.loss for one in samples),
            rss=_whole(values(one.rss for one in samples)),
            gpu=values(one.gpu for one in samples),
        )


def edges_between(begin: float, end: float) -> list[float]:
    """Return the edges of the intervals of a series, which are multiples of `LEVELS_S`.

    The last interval ends at or after `end`. The first contains `begin`, unless that is too long ago.
    """
    edges = [math.ceil(end / LEVELS_S[0]) * float(LEVELS_S[0])]
    for interval_s in LEVELS_S:
        for _ in range(LEVEL_POINTS):
            if edges[-1] <= begin:
                break
            edges.append((math.ceil(edges[-1] / interval_s) - 1) * float(interval_s))
    return edges[::-1]


def spread(edges: Sequence[float], values: Iterable[Interval]) -> list[float | None]:
    """Return the mean of the values in each interval between two edges; None where there is none."""
    count = max(0, len(edges) - 1)
    sums, weights = [0.0] * count, [0.0] * count
    for since, until, value in values:
        if value is None:
            continue
        for at in range(max(0, bisect_right(edges, since) - 1), count):
            inside = min(until, edges[at + 1]) - max(since, edges[at])
            if inside <= 0.0:
                if edges[at] >= until:
                    break
                continue
            sums[at] += inside * value
            weights[at] += inside
    return [total / weight if weight else None for total, weight in zip(sums, weights, strict=True)]


def series_of_node(
    generations: Sequence[Sequence[Sequence[CurvePoint]]],
    memory: Sequence[tuple[float, int]],
    usage: Series,
    now: float,
) -> Series:
    """Return the series of a node from the curves of its workers, by generation and worker.

    `usage` has the memory and GPU utilization, as far as somebody watched. `memory` has the bytes at other
    times.
    """
    curves = [[curve for curve in workers if curve] for workers in generations]
    first_ns = min((curve[0].at_ns for workers in curves for curve in workers), default=0)
    begin = min([first_ns / 1e9 or now, *usage.edges[:1], *(at for at, _ in memory[:1])])
    edges = edges_between(begin, now)
    noted = [Interval(since, until, size or None) for (since, _), (until, size) in pairwise(memory)]
    rates: list[list[float | None]] = []
    losses: list[list[float | None]] = []
    for workers in curves:
        of_rates = [spread(edges, _rates(one)) for one in workers]
        of_losses = [spread(edges, _losses(one)) for one in workers]
        rates.append([_median(column) for column in zip(*of_rates, strict=True)])
        losses.append([mean_loss(column) for column in zip(*of_losses, strict=True)])
    return Series(
        edges=edges,
        rates=_last_known(rates, len(edges) - 1),
        losses=_last_known(losses, len(edges) - 1),
        rss=_whole(
            _last_known(
                [spread(edges, noted), spread(edges, _intervals(usage, usage.rss))], len(edges) - 1
            )
        ),
        gpu=spread(edges, _intervals(usage, usage.gpu)),
    )


def shifted(series: Series, by: float) -> Series:
    """Return a series on another clock."""
    return msgspec.structs.replace(series, edges=[at + by for at in series.edges])


def combined(own: Series, nodes: Sequence[Series], now: float, *, are_all: bool) -> Series:
    """Return the series of a job: what a viewer saw itself, and before that, what the nodes know.

    `are_all`: `nodes` has all nodes, so the sum of their memory is that of the job.
    """
    begins = [one.edges[0] for one in (own, *nodes) if len(one.edges) > 1]
    edges = edges_between(min(begins, default=now), now)

    def of_nodes(name: str) -> list[Sequence[float | None]]:
        found = [spread(edges, _intervals(one, getattr(one, name))) for one in nodes]
        return [*zip(*found, strict=True)] or [()] * (len(edges) - 1)

    def own_or(name: str, past: Iterable[float | None]) -> list[float | None]:
        seen = spread(edges, _intervals(own, getattr(own, name)))
        return [one if one is not None else other for one, other in zip(seen, past, strict=True)]

    return Series(
        edges=edges,
        rates=own_or("rates", map(_median, of_nodes("rates"))),
        losses=own_or("losses", map(mean_loss, of_nodes("losses"))),
        rss=_whole(own_or("rss", (_total(one) if are_all else None for one in of_nodes("rss")))),
        gpu=own_or("gpu", map(mean_loss, of_nodes("gpu"))),
    )


def resampled(
    series: Series, values: Sequence[float | None], begin: float, end: float, count: int
) -> list[float | None]:
    """Return this many values at equal intervals."""
    edges = [begin + (end - begin) * at / count for at in range(count + 1)]
    return spread(edges, _intervals(series, values))


def _intervals(series: Series, values: Sequence[float | None]) -> Iterable[Interval]:
    return (
        Interval(since, until, value)
        for (since, until), value in zip(pairwise(series.edges), values, strict=False)
    )


def _rates(curve: Sequence[CurvePoint]) -> Iterable[Interval]:
    for low, high in pairwise(curve):
        took_s = (high.at_ns - low.at_ns) / 1e9
        rate = (high.step - low.step) / took_s if high.step >= low.step else None
        yield Interval(
            low.at_ns / 1e9, high.at_ns / 1e9, rate if rate is None else min(rate, RATE_MAX)
        )


def _losses(curve: Sequence[CurvePoint]) -> Iterable[Interval]:
    for low, high in pairwise(curve):
        yield Interval(low.at_ns / 1e9, high.at_ns / 1e9, high.loss)


def _last_known(rows: Sequence[Sequence[float | None]], count: int) -> list[float | None]:
    """Return, for each interval, the value of the last generation that has one."""
    found: list[float | None] = [None] * count
    for row in filter(None, rows):
        found = [old if new is None else new for old, new in zip(found, row, strict=True)]
    return found


def _median(values: Iterable[float | None]) -> float | None:
    known = sorted(one for one in values if one is not None)
    at = len(known) // 2
    return None if not known else (known[at] + known[~at]) / 2


def _total(values: Sequence[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return sum(known) if known and len(known) == len(values) else None


def _whole(values: Iterable[float | None]) -> list[int | None]:
    return [None if one is None else round(one) for one in values]
