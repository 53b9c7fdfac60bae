"""Plots as plain SVG: numbers and escaped names, without a library or a script."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WIDTH, HEIGHT = 1000, 200
TICKS = 4
X_TICKS_MAX = 7
COLOURS = 8
HEAT_LEVELS = ((0.9, "h1"), (0.75, "h2"), (0.5, "h3"), (0.25, "h4"), (-1.0, "h5"))
"""The minimum rate for each colour, relative to the median."""
TIME_STEPS = (
    *(one * 10.0**power for power in range(-4, 1) for one in (1, 2, 5)),
    *(10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 14400.0),
    *(21600.0, 43200.0, 86400.0, 172800.0, 604800.0, 2592000.0),
)


def duration(seconds: float, step: float = 0.0) -> str:
    """Return a time for people: `24 ms`, `12.5 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 60 and step:
        digits = max(0, math.ceil(-math.log10(step) - 1e-9))  # Labels of an axis must differ.
        return f"{seconds:.{digits}f} s"
    if seconds < 0.0995:
        return f"{1000 * seconds:.{1 if 0 < seconds < 0.00995 else 0}f} ms" if seconds else "0 s"
    if seconds < 59.95:
        return f"{seconds:.{1 if seconds >= 9.995 else 2}f} s"
    whole = round(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min")]
    shown = [*parts, (whole % 60, "s")]
    first = next(at for at, (count, _) in enumerate(shown) if count)
    return " ".join(f"{count} {unit}" for count, unit in shown[first : first + 2] if count)


def percent(value: float, whole: float) -> str:
    """Return a position on an axis."""
    return f"{100.0 * value / whole if whole else 0.0:.4f}%"


def time_ticks(seconds: float) -> list[tuple[float, str]]:
    """Return the marks of an axis of times."""
    step = next((one for one in TIME_STEPS if seconds / one <= X_TICKS_MAX), seconds or 1.0)
    marks = [at * step for at in range(int(seconds / step) + 1)]
    return [(at, duration(at, step) if at else "0") for at in marks]


def time_axis(seconds: float) -> str:
    """Return the labels below a plot."""
    marks = time_ticks(seconds)
    labels = "".join(
        f'<text x="{percent(at, seconds)}" y="14" '
        f'text-anchor="{"start" if not at else "end" if at > 0.96 * seconds else "middle"}">'
        f"{text}</text>"
        for at, text in marks
    )
    return f'<svg aria-hidden="true">{labels}</svg>'


def axis_end(value: float) -> float:
    """Return the end of an axis that begins at 0."""
    if value <= 0:
        return 1.0
    power = 10.0 ** (len(str(int(value))) - 1) if value >= 1 else 1.0
    while power > value:
        power /= 10.0
    for factor in (1.0, 1.2, 1.6, 2.0, 2.4, 3.2, 4.0, 6.0, 8.0, 10.0):
        if power * factor >= value:
            return power * factor
    return power * 10.0


def value_axis(low: float, high: float) -> str:
    """Return the labels beside a plot."""
    labels = []
    for at in range(TICKS + 1):
        value = low + (high - low) * at / TICKS
        place = 100.0 - 100.0 * at / TICKS
        shift = {0: -2, TICKS: 10}.get(at, 4)
        labels.append(
            f'<text x="90%" y="{place:.2f}%" dy="{shift}" text-anchor="end">{compact(value)}</text>'
        )
    return f'<svg aria-hidden="true">{"".join(labels)}</svg>'


def compact(value: float) -> str:
    """Return a number in few characters."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            divisor = 1e3 if unit == "k" else limit
            return f"{value / divisor:.3g}{unit}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def line(values: Sequence[float | None], low: float, high: float) -> str:
    """Return the path of a line with gaps where there is no value."""
    steps = []
    pen = "M"
    for at, value in enumerate(values):
        if value is None:
            pen = "M"
            continue
        x = WIDTH * (at + 1) / len(values)
        y = HEIGHT - HEIGHT * (value - low) / (high - low)
        steps.append(f"{pen}{x:.1f} {min(HEIGHT, max(0.0, y)):.1f}")
        pen = "L"
    return "".join(steps)


def band(
    lows: Sequence[float | None], highs: Sequence[float | None], low: float, high: float
) -> str:
    """Return the path around the area between two lines."""
    paths: list[str] = []
    run: list[tuple[float, float, float]] = []
    for at, (below, above) in enumerate([*zip(lows, highs, strict=True), (None, None)]):
        if below is None or above is None:
            if run:
                there = "L".join(f"{x:.1f} {top:.1f}" for x, _, top in run)
                back = "L".join(f"{x:.1f} {bottom:.1f}" for x, bottom, _ in reversed(run))
                paths.append(f"M{there}L{back}Z")
            run = []
            continue
        bottom, top = (HEIGHT - HEIGHT * (one - low) / (high - low) for one in (below, above))
        run.append((WIDTH * (at + 1) / len(lows), bottom, top))
    return "".join(paths)


def plot(
    *,
    title: str,
    paths: Iterable[str],
    low: float,
    high: float,
    seconds: float,
    marks: Iterable[float],
) -> str:
    """Return a whole plot; `paths` are elements, `marks` are times with a line from top to bottom."""
    grid = "".join(
        f'<line x1="0" x2="{WIDTH}" y1="{HEIGHT * at / TICKS}" y2="{HEIGHT * at / TICKS}" '
        'vector-effect="non-scaling-stroke"/>'
        for at in range(TICKS)
    )
    lines = "".join(
        f'<path class="mark" d="M{WIDTH * at / seconds:.1f} 0V{HEIGHT}"/>' for at in marks
    )
    return (
        f'<div class="plot"><div class="y">{value_axis(low, high)}</div><div class="area">'
        f'<svg role="img" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">'
        f"<title>{escape(title)}</title>{grid}{lines}{''.join(paths)}</svg></div>"
        f'<div></div><div class="x">{time_axis(seconds)}</div></div>'
    )


def heat_map(
    *, title: str, rows: Sequence[Sequence[float | None]], names: Sequence[str], seconds: float
) -> str:
    """Return a map of cells, row by row, coloured by their value up to 1."""
    height = HEIGHT / max(1, len(rows))
    cells: dict[str, list[str]] = {name: [] for _, name in HEAT_LEVELS}
    for number, row in enumerate(rows):
        width = WIDTH / len(row)
        levels = [*(_level(value) for value in row), ""]
        begun = 0
        for at in range(1, len(levels)):
            if levels[at] != levels[begun]:
                if levels[begun]:
                    across = width * (at - begun)
                    cells[levels[begun]].append(
                        f"M{width * begun:.1f} {height * number:.2f}"
                        f"h{across:.1f}v{height:.2f}h-{across:.1f}z"
                    )
                begun = at
    paths = "".join(f'<path class="{name}" d="{"".join(d)}"/>' for name, d in cells.items() if d)
    every = max(1, -(-len(names) // 12))
    labels = "".join(
        f'<text x="90%" y="{(at + 0.5) * 100 / len(names):.2f}%" dy="4" text-anchor="end">'
        f"{escape(name)}</text>"
        for at, name in enumerate(names)
        if at % every == 0
    )
    return (
        f'<div class="plot heat"><div class="y"><svg aria-hidden="true">{labels}</svg></div>'
        f'<div class="area"><svg role="img" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">'
        f"<title>{escape(title)}</title>{paths}</svg></div>"
        f'<div></div><div class="x">{time_axis(seconds)}</div></div>'
    )


def _level(value: float | None) -> str:
    if value is None:
        return ""
    return next(name for limit, name in HEAT_LEVELS if value >= limit)
