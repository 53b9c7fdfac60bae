"""The dashboard in examples/ shows metrics that exist, by labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.observe.metrics.job_metrics import JobMetrics
from holdfast.observe.metrics.prometheus import render
from recorded_runs import first_start

if TYPE_CHECKING:
    from collections.abc import Iterator

DASHBOARD = json.loads(
    (Path(__file__).parents[3] / "examples" / "grafana-dashboard.json").read_text()
)
PANELS = [one for one in DASHBOARD["panels"] if one["type"] != "row"]
NAME = re.compile(r"\bholdfast_\w+")
SELECTED = re.compile(r"\b(holdfast_\w+)\{([^}]*)\}")
GROUPED = re.compile(r"\bby \(([^)]*)\) *\((?:[a-z]+\()*(holdfast_\w+)")
ADDED_BY_PROMETHEUS = {"instance", "job"}


def labels_by_name() -> dict[str, set[str]]:
    """Return all names that are rendered, and the labels of each."""
    metrics = JobMetrics(lambda: [(4, 1, 0.5, "checkpoint")])
    for event in first_start():
        metrics(event)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(render(metrics.collect()).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


LABELS = labels_by_name()


def texts_of(value: Any) -> Iterator[str]:
    """Find every text in the file that is an expression, or may be one."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from [inner] if key in ("expr", "query") and isinstance(inner, str) else []
            yield from texts_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_of(inner)


EXPRESSIONS = sorted({*texts_of(DASHBOARD)})


def test_the_check_sees_the_expressions() -> None:
    assert len(EXPRESSIONS) > 20
    assert LABELS["holdfast_recovery_seconds_bucket"] == {"run_id", "stage", "le"}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_it_names_exists_with_these_labels(expression: str) -> None:
    assert {*NAME.findall(expression)} <= LABELS.keys()
    for name, selectors in SELECTED.findall(expression):
        assert {*re.findall(r"(\w+)=", selectors)} <= LABELS[name]
    for labels, name in GROUPED.findall(expression):
        assert {*re.findall(r"\w+", labels)} <= LABELS[name]
    assert expression.count("(") == expression.count(")")


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_legend_names_labels_that_there_are(panel: dict[str, Any]) -> None:
    assert panel["description"]
    for target in panel["targets"]:
        known = set().union(*(LABELS[name] for name in NAME.findall(target["expr"])))
        named = {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])}
        assert named <= known | ADDED_BY_PROMETHEUS


def test_panels_have_numbers_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({one["id"] for one in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for one in panels:
        at = one["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, one["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
