"""Counts between bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.observe.metrics.families import SECONDS, Histogram


def test_each_is_counted_by_the_first_bound_not_below_it() -> None:
    times = Histogram((1.0, 10.0))
    for value in (0.5, 1.0, 1.1, 10.0, 99.0):
        times.observe(value)
    assert times.cumulative() == [(1.0, 2), (10.0, 4), (math.inf, 5)]
    assert times.count == 5
    assert times.sum == pytest.approx(111.6)


def test_a_time_below_zero_counts_as_none() -> None:
    times = Histogram((1.0,))
    times.observe(-3.0)
    assert (times.sum, times.cumulative()[0]) == (0.0, (1.0, 1))


@given(st.lists(st.floats(0, 1e6)))
def test_the_last_bound_has_them_all(values: list[float]) -> None:
    times = Histogram(SECONDS)
    for value in values:
        times.observe(value)
    counts = [count for _, count in times.cumulative()]
    assert counts == sorted(counts)
    assert counts == [sum(one <= bound for one in values) for bound in (*SECONDS, math.inf)]


def test_a_copy_stays_as_it_is() -> None:
    times = Histogram((1.0,))
    copy = times.copy()
    times.observe(2.0)
    assert (copy.count, copy.cumulative()) == (0, [(1.0, 0), (math.inf, 0)])


@pytest.mark.parametrize("bounds", [(2.0, 1.0), (1.0, 1.0), (1.0, math.inf)])
def test_bounds_grow(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="bounds grow"):
        Histogram(bounds)
