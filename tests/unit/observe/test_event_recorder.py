"""Lifecycle events become the events that TorchElastic would record."""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING, Any

from holdfast.core.supervision import StopReason
from holdfast.observe import events_wanted
from holdfast.observe.events.destinations import configure
from holdfast.observe.events.event import Event, EventSource, NodeState
from holdfast.observe.events.handlers import EventHandler
from holdfast.observe.events.recorder import PREFIX, EventRecorder, RendezvousRecorder
from holdfast.observe.lifecycle import (
    GenerationStarted,
    GenerationStopped,
    GenerationStopping,
    LifecycleEvent,
    RanksAssigned,
    RendezvousEnded,
    RunEnded,
    RunStarted,
    WatchdogEvent,
    WorkerEnded,
    WorkerInfo,
    WorkerOutcome,
    WorkersObserved,
)

if TYPE_CHECKING:
    import pytest

BEGAN = RunStarted(1.0, 1000.5, "job", "trainer", "c10d", "train.py", 2, 3)
MET = RendezvousEnded(2.0, 1001.25, 0.5, 1, 4)
RANKED = RanksAssigned(2.5, 1001.5, 0.25, 1, 4)
WORKERS = (WorkerInfo(0, 2, 2, 8, 101), WorkerInfo(1, 3, 3, 8, 102))
STARTED = GenerationStarted(3.0, 1002.0, 0.125, 0, 0, 1, 4, WORKERS)

KEYS = [
    "run_id", "global_rank", "group_rank", "worker_id", "role", "hostname", "state",
    "total_run_time", "rdzv_backend", "raw_error", "metadata", "agent_restarts", "duration_ms",
]  # fmt: skip
INNER = ["group_world_size", "entry_point"]
INNER_OF_WORKER = [*INNER, "local_rank", "role_rank", "role_world_size", "exit_code", "worker_pid"]


def events_of(*run: LifecycleEvent) -> list[Event]:
    recorded: list[Event] = []
    recorder = EventRecorder(recorded.append)
    for one in run:
        recorder(one)
    return recorded


def ended(state: str, *ends: WorkerOutcome, error: str = "", restarts: int = 0) -> RunEnded:
    return RunEnded(9.0, 1009.0, 8.75, state, restarts, 3 - restarts, 3, 1, 4, ends, error)


def short(events: list[Event]) -> list[tuple[str, str]]:
    return [(one.source.value, one.name.removeprefix(PREFIX)) for one in events]


def inner(event: Event) -> dict[str, Any]:
    text = event.metadata["metadata"]
    assert isinstance(text, str)
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_run_that_succeeds() -> None:
    ends = [WorkerOutcome(worker, "succeeded", 0) for worker in WORKERS]
    events = events_of(BEGAN, MET, RANKED, STARTED, ended("succeeded", *ends))
    assert short(events) == [
        ("AGENT", "RENDEZVOUS"),
        ("AGENT", "ASSIGN_WORKER_RANKS"),
        ("WORKER", "START"),
        ("WORKER", "START"),
        ("WORKER", "SUCCEEDED"),
        ("WORKER", "SUCCEEDED"),
        ("AGENT", "SUCCEEDED"),
    ]
    for one in events:
        assert list(one.metadata) == KEYS
        assert list(inner(one)) == (INNER if one.source is EventSource.AGENT else INNER_OF_WORKER)
        assert one.metadata["hostname"] == os.uname().nodename


def test_every_value_has_its_type() -> None:
    met, _, start, *_ = events_of(BEGAN, MET, RANKED, STARTED)
    assert met == Event(
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
    assert start.metadata["duration_ms"] is None
    assert inner(start) == {
        "group_world_size": 4, "entry_point": "train.py", "local_rank": 0, "role_rank": 2,
        "role_world_size": 8, "exit_code": None, "worker_pid": 101,
    }  # fmt: skip
    assert start.timestamp == 1_002_000


def test_a_run_whose_workers_failed() -> None:
    failed = WorkerOutcome(WORKERS[0], "failed", 7, '{"message": "no"}')
    events = events_of(
        BEGAN,
        MET,
        RANKED,
        STARTED,
        ended("failed", failed, WorkerOutcome(WORKERS[1], "terminated")),
    )
    first, second, agent = events[-3:]
    assert short([first, second, agent]) == [
        ("WORKER", "FAILED"), ("WORKER", "TERMINATED"), ("AGENT", "SUCCEEDED"),
    ]  # fmt: skip
    assert first.metadata["raw_error"] == '{"message": "no"}'
    assert (inner(first)["exit_code"], inner(second)["exit_code"]) == (7, None)
    assert second.metadata["raw_error"] is None
    assert [one.metadata["total_run_time"] for one in events] == [0, 0, 0, 0, 8, 8, 8]


def test_a_run_that_raised() -> None:
    (event,) = events_of(BEGAN, ended("", error="Traceback ...\nSignalException"))
    assert short([event]) == [("AGENT", "FAILED")]
    assert event.metadata["raw_error"] == "Traceback ...\nSignalException"
    assert short(events_of(BEGAN, ended(""))) == [("AGENT", "FAILED")]


def test_a_rendezvous_that_failed() -> None:
    (event,) = events_of(BEGAN, RendezvousEnded(2.0, 1001.0, 0.5, None, None, "Traceback ..."))
    assert event.metadata["raw_error"] == "Traceback ..."
    assert event.metadata["group_rank"] is None
    assert event.metadata["duration_ms"] == 500.0


def test_restarts_are_counted_from_the_rendezvous_on() -> None:
    events = events_of(
        BEGAN,
        MET,
        RANKED,
        STARTED,
        WorkersObserved(4.0, "failed", 2),
        WorkerEnded(4.0, 1003.0, 0, WORKERS[0], failed=True),
        GenerationStopping(4.0, 0, StopReason.WORKER_FAILED),
        GenerationStopped(5.0, 0),
        RendezvousEnded(6.0, 1005.0, 0.1, 0, 2, restart_count=1),
        RanksAssigned(6.0, 1005.0, 0.1, 0, 2),
        GenerationStarted(7.0, 1006.0, 0.1, 1, 1, 0, 2, WORKERS[:1]),
        ended("succeeded", restarts=1),
    )
    counts = [(name, one.metadata["agent_restarts"]) for one in events for _, name in short([one])]
    assert counts == [
        ("RENDEZVOUS", 0), ("ASSIGN_WORKER_RANKS", 0), ("START", 0), ("START", 0),
        ("RENDEZVOUS", 1), ("ASSIGN_WORKER_RANKS", 1), ("START", 1), ("SUCCEEDED", 1),
    ]  # fmt: skip
    assert inner(events[6])["group_world_size"] == 2


def test_another_run_begins_anew() -> None:
    again = RunStarted(11.0, 1010.0, "job2", "trainer", "c10d", "train.py", 2, 3)
    events = events_of(BEGAN, MET, STARTED, ended("succeeded", restarts=2), again, MET)
    last = events[-1].metadata
    assert (last["run_id"], last["agent_restarts"], last["total_run_time"]) == ("job2", 0, 0)


def test_watchdog_events() -> None:
    started, expired = events_of(
        BEGAN, STARTED, WatchdogEvent(4.0, 1003.0, "watchdog started"),
        WatchdogEvent(4.0, 1003.0, "timer expired", 101, "step", 1002.5, 9),
    )[-2:]  # fmt: skip
    assert (started.name, started.source) == ("watchdog started", EventSource.AGENT)
    assert list(started.metadata) == KEYS[:-1]
    assert started.metadata["state"] == "RUNNING"
    assert inner(started) == {"watchdog_event": "watchdog started"}
    assert inner(expired) == {
        "watchdog_event": "timer expired", "worker_pid": 101, "scope_id": "step",
        "expiration_time": 1002.5, "signal": 9,
    }  # fmt: skip


def test_no_name_server_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_args: object) -> Any:
        raise AssertionError

    for name in ("getfqdn", "gethostbyaddr", "gethostbyname", "getaddrinfo"):
        monkeypatch.setattr(socket, name, ask)
    assert len(events_of(BEGAN, MET, RANKED, STARTED)) == 4


class Keeping(EventHandler):
    def __init__(self) -> None:
        self.got: list[Any] = []

    def record(self, event: Any) -> None:
        self.got.append(event)


def test_rendezvous_events_for_whoever_configured_a_handler() -> None:
    handler = Keeping()
    assert not events_wanted("dynamic_rendezvous")
    configure(handler, "dynamic_rendezvous")
    assert events_wanted("dynamic_rendezvous")
    recorder = RendezvousRecorder()
    failed = RendezvousEnded(2.0, 1001.0, 0.5, None, None, "Traceback ...")
    for one in (BEGAN, MET, failed, STARTED, ended("succeeded"), ended("failed")):
        recorder(one)
    recorder.close()
    assert [one.node_state for one in handler.got] == [
        NodeState.INIT, NodeState.RUNNING, NodeState.FAILED, NodeState.SUCCEEDED, NodeState.FAILED,
    ]  # fmt: skip
    assert {one.run_id for one in handler.got} == {"job"}
    assert (handler.got[1].rank, handler.got[2].error_trace) == (1, "Traceback ...")
