from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from event_fakes import PATIENCE_S, Keeping, event

from holdfast import events
from holdfast.events import Event, NodeState, RdzvEvent
from holdfast.observe.events.logging_handlers import ForwardingHandler
from holdfast.observe.safe_handler import SafeHandler

if TYPE_CHECKING:
    import pytest


def test_events_are_logged_with_the_event(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGLEVEL", "ERROR")
    one = event("100% done")
    events.record(one, "logging")
    events.flush(PATIENCE_S)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("holdfast.events", "INFO")
    assert Event.deserialize(record.getMessage()) == one
    assert vars(record)["event"] == one


def test_a_text_is_given_on_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Keeping()
    handler = ForwardingHandler(SafeHandler(kept, "mine"))
    step = RdzvEvent("a", "job", "m", "h", 1, NodeState.FAILED)
    problems: list[logging.LogRecord] = []
    monkeypatch.setattr(handler, "handleError", problems.append)
    for text in (event().serialize(), step.serialize(), "no event"):
        handler.handle(logging.makeLogRecord({"msg": text}))
    assert kept.got == [event(), step]
    assert [one.msg for one in problems] == ["no event"]
