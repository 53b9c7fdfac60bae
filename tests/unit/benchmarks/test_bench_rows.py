from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

# The benchmarks are run from the project's root and are not installed.
sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.figures import Metric
from benchmarks.launching import Lab
from benchmarks.measuring import Row, measure
from benchmarks.rows import GROUPS, ROWS

if TYPE_CHECKING:
    from benchmarks.launching import Samples

LAUNCHERS = ("torchrun", "holdfast")


class QuietLab(Lab):
    """A lab where nothing runs."""

    def __init__(self) -> None:
        pass

    def note_leftovers(self, launcher: str) -> None:
        pass


def test_a_slow_launcher_gets_fewer_rounds_and_still_takes_turns() -> None:
    turns = []

    def take_turn(_: Lab, launcher: str) -> Samples:
        turns.append(launcher)
        return {"time": [1.0]}

    row = Row(
        "row", take_turn, (Metric("time", "a time", "s"),), LAUNCHERS, 3, 1,
        warm_up=False, rounds_at_most={"torchrun": 1},
    )  # fmt: skip
    (result,) = measure(QuietLab(), row, 3, LAUNCHERS, "")
    assert turns == ["torchrun", "holdfast", "holdfast", "holdfast"]
    assert result.samples == {"torchrun": [1.0], "holdfast": [1.0, 1.0, 1.0]}


def test_names_of_rows_and_groups_are_unique_and_groups_hold_all_rows() -> None:
    names = [row.name for row in ROWS]
    assert len({*names, *GROUPS}) == len(names) + len(GROUPS)
    assert [name for group in GROUPS.values() for name in group] == names


def test_metrics_of_a_row_have_titles_that_stand_alone() -> None:
    leading = [row.metrics[0].title for row in ROWS]
    assert [title for title in leading if title.startswith("...")] == []
