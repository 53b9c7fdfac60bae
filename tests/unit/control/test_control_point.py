"""How an agent handles requests and queries in a job without a coordinator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.control.control_point import ControlPoint
from holdfast.control.node_server import own_summary, record_of
from holdfast.core.protocol import Request
from holdfast.core.requests import Action, RequestRefusal
from holdfast.core.supervision import Begun, RoundJoined, Supervision, WorkersStarted
from holdfast.observe import lifecycle
from holdfast.wire.messages import NodeReport


def agent_of(nodes: int | None, rank: int = 0) -> Any:
    """Return the agent of one node of a job on a user's own rendezvous handler."""
    machine = Supervision(local_world_size=2, max_restarts=3)
    for event in (Begun(), RoundJoined(0, rank, nodes or 1), WorkersStarted(0)):
        machine.handle(0.0, event)
    spec = SimpleNamespace(role="default", local_world_size=2, rdzv_handler=object())
    group = SimpleNamespace(
        spec=spec,
        group_rank=rank,
        group_world_size=nodes,
        workers=[SimpleNamespace(global_rank=2 * rank + one) for one in range(2)],
    )
    return SimpleNamespace(
        machine=machine,
        connection=None,
        group=group,
        requested=lambda request, what: None,
    )


@pytest.mark.parametrize("action", [Action.STOP, Action.RESTART])
def test_node_without_coordinator_refuses_job_wide_requests(action: Action) -> None:
    point = ControlPoint(agent_of(2), 0.0)
    answer = point.request(Request(id="r", action=action.value))
    assert [*point.take_requests()] == []
    assert answer.result(0).refusal == RequestRefusal.NO_COORDINATOR.value


def test_the_only_node_of_a_job_decides_alone() -> None:
    for nodes in (None, 1):
        agent = agent_of(nodes)
        point = ControlPoint(agent, 0.0)
        answer = point.request(Request(id="r", action=Action.STOP.value))
        for event in point.take_requests():
            agent.machine.handle(1.0, event)
        assert answer.result(0).refusal == ""


def test_node_without_coordinator_reports_the_number_of_nodes() -> None:
    report = NodeReport(run_id="job", node="b", state="running", generation=0)
    job = own_summary(agent_of(3, rank=1), report)
    assert (job.members, job.present, job.min_nodes) == (3, 3, 3)
    assert [(one.node, one.rank, one.first_rank) for one in job.nodes] == [("b", 1, 2)]


@pytest.mark.parametrize(("failed", "stopped"), [(True, False), (True, True), (False, False)])
def test_only_original_failures_are_reported_as_problems(*, failed: bool, stopped: bool) -> None:
    worker = lifecycle.WorkerInfo(0, 4, 4, 8, 100)
    ended = lifecycle.WorkerEnded(1.0, 2.0, 0, worker, failed, stopped)
    assert record_of("node", (2.0, ended)).is_problem is (failed and not stopped)
