"""TorchElastic's table of log handlers, and its helper for rendezvous events."""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING

import pytest

from event_fakes import PATIENCE_S, ListHandler, RecordingHandler
from holdfast import observe
from holdfast.elastic import events
from holdfast.elastic.events import NodeState, RdzvEvent
from holdfast.elastic.events.handlers import _log_handlers
from holdfast.observe.events import destinations

if TYPE_CHECKING:
    from collections.abc import Iterator

EVENT = events.Event("it", events.EventSource.AGENT, 7)


@pytest.fixture(autouse=True)
def nothing_configured() -> Iterator[None]:
    yield
    for table in (observe.configured, destinations._found):
        for one in table.values():
            one.close(PATIENCE_S)
        table.clear()
    for _, one in destinations._added.values():
        one.close(PATIENCE_S)
    destinations._added.clear()


@pytest.mark.parametrize("destination", ["null", "console", "dynamic_rendezvous", "mine"])
def test_log_handlers_can_be_added_at_any_time(
    destination: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = ListHandler(), ListHandler()
    if destination != "mine":
        events.record(EVENT, destination)
        capsys.readouterr()
    for handler in (first, second):
        monkeypatch.setitem(_log_handlers, destination, handler)
        for _ in range(2):
            events.record(EVENT, destination)
        assert events.get_logging_handler(destination) is handler
    events.flush(PATIENCE_S)
    assert first.lines == second.lines == [EVENT.serialize()] * 2
    monkeypatch.undo()
    if destination != "mine":
        events.record(EVENT, destination)
        assert len(second.lines) == 2
        assert bool(capsys.readouterr().err) == (destination == "console")


def test_every_destination_is_also_a_log_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(events.get_logging_handler(), logging.NullHandler)
    with pytest.raises(KeyError):
        events.get_logging_handler("unheard of")
    kept = RecordingHandler()
    events.configure(kept, "mine")
    handler = events.get_logging_handler("mine")
    step = RdzvEvent("a", "job", "m", "h", 1, NodeState.FAILED)
    problems: list[logging.LogRecord] = []
    monkeypatch.setattr(handler, "handleError", problems.append)
    for text in (EVENT.serialize(), step.serialize(), "no event"):
        handler.handle(logging.makeLogRecord({"msg": text}))
    events.flush(PATIENCE_S)
    assert kept.received == [EVENT, step]
    assert [one.msg for one in problems] == ["no event"]


def test_rendezvous_event_names_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask_a_name_server(name: str = "") -> str:
        raise AssertionError

    monkeypatch.setattr(socket, "getfqdn", ask_a_name_server)
    record = events.construct_and_record_rdzv_event
    record("job", "for nobody", NodeState.INIT)
    handler = RecordingHandler()
    events.configure(handler, "dynamic_rendezvous")
    record("job", "joined", NodeState.RUNNING, rank=3)
    record("job", "m", NodeState.INIT, "named", "there", 42, "h:1", 5)
    try:
        raise ValueError("no room")
    except ValueError:
        record("job", "m", NodeState.FAILED, name="failed")
    events.flush(PATIENCE_S)
    first, second, third = handler.received
    here, me = os.path.basename(__file__), test_rendezvous_event_names_its_caller.__name__
    host = os.uname().nodename
    assert first == RdzvEvent(
        f"{here}:{me}", "job", "joined", host, os.getpid(), NodeState.RUNNING, rank=3
    )
    assert second == RdzvEvent(
        f"{here}:named", "job", "m", "there", 42, NodeState.INIT, "h:1", None, 5
    )
    assert "ValueError: no room" in third.error_trace
