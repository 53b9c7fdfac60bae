"""The history line of `holdfast top`: a sparkline for each kind of value, with the current one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from holdfast.control.series import resampled
from holdfast.views.tables import loss_text
from holdfast.views.top.columns import memory, rate_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.control.live_job import LiveJob
    from holdfast.views.top.table import Cell

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.:-=+*#"
"""The same for a terminal whose locale is not UTF-8."""
NOT_A_NUMBER = "!"
SPANS: dict[str, float] = {"all": math.inf, "2h": 7200.0, "10m": 600.0}
"""The times that the line can cover, by name."""
WIDTH_MIN, WIDTH_MAX = 5, 48
GAP = 3
SIMILAR = 0.1
"""A memory that varies by less than this share of its maximum is drawn as nearly constant."""


class _Kind(NamedTuple):
    label: str
    values: Sequence[float | None]
    low: float
    high: float
    text: str
    style: str


def glyphs_of(environ: Mapping[str, str]) -> str:
    """Return the characters that a terminal with this locale can show."""
    names = (environ.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    locale = next(filter(None, names), "").lower().replace("-", "")
    return BLOCKS if "utf8" in locale else ASCII


def sparkline(values: Sequence[float | None], low: float, high: float, glyphs: str) -> str:
    """Return a character for each value: a blank for an unknown one, `!` for one that is not finite."""
    shown = []
    for value in values:
        if value is None:
            shown.append(" ")
        elif not math.isfinite(value):
            shown.append(NOT_A_NUMBER)
        else:
            share = (value - low) / (high - low) if high > low else 0.0
            shown.append(glyphs[min(len(glyphs) - 1, max(0, int(share * len(glyphs))))])
    return "".join(shown)


def history_line(job: LiveJob, width: int, span: str, glyphs: str) -> list[Cell]:
    """Return as many sparklines as fit, over one of `SPANS`; nothing before there is a history."""
    series, one = job.series, job.header
    kinds = [
        _Kind("steps/s ", series.rates, 0.0, _highest(series.rates), rate_text(one.rate), ""),
        _Kind("loss ", series.losses, _lowest(series.losses), _highest(series.losses),
              loss_text(one.loss), "bad" if isinstance(one.loss, str) else ""),
        _Kind("mem ", series.rss, min(_lowest(series.rss), (1 - SIMILAR) * _highest(series.rss)),
              _highest(series.rss), memory(one.rss_bytes), ""),
        _Kind("gpu ", series.gpu, 0.0, 1.0, "-" if one.gpu is None else f"{one.gpu:.0%}", ""),
    ]  # fmt: skip
    kinds = [kind for kind in kinds if any(value is not None for value in kind.values)]
    room = width - len(span)
    while kinds and (size := _size(kinds, room)) < WIDTH_MIN:
        kinds.pop()
    if not kinds:
        return [("", "")]
    end = series.edges[-1]
    begin = max(series.edges[0], end - SPANS[span])
    cells: list[Cell] = []
    for kind in kinds:
        values = resampled(series, kind.values, begin, end, min(size, WIDTH_MAX))
        cells += [
            (kind.label, "dim"),
            (sparkline(values, kind.low, kind.high, glyphs), "accent"),
            (f" {kind.text}", kind.style),
            (" " * GAP, ""),
        ]
    return [*cells, (span, "dim")]


def _size(kinds: Sequence[_Kind], room: int) -> int:
    texts = sum(len(kind.label) + 1 + len(kind.text) + GAP for kind in kinds)
    return (room - texts) // len(kinds)


def _highest(values: Sequence[float | None]) -> float:
    return max((one for one in values if one is not None and math.isfinite(one)), default=0.0)


def _lowest(values: Sequence[float | None]) -> float:
    return min((one for one in values if one is not None and math.isfinite(one)), default=0.0)
