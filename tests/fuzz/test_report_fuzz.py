"""A report is made from the readable part of a log directory with arbitrary content, or refused."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.views.report import records
from holdfast.views.report.html import render
from holdfast.views.report.model import describe
from timelines import Timeline, one_restart

untimed = settings(deadline=None, max_examples=200)  # Other programs may use the machine.

LINES = [msgspec.json.decode(line) for line in one_restart().lines]
NUMBERS = st.one_of(
    st.integers(-2, 60),
    st.sampled_from([0, 1, 2**31, 2**62, 1e12, -1e12, 0.5, 1e308, 1077.0, 1078.0]),
    st.floats(allow_nan=False, allow_infinity=False),
)
VALUES = st.one_of(
    NUMBERS, st.text(max_size=8), st.none(), st.booleans(), st.lists(st.lists(NUMBERS, max_size=3))
)


@st.composite
def changed_lines(draw: st.DrawFn) -> list[bytes]:
    """Return the lines of a timeline, some of which are missing, moved or changed."""
    lines = [dict(line) for line in LINES]
    for _ in range(draw(st.integers(0, 12))):
        line = lines[draw(st.integers(0, len(lines) - 1))]
        key = draw(st.sampled_from(sorted(set(line) - {"kind"})))
        line[key] = draw(VALUES)
    order = draw(st.lists(st.integers(0, len(lines) - 1), min_size=1, max_size=60))
    kept = lines if draw(st.booleans()) else [lines[0], *(lines[at] for at in order)]
    return [msgspec.json.encode(line) for line in kept]


@untimed
@given(st.lists(changed_lines(), min_size=1, max_size=3))
def test_report_of_changed_timelines_is_made_or_refused(files: list[list[bytes]]) -> None:
    runs = [run for lines in files for run in records.parse(lines)]
    for job in records.jobs_in(runs):
        report = describe(job)
        assert report.goodput is None or 0.0 <= report.goodput <= 1.0
        assert sum(cost.seconds for cost in report.costs) <= report.duration_s * 1.0001 + 0.01
        render(report).encode()
        msgspec.json.encode(report)


@untimed
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_not_a_timeline(data: bytes) -> None:
    node = Timeline()
    node.run()
    runs = records.parse([*node.lines, *data.split(b"\n")])
    assert [describe([run]).run_id for run in runs] == ["job"]
