"""The dashboard in examples/ uses only existing metrics and labels."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from holdfast.observe.metrics.job_metrics import JobMetrics
from holdfast.observe.metrics.prometheus import render
from holdfast.processes.workers.pages import OpenSection, Progress
from recorded_runs import first_start

DASHBOARD = json.loads(
    (Path(__file__).parents[3] / "examples" / "grafana-dashboard.json").read_text()
)
PANELS = [one for one in DASHBOARD["panels"] if one["type"] != "row"]
NAME = re.compile(r"\bholdfast_\w+")
SELECTED = re.compile(r"\b(holdfast_\w+)\{([^}]*)\}")
GROUPED = re.compile(r"\bby \(([^)]*)\) *\((?:[a-z]+\()*(holdfast_\w+)")
ADDED_BY_PROMETHEUS = {"instance", "job"}


def labels_by_name() -> dict[str, set[str]]:
    """Return all rendered names, and the labels of each."""
    at_ns = time.monotonic_ns()
    section = OpenSection("checkpoint", 0, None)
    progress = Progress(7, 1, at_ns, 9, 0.5, 2.0, at_ns, (section,))
    metrics = JobMetrics(lambda: [(4, progress)])
    for event in first_start():
        metrics(event)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(render(metrics.collect()).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


LABELS = labels_by_name()


def test_every_expression_names_existing_metrics_and_labels() -> None:
    targets = [target for panel in PANELS for target in panel["targets"]]
    queries = [
        one["query"] for one in DASHBOARD["templating"]["list"] if isinstance(one["query"], str)
    ]
    expressions = [target["expr"] for target in targets] + queries
    assert len(expressions) > 20
    for expression in expressions:
        assert {*NAME.findall(expression)} <= LABELS.keys(), expression
        for name, selectors in SELECTED.findall(expression):
            assert {*re.findall(r"(\w+)=", selectors)} <= LABELS[name], expression
        for labels, name in GROUPED.findall(expression):
            assert {*re.findall(r"\w+", labels)} <= LABELS[name], expression
    for target in targets:
        known = set().union(*(LABELS[name] for name in NAME.findall(target["expr"])))
        named = {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])}
        assert named <= known | ADDED_BY_PROMETHEUS, target
