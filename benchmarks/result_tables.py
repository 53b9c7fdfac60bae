"""The tables: medians and ratios, and the spread of the samples.

The lines are Markdown tables, aligned, so that they read the same on a console and in a document.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.figures import BARE, HOLDFAST, LAUNCHERS, NEVER, TORCHRUN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.figures import RowResult, TargetCheck

NOTHING = "-"


def number(value: float | None, waited: float | None = None) -> str:
    """Return a figure with three significant digits."""
    if value is None:
        return NOTHING
    if value == NEVER:
        return "never" if waited is None else f"never (> {waited:g})"
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def times(value: float | None) -> str:
    """Return a ratio."""
    return NOTHING if value is None or value == NEVER else f"{number(value)}x"


def verdict(one: TargetCheck) -> str:
    """Return whether a target was reached, as one word."""
    return {True: "yes", False: "NO", None: "not measured"}[one.reached]


def aligned(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is text, the others are right-aligned."""
    widths = [max(len(line[column]) for line in [header, *lines]) for column in range(len(header))]

    def one(cells: Sequence[str]) -> str:
        first, *rest = cells
        padded = [first.ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |"

    ruler = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([one(header), one(ruler), *map(one, lines)])


def medians(results: Sequence[RowResult]) -> str:
    """Return the table of medians, ratios and targets; a second target has a line of its own."""
    lines = []
    for result in results:
        verdicts = result.verdicts()
        metric = result.metric
        lines.append(
            [
                f"{metric.title} ({metric.unit})",
                number(result.median(TORCHRUN), metric.waited),
                number(result.median(HOLDFAST), metric.waited),
                number(result.median(BARE), metric.waited),
                times(result.times_better()),
                times(result.times_bare()),
                verdicts[0].target if verdicts else "",
                verdict(verdicts[0]) if verdicts else "",
            ]
        )
        lines += [["", "", "", "", "", "", one.target, verdict(one)] for one in verdicts[1:]]
    better = "torchrun / holdfast"
    header = ["medians", *LAUNCHERS, better, "holdfast / bare", "target", "reached"]
    return aligned(header, lines)


def spread(results: Sequence[RowResult]) -> str:
    """Return the spread of the samples of each figure and launcher."""
    lines = []
    for result in results:
        title = f"{result.metric.title} ({result.metric.unit})"
        for launcher, summary in result.summaries().items():
            lines.append(
                [
                    title,
                    launcher,
                    str(summary.count),
                    number(summary.low),
                    number(summary.quartile1),
                    number(summary.median),
                    number(summary.quartile3),
                    number(summary.high),
                ]
            )
            title = ""
    header = ["spread", "launcher", "samples", "min", "quartile", "median", "quartile", "max"]
    return aligned(header, lines)


def missed(results: Sequence[RowResult]) -> list[str]:
    """Return a line for every target that was measured and not reached."""
    return [
        f"{result.metric.title}: {number(one.measured)}, target: {one.target}"
        for result in results
        for one in result.verdicts()
        if one.reached is False
    ]
