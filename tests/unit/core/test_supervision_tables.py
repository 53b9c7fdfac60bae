"""How each state of the two supervisions treats each event; transcripts show the decisions."""

from __future__ import annotations

from signal import SIGTERM
from typing import Any

import pytest

from holdfast.core.machine import STEPS_MAX, Event, InvalidEvent
from holdfast.core.phases import JobOutcome, NodeRole
from holdfast.core.protocol import View
from holdfast.core.supervision import (
    BarrierEnded,
    Begun,
    CoordinatedSupervision,
    CoordinatorLost,
    Finish,
    NodesWaiting,
    Outcome,
    Requested,
    RoundJoined,
    SignalReceived,
    StartCancelled,
    State,
    Supervision,
    SupervisionSettings,
    ViewReceived,
    WorkerExited,
    WorkersStarted,
    WorkersStopped,
    WorkersUnhealthy,
)

# h: the state handles the event; dot: it ignores the event; x: it rejects the event.
EVENTS = (Begun, RoundJoined, WorkersStarted, WorkerExited, WorkersUnhealthy, NodesWaiting,
          SignalReceived, WorkersStopped, BarrierEnded, ViewReceived, CoordinatorLost,
          StartCancelled)  # fmt: skip
TABLES: dict[type[Supervision], dict[State, str]] = {
    Supervision: {
        #               Beg Rou Sta Exi Unh Nod Sig Sto Bar Vie Los Can
        State.IDLE:     "h   x   x   x   x   x   h   x   x   x   x   x",
        State.JOINING:  "x   h   x   .   .   .   h   x   x   x   x   x",
        State.STARTING: "x   x   h   x   x   .   h   x   x   x   x   h",
        State.RUNNING:  "x   x   x   h   h   h   h   x   x   x   x   x",
        State.STOPPING: "x   x   x   h   .   .   h   h   x   x   x   x",
        State.LEAVING:  "x   x   x   .   x   .   h   x   h   x   x   x",
        State.DONE:     "x   .   x   .   .   .   .   x   .   x   x   x",
    },
    CoordinatedSupervision: {
        State.IDLE:     "h   x   x   x   x   x   h   x   x   x   x   x",
        State.JOINING:  "x   x   x   .   .   x   h   x   .   h   h   x",
        State.STARTING: "x   x   h   x   x   x   h   x   .   h   h   h",
        State.RUNNING:  "x   x   x   h   h   x   h   x   .   h   h   x",
        State.STOPPING: "x   x   x   h   .   x   h   h   .   h   h   x",
        State.LEAVING:  "x   x   x   .   x   x   h   x   h   h   h   x",
        State.DONE:     "x   x   x   .   .   x   .   x   .   .   .   x",
    },
}  # fmt: skip
CELLS = [
    pytest.param(kind, state, event, mark, id=f"{kind.__name__}-{state.value}-{event.__name__}")
    for kind, table in TABLES.items()
    for state, row in table.items()
    for event, mark in zip(EVENTS, row.split(), strict=True)
]


def view(role: NodeRole, generation: int = -1, **more: Any) -> View:
    known = {"run_id": "run", "node": "a", "incarnation": 1, "term": 1, "revision": 1}
    return View(role=role, generation=generation, **known, **more)  # type: ignore[arg-type]


def machine_in(kind: type[Supervision], state: State) -> Supervision:
    """Return a machine in this state; its workers, if any, are of generation 1."""
    machine = kind(local_world_size=1, max_restarts=1)
    joins: list[Event] = [ViewReceived(view(NodeRole.MEMBER, 1))]
    if kind is Supervision:
        first = [RoundJoined(0, 0, 1), WorkersStarted(0), NodesWaiting(1), WorkersStopped(0)]
        joins = [*first, RoundJoined(1, 0, 1)]
    succeeds = [WorkerExited(1, 0, failed=False), WorkersStopped(1), BarrierEnded()]
    for event in (Begun(), *joins, WorkersStarted(1), *succeeds):
        if machine.state is state and machine.generation in (-1, 1):
            break
        machine.handle(0.0, event)
    assert machine.state is state
    return machine


def example(event: type[Event], generation: int) -> Event:
    values = {
        "generation": generation, "local_rank": 0, "failed": True, "why": "", "count": 1,
        "signum": SIGTERM, "round": 0, "group_rank": 0, "group_world_size": 1,
        "view": view(NodeRole.WAITING),
    }  # fmt: skip
    names: tuple[str, ...] = event.__match_args__
    return event(**{name: values[name] for name in names if name in values})


def state_of(machine: Supervision) -> dict[str, object]:
    return {**vars(machine), "story": [*machine.story]}


@pytest.mark.parametrize(("kind", "state", "event", "mark"), CELLS)
def test_each_state_handles_ignores_or_rejects_each_event(
    kind: type[Supervision], state: State, event: type[Event], mark: str
) -> None:
    machine = machine_in(kind, state)
    happened, before = example(event, machine.generation), state_of(machine)
    if mark == "x":
        with pytest.raises(InvalidEvent):
            machine.handle(1.0, happened)
    elif mark == ".":
        assert machine.handle(1.0, happened) == []
    else:
        effects = machine.handle(2.5, happened, "a cause")
        step = [*machine.story][-1]
        assert (step.id, step.cause, step.now) == (machine.story.last, "a cause", 2.5)
        assert (step.state, step.event, step.effects) == (state, happened, tuple(effects))
        return
    assert state_of(machine) == before


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize(
    "event", [WorkersStarted, StartCancelled, WorkersStopped, WorkerExited, WorkersUnhealthy]
)
def test_a_report_of_another_generation_changes_nothing(
    kind: type[Supervision], event: type[Event]
) -> None:
    states = {WorkersStarted: State.STARTING, StartCancelled: State.STARTING}
    state = {**states, WorkersStopped: State.STOPPING}.get(event)
    machine = machine_in(kind, state or State.RUNNING)
    before = state_of(machine)
    for generation in (0, 2):
        late = generation == 0 and state is None
        try:
            assert machine.handle(1.0, example(event, generation)) == []
        except InvalidEvent:
            assert not late
        else:
            assert late, "only an exit may be reported late"
    assert state_of(machine) == before


@pytest.mark.parametrize("outcome", list(JobOutcome))
@pytest.mark.parametrize("then", [[], [SignalReceived(SIGTERM)]], ids=["closed", "and a signal"])
def test_outcome_of_a_job_never_changes_on_a_node(outcome: JobOutcome, then: list[Event]) -> None:
    machine = machine_in(CoordinatedSupervision, State.RUNNING)
    closed = view(NodeRole.CLOSED, outcome=outcome, final=True)
    effects = machine.handle(0.0, ViewReceived(closed))
    for event in (*then, WorkersStopped(1)):
        effects = machine.handle(0.0, event)
    succeeded = outcome is JobOutcome.SUCCEEDED
    assert effects[-1] == Finish(Outcome.SUCCEEDED if succeeded else Outcome.FAILED)


FAILED = WorkerExited(1, 0, failed=True)
UNHEALTHY = WorkersUnhealthy(1, "no progress")


@pytest.mark.parametrize(
    ("kind", "event", "grace_s"),
    [
        (Supervision, FAILED, 1),
        (Supervision, UNHEALTHY, 1),
        (Supervision, NodesWaiting(1), 30),
        (Supervision, SignalReceived(SIGTERM), 30),
        (Supervision, Requested("r1", "restart", "a restart"), 30),
        (Supervision, Requested("r1", "stop", "a stop", 5.0), 5),
        (CoordinatedSupervision, FAILED, 1),
        (CoordinatedSupervision, UNHEALTHY, 1),
        (CoordinatedSupervision, SignalReceived(SIGTERM), 30),
        (CoordinatedSupervision, CoordinatorLost("no response"), 30),
        (CoordinatedSupervision, ViewReceived(view(NodeRole.MEMBER, 2)), 30),
        (CoordinatedSupervision, ViewReceived(view(NodeRole.MEMBER, 2, after_failure=True)), 1),
        (CoordinatedSupervision, ViewReceived(view(NodeRole.WAITING, 1, after_failure=True)), 1),
        (CoordinatedSupervision, ViewReceived(view(NodeRole.CLOSED, 1, after_failure=True)), 1),
        (CoordinatedSupervision, ViewReceived(view(NodeRole.FENCED, 2)), 1),
        (CoordinatedSupervision, ViewReceived(view(NodeRole.CLOSED, 1, grace_s=5.0)), 5),
    ],
)
def test_only_a_failure_shortens_the_time_to_exit(
    kind: type[Supervision], event: Event, grace_s: float
) -> None:
    machine = machine_in(kind, State.RUNNING)
    machine.settings = SupervisionSettings(shutdown_timeout=30, failure_grace=1)
    machine.handle(0.0, event)
    assert machine.state is State.STOPPING
    assert machine.grace_s == grace_s


def test_a_story_keeps_only_the_newest_steps() -> None:
    machine = Supervision(local_world_size=1, max_restarts=0)
    machine.handle(0.0, Begun())
    for generation in range(STEPS_MAX):
        for event in (
            RoundJoined(generation, 0, 1), WorkersStarted(generation),
            NodesWaiting(1), WorkersStopped(generation),
        ):  # fmt: skip
            machine.handle(0.0, event)
    assert len(machine.story) == STEPS_MAX
    assert [*machine.story][-1].event == WorkersStopped(STEPS_MAX - 1)


@pytest.mark.parametrize("started", [-1, 0])
def test_failure_report_has_the_jobs_generation_on_every_node(started: int) -> None:
    """A standby, or a node that left the round, learns of the failure with the end of the job."""
    machine = CoordinatedSupervision(local_world_size=1, max_restarts=2)
    machine.handle(0.0, Begun())
    if started >= 0:
        for event in (
            ViewReceived(view(NodeRole.MEMBER, started)),
            WorkersStarted(started),
            ViewReceived(view(NodeRole.STANDBY, 1)),
            WorkersStopped(started),
        ):
            machine.handle(0.0, event)
    else:
        machine.handle(0.0, ViewReceived(view(NodeRole.STANDBY, 0)))
    end = view(NodeRole.CLOSED, 2, restarts=2, outcome=JobOutcome.FAILED, final=True)
    assert machine.handle(0.0, ViewReceived(end)) == [Finish(Outcome.FAILED)]
    assert machine.generation == started
    assert (machine.failed_generation, machine.restart_count) == (2, 2)
