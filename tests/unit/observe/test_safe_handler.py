from __future__ import annotations

from typing import TYPE_CHECKING

from event_fakes import Failing, Keeping, event, names

from holdfast.observe.safe_handler import FAULTS_MAX, SafeHandler

if TYPE_CHECKING:
    import pytest


def test_a_handler_gets_events_at_once() -> None:
    handler = Keeping()
    guarded = SafeHandler(handler, "mine")
    guarded.record(event("a"))
    guarded.record(event("b"))
    assert names(handler.got) == ["a", "b"]
    guarded.flush(0)
    guarded.close(0)
    assert handler.calls == ["flush", "close"]


def test_one_that_raises_is_named_once(said: pytest.LogCaptureFixture) -> None:
    guarded = SafeHandler(Failing(), "mine")
    for name in ("bad 1", "good", "bad 2", "good", "bad 3", "good", "bad 4"):
        guarded.record(event(name))
    assert said.messages == ["the event handler mine failed: ValueError: cannot do bad 1"]
    assert not guarded.is_dropped
    guarded.close(0)
    assert said.messages[1:] == ["4 events were not recorded by the event handler mine"]
    guarded.close(0)
    assert len(said.messages) == 2


def test_one_that_stays_faulty_is_dropped(said: pytest.LogCaptureFixture) -> None:
    handler = Failing()
    guarded = SafeHandler(handler, "mine")
    for number in range(FAULTS_MAX + 2):
        guarded.record(event(f"bad {number}"))
    assert guarded.is_dropped
    assert len(handler.got) == FAULTS_MAX
    assert said.messages[1:] == [
        f"the event handler mine failed {FAULTS_MAX} times in a row: it gets no more events"
    ]
    guarded.close(0)
    assert handler.calls == []
    assert said.messages[2:] == [
        f"{FAULTS_MAX + 2} events were not recorded by the event handler mine"
    ]


def test_one_that_cannot_be_closed_hurts_nobody(said: pytest.LogCaptureFixture) -> None:
    class Unclosable(Keeping):
        def close(self) -> None:
            raise OSError("stays open")

    SafeHandler(Unclosable(), "mine").close(0)
    assert said.messages == ["the event handler mine failed: OSError: stays open"]


def test_a_handler_needs_only_to_record() -> None:
    class Bare:
        got = 0

        def record(self, event: object) -> None:
            self.got += 1

    bare = Bare()
    guarded = SafeHandler(bare, "bare")  # type: ignore[arg-type]
    guarded.record(event())
    guarded.flush(0)
    guarded.close(0)
    assert bare.got == 1
