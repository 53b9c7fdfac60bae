"""Colours: on a terminal that wants them, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from io import StringIO
from typing import TYPE_CHECKING

import pytest

from holdfast import console

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import TextIO

HOLDFAST = (sys.executable, "-m", "holdfast")
FAILS = """
import sys
print("step 1", file=sys.stderr)
raise ValueError("no room")
"""


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def terminal() -> Iterator[TextIO]:
    master, slave = os.openpty()
    with open(slave, "w") as stream:
        yield stream
    os.close(master)


@pytest.mark.parametrize(
    ("env", "on_terminal", "elsewhere"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"CLICOLOR_FORCE": "1", "TERM": "dumb"}, True, True),
        ({"FORCE_COLOR": "0"}, True, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
    ],
    ids=str,
)
def test_colours_follow_the_terminal_and_the_usual_variables(
    env: dict[str, str],
    on_terminal: bool,
    elsewhere: bool,
    terminal: TextIO,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert console.is_coloured(terminal) is on_terminal
    assert console.is_coloured(StringIO()) is elsewhere


def test_closed_stream_has_no_colours() -> None:
    closed = StringIO()
    closed.close()
    assert not console.is_coloured(closed)
    assert not console.is_coloured(None)


def test_failed_job_is_red_on_the_terminal_and_plain_in_files(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS)
    command = [*HOLDFAST, "run", "--max-restarts", "1", "--tee", "3", "--log-dir", "logs"]
    master, slave = os.openpty()
    with subprocess.Popen([*command, "train.py"], cwd=tmp_path, stderr=slave) as job:
        os.close(slave)
        shown = b""
        while piece := _read(master):
            shown += piece
    os.close(master)
    assert job.returncode == 1
    lines = shown.decode().split("\r\n")
    [restart] = [line for line in lines if "restart 1 of 1" in line]
    assert restart.startswith("\x1b[33m[holdfast] ")
    assert restart.endswith("\x1b[0m")
    for text in ("Root Cause (first observed failure):", "    ValueError: no room"):
        assert f"\x1b[31m{text}\x1b[0m" in lines
    assert "Other Failures:" in lines
    files = [path for path in (tmp_path / "logs").rglob("*") if path.is_file()]
    assert any(path.name == "failure.json" for path in files)
    assert not [
        path for path in files if b"\x1b" in path.read_bytes() or b"\\u001b" in path.read_bytes()
    ]


def _read(master: int) -> bytes:
    try:
        return os.read(master, 65536)
    except OSError:
        return b""  # The last process with the terminal open has exited.
