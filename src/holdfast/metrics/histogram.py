"""How many of something took how long: counts between fixed bounds, and their sum."""

from __future__ import annotations

import math
from bisect import bisect_left

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""For times from a process's start to a rendezvous that waits for a machine: half a decade each."""


class Histogram:
    """Counts each time by the first bound that is not below it. Not for two threads at once."""

    __slots__ = ("bounds", "count", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        if [*bounds] != sorted({*bounds}) or not all(map(math.isfinite, bounds)):
            raise ValueError(f"bounds grow, and end before infinity: {bounds}")
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bound; the last are those beyond all of them."""
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one; a time below zero is none, as two clocks may make it."""
        value = max(0.0, value)
        self.counts[bisect_left(self.bounds, value)] += 1
        self.count += 1
        self.sum += value

    def cumulative(self) -> list[tuple[float, int]]:
        """Return for each bound, and for infinity, how many were not above it."""
        so_far = 0
        found = []
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            so_far += count
            found.append((bound, so_far))
        return found

    def copy(self) -> Histogram:
        """Return the same, to be looked at while this one goes on."""
        other = Histogram.__new__(Histogram)
        other.bounds, other.counts = self.bounds, [*self.counts]
        other.count, other.sum = self.count, self.sum
        return other
