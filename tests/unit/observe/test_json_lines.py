from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from event_fakes import event, names

from holdfast.events import Event, JsonLinesEventHandler
from holdfast.observe.events import handlers as json_lines_module
from holdfast.observe.events.handlers import file_name
from holdfast.observe.safe_handler import SafeHandler

if TYPE_CHECKING:
    from pathlib import Path

WRITERS, LINES = 4, 200


def read(path: Path | str) -> list[Event]:
    with open(path) as file:
        text = file.read()
    assert text.endswith("\n")
    return [Event.deserialize(line) for line in text.splitlines()]


def test_each_event_is_a_line_of_the_nodes_file(tmp_path: Path) -> None:
    handler = JsonLinesEventHandler(str(tmp_path))
    handler.record(event("a", text="two\nlines"))
    path = tmp_path / f"events-{os.uname().nodename}-{os.getpid()}.jsonl"
    assert read(path) == [event("a", text="two\nlines")]  # It is there at once.
    handler.record(event("b"))
    handler.close()
    assert names(read(path)) == ["a", "b"]
    assert handler.path == str(path)
    assert os.listdir(tmp_path) == [file_name()]


def test_a_file_that_is_there_is_continued(tmp_path: Path) -> None:
    for name in ("a", "b"):
        handler = JsonLinesEventHandler(str(tmp_path))
        handler.record(event(name))
        handler.close()
    assert names(read(handler.path)) == ["a", "b"]


def test_events_wait_for_the_folder(tmp_path: Path) -> None:
    folder: list[str] = []
    handler = JsonLinesEventHandler(lambda: folder[0] if folder else None)
    handler.record(event("a"))
    handler.record(event("b"))
    assert handler.path == ""
    folder.append(str(tmp_path))
    handler.record(event("c"))
    handler.close()
    assert names(read(handler.path)) == ["a", "b", "c"]


def test_events_that_wait_are_written_at_the_end_and_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(json_lines_module, "KEPT_MAX", 2)
    folder: list[str] = []
    handler = JsonLinesEventHandler(lambda: folder[0] if folder else None)
    guarded = SafeHandler(handler, "jsonl")
    for name in "abc":
        guarded.record(event(name))
    folder.append(str(tmp_path))
    guarded.close(0)
    assert names(read(handler.path)) == ["b", "c"]
    assert said.messages == [
        "the event handler jsonl failed: OSError: 1 events came before there was a folder"
    ]


def test_a_run_without_a_folder_writes_nothing(said: pytest.LogCaptureFixture) -> None:
    guarded = SafeHandler(JsonLinesEventHandler(lambda: None), "jsonl")
    guarded.record(event())
    guarded.close(0)
    assert said.messages == []


def test_a_full_file_is_put_aside(tmp_path: Path) -> None:
    size = len(event("0").serialize()) + 1
    handler = JsonLinesEventHandler(str(tmp_path), file_bytes_max=2 * size)
    for number in range(7):
        handler.record(event(str(number)))
    handler.close()
    assert names(read(handler.path)) == ["6"]
    assert names(read(f"{handler.path}.1")) == ["4", "5"]
    assert len(os.listdir(tmp_path)) == 2


def test_a_line_longer_than_the_limit_is_still_written(tmp_path: Path) -> None:
    handler = JsonLinesEventHandler(str(tmp_path), file_bytes_max=10)
    handler.record(event("first"))
    handler.record(event("second"))
    handler.close()
    assert names(read(handler.path)) == ["second"]


WRITER = f"""
import sys
from holdfast.events import Event, EventSource, JsonLinesEventHandler, json_lines
json_lines.file_name = lambda: "shared.jsonl"  # The worst case: all have one file.
handler = JsonLinesEventHandler(sys.argv[1])
sys.stdin.read()
for line in range({LINES}):
    name = f"{{sys.argv[2]}} {{line}}"
    handler.record(Event(name, EventSource.AGENT, 7, {{"filler": "x" * 5000}}))
"""


def test_writers_of_one_file_never_mix_their_lines(tmp_path: Path) -> None:
    """Lines longer than a page, so that a buffer in between would show."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(number)], stdin=subprocess.PIPE
        )
        for number in range(WRITERS)
    ]
    for one in writers:
        assert one.stdin is not None
        one.stdin.close()  # They begin together.
    assert [one.wait(60) for one in writers] == [0] * WRITERS
    found = names(read(tmp_path / "shared.jsonl"))
    assert sorted(found) == sorted(f"{n} {line}" for n in range(WRITERS) for line in range(LINES))
    for number in range(WRITERS):
        own = [name for name in found if name.startswith(f"{number} ")]
        assert own == [f"{number} {line}" for line in range(LINES)]


def test_a_line_that_does_not_fit_spoils_no_other(tmp_path: Path) -> None:
    """A disk that is full takes a part of a line; the next line begins anew."""
    handler = JsonLinesEventHandler(str(tmp_path))
    handler.record(event("first"))
    size = os.path.getsize(handler.path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, before[1]))
        with pytest.raises(OSError, match="only 5 of"):
            handler.record(event("torn"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    handler.record(event("last"))
    handler.close()
    with open(handler.path) as file:
        first, torn, last = file.read().splitlines()
    assert (json.loads(first)["name"], torn, json.loads(last)["name"]) == ("first", '{"nam', "last")


def test_a_folder_that_cannot_be_written_is_named(said: pytest.LogCaptureFixture) -> None:
    guarded = SafeHandler(JsonLinesEventHandler("/nowhere/at/all"), "jsonl")
    guarded.record(event())
    assert "No such file or directory: '/nowhere/at/all/events-" in said.text


def test_a_disk_that_is_full_is_named(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    (tmp_path / file_name()).symlink_to("/dev/full")
    guarded = SafeHandler(JsonLinesEventHandler(str(tmp_path)), "jsonl")
    guarded.record(event())
    guarded.close(0)
    assert f"No space left on device: '{tmp_path}/events-" in said.text
