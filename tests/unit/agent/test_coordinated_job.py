"""How an agent handles the coordinator's messages, and how long it waits for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from holdfast import console
from holdfast.agent.coordinated_job import CoordinatedJob
from holdfast.agent.lifecycle_reporter import LifecycleReporter
from holdfast.agent.spec import WorkerGroup, WorkerSpec
from holdfast.core import supervision
from holdfast.core.machine import TICK
from holdfast.core.phases import JobOutcome, NodePhase, NodeRole
from holdfast.core.protocol import Failure, Member, View
from holdfast.core.supervision import (
    WAIT_NOTICE_AFTER_S,
    CoordinatedSupervision,
    CoordinatorLost,
    ReportStatus,
    ReportWait,
    SupervisionSettings,
)
from holdfast.errors import JobStopped
from holdfast.observe.lifecycle import StandbyChanged
from holdfast.processes.failures.failure import ChildFailedError, ProcessFailure
from holdfast.rendezvous.rendezvous_errors import RendezvousClosedError, RendezvousTimeoutError

if TYPE_CHECKING:
    from holdfast.core.machine import Effect, Event
    from holdfast.membership.interface import RenewDeadline
    from holdfast.observe.lifecycle import LifecycleEvent

JOIN_S, BARRIER_S = 600.0, 300.0


class FakeMembership:
    """A membership without a coordinator, and its handler; `messages` has the messages to deliver."""

    join_timeout_s = JOIN_S
    endpoint = "head:29400"
    node_id = "here"
    hosting = False
    presence_fd = -1
    serves_workers = False

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.output: list[NodePhase] = []
        self.served: list[int] = []
        self.view: View | None = None

    def enter(self, **_shape: object) -> FakeMembership:
        return self

    def take(self) -> list[Any]:
        taken, self.messages = self.messages, []
        for one in taken:
            if isinstance(one, supervision.ViewReceived):
                self.view = one.view
        return taken

    def watch_stop_deadline(self, renew: RenewDeadline) -> None:
        renew(None, 0.0)

    def report(self, phase: NodePhase, *_: object, **_more: object) -> None:
        self.output.append(phase)

    def problem(self) -> str:
        return (
            ""
            if self.view
            else "no connection to the coordinator at head:29400 for 2.0 s: connection refused"
        )

    def describe_timeout(self, _membership: object) -> str:
        return "too few"

    def serve_workers(self, view: View) -> None:
        self.served.append(view.generation)

    def describe_refusal(self, why: str, _reason: object = None) -> str:
        return f"{self.endpoint}: {why}"

    def describe_loss(self, gave_up: CoordinatorLost) -> str:
        return f"away for {gave_up.unreachable_s:g} s"


class Node:
    """A job with one agent. The test passes its events to the machine, as the agent's loop does."""

    def __init__(self) -> None:
        handler: Any = FakeMembership()
        self.membership: FakeMembership = handler
        self.machine = CoordinatedSupervision(
            SupervisionSettings(BARRIER_S),
            local_world_size=1,
            max_restarts=0,
            join_timeout_s=JOIN_S,
        )
        group = WorkerGroup(WorkerSpec("trainer", 1, handler, entrypoint="true"))
        reporter = LifecycleReporter(group)
        reporter.machine = self.machine
        self.observed: list[LifecycleEvent] = []
        reporter.observers.add(self.observed.append)
        self.job = CoordinatedJob(handler, group, self.machine, reporter, dict)
        self.job.join()
        self.perform(self.machine.handle(0.0, supervision.Begun()))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, (ReportStatus, ReportWait)):
                self.job.perform(effect, "")

    def deliver(self, at: float, *messages: object) -> list[Event]:
        """Deliver messages at a time since the start; return the resulting events."""
        views = supervision.ViewReceived
        self.membership.messages += [
            views(one) if isinstance(one, View) else one for one in messages
        ]
        events = self.job.events(at)
        for event in events:
            self.perform(self.machine.handle(at, event))
        self.perform(self.machine.handle(at, TICK))
        return events

    def end(self) -> supervision.Outcome | None:
        """Return the machine's outcome, if it has one."""
        last = [*self.machine.story][-1].effects
        return next((one.outcome for one in last if isinstance(one, supervision.Finish)), None)

    def due(self) -> float | None:
        """Return when the machine needs a tick."""
        return self.machine.next_deadline(0.0)


def view(role: NodeRole, revision: int = 1, **more: Any) -> View:
    return View(
        run_id="job", node="here", incarnation=1, term=1, revision=revision, role=role,
        present=1, needed=2, **more,
    )  # fmt: skip


@pytest.fixture
def node(caplog: pytest.LogCaptureFixture) -> Node:
    caplog.set_level(console.NOTICE, "holdfast")
    return Node()


def run(node: Node, at: float) -> None:
    """Start a node's workers."""
    node.deliver(at, view(NodeRole.MEMBER, generation=0, rank=0, size=2))
    node.machine.handle(at, supervision.WorkersStarted(0))


def be_done(node: Node, at: float) -> None:
    """Let a node's workers succeed."""
    node.machine.handle(at, supervision.WorkerExited(0, 0, failed=False))
    node.machine.handle(at, supervision.WorkersStopped(0))


@pytest.mark.parametrize("wait_reason", ["", "it comes back too often"])
def test_wait_for_nodes_times_out(node: Node, wait_reason: str) -> None:
    node.deliver(0.0, view(NodeRole.WAITING, wait_reason=wait_reason))
    node.deliver(0.0)
    assert node.due() == WAIT_NOTICE_AFTER_S
    node.deliver(WAIT_NOTICE_AFTER_S)
    assert node.due() == JOIN_S
    assert node.end() is None
    node.deliver(JOIN_S)
    assert node.end() is supervision.Outcome.JOIN_TIMED_OUT
    error = node.job.error(supervision.Outcome.JOIN_TIMED_OUT)
    assert isinstance(error, RendezvousTimeoutError)
    assert str(error) == "too few"


def test_round_at_the_limit_ends_the_wait(node: Node) -> None:
    node.deliver(0.0, view(NodeRole.WAITING))
    node.deliver(0.0)
    member = view(NodeRole.MEMBER, 2, generation=0, rank=0, size=2)
    assert node.deliver(JOIN_S, member) == [supervision.ViewReceived(member)]


def test_standby_time_does_not_count_as_waiting(node: Node) -> None:
    node.deliver(0.0, view(NodeRole.STANDBY))
    node.deliver(0.0)
    assert node.due() is None
    node.deliver(2 * JOIN_S, view(NodeRole.WAITING, 2))
    node.deliver(2 * JOIN_S)
    changes = [one for one in node.observed if isinstance(one, StandbyChanged)]
    assert [one.is_standby for one in changes] == [True, False]
    assert node.due() == 2 * JOIN_S + WAIT_NOTICE_AFTER_S
    node.deliver(3 * JOIN_S - 1)
    assert node.end() is None
    node.deliver(3 * JOIN_S)
    assert node.end() is supervision.Outcome.JOIN_TIMED_OUT


def test_wait_notice_is_printed_once(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.deliver(0.0)
    for at in (WAIT_NOTICE_AFTER_S, WAIT_NOTICE_AFTER_S + 1):
        node.deliver(at)
    assert len(caplog.messages) == 1
    node.deliver(5.0, view(NodeRole.WAITING))
    node.deliver(5.0)
    assert "1 of 2" in caplog.messages[1]


def test_finished_node_waits_for_others_up_to_a_limit(node: Node) -> None:
    run(node, 1.0)
    be_done(node, 2.0)
    node.deliver(2.0)
    assert node.due() == 2.0 + WAIT_NOTICE_AFTER_S
    node.deliver(2.0 + WAIT_NOTICE_AFTER_S)
    assert node.due() == 2.0 + BARRIER_S
    node.deliver(2.0 + BARRIER_S)
    assert node.end() is supervision.Outcome.SUCCEEDED


def test_workers_store_is_served_when_the_round_forms(node: Node) -> None:
    """It must not wait until this node's old workers stop: workers of other nodes may be faster."""
    node.deliver(0.0, view(NodeRole.WAITING))
    assert node.membership.served == []
    node.deliver(1.0, view(NodeRole.MEMBER, generation=3, rank=0, size=2))
    assert node.membership.served == [3]


@pytest.mark.parametrize("needed_for", ["hosting", "serves_workers"])
def test_needed_node_waits_for_others_without_a_limit(node: Node, needed_for: str) -> None:
    setattr(node.membership, needed_for, True)
    run(node, 1.0)
    be_done(node, 2.0)
    node.deliver(2.0)
    assert node.due() == 2.0 + WAIT_NOTICE_AFTER_S
    node.deliver(2.0 + BARRIER_S)
    assert (node.end(), node.due()) == (None, None)


def test_lost_coordinator_ends_the_run(node: Node) -> None:
    assert node.deliver(1.0, CoordinatorLost("connection refused", 60.0)) == [
        supervision.CoordinatorLost("connection refused", 60.0)
    ]
    assert node.machine.state is supervision.State.DONE
    assert str(node.job.error(supervision.Outcome.COORDINATOR_LOST)) == "away for 60 s"


@pytest.mark.parametrize("role", [NodeRole.WAITING, NodeRole.STANDBY])
def test_node_that_ran_no_workers_learns_of_the_end(
    node: Node, role: NodeRole, caplog: pytest.LogCaptureFixture
) -> None:
    node.deliver(0.0, view(role))
    outcome, why = JobOutcome.SUCCEEDED, "all workers succeeded"
    node.deliver(1.0, view(NodeRole.CLOSED, 2, outcome=outcome, why=why, final=True))
    assert node.end() is supervision.Outcome.SUCCEEDED
    assert caplog.messages[-1] == (
        "the job 'job' is over: all workers succeeded; this node ran no workers"
    )


def test_failure_of_another_node_is_first(node: Node) -> None:
    run(node, 0.0)
    elsewhere = Failure(node="there", host="h", rank=3, pid=9, exitcode=1, summary="it failed")
    closed = view(NodeRole.CLOSED, 2, outcome=JobOutcome.FAILED, failure=elsewhere, final=True)
    node.deliver(1.0, closed)
    mine = ProcessFailure(0, 5, -15, "")
    merged = node.job.failures({0: mine})
    assert ChildFailedError("", merged).get_first_failure()[0] == 3
    assert (mine.consequence, mine.order) == (True, 1)
    mine.stopped = True
    assert merged.keys() == {0, 3}
    node.job.group.spec.entrypoint = print  # Functions that were only stopped are not listed.
    assert node.job.failures({0: mine}).keys() == {3}


def test_reason_of_unhealthy_workers_is_reported_to_other_nodes(node: Node) -> None:
    reported: list[Any] = []

    def report(
        phase: NodePhase, _generation: int, failure: object = None, *_: object, **__: object
    ) -> None:
        reported.append((phase, failure))

    node.membership.report = report  # type: ignore[method-assign, assignment]
    run(node, 0.0)
    for effect in node.machine.handle(1.0, supervision.WorkersUnhealthy(0, "the store is gone")):
        if isinstance(effect, supervision.ReportStatus):
            node.job.perform(effect, "")
    (phase, failure) = reported[-1]
    assert phase is NodePhase.FAILED
    assert (failure.summary, failure.sudden, failure.retryable) == ("the store is gone", True, True)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"stopped_by": "r1", "request_text": "stop by ann"}, JobStopped),
        ({"stopped_by": "", "request_text": "b closed the job"}, RendezvousClosedError),
    ],
)
def test_only_a_stop_request_ends_the_job_as_stopped(
    changes: dict[str, Any], error: type[Exception]
) -> None:
    node = Node()
    why = "b closed the job"
    node.deliver(
        1.0, view(NodeRole.CLOSED, outcome=JobOutcome.STOPPED, why=why, final=True, **changes)
    )
    assert type(node.job.error(supervision.Outcome.STOPPED)) is error


def test_first_node_prints_once_which_nodes_have_which_ranks(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    members = (Member("here", "h", 0), Member("there", "t", 2), Member("far", "f", 3))
    shape: dict[str, Any] = {"rank": 0, "size": 3, "world_size": 6, "members": members}
    node.deliver(0.0, view(NodeRole.MEMBER, generation=0, round_key=7, **shape))
    node.deliver(1.0, view(NodeRole.MEMBER, 2, generation=1, round_key=7, **shape))
    listed = [line for line in caplog.messages if "ranks" in line]
    assert listed == ["round -1: ranks 0-1 on here, 2 on there, 3-5 on far"]
    assert node.job.members == ("here", "there", "far")
