"""Lets the launchers take turns, and shows the progress."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.figures import RowResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.figures import Metric
    from benchmarks.launching import Lab, Samples

# The shortest time between two lines of progress if the console is a file.
PROGRESS_INTERVAL_S = 2.0


@dataclass(frozen=True)
class Row:
    """Figures that are measured together: `measure` is one turn of one launcher."""

    name: str
    measure: Callable[[Lab, str], Samples]
    metrics: tuple[Metric, ...]
    launchers: tuple[str, ...]
    rounds: int
    quick_rounds: int  # 0 for a row that takes minutes.
    warm_up: bool = True
    # A launcher that waits for minutes gets fewer rounds.
    rounds_at_most: dict[str, int] = field(default_factory=dict)


class MeasuringProgress:
    """One line that is rewritten on a terminal, and a line from time to time elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._shown_at = 0.0

    def show(self, text: str) -> None:
        """Show the current activity."""
        now = time.monotonic()
        if self._live:
            sys.stderr.write(f"\r\x1b[K{text}")
        elif now - self._shown_at >= PROGRESS_INTERVAL_S:
            sys.stderr.write(f"{text}\n")
            self._shown_at = now
        sys.stderr.flush()

    def done(self) -> None:
        """Clear the line."""
        if self._live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def measure(
    lab: Lab, row: Row, rounds: int, launchers: Sequence[str], label: str
) -> list[RowResult]:
    """Measure a row: a warm-up turn for each launcher, then `rounds` turns that count."""
    results = [RowResult(metric) for metric in row.metrics]
    chosen = [launcher for launcher in row.launchers if launcher in launchers]
    progress = MeasuringProgress()
    for turn in range(-1 if row.warm_up else 0, rounds):
        for launcher in chosen:
            if turn >= row.rounds_at_most.get(launcher, rounds):
                continue
            which = "warm-up" if turn < 0 else f"round {turn + 1} of {rounds}"
            progress.show(f"{label} {row.name}: {which}, {launcher}")
            samples = row.measure(lab, launcher)
            lab.note_leftovers(launcher)
            if turn < 0:
                continue
            for result in results:
                result.add(launcher, samples[result.metric.key])
    progress.done()
    return results
