from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from event_fakes import PATIENCE_S, Keeping, event, names

from holdfast import events
from holdfast.errors import UsageError
from holdfast.observe.background import BackgroundHandler
from holdfast.observe.events import destinations, logging_handlers
from holdfast.observe.safe_handler import SafeHandler

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.events import Event


def test_a_configured_handler_gets_what_goes_to_the_default() -> None:
    handler = Keeping()
    events.configure(handler)
    events.record(event("a"))
    events.record(event("b"), "null")
    events.flush(PATIENCE_S)
    assert names(handler.got) == ["a", "b"]
    assert handler.calls == ["flush"]


def test_a_handler_for_another_destination() -> None:
    first, second = Keeping(), Keeping()
    events.configure(first)
    events.configure(second, destination="mine")
    events.record(event("a"), "mine")
    events.flush(PATIENCE_S)
    assert (names(first.got), names(second.got)) == ([], ["a"])


def test_the_handler_that_is_replaced_has_everything_and_is_closed() -> None:
    first, second = Keeping(), Keeping()
    events.configure(first)
    events.record(event("a"))
    events.configure(second)
    assert (names(first.got), first.calls) == (["a"], ["close"])
    events.record(event("b"))
    events.flush(PATIENCE_S)
    assert (names(first.got), names(second.got)) == (["a"], ["b"])


def test_one_of_ours_is_called_directly_and_any_other_apart() -> None:
    assert type(destinations.find("null")) is SafeHandler
    assert type(destinations.find("dynamic_rendezvous")) is SafeHandler
    assert type(destinations.find("console")) is SafeHandler
    assert type(destinations.find("logging")) is BackgroundHandler
    assert destinations.find("console") is destinations.find("console")


def test_what_is_no_handler_is_refused() -> None:
    for wrong in (object(), Keeping, None):
        with pytest.raises(UsageError, match="is no event handler"):
            events.configure(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is empty"):
        events.configure(Keeping(), "")


def test_an_unknown_destination_is_named_with_those_there_are() -> None:
    events.configure(Keeping(), "mine")
    with pytest.raises(UsageError, match=r"accepted: console, .*, mine, null, otel$"):
        events.record(event(), "other")
    with pytest.raises(UsageError, match="'jsonl' needs a folder"):
        events.record(event(), "jsonl")


def test_a_folder_for_lines_outside_of_a_job(tmp_path: Path) -> None:
    events.configure(events.JsonLinesEventHandler(str(tmp_path)), "jsonl")
    events.record(event(), "jsonl")
    events.flush(PATIENCE_S)
    (path,) = tmp_path.iterdir()
    assert path.read_text() == event().serialize() + "\n"


class ListHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_a_handler_of_logging_can_be_configured() -> None:
    handler = ListHandler()
    events.configure(handler)
    events.record(event())
    events.flush(PATIENCE_S)
    assert handler.lines == [event().serialize()]


@pytest.mark.parametrize("destination", ["null", "console", "dynamic_rendezvous", "mine"])
def test_the_table_of_torchelastic_can_be_written_into(
    destination: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = ListHandler(), ListHandler()
    if destination != "mine":
        destinations.find(destination)  # It does not matter that it was used before.
    for handler in (first, second):
        monkeypatch.setitem(logging_handlers._log_handlers, destination, handler)
        for _ in range(2):
            events.record(event(), destination)
        assert events.get_logging_handler(destination) is handler
    events.flush(PATIENCE_S)
    assert first.lines == second.lines == [event().serialize()] * 2
    monkeypatch.undo()
    if destination != "mine":
        events.record(event("after"), destination)
        assert len(second.lines) == 2
        assert ("after" in capsys.readouterr().err) == (destination == "console")


def test_loglevel_does_not_silence_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGLEVEL", "ERROR")
    handler = ListHandler()
    events.configure(handler, "quiet")
    events.record(event(), "quiet")
    events.flush(PATIENCE_S)
    assert len(handler.lines) == 1


def test_a_null_handler_of_logging_starts_no_thread() -> None:
    events.configure(logging.NullHandler(), "mine")
    assert type(destinations.find("mine")) is SafeHandler
    assert not destinations.is_recorded("mine")


def test_a_logging_handler_for_every_destination() -> None:
    assert isinstance(events.get_logging_handler(), logging.NullHandler)
    assert isinstance(events.get_logging_handler("console"), logging.StreamHandler)
    with pytest.raises(KeyError, match="unheard of"):
        events.get_logging_handler("unheard of")
    kept = Keeping()
    events.configure(kept, "mine")
    record = logging.makeLogRecord({"msg": event("by logging").serialize()})
    events.get_logging_handler("mine").handle(record)
    events.flush(PATIENCE_S)
    assert kept.got == [event("by logging")]


def install(folder: Path, code: str) -> None:
    """Make a package as installers leave it."""
    info = folder / "some_events-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some_events\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[holdfast.event_handlers]\nsome = some_events:Mine\n")
    (folder / "some_events.py").write_text(code)


def test_a_plugin_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        tmp_path,
        "from holdfast.events import EventHandler\n"
        "class Mine(EventHandler):\n"
        "    got = []\n"
        "    def record(self, event):\n"
        "        self.got.append(event)\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        events.record(event("a"), "some")
        events.record(event("b"), "some")
        events.flush(PATIENCE_S)
        plugin: Any = sys.modules["some_events"]
        assert names(plugin.Mine.got) == ["a", "b"]
    finally:
        sys.modules.pop("some_events", None)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import a_module_that_is_not_there", "'some' .* cannot be made: ModuleNotFoundError"),
        ("def Mine():\n    return 7", "7 is no event handler"),
        ("raise SystemExit(9)", "'some' .* cannot be made: SystemExit: 9"),
    ],
)
def test_a_faulty_plugin_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, told: str
) -> None:
    install(tmp_path, code)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(UsageError, match=told):
            events.record(event(), "some")
    finally:
        sys.modules.pop("some_events", None)


def test_a_handler_may_put_another_in_its_place(said: pytest.LogCaptureFixture) -> None:
    other = Keeping()

    class GivingUp(Keeping):
        def record(self, event: Event) -> None:
            assert all_there.wait(PATIENCE_S)
            super().record(event)
            events.flush(PATIENCE_S)  # It has itself to wait for.
            if event.name == "b":
                events.configure(other)
            if len(self.got) == 3:
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
    assert names(handler.got) == ["a", "b", "c"]
    assert names(other.got) == ["d"]
    assert said.messages == []
