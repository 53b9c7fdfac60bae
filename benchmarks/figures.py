"""The figures of a run as pure data: samples in, medians, ratios and verdicts out.

A `Metric` has the meaning of a number and its targets; `RowResult` adds the samples. A sample that did
not arrive in time is `NEVER`. Nothing here measures, reads a clock or prints.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any, Literal

TORCHRUN, HOLDFAST, BARE = "torchrun", "holdfast", "bare"
LAUNCHERS = (TORCHRUN, HOLDFAST, BARE)
NEVER = math.inf


@dataclass(frozen=True)
class Summary:
    """Median, quartiles and extremes of the samples of one figure."""

    count: int
    median: float
    low: float
    high: float
    quartile1: float
    quartile3: float

    @classmethod
    def of(cls, samples: list[float]) -> Summary:
        """Summarise at least one sample."""
        if len(samples) == 1:
            (only,) = samples
            return cls(1, only, only, only, only, only)
        if NEVER in samples:  # `NEVER` has no mean with a number, so each quantile is a sample.
            ordered, last = sorted(samples), len(samples) - 1
            quartile1, quartile3 = ordered[last // 4], ordered[(last * 3 + 3) // 4]
            median = ordered[(last + 1) // 2]
            return cls(len(samples), median, ordered[0], ordered[-1], quartile1, quartile3)
        quartile1, median, quartile3 = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(len(samples), median, min(samples), max(samples), quartile1, quartile3)


@dataclass(frozen=True)
class Target:
    """A target: a minimum speed relative to `torchrun`, a maximum relative to a bare process, or an absolute
    maximum (`limit`) or minimum (`floor`).
    """

    against: Literal["torchrun", "bare", "limit", "floor"]
    number: float


@dataclass(frozen=True)
class TargetCheck:
    """A target and the measured value; `reached` is None if there is nothing to compare."""

    target: str
    measured: float | None
    reached: bool | None


@dataclass(frozen=True)
class Metric:
    """One figure of a row."""

    key: str
    title: str
    unit: str
    targets: tuple[Target, ...] = ()
    higher_is_better: bool = False
    waited: float | None = None  # The time limit after which a sample counts as `NEVER`.


@dataclass
class RowResult:
    """The samples of one figure, by launcher, in the order they were taken."""

    metric: Metric
    samples: dict[str, list[float]] = field(default_factory=dict)

    def add(self, launcher: str, values: list[float]) -> None:
        """Add the samples of one turn."""
        self.samples.setdefault(launcher, []).extend(values)

    def summaries(self) -> dict[str, Summary]:
        """Return a summary for every launcher that has samples."""
        return {name: Summary.of(values) for name, values in self.samples.items() if values}

    def median(self, launcher: str) -> float | None:
        """Return a launcher's median, or None if it was not measured."""
        samples = self.samples.get(launcher)
        return Summary.of(samples).median if samples else None

    def times_better(self) -> float | None:
        """Return how many times better Holdfast's median is than that of `torchrun`."""
        theirs, ours = self.median(TORCHRUN), self.median(HOLDFAST)
        return _ratio(ours, theirs) if self.metric.higher_is_better else _ratio(theirs, ours)

    def times_bare(self) -> float | None:
        """Return Holdfast's median as a multiple of the bare processes'."""
        return _ratio(self.median(HOLDFAST), self.median(BARE))

    def verdicts(self) -> list[TargetCheck]:
        """Return every target with its measured value."""
        return [self._verdict(target) for target in self.metric.targets]

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        metric = self.metric
        summaries = {name: vars(summary) for name, summary in self.summaries().items()}
        return {
            "key": metric.key,
            "title": metric.title,
            "unit": metric.unit,
            "higher_is_better": metric.higher_is_better,
            "waited": metric.waited,
            "summary": _plain(summaries),
            "torchrun_over_holdfast": _plain(self.times_better()),
            "holdfast_over_bare": _plain(self.times_bare()),
            "targets": _plain([vars(verdict) for verdict in self.verdicts()]),
            "samples": _plain(self.samples),
        }

    def _verdict(self, target: Target) -> TargetCheck:
        if target.against == "torchrun":
            text = f"at least {target.number:.3g}x torchrun's speed"
            better = self.times_better()
            return TargetCheck(text, better, None if better is None else better >= target.number)
        if target.against == "floor":
            text = f"at least {target.number:,g} {self.metric.unit}"
            least = self.median(HOLDFAST)
            return TargetCheck(text, least, None if least is None else least >= target.number)
        if target.against == "bare":
            text, measured = f"at most {target.number:g}x bare", self.times_bare()
        else:
            # An upper limit applies to the worst sample.
            text = f"at most {target.number:g} {self.metric.unit}"
            measured = max(self.samples.get(HOLDFAST, []), default=None)
        return TargetCheck(text, measured, None if measured is None else measured <= target.number)


def _ratio(above: float | None, below: float | None) -> float | None:
    if not above or not below or above == below == NEVER:
        return None  # A ratio to zero means nothing.
    return above / below


def _plain(value: Any) -> Any:
    """Replace each `NEVER`, for which JSON has no number, with a word."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return "never" if isinstance(value, float) and value == NEVER else value
