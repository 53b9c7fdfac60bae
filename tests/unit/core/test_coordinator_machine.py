"""Jobs that break an invariant; the transcripts of `coordinator` show the rest."""

from __future__ import annotations

import pytest

from fake_node import RUN, a_job_of, a_node
from holdfast.core.coordinator_machine import CoordinatorMachine, StatusReceived
from holdfast.core.machine import InvalidEvent
from holdfast.core.phases import JobOutcome, NodeRole
from holdfast.core.protocol import Ack, View
from holdfast.core.rounds import Job, Rounds

TWO = a_job_of(2, 2, max_restarts=3)


class Broken(Rounds):
    def check(self) -> None:
        assert not self.job.nodes, "the job has nodes"


class Dead(Rounds):
    def handle(self, now: float, event: object, cause: str = "") -> list[View]:
        raise KeyError("lost")


def coordinator(**more: object) -> CoordinatorMachine:
    return CoordinatorMachine(0.0, silence_s=5.0, grace_s=0.2, **more)  # type: ignore[arg-type]


def joins(machine: CoordinatorMachine, run_id: str = RUN, seq: int = 0) -> View | Ack:
    node = a_node("a", TWO, 1)
    node.run_id, node.seq = run_id, seq
    (answer,) = machine.handle(0.0, StatusReceived(node.status(), ""))
    return answer


def test_a_broken_job_is_closed_and_other_jobs_continue() -> None:
    machine = coordinator(rounds=lambda job: (Broken if job.run_id == RUN else Rounds)(job))
    answer = joins(machine)
    assert isinstance(answer, View)
    assert (answer.role, answer.outcome) == (NodeRole.CLOSED, JobOutcome.FAILED)
    assert "the job has nodes" in machine.broken[RUN]
    other = joins(machine, "other")
    assert isinstance(other, View)
    assert other.role is NodeRole.WAITING


def test_nodes_of_a_job_that_cannot_be_closed_learn_of_its_end_by_their_next_status() -> None:
    made: list[Job] = []

    def rounds(job: Job) -> Rounds:
        made.append(job)
        return (Dead if len(made) == 1 else Rounds)(job)

    machine = coordinator(rounds=rounds)
    assert joins(machine) == Ack(run_id=RUN, node="a", incarnation=1, seq=-1)
    answer = joins(machine, seq=1)
    assert isinstance(answer, View)
    assert (answer.role, answer.final) == (NodeRole.CLOSED, True)


def test_strict_mode_raises_the_error() -> None:
    with pytest.raises(AssertionError, match="the job has nodes"):
        joins(coordinator(rounds=Broken, strict=True))
    with pytest.raises(InvalidEvent):
        coordinator().handle(0.0, a_node("a", TWO, 1).status())  # type: ignore[arg-type]
