from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM
from typing import Any

import pytest

from holdfast.core.machine import STEPS_MAX, Effect, Event, InvalidEvent, Step
from holdfast.core.supervision import (
    BarrierEnded,
    Begun,
    Budget,
    EnterBarrier,
    Finish,
    JoinRound,
    KillWorkers,
    NodesWaiting,
    Outcome,
    RoundJoined,
    SignalReceived,
    StartWorkers,
    State,
    StopReason,
    StopWorkers,
    Supervision,
    WorkerExited,
    WorkersStarted,
    WorkersStopped,
    WorkersUnhealthy,
)

# What each state does with each event: h handles it, a dot passes over it, x refuses it.
EVENTS = (Begun, RoundJoined, WorkersStarted, WorkerExited, WorkersUnhealthy, NodesWaiting,
          SignalReceived, WorkersStopped, BarrierEnded)  # fmt: skip
TABLE = {
    #               Beg Rou Sta Exi Unh Nod Sig Sto Bar
    State.IDLE:     "h   x   x   x   x   x   h   x   x",
    State.JOINING:  "x   h   x   .   .   .   h   x   x",
    State.STARTING: "x   x   h   x   x   .   h   x   x",
    State.RUNNING:  "x   x   x   h   h   h   h   x   x",
    State.STOPPING: "x   x   x   h   .   .   h   h   x",
    State.LEAVING:  "x   x   x   .   x   .   h   x   h",
    State.DONE:     "x   .   x   .   .   .   .   x   .",
}  # fmt: skip


def pairs(mark: str) -> list[Any]:
    return [
        pytest.param(state, event, id=f"{state.value}-{event.__name__}")
        for state, row in TABLE.items()
        for event, its_mark in zip(EVENTS, row.split(), strict=True)
        if its_mark == mark
    ]


def running(*, workers: int = 2, max_restarts: int = 1, generation: int = 0) -> Supervision:
    """Return a machine whose workers run; the earlier generations ended by regroups."""
    machine = Supervision(local_world_size=workers, max_restarts=max_restarts)
    tell(machine, Begun())
    for each in range(generation + 1):
        tell(machine, RoundJoined(each, 0, 1), WorkersStarted(each))
        if each < generation:
            tell(machine, NodesWaiting(1), WorkersStopped(each))
    return machine


def machine_in(state: State) -> Supervision:
    """Return a machine in this state; where it has workers, they are of generation 1."""
    machine = running(generation=1)
    match state:
        case State.IDLE:
            return Supervision(local_world_size=2, max_restarts=1)
        case State.JOINING:
            tell(machine, NodesWaiting(1), WorkersStopped(1))
        case State.STARTING:
            machine = running()
            tell(machine, NodesWaiting(1), WorkersStopped(0), RoundJoined(1, 0, 1))
        case State.STOPPING:
            tell(machine, NodesWaiting(1))
        case State.LEAVING | State.DONE:
            tell(machine, WorkerExited(1, 0, failed=False), WorkerExited(1, 1, failed=False))
            tell(machine, WorkersStopped(1))
            if state is State.DONE:
                tell(machine, BarrierEnded())
        case _:
            pass
    assert machine.state is state
    return machine


def tell(machine: Supervision, *events: Event) -> list[Effect]:
    """Give the events to the machine; return the effects of the last."""
    effects: list[Effect] = []
    for event in events:
        effects = machine.handle(0.0, event)
        machine.check()
    return effects


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
    }
    names: tuple[str, ...] = event.__match_args__
    return event(**{name: values[name] for name in names if name in values})


def snapshot(machine: Supervision) -> dict[str, object]:
    return {**vars(machine), "story": list(machine.story)}


# The table.


def test_the_table_above_has_every_state_and_event() -> None:
    assert list(TABLE) == list(State)
    here = [kind for kind in Event.__subclasses__() if kind.__module__ == Event.__module__]
    assert tuple(here) == EVENTS


def test_the_table_above_is_the_machines_own() -> None:
    assert {(p.values[0], p.values[1]) for p in pairs("h")} == set(Supervision._handlers)
    assert {(p.values[0], p.values[1]) for p in pairs(".")} == {
        (state, event) for state, events in Supervision._ignored.items() for event in events
    }


@pytest.mark.parametrize(("state", "event"), pairs("x"))
def test_an_event_that_cannot_happen_raises_and_changes_nothing(
    state: State, event: type[Event]
) -> None:
    machine = machine_in(state)
    before = snapshot(machine)
    with pytest.raises(InvalidEvent, match=f"{event.__name__}.* cannot happen while {state.value}"):
        machine.handle(1.0, example(event, machine.generation))
    assert snapshot(machine) == before


@pytest.mark.parametrize(("state", "event"), pairs("."))
def test_an_event_that_no_longer_matters_changes_nothing(state: State, event: type[Event]) -> None:
    machine = machine_in(state)
    before = snapshot(machine)
    assert machine.handle(1.0, example(event, machine.generation)) == []
    assert snapshot(machine) == before


@pytest.mark.parametrize(("state", "event"), pairs("h"))
def test_an_event_that_is_handled_is_in_the_story(state: State, event: type[Event]) -> None:
    machine = machine_in(state)
    fact = example(event, machine.generation)
    effects = machine.handle(2.5, fact)
    assert [*machine.story][-1] == Step(machine.story.last, "", 2.5, state, fact, tuple(effects))


@pytest.mark.parametrize("off_by", [-1, 1])
@pytest.mark.parametrize(
    ("state", "event"), [(State.STARTING, WorkersStarted), (State.STOPPING, WorkersStopped)]
)
def test_an_outcome_of_another_generation_raises_and_changes_nothing(
    state: State, event: type[WorkersStarted | WorkersStopped], off_by: int
) -> None:
    machine = machine_in(state)
    before = snapshot(machine)
    with pytest.raises(InvalidEvent, match="is not the current one"):
        machine.handle(1.0, event(machine.generation + off_by))
    assert snapshot(machine) == before


# Late news.


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (State.JOINING, WorkerExited),
        (State.JOINING, WorkersUnhealthy),
        (State.STARTING, WorkerExited),
        (State.STARTING, WorkersUnhealthy),
        (State.RUNNING, WorkerExited),
        (State.RUNNING, WorkersUnhealthy),
        (State.STOPPING, WorkerExited),
        (State.STOPPING, WorkersUnhealthy),
        (State.LEAVING, WorkerExited),
        (State.LEAVING, WorkersUnhealthy),
        (State.DONE, WorkerExited),
        (State.DONE, WorkersUnhealthy),
    ],
)
def test_late_news_of_an_earlier_generation_is_ignored(state: State, event: type[Event]) -> None:
    machine = machine_in(state)
    before = snapshot(machine)
    assert machine.handle(1.0, example(event, 0)) == []
    after = snapshot(machine)
    del before["story"], after["story"]
    assert after == before


# Failures and the budget.


def test_a_failure_stops_all_workers_with_the_configured_signal() -> None:
    machine = running(workers=3)
    assert tell(machine, WorkerExited(0, 1, failed=True)) == [
        StopWorkers(0, StopReason.WORKER_FAILED, signum=0)
    ]
    assert machine.running == {0, 2}


def test_the_budget_allows_so_many_restarts_and_no_more() -> None:
    machine = running(max_restarts=2)
    for generation in range(2):
        failure = WorkerExited(generation, 0, failed=True)
        assert tell(machine, failure, WorkersStopped(generation)) == [JoinRound()]
        started = tell(machine, RoundJoined(generation + 1, 0, 1))
        assert started == [StartWorkers(generation + 1, restart_count=generation + 1)]
        tell(machine, WorkersStarted(generation + 1))
    effects = tell(machine, WorkerExited(2, 0, failed=True), WorkersStopped(2))
    assert effects == [Finish(Outcome.FAILED)]
    assert machine.restart_count == 2


@pytest.mark.parametrize("max_restarts", [0, -1])
def test_without_a_budget_the_first_failure_is_the_end(max_restarts: int) -> None:
    machine = running(max_restarts=max_restarts)
    effects = tell(machine, WorkerExited(0, 0, failed=True), WorkersStopped(0))
    assert effects == [Finish(Outcome.FAILED)]


def test_regroups_are_not_charged() -> None:
    machine = running(max_restarts=0, generation=5)
    assert machine.generation == 5
    assert machine.restart_count == 0


def test_no_nodes_waiting_is_no_reason_to_regroup() -> None:
    assert tell(running(), NodesWaiting(0)) == []


@pytest.mark.parametrize(
    "failure",
    [
        WorkerExited(0, 0, failed=True, retryable=False),
        WorkersUnhealthy(0, "stuck", retryable=False),
    ],
)
def test_a_failure_that_a_restart_would_repeat_is_the_end(failure: Event) -> None:
    machine = running(max_restarts=3)
    assert tell(machine, failure, WorkersStopped(0)) == [Finish(Outcome.FAILED)]
    assert machine.restart_count == 0


def test_what_comes_after_the_stop_began_makes_a_failure_neither_worse_nor_another() -> None:
    machine = running(max_restarts=1)
    tell(machine, WorkerExited(0, 1, failed=True))
    tell(machine, WorkerExited(0, 0, failed=True, retryable=False))
    assert machine.first_failed == 1
    assert machine.reason is StopReason.WORKER_FAILED
    assert tell(machine, WorkersStopped(0)) == [JoinRound()]


def test_a_worker_that_fails_in_a_regroup_is_not_charged() -> None:
    machine = running()
    tell(machine, NodesWaiting(1), WorkerExited(0, 0, failed=True), WorkersStopped(0))
    assert machine.restart_count == 0
    assert machine.first_failed is None


def test_the_next_generation_begins_without_the_failure_of_the_last() -> None:
    machine = running(max_restarts=2)
    tell(machine, WorkerExited(0, 1, failed=True), WorkersStopped(0))
    assert machine.first_failed == 1
    tell(machine, RoundJoined(1, 0, 1))
    assert machine.first_failed is None
    assert machine.running == {0, 1}
    # The failure that cannot be mended came too late to count, and must not count now.
    tell(machine, WorkersStarted(1), WorkerExited(1, 0, failed=True))
    tell(machine, WorkerExited(1, 1, failed=True, retryable=False), WorkersStopped(1))
    tell(machine, RoundJoined(2, 0, 1), WorkersStarted(2))
    assert machine.state is State.RUNNING


@pytest.mark.parametrize(
    ("cause", "outcome"),
    [
        (WorkerExited(0, 0, failed=True), Outcome.FAILED),
        (WorkersUnhealthy(0, "no progress"), Outcome.FAILED),
        (NodesWaiting(1), Outcome.FAILED),
        (SignalReceived(SIGTERM), Outcome.SIGNALLED),
    ],
)
def test_nothing_is_started_beside_a_process_that_cannot_be_killed(
    cause: Event, outcome: Outcome
) -> None:
    (effect,) = tell(running(max_restarts=3), cause, WorkersStopped(0, unkillable=1))
    assert isinstance(effect, Finish)
    assert effect.outcome is outcome


# Success.


def test_success_needs_every_worker() -> None:
    machine = running(workers=3)
    assert tell(machine, WorkerExited(0, 2, failed=False)) == []
    assert tell(machine, WorkerExited(0, 0, failed=False)) == []
    assert tell(machine, WorkerExited(0, 1, failed=False)) == [StopWorkers(0, StopReason.SUCCEEDED)]
    assert tell(machine, WorkersStopped(0)) == [EnterBarrier()]
    assert tell(machine, BarrierEnded()) == [Finish(Outcome.SUCCEEDED)]


def test_a_failure_after_others_succeeded_is_a_failure() -> None:
    machine = running(max_restarts=0)
    tell(machine, WorkerExited(0, 0, failed=False))
    assert tell(machine, WorkerExited(0, 1, failed=True)) == [
        StopWorkers(0, StopReason.WORKER_FAILED)
    ]
    assert tell(machine, WorkersStopped(0)) == [Finish(Outcome.FAILED)]


# Signals.


@pytest.mark.parametrize("state", [State.IDLE, State.JOINING, State.LEAVING])
def test_a_signal_where_no_worker_runs_is_the_end(state: State) -> None:
    machine = machine_in(state)
    assert tell(machine, SignalReceived(SIGHUP)) == [Finish(Outcome.SIGNALLED, SIGHUP)]
    assert machine.state is State.DONE


@pytest.mark.parametrize("signum", [SIGTERM, SIGINT, SIGHUP])
def test_a_signal_is_passed_on_to_running_workers(signum: int) -> None:
    machine = running()
    assert tell(machine, SignalReceived(signum)) == [StopWorkers(0, StopReason.SIGNAL, signum)]
    assert tell(machine, WorkersStopped(0)) == [Finish(Outcome.SIGNALLED, signum)]


def test_a_signal_while_starting_stops_what_was_started() -> None:
    machine = machine_in(State.STARTING)
    assert tell(machine, SignalReceived(SIGTERM)) == []
    assert tell(machine, WorkersStarted(1)) == [StopWorkers(1, StopReason.SIGNAL, SIGTERM)]


def test_the_first_signal_is_the_one_that_counts() -> None:
    machine = running()
    tell(machine, SignalReceived(SIGTERM), SignalReceived(SIGHUP))
    assert tell(machine, WorkersStopped(0)) == [Finish(Outcome.SIGNALLED, SIGTERM)]


@pytest.mark.parametrize(
    ("signals", "kills"),
    [
        ([SIGINT], 0),
        ([SIGINT, SIGINT], 1),
        ([SIGINT, SIGINT, SIGINT], 2),
        ([SIGTERM, SIGTERM, SIGTERM], 0),
        ([SIGTERM, SIGINT], 0),
        ([SIGTERM, SIGINT, SIGINT], 1),
        ([SIGINT, SIGTERM, SIGINT], 1),
    ],
)
def test_a_second_sigint_kills(signals: list[int], kills: int) -> None:
    machine = running()
    effects = [effect for each in signals for effect in tell(machine, SignalReceived(each))]
    assert effects == [StopWorkers(0, StopReason.SIGNAL, signals[0])] + [KillWorkers(0)] * kills


def test_a_second_sigint_kills_in_a_stop_that_a_failure_began() -> None:
    machine = running()
    tell(machine, WorkerExited(0, 0, failed=True))
    assert tell(machine, SignalReceived(SIGINT)) == []
    assert tell(machine, SignalReceived(SIGINT)) == [KillWorkers(0)]


def test_a_second_sigint_while_starting_kills_what_was_started() -> None:
    machine = machine_in(State.STARTING)
    tell(machine, SignalReceived(SIGINT), SignalReceived(SIGINT))
    assert tell(machine, WorkersStarted(1)) == [StopWorkers(1, StopReason.SIGNAL, SIGKILL)]


@pytest.mark.parametrize(
    ("nodes", "effect"), [(1, EnterBarrier()), (2, Finish(Outcome.SIGNALLED, SIGTERM))]
)
def test_a_signal_after_a_success_does_not_wait_for_others_and_does_not_undo_it(
    nodes: int, effect: Effect
) -> None:
    machine = Supervision(local_world_size=1, max_restarts=0)
    tell(machine, Begun(), RoundJoined(0, 0, nodes), WorkersStarted(0))
    tell(machine, WorkerExited(0, 0, failed=False), SignalReceived(SIGTERM))
    assert tell(machine, WorkersStopped(0)) == [effect]


def test_no_workers_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="never be done"):
        Supervision(local_world_size=0, max_restarts=0)


@pytest.mark.parametrize(
    ("cause", "max_restarts", "end"),
    [
        (WorkerExited(0, 0, failed=True), 1, Finish(Outcome.SIGNALLED, SIGTERM)),
        (WorkerExited(0, 0, failed=True), 0, Finish(Outcome.FAILED)),
        (WorkerExited(0, 0, failed=True, retryable=False), 1, Finish(Outcome.FAILED)),
        (WorkersUnhealthy(0, "no progress"), 1, Finish(Outcome.SIGNALLED, SIGTERM)),
        (WorkersUnhealthy(0, "no progress"), 0, Finish(Outcome.FAILED)),
        (NodesWaiting(1), 0, Finish(Outcome.SIGNALLED, SIGTERM)),
    ],
)
def test_a_signal_during_a_stop_ends_the_job_but_hides_no_failure_that_ends_it(
    cause: Event, max_restarts: int, end: Finish
) -> None:
    machine = running(max_restarts=max_restarts)
    tell(machine, cause, SignalReceived(SIGTERM))
    assert tell(machine, WorkersStopped(0)) == [end]
    assert machine.restart_count == 0


# The rest.


def test_the_story_keeps_the_newest_steps_and_no_more_than_its_limit() -> None:
    machine = running(generation=STEPS_MAX)
    assert len(machine.story) == STEPS_MAX
    assert [*machine.story][-1].event == WorkersStarted(STEPS_MAX)


def test_the_check_notices_an_overspent_budget() -> None:
    machine = running(max_restarts=1, generation=1)
    machine.budget = Budget(max_restarts=1, used=2)
    with pytest.raises(AssertionError):
        machine.check()


def test_the_check_notices_restarts_that_were_not_starts() -> None:
    machine = running(max_restarts=5)
    machine.budget = Budget(max_restarts=5, used=2)
    with pytest.raises(AssertionError):
        machine.check()


@pytest.mark.parametrize("state", [State.IDLE, State.JOINING, State.LEAVING, State.DONE])
def test_the_check_notices_workers_where_there_can_be_none(state: State) -> None:
    machine = machine_in(state)
    machine.running = frozenset({0})
    with pytest.raises(AssertionError):
        machine.check()
