"""Every view shows the same goodput and generation for the same events."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.control import node_server
from holdfast.control.history import History
from holdfast.control.live_job import LiveJob
from holdfast.core.supervision import StopReason
from holdfast.observe.metrics.job_metrics import JobMetrics
from holdfast.observe.metrics.prometheus import render
from holdfast.rendezvous.handler import host_label
from holdfast.views import tables
from holdfast.views.dashboard.watched_job import WatchedJob
from holdfast.views.report import html, records
from holdfast.views.report.model import describe
from holdfast.views.top import columns
from holdfast.wire.messages import AgentIdentity, JobSummary, NodeReport, NodeSummary
from in_loop import in_loop
from timelines import Timeline, one_restart

if TYPE_CHECKING:
    from collections.abc import Sequence


def two_nodes() -> list[Timeline]:
    """Only node b reports steps. It ended generation 0."""
    nodes = [Timeline("a", (0, 1)), Timeline("b", (2, 3), rank=1)]
    for node, reason in zip(
        nodes, (StopReason.GENERATION_CHANGED, StopReason.REGROUP), strict=True
    ):
        node.run()
        for number, (begin, end, why) in enumerate(
            ((2.0, 20.0, reason), (22.0, 40.0, StopReason.SUCCEEDED))
        ):
            node.generation(number, begin, begin + 1.0, nodes=2, restarts=0)
            if node.node == "b":
                node.steps(number, begin + 3.0, 15 * number, 15 * number + 14, 1.0)
            node.stops(number, end, end + 1.0, why)
        node.end(42.0)
    return nodes


def not_started() -> list[Timeline]:
    node = Timeline()
    node.run()
    return [node]


class Views:
    """What each view shows of a job at the end of its records."""

    def __init__(self, nodes: Sequence[Timeline], monkeypatch: pytest.MonkeyPatch) -> None:
        self.pages = [self._metrics(one) for one in nodes]
        [job] = records.jobs_in([run for node in nodes for run in node.runs()])
        self.report = describe(job)
        self.page = html.render(self.report)
        reports = [self._node_report(one, monkeypatch) for one in nodes]
        self.summary = JobSummary(
            run_id="job", phase="active", generation=max(one.generation for one in reports),
            nodes=[
                NodeSummary(node=one.node, rank=rank, report=one) for rank, one in enumerate(reports)
            ],
        )  # fmt: skip
        self.live = LiveJob()
        self.live.connected()
        self.live.add_summary(1000.0, self.summary)

    @staticmethod
    def _metrics(node: Timeline) -> dict[str, float]:
        metrics = JobMetrics(clock=lambda: node.events[-1].at + 1.0)  # type: ignore[attr-defined]
        for event in node.events:
            metrics(event)
        text = render(metrics.collect()).decode()
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        return {one.name.removeprefix("holdfast_"): one.value for one in samples}

    @staticmethod
    def _node_report(node: Timeline, monkeypatch: pytest.MonkeyPatch) -> NodeReport:
        history = History()
        for event in node.events:
            history.add(event)
        handler = SimpleNamespace(get_run_id=lambda: "job", node_id=node.node)
        agent: Any = SimpleNamespace(
            group=SimpleNamespace(spec=SimpleNamespace(rdzv_handler=handler)), activity=""
        )
        clock = SimpleNamespace(monotonic=lambda: node.events[-1].at + 1.0)  # type: ignore[attr-defined]
        monkeypatch.setattr(node_server, "time", clock)
        return node_server.report_of(agent, history, workers=False)

    @property
    def status(self) -> str:
        return tables.status_text(self.summary).partition("\n")[0]

    @property
    def top(self) -> str:
        return "".join(text for text, _ in columns.head(self.live, 200, 1000.0)[0])

    async def dashboard(self) -> dict[str, Any]:
        """Return what a browser receives of the job."""

        async def connect() -> Any:
            await asyncio.Event().wait()

        watched = WatchedJob(connect, is_read_only=True)
        watched._model.add_summary(1000.0, self.summary)
        listener = watched.broadcast.listen()
        assert listener is not None
        update = await listener.get(5.0)
        assert update is not None
        found: dict[str, Any] = json.loads(update)["job"]
        return found


@pytest.mark.parametrize(
    ("nodes", "goodput", "text"),
    [
        # Steps 1 to 15 of the first generation, and all of the second.
        ([one_restart()], 30.0 / 55.0, "54.5 %"),
        # Only b's record counts: from 5 to 20, and from 25 until the run ended, since the other node may have worked.
        (two_nodes(), (15.0 + 17.0) / 42.0, "76.2 %"),
    ],
    ids=["one node", "two nodes"],
)
@in_loop
async def test_every_view_shows_the_same_goodput(
    nodes: list[Timeline], goodput: float, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = Views(nodes, monkeypatch)
    assert views.pages[-1]["goodput_ratio"] == pytest.approx(goodput)
    assert f", goodput {text}" in views.status
    assert f"goodput {text}" in views.top
    page = await views.dashboard()
    assert page["goodput"] == pytest.approx(goodput)
    assert not page["goodput_is_upper_bound"]
    assert views.report.goodput == pytest.approx(goodput, abs=1e-4)
    assert f"<b>{text}</b><span>goodput</span>" in views.page
    assert views.pages[-1]["generation"] == page["generation"] == 1
    assert "generation 1" in views.status
    assert "generation 1" in views.top


@in_loop
async def test_no_view_shows_a_goodput_or_a_generation_before_workers_were_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    views = Views(not_started(), monkeypatch)
    assert not {"goodput_ratio", "generation"} & views.pages[0].keys()
    assert "generation -, goodput -" in views.status
    assert tables.job_row(views.summary)["generation"] is None
    here = AgentIdentity(run_id="job", generation=-1)
    assert {
        row["generation"] for row in (tables.agent_row(here), tables.local_job_row([here]))
    } == {None}
    assert tables.agent_row(here)["node"] == host_label(), "as status calls the only node"
    assert "generation -" in views.top
    assert "goodput -" in views.top
    page = await views.dashboard()
    assert (page["goodput"], page["goodput_is_upper_bound"], page["generation"]) == (
        None,
        False,
        -1,
    )
    assert views.report.goodput is None
    assert "<b>&ndash;</b><span>goodput</span>" in views.page
