from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

# The benchmarks are run from the project's root and are not installed.
sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.figures import NEVER, Metric, RowResult, Summary, Target

LOSS = Metric("killed", "a node lost", "s", (Target("limit", 1),), waited=30)
RESTART = Metric("restart", "a restart", "s", (Target("torchrun", 8),))


@pytest.mark.parametrize(
    ("samples", "summary"),
    [
        ([NEVER], Summary(1, NEVER, NEVER, NEVER, NEVER, NEVER)),
        ([NEVER, NEVER], Summary(2, NEVER, NEVER, NEVER, NEVER, NEVER)),
        ([3, NEVER, 1, 2, 4], Summary(5, 3, 1, NEVER, 2, 4)),
        ([1, NEVER], Summary(2, NEVER, 1, NEVER, 1, NEVER)),
    ],
)
def test_missing_samples_count_as_slowest(samples: list[float], summary: Summary) -> None:
    assert Summary.of(samples) == summary


def test_one_missing_sample_misses_a_limit() -> None:
    measured = RowResult(LOSS, {"holdfast": [0.5, NEVER, 0.5]})
    assert [one.reached for one in measured.verdicts()] == [False]


@pytest.mark.parametrize(
    ("torchrun", "holdfast", "reached"),
    [(NEVER, 1.0, True), (9.0, NEVER, False), (NEVER, NEVER, None)],
)
def test_ratio_handles_missing_samples(
    torchrun: float, holdfast: float, reached: bool | None
) -> None:
    measured = RowResult(RESTART, {"torchrun": [torchrun], "holdfast": [holdfast]})
    assert [one.reached for one in measured.verdicts()] == [reached]


def test_missing_samples_are_text_in_json() -> None:
    received = RowResult(LOSS, {"torchrun": [NEVER, NEVER], "holdfast": [0.5]}).as_json()
    read = json.loads(json.dumps(received, allow_nan=False))
    assert read["samples"]["torchrun"] == ["never", "never"]
    assert read["summary"]["torchrun"]["median"] == "never"
    assert read["torchrun_over_holdfast"] == "never"


@pytest.mark.parametrize(("speeds", "reached"), [([90, 100, 110], True), ([90, 99, 200], False)])
def test_lower_limit_applies_to_the_median(speeds: list[float], reached: bool) -> None:
    floor = Metric("steps", "a simulator", "steps/s", (Target("floor", 100),))
    assert [one.reached for one in RowResult(floor, {"holdfast": speeds}).verdicts()] == [reached]
