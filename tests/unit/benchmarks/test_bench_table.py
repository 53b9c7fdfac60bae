from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The benchmarks are run from the project's root and are not installed.
sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks import table
from benchmarks.figures import Metric, Result, Summary, Target, Verdict


def result(metric: Metric, **samples: list[float]) -> Result:
    return Result(metric, samples)


TIME = Metric("time", "a command", "ms", (Target("torchrun", 12), Target("bare", 5)))
SPEED = Metric("speed", "a tee", "MB/s", (Target("torchrun", 3),), higher_is_better=True)
MEMORY = Metric("memory", "an agent", "MiB", (Target("limit", 32),))


def test_a_summary_has_the_median_the_quartiles_and_the_ends() -> None:
    assert Summary.of([5, 1, 4, 2, 3]) == Summary(5, 3, 1, 5, 2, 4)


def test_one_sample_is_its_own_summary() -> None:
    assert Summary.of([7.5]) == Summary(1, 7.5, 7.5, 7.5, 7.5, 7.5)


def test_for_a_time_better_means_less() -> None:
    measured = result(TIME, torchrun=[2400, 2000, 9000], holdfast=[100], bare=[40])
    assert measured.times_better() == 24
    assert measured.times_bare() == 2.5


def test_for_a_speed_better_means_more() -> None:
    assert result(SPEED, torchrun=[50], holdfast=[200]).times_better() == 4


def test_each_target_is_judged_by_its_own_comparison() -> None:
    measured = result(TIME, torchrun=[1200], holdfast=[100], bare=[16])
    assert measured.verdicts() == [
        Verdict("at least 12x torchrun's speed", 12.0, reached=True),
        Verdict("at most 5x bare", 6.25, reached=False),
    ]


@pytest.mark.parametrize(("mib", "reached"), [(32.0, True), (32.1, False)])
def test_an_absolute_target_needs_no_other_launcher(mib: float, reached: bool) -> None:
    assert result(MEMORY, holdfast=[mib]).verdicts() == [Verdict("at most 32 MiB", mib, reached)]


def test_an_absolute_target_is_held_against_the_worst_sample() -> None:
    assert [one.reached for one in result(MEMORY, holdfast=[16, 16, 33]).verdicts()] == [False]


def test_a_target_with_nothing_to_compare_is_neither_reached_nor_missed() -> None:
    measured = result(TIME, holdfast=[100])
    assert [verdict.reached for verdict in measured.verdicts()] == [None, None]
    assert table.missed([measured]) == []


def test_a_ratio_with_nothing_is_no_ratio() -> None:
    assert result(MEMORY, torchrun=[70], holdfast=[0]).times_better() is None
    assert result(MEMORY, torchrun=[0], holdfast=[70]).times_better() is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (0.3442, "0.344"), (2.5, "2.50"), (16.42, "16.4"), (2185.4, "2185")],
)
def test_a_number_shows_three_digits(value: float | None, text: str) -> None:
    assert table.number(value) == text


def test_the_medians_have_a_line_for_each_further_target() -> None:
    measured = result(TIME, torchrun=[1300], holdfast=[100], bare=[10])
    first, second = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table.medians([measured]).splitlines()[2:]
    )
    ratios = ["1300", "100", "10.0", "13.0x", "10.0x"]
    assert first == ["a command (ms)", *ratios, "at least 12x torchrun's speed", "yes"]
    assert second == ["", "", "", "", "", "", "at most 5x bare", "NO"]


def test_a_table_is_aligned_markdown() -> None:
    assert table.aligned(["what", "ms"], [["longer", "1"], ["x", "1000"]]).splitlines() == [
        "| what   |   ms |",
        "| ------ | ---: |",
        "| longer |    1 |",
        "| x      | 1000 |",
    ]


def test_the_spread_names_each_launcher_that_was_measured() -> None:
    lines = table.spread([result(MEMORY, torchrun=[221, 223], holdfast=[16])]).splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["torchrun", "holdfast"]


def test_what_was_missed_is_said_with_its_target() -> None:
    slow = result(SPEED, torchrun=[100], holdfast=[150])
    assert table.missed([slow]) == ["a tee: 1.50, to reach: at least 3x torchrun's speed"]


def test_the_figures_as_json_hold_every_sample() -> None:
    told = result(SPEED, torchrun=[50], holdfast=[200, 100]).as_json()
    assert told["samples"] == {"torchrun": [50], "holdfast": [200, 100]}
    assert told["summary"]["holdfast"]["median"] == 150
    assert told["torchrun_over_holdfast"] == 3
    assert told["targets"][0]["reached"] is True
