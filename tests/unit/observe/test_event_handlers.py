"""Holdfast's own handlers: JSON lines, console, logging."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from event_fakes import event, names
from holdfast import console
from holdfast.events import ConsoleEventHandler, Event, JsonLinesEventHandler
from holdfast.observe.events import event_handlers

if TYPE_CHECKING:
    from pathlib import Path

WRITERS, LINES = 4, 200


def read(path: Path | str) -> list[Event]:
    with open(path) as file:
        text = file.read()
    assert text.endswith("\n")
    return [Event.deserialize(line) for line in text.splitlines()]


def test_each_event_is_written_immediately_and_a_file_is_continued(tmp_path: Path) -> None:
    for name in ("a", "b"):
        handler = JsonLinesEventHandler(str(tmp_path))
        handler.record(event(name, text="two\nlines"))
        assert read(handler.path)[-1] == event(name, text="two\nlines")
        handler.close()
    assert names(read(handler.path)) == ["a", "b"]
    assert os.listdir(tmp_path) == [f"events-{os.uname().nodename}-{os.getpid()}.jsonl"]


def test_events_are_buffered_until_the_folder_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_handlers, "BUFFERED_MAX", 2)
    folder: list[str] = []
    handler = JsonLinesEventHandler(lambda: folder[0] if folder else None)
    for name in "abc":
        handler.record(event(name))
    assert handler.path == ""
    folder.append(str(tmp_path))
    handler.flush()
    assert names(read(handler.path)) == ["b", "c"]
    with pytest.raises(OSError, match="1 events"):
        handler.close()


def test_full_file_is_rotated_and_a_long_line_is_still_written(tmp_path: Path) -> None:
    size = len(event("0").serialize()) + 1
    handler = JsonLinesEventHandler(str(tmp_path), file_bytes_max=2 * size)
    for number in range(7):
        handler.record(event(str(number)))
    assert names(read(handler.path)) == ["6"]
    assert names(read(f"{handler.path}.1")) == ["4", "5"]
    handler.record(event("x" * 3 * size))
    handler.close()
    assert names(read(handler.path)) == ["x" * 3 * size]
    assert len(os.listdir(tmp_path)) == 2


def test_forked_child_does_not_rotate_its_parents_file(tmp_path: Path) -> None:
    handler = JsonLinesEventHandler(str(tmp_path), file_bytes_max=10)
    handler.record(event("first"))
    child = os.fork()
    if not child:
        handler.record(event("child's"))
        os._exit(0)
    os.waitpid(child, 0)
    assert names(read(handler.path)) == ["first", "child's"]
    handler.close()


WRITER = f"""
import sys
from holdfast.events import Event, EventSource, JsonLinesEventHandler
from holdfast.observe.events import event_handlers
event_handlers.file_name = lambda _stem: "shared.jsonl"  # The worst case: all have one file.
handler = JsonLinesEventHandler(sys.argv[1])
sys.stdin.read()
for line in range({LINES}):
    name = f"{{sys.argv[2]}} {{line}}"
    handler.record(Event(name, EventSource.AGENT, 7, {{"filler": "x" * 5000}}))
"""


def test_writers_of_one_file_never_mix_their_lines(tmp_path: Path) -> None:
    """The lines are longer than a page, so that an intermediate buffer would show."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(number)], stdin=subprocess.PIPE
        )
        for number in range(WRITERS)
    ]
    for one in writers:
        assert one.stdin is not None
        one.stdin.close()  # They start at the same time.
    assert [one.wait(60) for one in writers] == [0] * WRITERS
    found = names(read(tmp_path / "shared.jsonl"))
    assert len(found) == WRITERS * LINES
    for number in range(WRITERS):
        own = [name for name in found if name.startswith(f"{number} ")]
        assert own == [f"{number} {line}" for line in range(LINES)]


def test_truncated_line_does_not_affect_the_next(tmp_path: Path) -> None:
    """A full disk accepts only a part of a line; the next event begins on a new line."""
    handler = JsonLinesEventHandler(str(tmp_path))
    handler.record(event("first"))
    size = os.path.getsize(handler.path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, before[1]))
        with pytest.raises(OSError, match=handler.path):
            handler.record(event("torn"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    handler.record(event("last"))
    handler.close()
    with open(handler.path) as file:
        first, torn, last = file.read().splitlines()
    assert (json.loads(first)["name"], torn, json.loads(last)["name"]) == ("first", '{"nam', "last")


def test_console_handler_does_not_wait_for_a_full_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_unfinished", False)
    for fill in (True, False):
        readable, writable = os.pipe()
        size = fcntl.fcntl(writable, fcntl.F_GETPIPE_SZ)
        if fill:
            os.write(writable, b"x" * size)
        with open(writable, "w") as stream, open(readable):
            monkeypatch.setattr(sys, "stderr", stream)
            with pytest.raises(OSError, match="console"):
                ConsoleEventHandler().record(event("x" if fill else "x" * 2 * size))
