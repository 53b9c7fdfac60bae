from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import pytest

from holdfast.agent.spec import (
    DEFAULT_ROLE,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from holdfast.errors import UsageError
from holdfast.rendezvous.single_node import SingleNodeHandler

HANDLER = SingleNodeHandler("job")


def spec(**settings: Any) -> WorkerSpec:
    return WorkerSpec(
        **{
            "role": "trainer",
            "local_world_size": 2,
            "rdzv_handler": HANDLER,
            "entrypoint": "train",
            **settings,
        }
    )


def train() -> None:
    """Be an entry point."""


@pytest.mark.torch
@pytest.mark.parametrize("name", ["WorkerSpec", "RunResult"])
def test_fields_have_the_order_and_defaults_of_torch(name: str) -> None:
    from torch.distributed.elastic.agent import server

    from holdfast.agent import spec as workers

    def described(module: Any) -> list[Any]:
        return [
            (field.name, field.default, field.default_factory)
            for field in dataclasses.fields(getattr(module, name))
        ]

    assert described(workers) == described(server)


@pytest.mark.torch
def test_states_and_what_they_say_are_those_of_torch() -> None:
    from torch.distributed.elastic.agent.server import WorkerState as Torch

    def described(states: Any) -> list[Any]:
        return [(s.name, s.value, str(s), f"{s}", states.is_running(s)) for s in states]

    assert described(WorkerState) == described(Torch)


@pytest.mark.torch
def test_slots_and_text_are_those_of_torch() -> None:
    from torch.distributed.elastic.agent import server

    assert set(Worker.__slots__) == set(server.Worker.__slots__)
    assert set(WorkerGroup.__slots__) == set(server.WorkerGroup.__slots__)
    assert str(Worker(1, 5, 4, 8, 6)) == str(server.Worker(1, 5, 4, 8, 6))
    assert repr(Worker(1)) == repr(server.Worker(1))


@pytest.mark.parametrize("size", [0, -1])
def test_a_group_without_workers_is_refused(size: int) -> None:
    with pytest.raises(UsageError, match=rf"^local_world_size: {size} workers cannot be started"):
        spec(local_world_size=size)


@pytest.mark.parametrize("interval", [0, -0.1])
def test_an_interval_that_is_no_time_is_refused(interval: float) -> None:
    with pytest.raises(UsageError, match=rf"^monitor_interval: {interval} is not a time"):
        spec(monitor_interval=interval)


@pytest.mark.parametrize("nothing", [None, ""])
def test_nothing_to_run_is_refused(nothing: str | None) -> None:
    with pytest.raises(UsageError, match=r"^entrypoint: there is nothing to run"):
        spec(entrypoint=nothing)


def test_the_old_name_of_the_entrypoint_is_taken_and_told_of_at_the_call() -> None:
    with pytest.warns(DeprecationWarning, match="entrypoint") as caught:
        made = spec(fn=train)
    assert made.entrypoint is train
    # The call is in the helper above: not in a generated constructor, nor in the module.
    assert caught[0].filename == __file__


def test_the_current_name_brings_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert spec(entrypoint=train).entrypoint is train


@pytest.mark.parametrize(
    ("entrypoint", "name"),
    [
        ("/usr/bin/python3", "python3"),
        ("train.sh", "train.sh"),
        (train, "train"),
        (WorkerState.is_running, "WorkerState.is_running"),
    ],
)
def test_the_entrypoint_has_a_name(entrypoint: Any, name: str) -> None:
    assert spec(entrypoint=entrypoint).get_entrypoint_name() == name


def test_a_callable_without_a_name_is_shown_as_it_is() -> None:
    partial = functools.partial(train)
    assert spec(entrypoint=partial).get_entrypoint_name() == repr(partial)


def test_a_new_worker_knows_its_local_rank_only() -> None:
    worker = Worker(3)
    assert worker.id is None
    assert str(worker) == (
        "local_rank=3,global_rank=-1,role_rank=-1,world_size=-1,role_world_size=-1"
    )


def test_a_new_group_waits_for_its_first_round() -> None:
    made = spec()
    group = WorkerGroup(made)
    assert group.spec is made
    assert [worker.local_rank for worker in group.workers] == [0, 1]
    assert group.state is WorkerState.INIT
    assert (group.store, group.group_rank, group.group_world_size) == (None, None, None)
    assert (group.master_addr, group.master_port) == (None, None)


def test_only_a_failed_result_is_failed() -> None:
    assert [state for state in WorkerState if RunResult(state).is_failed()] == [WorkerState.FAILED]


def test_results_share_nothing() -> None:
    one, other = RunResult(WorkerState.INIT), RunResult(WorkerState.INIT)
    one.return_values[0] = 1
    one.failures[0] = None  # type: ignore[assignment]
    assert (other.return_values, other.failures) == ({}, {})


def test_the_default_role() -> None:
    assert DEFAULT_ROLE == "default"
