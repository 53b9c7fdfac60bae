"""Metric families and histograms: the values that exporters send.

A family has a name, a kind, a help text and samples: labels and a value each. An invalid name raises
when the family is created.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""The default bounds, two in each decade: a process starts in 1 ms, a rendezvous may wait 1,000 s for a machine."""


class Histogram:
    """Counts durations by bucket. Not thread-safe."""

    __slots__ = ("bounds", "count", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        if [*bounds] != sorted({*bounds}) or not all(map(math.isfinite, bounds)):
            raise ValueError(f"bounds must be finite and increasing: {bounds}")
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """The counts by bound; the last one counts the durations above all bounds."""
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one duration. A negative one, which two clocks can cause, counts as zero."""
        value = max(0.0, value)
        self.counts[bisect_left(self.bounds, value)] += 1
        self.count += 1
        self.sum += value

    def cumulative(self) -> list[tuple[float, int]]:
        """Return each bound, and infinity, with the number of durations up to it."""
        so_far = 0
        found = []
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            so_far += count
            found.append((bound, so_far))
        return found

    def copy(self) -> Histogram:
        """Return a snapshot."""
        other = Histogram.__new__(Histogram)
        other.bounds, other.counts = self.bounds, [*self.counts]
        other.count, other.sum = self.count, self.sum
        return other


NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class Sample(NamedTuple):
    """One value of a family, identified by its labels."""

    labels: Mapping[str, object]
    value: float | Histogram


class Family:
    """All samples of one name; `kind` is `gauge`, `counter` or `histogram`."""

    def __init__(self, name: str, kind: str, help_text: str) -> None:
        if not NAME.fullmatch(name) or kind not in ("gauge", "counter", "histogram"):
            raise ValueError(f"not a valid family: {name!r} of kind {kind!r}")
        if (kind == "counter") != name.endswith("_total"):
            raise ValueError(f"{name!r}: the names of counters, and only those, end in _total")
        self.name = name
        self.kind = kind
        self.help_text = help_text
        self.samples: list[Sample] = []

    def add(self, value: float | Histogram, **labels: object) -> Family:
        """Add a sample; return the family."""
        for label in labels:
            if not LABEL.fullmatch(label) or label == "le":
                raise ValueError(f"{self.name}: not a valid label: {label!r}")
        self.samples.append(Sample(labels, value))
        return self
