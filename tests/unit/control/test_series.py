"""The values of a job over time: from curves of workers, samples of a viewer, and both."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from holdfast.control.history import eta_s
from holdfast.control.series import (
    POINTS_MAX,
    Recent,
    Sample,
    Series,
    combined,
    edges_between,
    series_of_node,
    shifted,
)
from holdfast.processes.workers.pages import CurvePoint

HOUR_S = 3600.0


def curve(
    begin_s: float, end_s: float, every_s: float, rate: float, first: int = 0
) -> list[CurvePoint]:
    """Return the curve of a worker with this rate; its loss is its step."""
    count = int((end_s - begin_s) / every_s) + 1
    steps = [first + round(at * every_s * rate) for at in range(count)]
    times = [begin_s + at * every_s for at in range(count)]
    return [
        CurvePoint(int(at * 1e9), step, float(step)) for at, step in zip(times, steps, strict=True)
    ]


def value_at(series: Series, name: str, at: float) -> float | None:
    values: list[float | None] = getattr(series, name)
    return next(
        value
        for (since, until), value in zip(pairwise(series.edges), values, strict=True)
        if since <= at < until
    )


def test_intervals_are_short_at_the_end_and_longer_before() -> None:
    edges = edges_between(0.0, 50 * HOUR_S + 1)
    lengths = [high - low for low, high in pairwise(edges)]
    assert edges[0] <= 0.0 < edges[1]
    assert edges[-2] < 50 * HOUR_S + 1 <= edges[-1]
    assert len(lengths) <= POINTS_MAX
    assert set(lengths) >= {2.0, 15.0, 120.0, 1200.0, 12000.0}
    assert lengths[-40:] == [2.0] * 40
    assert len(edges_between(-1e9, 1e9)) == POINTS_MAX + 1


def test_series_of_a_node_has_the_median_rate_and_the_mean_loss() -> None:
    workers = [curve(100.0, 160.0, 1.0, rate) for rate in (2, 4, 10)]
    found = series_of_node([workers], (), Series(), 160.0)
    assert {one for one in found.rates if one is not None} == {4.0}
    assert value_at(found, "losses", 121.0) == pytest.approx((43 + 86 + 215) / 3, rel=0.03)
    assert not any(found.rss) + any(found.gpu)


def test_restart_leaves_a_gap_and_lost_steps_are_no_negative_rate() -> None:
    before, after = curve(100.0, 140.0, 2.0, 5), curve(160.0, 200.0, 2.0, 8, first=120)
    found = series_of_node([[before], [], [after]], (), Series(), 200.0)
    assert [value_at(found, "rates", at) for at in (139.0, 150.0, 161.0)] == [5.0, None, 8.0]
    again = series_of_node([[before + after]], (), Series(), 200.0)  # In one process.
    assert [value_at(again, "rates", at) for at in (139.0, 150.0, 161.0)] == [5.0, None, 8.0]


def test_loss_that_is_not_a_number_is_not_averaged_away() -> None:
    good = curve(100.0, 120.0, 2.0, 1)
    bad = [CurvePoint(one.at_ns, one.step, math.nan) for one in good]
    found = series_of_node([[good, bad]], (), Series(), 120.0)
    loss = value_at(found, "losses", 111.0)
    assert loss is not None
    assert math.isnan(loss)


def test_samples_do_not_stand_for_the_time_when_nobody_watched() -> None:
    recent = Recent()
    for begin in (1000.0, 9000.0):
        for second in range(30):
            recent.add(Sample(begin + second, rss=7 * begin))
    found = recent.series(9029.0)
    assert value_at(found, "rss", 1020.0) == 7000
    assert value_at(found, "rss", 9015.0) == 63000
    assert found.rss[-1] == 63000, "the last sample counts, although another one is recent"
    assert {value_at(found, "rss", at) for at in (2000.0, 5000.0, 8000.0, 8990.0)} == {None}
    assert len(found.rss) <= POINTS_MAX


def test_viewer_sees_what_happened_before_it_began() -> None:
    nodes = [
        shifted(series_of_node([[curve(100.0, 400.0, 1.0, rate)]], (), Series(), 400.0), 5000.0)
        for rate in (4, 6)
    ]
    recent = Recent()
    for second in range(10):
        recent.add(Sample(5391.0 + second, rate=20.0, loss=1.0, rss=1000, gpu=0.5))
    found = combined(recent.series(5400.0), nodes, 5400.0, are_all=True)
    assert 5070.0 < found.edges[0] <= 5100.0
    assert found.edges[-1] == 5400.0
    assert [value_at(found, "rates", at) for at in (5150.0, 5380.0, 5399.0)] == [5.0, 5.0, 20.0]
    assert [value_at(found, "gpu", at) for at in (5150.0, 5399.0)] == [None, 0.5]


def test_memory_that_the_agent_noted_fills_the_time_when_nobody_watched() -> None:
    recent = Recent()
    for second in range(10):
        recent.add(Sample(500.0 + second, rss=3000))
    noted = [(100.0 + 30 * at, 1000 if at % 2 else 0) for at in range(14)]
    found = series_of_node([], noted, recent.series(510.0), 510.0)
    assert [value_at(found, "rss", at) for at in (110.0, 140.0, 470.0, 505.0)] == [
        1000, None, 1000, 3000,
    ]  # fmt: skip


def test_memory_of_a_job_is_that_of_all_its_nodes() -> None:
    recent = Recent()
    for second in range(10):
        recent.add(Sample(100.0 + second, rss=1000))
    node = series_of_node([], (), recent.series(110.0), 110.0)
    both = combined(Series(), [node, node], 110.0, are_all=True)
    assert value_at(both, "rss", 105.0) == 2000
    some = combined(Series(), [node, node], 110.0, are_all=False)
    assert {*some.rss} == {None}


def test_hostile_series_is_harmless() -> None:
    wild = Series(edges=[9e14, 0.0, 5.0, 5.0, 1e15], rates=[1.0], losses=[math.inf] * 240)
    found = combined(Series(), [wild], 100.0, are_all=True)
    assert len(found.rates) <= POINTS_MAX


@pytest.mark.parametrize(
    ("step", "total", "pace", "age_s", "left_s"),
    [
        (100, 500, 2.0, 0.0, 200.0),
        (100, 500, 2.0, 0.25, 199.75),
        (100, 500, 0.1, 45.0, 3990.0),  # A slow step: the estimate waits.
        (100, 500, 0.1, 60.0, None),  # It stalls.
        (600, 500, 2.0, 0.0, 0.0),
        (100, None, 2.0, 0.0, None),
        (100, 500, None, 0.0, None),
        (100, 500, 0.0, 0.0, None),
    ],
)
def test_eta_follows_the_pace(
    step: int, total: int | None, pace: float | None, age_s: float, left_s: float | None
) -> None:
    assert eta_s(step, total, pace, age_s) == left_s
