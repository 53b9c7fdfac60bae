"""The conversion of lifecycle events to events; tests/peers compares names and keys with torchrun's."""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING, Any

from event_fakes import RecordingHandler
from holdfast.observe import events_wanted
from holdfast.observe.events.destinations import configure
from holdfast.observe.events.event import Event, EventSource, NodeState
from holdfast.observe.events.event_recorder import PREFIX, EventRecorder, RendezvousRecorder
from holdfast.observe.lifecycle import (
    GenerationStarted,
    LifecycleEvent,
    RanksAssigned,
    RendezvousEnded,
    RunEnded,
    RunStarted,
    WorkerInfo,
    WorkerOutcome,
)

if TYPE_CHECKING:
    import pytest

BEGAN = RunStarted(1.0, 1000.5, "job", "trainer", "c10d", "train.py", 2, 3)
MET = RendezvousEnded(2.0, 1001.25, 0.5, 1, 4)
MET_AGAIN = RendezvousEnded(6.0, 1005.0, 0.1, 0, 2, restart_count=1)
NOT_MET = RendezvousEnded(2.0, 1001.0, 0.5, None, None, "Traceback ...")
RANKED = RanksAssigned(2.5, 1001.5, 0.25, 1, 4)
WORKERS = (WorkerInfo(0, 2, 2, 8, 101), WorkerInfo(1, 3, 3, 8, 102))
STARTED = GenerationStarted(3.0, 1002.0, 0.125, 0, 0, 1, 4, WORKERS)
RESTARTED = GenerationStarted(7.0, 1006.0, 0.1, 1, 1, 0, 2, WORKERS[:1])


def events_of(*run: LifecycleEvent) -> list[Event]:
    recorded: list[Event] = []
    recorder = EventRecorder(recorded.append)
    for one in run:
        recorder(one)
    return recorded


def ended(state: str, *outcomes: WorkerOutcome, error: str = "", restarts: int = 0) -> RunEnded:
    return RunEnded(9.0, 1009.0, 8.75, state, restarts, 3 - restarts, 3, 1, 4, outcomes, error)


def short(events: list[Event], key: str) -> list[tuple[str, object]]:
    return [(one.name.removeprefix(PREFIX), one.metadata[key]) for one in events]


def inner(event: Event) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(str(event.metadata["metadata"]))
    return found


def test_events_of_a_run_have_all_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask_a_name_server(*_args: object) -> Any:
        raise AssertionError

    for name in ("getfqdn", "gethostbyaddr", "gethostbyname", "getaddrinfo"):
        monkeypatch.setattr(socket, name, ask_a_name_server)
    failed = WorkerOutcome(WORKERS[0], "failed", 7, '{"message": "no"}')
    end = ended("failed", failed, WorkerOutcome(WORKERS[1], "terminated"))
    events = events_of(BEGAN, MET, RANKED, STARTED, end)
    rendezvoused, _, start, _, first, second, agent = events
    assert rendezvoused == Event(
        "torchelastic.worker.status.RENDEZVOUS",
        EventSource.AGENT,
        1_001_250,
        {
            "run_id": "job", "global_rank": None, "group_rank": 1, "worker_id": None,
            "role": "trainer", "hostname": os.uname().nodename, "state": "RENDEZVOUS",
            "total_run_time": 0, "rdzv_backend": "c10d", "raw_error": None,
            "metadata": '{"group_world_size": 4, "entry_point": "train.py"}',
            "agent_restarts": 0, "duration_ms": 500.0,
        },
    )  # fmt: skip
    assert (start.metadata["global_rank"], start.metadata["worker_id"]) == (2, "101")
    assert (start.timestamp, start.metadata["duration_ms"]) == (1_002_000, None)
    assert inner(start) == {
        "group_world_size": 4, "entry_point": "train.py", "local_rank": 0, "role_rank": 2,
        "role_world_size": 8, "exit_code": None, "worker_pid": 101,
    }  # fmt: skip
    assert short([first, second, agent], "raw_error") == [
        ("FAILED", '{"message": "no"}'), ("TERMINATED", None), ("SUCCEEDED", None),
    ]  # fmt: skip
    assert (inner(first)["exit_code"], inner(second)["exit_code"]) == (7, None)
    assert [one.metadata["total_run_time"] for one in events] == [0, 0, 0, 0, 8, 8, 8]


def test_restarts_are_counted_from_the_rendezvous_and_per_run() -> None:
    again = RunStarted(11.0, 1010.0, "job2", "trainer", "c10d", "train.py", 2, 3)
    run = [BEGAN, MET, STARTED, MET_AGAIN, RESTARTED, ended("succeeded", restarts=1), again, MET]
    events = events_of(*run)
    assert short(events, "agent_restarts") == [
        ("RENDEZVOUS", 0), ("START", 0), ("START", 0), ("RENDEZVOUS", 1), ("START", 1),
        ("SUCCEEDED", 1), ("RENDEZVOUS", 0),
    ]  # fmt: skip
    assert inner(events[4])["group_world_size"] == 2
    assert (events[-1].metadata["run_id"], events[-1].metadata["total_run_time"]) == ("job2", 0)


def test_configured_handler_receives_rendezvous_events() -> None:
    handler = RecordingHandler()
    assert not events_wanted("dynamic_rendezvous")
    configure(handler, "dynamic_rendezvous")
    assert events_wanted("dynamic_rendezvous")
    recorder = RendezvousRecorder()
    for one in (BEGAN, MET, NOT_MET, STARTED, ended("succeeded"), ended("failed")):
        recorder(one)
    recorder.close()
    assert [one.node_state for one in handler.received] == [
        NodeState.INIT, NodeState.RUNNING, NodeState.FAILED, NodeState.SUCCEEDED, NodeState.FAILED,
    ]  # fmt: skip
    assert {one.run_id for one in handler.received} == {"job"}
    assert (handler.received[1].rank, handler.received[2].error_trace) == (1, "Traceback ...")
