from __future__ import annotations

import fcntl
import io
import os
import subprocess
import sys

import pytest
from event_fakes import event

from holdfast import console as messages
from holdfast.events import ConsoleEventHandler

PROGRAM = """
from holdfast import events
events.record(events.Event("it", events.EventSource.AGENT, 7), "console")
"""


@pytest.mark.parametrize("level", ["", "WARNING", "ERROR", "CRITICAL"])
def test_events_are_shown_whatever_the_level(level: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "LOGLEVEL": level},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("", event().serialize() + "\n")


def test_a_console_that_takes_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    try:
        while True:
            os.write(writable, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writable, True)
    with open(writable, "w") as full, open(readable):
        monkeypatch.setattr(sys, "stderr", full)
        with pytest.raises(OSError, match="takes no line for 200 ms"):
            ConsoleEventHandler().record(event())


def test_an_event_longer_than_the_console_takes_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "_unfinished", False)
    readable, writable = os.pipe()
    long = event("x" * 2 * fcntl.fcntl(writable, fcntl.F_GETPIPE_SZ))
    with open(writable, "w") as console, open(readable):
        monkeypatch.setattr(sys, "stderr", console)
        with pytest.raises(OSError, match="takes no line for 200 ms"):
            ConsoleEventHandler().record(long)


def test_a_stream_without_a_descriptor_and_no_stream_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    ConsoleEventHandler().record(event("a"))
    assert stream.getvalue() == event("a").serialize() + "\n"
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(OSError, match="no standard error"):
        ConsoleEventHandler().record(event("a"))
