"""Metric families and histograms, and their text in Prometheus' exposition format 0.0.4.

A family is a name, a kind, a help text, and its samples: labels and a value each. A label's value
may be anything a user chose, so it is escaped here and nowhere else; names are ours, and an invalid
one raises when its family is made.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


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


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABEL_CHARS_MAX = 200
"""A value of a label is cut there: Prometheus keeps every one of them for as long as its data."""

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class Sample(NamedTuple):
    """One value, told apart from the others of its family by labels."""

    labels: Mapping[str, object]
    value: float | Histogram


class Family:
    """All samples of one name; `kind` is `gauge`, `counter` or `histogram`."""

    def __init__(self, name: str, kind: str, meaning: str) -> None:
        if not NAME.fullmatch(name) or kind not in ("gauge", "counter", "histogram"):
            raise ValueError(f"no family can be called {name!r} and be a {kind!r}")
        if (kind == "counter") != name.endswith("_total"):
            raise ValueError(f"{name!r}: the name of a counter, and of no other, ends in _total")
        self.name = name
        self.kind = kind
        self.meaning = meaning
        self.samples: list[Sample] = []

    def add(self, value: float | Histogram, **labels: object) -> Family:
        """Add a sample; return the family, so that one is made in a line."""
        for label in labels:
            if not LABEL.fullmatch(label) or label == "le":
                raise ValueError(f"{self.name}: no label can be called {label!r}")
        self.samples.append(Sample(labels, value))
        return self


def render(families: Iterable[Family]) -> bytes:
    """Return the page. A family without samples is left out: there is nothing to say yet."""
    return "".join(line for family in families for line in _lines(family)).encode(errors="replace")


def _lines(family: Family) -> Iterator[str]:
    if not family.samples:
        return
    name = family.name
    meaning = family.meaning.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP {name} {meaning}\n"
    yield f"# TYPE {name} {family.kind}\n"
    for labels, value in family.samples:
        if isinstance(value, (int, float)):
            yield f"{name}{written(labels)} {number(value)}\n"
            continue
        for bound, count in value.cumulative():
            yield f"{name}_bucket{written({**labels, 'le': number(bound)})} {count}\n"
        yield f"{name}_sum{written(labels)} {number(value.sum)}\n"
        yield f"{name}_count{written(labels)} {value.count}\n"


def written(labels: Mapping[str, object]) -> str:
    """Return labels as they stand behind a name."""
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}"


def escaped(value: object) -> str:
    """Return a label's value as it stands between quotes."""
    text = str(value)[:LABEL_CHARS_MAX]
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def number(value: float) -> str:
    """Return a number as Prometheus writes it."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
