"""What an agent that is told does: the whole table of states and events."""

from __future__ import annotations

from signal import SIGTERM
from typing import Any

import pytest

from holdfast.core.coordinated_supervision import (
    CoordinatedSupervision,
    CoordinatorLost,
    ReportStatus,
    ViewReceived,
)
from holdfast.core.machine import Effect, Event, InvalidEvent
from holdfast.core.protocol import JobOutcome, NodePhase, NodeRole, View
from holdfast.core.supervision import (
    BarrierEnded,
    Begun,
    Finish,
    NodesWaiting,
    Outcome,
    RoundJoined,
    SignalReceived,
    StartWorkers,
    State,
    WorkerExited,
    WorkersStarted,
    WorkersStopped,
    WorkersUnhealthy,
)

# What each state does with each event: h handles it, a dot passes over it, x refuses it.
EVENTS = (Begun, RoundJoined, WorkersStarted, WorkerExited, WorkersUnhealthy, NodesWaiting,
          SignalReceived, WorkersStopped, BarrierEnded, ViewReceived, CoordinatorLost)  # fmt: skip
TABLE = {
    #               Beg Rou Sta Exi Unh Nod Sig Sto Bar Tol Lef
    State.IDLE:     "h   x   x   x   x   x   h   x   x   x   x",
    State.JOINING:  "x   x   x   .   .   x   h   x   .   h   h",
    State.STARTING: "x   x   h   x   x   x   h   x   .   h   h",
    State.RUNNING:  "x   x   x   h   h   x   h   x   .   h   h",
    State.STOPPING: "x   x   x   h   .   x   h   h   .   h   h",
    State.LEAVING:  "x   x   x   .   x   x   h   x   h   h   h",
    State.DONE:     "x   x   x   .   .   x   .   x   .   .   .",
}  # fmt: skip


def pairs(mark: str) -> list[Any]:
    return [
        pytest.param(state, event, id=f"{state.value}-{event.__name__}")
        for state, row in TABLE.items()
        for event, its_mark in zip(EVENTS, row.split(), strict=True)
        if its_mark == mark
    ]


def view(role: NodeRole, generation: int = -1, **more: Any) -> View:
    return View(
        run_id="run",
        node="a",
        incarnation=1,
        term=1,
        revision=1,
        role=role,
        generation=generation,
        **more,
    )


def tell(machine: CoordinatedSupervision, *events: Event) -> list[Effect]:
    effects: list[Effect] = []
    for event in events:
        effects = machine.handle(0.0, event)
        machine.check()
    return effects


def machine_in(state: State) -> CoordinatedSupervision:
    """Return a machine in this state; where it has workers, they are of generation 1."""
    machine = CoordinatedSupervision(local_world_size=1, max_restarts=1)
    if state is State.IDLE:
        return machine
    tell(machine, Begun())
    if state is State.JOINING:
        return machine
    tell(machine, ViewReceived(view(NodeRole.MEMBER, 1)))
    if state is State.STARTING:
        return machine
    tell(machine, WorkersStarted(1))
    if state is State.RUNNING:
        return machine
    tell(machine, WorkerExited(1, 0, failed=False))
    if state is State.STOPPING:
        return machine
    tell(machine, WorkersStopped(1))
    if state is State.LEAVING:
        return machine
    tell(machine, BarrierEnded())
    assert machine.state is State.DONE
    return machine


def example(event: type[Event], generation: int) -> Event:
    values: dict[str, Any] = {
        "generation": generation,
        "local_rank": 0,
        "failed": True,
        "why": "no heartbeat",
        "count": 1,
        "signum": SIGTERM,
        "round": 0,
        "group_rank": 0,
        "group_world_size": 1,
        "view": view(NodeRole.WAITING),
    }
    names: tuple[str, ...] = event.__match_args__
    return event(**{name: values[name] for name in names if name in values})


def snapshot(machine: CoordinatedSupervision) -> dict[str, object]:
    return {**vars(machine), "story": list(machine.story)}


def test_the_table_above_has_every_state_and_event() -> None:
    assert list(TABLE) == list(State)
    assert set(EVENTS) == set(Event.__subclasses__())


def test_the_table_above_is_the_machines_own() -> None:
    assert {(p.values[0], p.values[1]) for p in pairs("h")} == set(CoordinatedSupervision._handlers)
    assert {(p.values[0], p.values[1]) for p in pairs(".")} == {
        (state, event)
        for state, events in CoordinatedSupervision._ignored.items()
        for event in events
    }


@pytest.mark.parametrize("state", list(State))
def test_a_machine_can_be_in_every_state(state: State) -> None:
    assert machine_in(state).state is state


@pytest.mark.parametrize(("state", "event"), pairs("x"))
def test_an_event_that_cannot_happen_raises_and_changes_nothing(
    state: State, event: type[Event]
) -> None:
    machine = machine_in(state)
    before = snapshot(machine)
    with pytest.raises(InvalidEvent, match=event.__name__):
        machine.handle(0.0, example(event, machine.generation))
    assert snapshot(machine) == before


@pytest.mark.parametrize(("state", "event"), pairs("."))
def test_an_event_that_no_longer_matters_is_passed_over(state: State, event: type[Event]) -> None:
    machine = machine_in(state)
    before = snapshot(machine)
    assert machine.handle(0.0, example(event, machine.generation)) == []
    assert snapshot(machine) == before


@pytest.mark.parametrize(("state", "event"), pairs("h"))
def test_an_event_that_can_happen_is_handled_and_told_of(state: State, event: type[Event]) -> None:
    machine = machine_in(state)
    happened = example(event, machine.generation)
    tell(machine, happened)
    assert [*machine.story][-1].event == happened


@pytest.mark.parametrize("event", [WorkersStarted, WorkerExited, WorkersStopped, WorkersUnhealthy])
def test_news_of_a_generation_to_come_is_refused_and_changes_nothing(event: type[Event]) -> None:
    state = {WorkersStarted: State.STARTING, WorkersStopped: State.STOPPING}.get(event)
    machine = machine_in(state or State.RUNNING)
    before = snapshot(machine)
    with pytest.raises(InvalidEvent):
        machine.handle(0.0, example(event, machine.generation + 1))
    assert snapshot(machine) == before


# What transcripts do not show.


def test_workers_see_the_restarts_of_the_job_not_of_the_node() -> None:
    machine = CoordinatedSupervision(local_world_size=1, max_restarts=3)
    tell(machine, Begun(), ViewReceived(view(NodeRole.STANDBY, 7, restarts=2)))
    assert tell(machine, ViewReceived(view(NodeRole.MEMBER, 8, restarts=2))) == [
        ReportStatus(NodePhase.RUNNING, 8),
        StartWorkers(8, 2),
    ]


def test_the_count_of_restarts_is_the_jobs_even_if_that_began_anew() -> None:
    machine = CoordinatedSupervision(local_world_size=1, max_restarts=3)
    tell(machine, Begun(), ViewReceived(view(NodeRole.MEMBER, 1, restarts=2)), WorkersStarted(1))
    tell(machine, ViewReceived(view(NodeRole.FENCED, 1)), WorkersStopped(1))
    assert tell(machine, ViewReceived(view(NodeRole.MEMBER, 5)))[-1] == StartWorkers(5, 0)


@pytest.mark.parametrize(
    ("told", "outcome"),
    [
        ([], Outcome.FAILED),  # No restart was left, so the failure was the end.
        ([ViewReceived(view(NodeRole.CLOSED, 1, outcome=JobOutcome.FAILED))], Outcome.FAILED),
        ([ViewReceived(view(NodeRole.CLOSED, 1, outcome=JobOutcome.SUCCEEDED))], Outcome.SUCCEEDED),
    ],
)
def test_a_signal_does_not_hide_how_the_job_had_ended(told: list[Event], outcome: Outcome) -> None:
    machine = CoordinatedSupervision(local_world_size=2, max_restarts=0)
    tell(machine, Begun(), ViewReceived(view(NodeRole.MEMBER, 1)), WorkersStarted(1))
    tell(machine, WorkerExited(1, 0, failed=True), *told, SignalReceived(SIGTERM))
    (finish,) = tell(machine, WorkersStopped(1))
    assert finish == Finish(outcome)


def test_a_signal_before_the_restart_of_a_mendable_failure_is_the_reason() -> None:
    machine = CoordinatedSupervision(local_world_size=1, max_restarts=1)
    tell(machine, Begun(), ViewReceived(view(NodeRole.MEMBER, 1)), WorkersStarted(1))
    tell(machine, WorkerExited(1, 0, failed=True), SignalReceived(SIGTERM))
    assert tell(machine, WorkersStopped(1)) == [Finish(Outcome.SIGNALLED, SIGTERM)]


def test_a_signal_after_the_workers_were_done_makes_nobody_start_again() -> None:
    machine = CoordinatedSupervision(local_world_size=1, max_restarts=1)
    tell(machine, Begun(), ViewReceived(view(NodeRole.MEMBER, 1)), WorkersStarted(1))
    tell(machine, WorkerExited(1, 0, failed=False))
    said = tell(machine, SignalReceived(SIGTERM))
    assert said == [ReportStatus(NodePhase.SUCCEEDED, 1), ReportStatus(NodePhase.LEAVING, 1)]


@pytest.mark.parametrize("outcome", list(JobOutcome))
def test_the_end_of_the_job_is_that_of_the_node(outcome: JobOutcome) -> None:
    machine = machine_in(State.LEAVING)
    well = outcome is JobOutcome.SUCCEEDED
    expected = Finish(Outcome.SUCCEEDED if well else Outcome.FAILED)
    assert tell(machine, ViewReceived(view(NodeRole.CLOSED, 1, outcome=outcome, final=True))) == [
        expected
    ]


def test_no_worker_starts_after_the_end() -> None:
    machine = machine_in(State.DONE)
    assert tell(machine, ViewReceived(view(NodeRole.MEMBER, 9))) == []
    assert machine.state is State.DONE
