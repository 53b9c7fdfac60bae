from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Any

from event_fakes import PATIENCE_S, Blocking, Keeping, event, names

from holdfast import events
from holdfast.events import Event, EventSource, NodeState, RdzvEvent
from holdfast.observe.safe_handler import FAULTS_MAX

if TYPE_CHECKING:
    import pytest


def test_an_event_without_a_time_gets_it_and_the_given_one_stays() -> None:
    handler = Keeping()
    events.configure(handler)
    given = Event("a", EventSource.WORKER, metadata={"x": 1})
    begin_ms = time.time_ns() // 1_000_000
    events.record(given)
    end_ms = time.time_ns() // 1_000_000
    events.record(event("b"))
    events.flush(PATIENCE_S)
    first, second = handler.got
    assert begin_ms <= first.timestamp <= end_ms
    assert (first.name, first.source, first.metadata) == ("a", EventSource.WORKER, {"x": 1})
    assert given.timestamp == 0
    assert second.timestamp == 7


def test_nothing_happens_by_default() -> None:
    events.record(event())
    events.record_rdzv_event(RdzvEvent("a", "job", "m", "h", 1, NodeState.INIT))
    events.construct_and_record_rdzv_event("job", "m", NodeState.INIT)


def test_a_step_of_the_rendezvous_names_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask_a_name_server(name: str = "") -> str:
        raise AssertionError

    monkeypatch.setattr(socket, "getfqdn", ask_a_name_server)
    handler = Keeping()
    events.configure(handler, "dynamic_rendezvous")
    events.construct_and_record_rdzv_event("job", "joined", NodeState.RUNNING, rank=3)
    events.construct_and_record_rdzv_event(
        "job", "m", NodeState.INIT, "named", "there", 42, "h:1", 5
    )
    try:
        raise ValueError("no room")
    except ValueError:
        events.construct_and_record_rdzv_event("job", "m", NodeState.FAILED, name="failed")
    events.flush(PATIENCE_S)
    got: list[Any] = [*handler.got]
    first, second, third = got
    here = os.uname().nodename
    assert first == RdzvEvent(
        f"test_event_recording.py:{test_a_step_of_the_rendezvous_names_its_caller.__name__}",
        "job", "joined", here, os.getpid(), NodeState.RUNNING, rank=3,
    )  # fmt: skip
    assert second == RdzvEvent(
        "test_event_recording.py:named", "job", "m", "there", 42, NodeState.INIT, "h:1", None, 5
    )
    assert isinstance(third, RdzvEvent)
    assert third.error_trace.startswith("Traceback")
    assert third.error_trace.endswith("ValueError: no room\n")


def test_an_event_is_recorded_as_it_was_then() -> None:
    handler = Blocking()
    events.configure(handler)
    events.record(event("first"))
    assert handler.entered.wait(PATIENCE_S)
    later = event("later", step=1)
    events.record(later)
    later.metadata["step"] = 2
    later.name = "another"
    handler.go_on.set()
    events.flush(PATIENCE_S)
    assert handler.got[1] == event("later", step=1)


def test_no_handler_is_blamed_for_what_is_in_an_event(
    capsys: pytest.CaptureFixture[str], said: pytest.LogCaptureFixture
) -> None:
    for _ in range(FAULTS_MAX):
        events.record(event("odd", what=b"bytes"), "console")  # type: ignore[arg-type]
    events.record(event("good"), "console")
    found = [Event.deserialize(line) for line in capsys.readouterr().err.splitlines()]
    assert names(found) == ["odd"] * FAULTS_MAX + ["good"]
    assert found[0].metadata == {"what": "b'bytes'"}
    assert said.messages == []
