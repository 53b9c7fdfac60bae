"""Which handler receives the events of a destination, and of a job."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from event_fakes import PATIENCE_S, BlockingHandler, ListHandler, RecordingHandler, event, names
from holdfast import events
from holdfast.errors import UsageError
from holdfast.events import Event, EventSource
from holdfast.observe.events.event_recorder import JobEvents

if TYPE_CHECKING:
    from pathlib import Path


def lines_in(folder: Path) -> list[Event]:
    lines = [line for path in folder.iterdir() for line in path.read_text().splitlines()]
    return [Event.deserialize(line) for line in lines]


def test_each_destination_has_its_own_handler() -> None:
    first, second, logged = RecordingHandler(), RecordingHandler(), ListHandler()
    events.record(event("for nobody"))
    events.configure(first)
    events.configure(second, destination="mine")
    events.configure(logged, "logged")
    for name, destination in (("a", "null"), ("b", "mine"), ("c", "logged")):
        events.record(event(name), destination)
    events.record(event("d"))
    events.flush(PATIENCE_S)
    assert (names(first.received), names(second.received)) == (["a", "d"], ["b"])
    assert logged.lines == [event("c").serialize()]
    assert first.calls == ["flush"]


def test_replaced_handler_receives_pending_events_and_is_closed() -> None:
    first, second = RecordingHandler(), RecordingHandler()
    events.configure(first)
    events.record(event("a"))
    events.configure(second)
    assert (names(first.received), first.calls) == (["a"], ["close"])
    events.record(event("b"))
    events.flush(PATIENCE_S)
    assert (names(first.received), names(second.received)) == (["a"], ["b"])


def test_event_is_recorded_unchanged_with_its_time() -> None:
    handler = BlockingHandler()
    events.configure(handler)
    events.record(event("first"))
    assert handler.entered.wait(PATIENCE_S)
    later = Event("later", EventSource.WORKER, metadata={"step": 1})
    begin_ms = time.time_ns() // 1_000_000
    events.record(later)
    end_ms = time.time_ns() // 1_000_000
    later.metadata["step"] = 2
    later.name = "another"
    handler.released.set()
    events.flush(PATIENCE_S)
    first, second = handler.received
    assert (first.timestamp, later.timestamp) == (7, 0)
    assert begin_ms <= second.timestamp <= end_ms
    assert (second.name, second.source, second.metadata) == ("later", later.source, {"step": 1})


def test_handler_may_flush_and_replace_itself(log: pytest.LogCaptureFixture) -> None:
    other = RecordingHandler()

    class GivingUp(RecordingHandler):
        def record(self, event: Event) -> None:
            assert all_there.wait(PATIENCE_S)
            super().record(event)
            events.flush(PATIENCE_S)  # It would wait for itself.
            if event.name == "b":
                events.configure(other)
            if len(self.received) == 3:
                done.set()

    all_there, done = threading.Event(), threading.Event()
    handler = GivingUp()
    events.configure(handler)
    for name in ("a", "b", "c"):
        events.record(event(name))
    all_there.set()
    assert done.wait(PATIENCE_S / 2)
    events.record(event("d"))
    events.flush(PATIENCE_S)
    assert names(handler.received) == ["a", "b", "c"]
    assert names(other.received) == ["d"]
    assert log.messages == []


PLUGIN = """
from holdfast.events import EventHandler
class Mine(EventHandler):
    received = []
    def record(self, event):
        self.received.append(event)
"""


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (PLUGIN, ""),
        ("import a_module_that_is_not_there", "ModuleNotFoundError"),
        ("def Mine():\n    return 7", "7"),
        ("raise SystemExit(9)", "SystemExit: 9"),
    ],
)
def test_plugin_is_found_by_name_and_a_faulty_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, problem: str
) -> None:
    info = tmp_path / "some_events-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some_events\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[holdfast.event_handlers]\nsome = some_events:Mine\n")
    (tmp_path / "some_events.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        if problem:
            with pytest.raises(UsageError, match=problem):
                events.record(event(), "some")
            return
        events.record(event("a"), "some")
        events.record(event("b"), "some")
        events.flush(PATIENCE_S)
        plugin: Any = sys.modules["some_events"]
        assert names(plugin.Mine.received) == ["a", "b"]
    finally:
        sys.modules.pop("some_events", None)


def test_job_writes_lines_to_its_folder_and_to_a_configured_handler(tmp_path: Path) -> None:
    handler = RecordingHandler()
    for number, name in enumerate(("null", "jsonl", "null")):
        job = JobEvents(name, str(tmp_path))
        job.record(event(str(number)))
        job.close()
        if not number:
            events.configure(handler)  # It serves several jobs in turn.
    assert names(lines_in(tmp_path)) == ["0", "1", "2"]
    assert names(handler.received) == ["1", "2"]
    assert handler.calls == ["flush"] * 2
    job = JobEvents("jsonl", None)
    job.record(event("3"))
    job.close()
    assert len(lines_in(tmp_path)) == 3
