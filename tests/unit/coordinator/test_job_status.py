from __future__ import annotations

import pytest

from holdfast.coordinator import job_status
from holdfast.core.coordinator import CoordinatorMachine, StatusReceived
from holdfast.core.protocol import JobSettings, NodeInfo, Status
from holdfast.wire.frames import FrameReader
from holdfast.wire.limits import STATUS_FRAME_BYTES_MAX
from holdfast.wire.messages import StatusReply, StatusRequest, decode


@pytest.fixture
def hosting() -> CoordinatorMachine:
    hosting = CoordinatorMachine(0.0, silence_s=5, grace_s=0.2, strict=True)
    for run_id, nodes in (("x", 2), ("y", 1)):
        for name in ("a", "b"):
            status = Status(
                seq=1,
                run_id=run_id,
                info=NodeInfo(node=name, incarnation=hash((run_id, name)) % 1000, host=f"h-{name}"),
                settings=JobSettings(min_nodes=nodes, max_nodes=nodes, max_restarts=4),
            )
            hosting.handle(0.0, StatusReceived(status, "10.0.0.1"))
    return hosting


def answer_to(hosting: CoordinatorMachine, query: StatusRequest) -> StatusReply:
    (body,) = FrameReader(STATUS_FRAME_BYTES_MAX).feed(job_status.answer_frame(hosting, query))
    answer = decode(body)
    assert isinstance(answer, StatusReply)
    assert answer.id == query.id
    return answer


def test_all_jobs_are_told_of(hosting: CoordinatorMachine) -> None:
    x, y = answer_to(hosting, StatusRequest(id=3)).jobs
    assert (x.run_id, x.phase, x.round, x.generation, x.max_restarts) == ("x", "active", 0, 0, 4)
    assert [(one.node, one.rank, one.address, one.host) for one in x.nodes] == [
        ("a", 0, "10.0.0.1", "h-a"),
        ("b", 1, "10.0.0.1", "h-b"),
    ]
    assert [(one.node, one.rank) for one in y.nodes] == [("a", 0), ("b", -1)]
    assert x.history == ["active, round 0, generation 0: all nodes are here"]


def test_one_job_can_be_asked_for(hosting: CoordinatorMachine) -> None:
    assert [job.run_id for job in answer_to(hosting, StatusRequest(id=1, run_id="y")).jobs] == ["y"]
    assert answer_to(hosting, StatusRequest(id=2, run_id="z")).jobs == []


def test_an_answer_that_would_be_too_large_goes_without_the_nodes(
    hosting: CoordinatorMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_status, "STATUS_FRAME_BYTES_MAX", 400)
    x, y = answer_to(hosting, StatusRequest(id=1)).jobs
    assert (x.run_id, x.generation, x.nodes, x.history) == ("x", 0, [], [])
    assert y.run_id == "y"
