"""py-spy: found in safe places only, and every way it fails is one line."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from holdfast.control import stacks
from holdfast.control.stacks import PySpyFailed, find_py_spy, run_py_spy

if TYPE_CHECKING:
    from pathlib import Path


def program(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    file = folder / "py-spy"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have py-spy looked for in a folder of the test's own."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/nowhere:/usr/bin:/bin")
    return tmp_path


def test_it_is_beside_this_python_or_on_the_path(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_py_spy() is None
    with pytest.raises(PySpyFailed, match="py-spy is not there; install it"):
        run_py_spy(os.getpid())
    program(stand_in / "on-path", "true")
    monkeypatch.setenv("PATH", f"/nowhere:{stand_in}/on-path")
    assert find_py_spy() == f"{stand_in}/on-path/py-spy"
    program(stand_in, "true")
    assert find_py_spy() == f"{stand_in}/py-spy"
    (stand_in / "py-spy").chmod(0o644)
    assert find_py_spy() == f"{stand_in}/on-path/py-spy"


def test_a_relative_folder_is_not_trusted(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(stand_in / "here", "true")
    monkeypatch.chdir(stand_in / "here")
    for path in (".", "", "../here"):
        monkeypatch.setenv("PATH", path)
        assert find_py_spy() is None


SLEEPING = """
import sys, time
def deep_inside():
    print(flush=True)
    time.sleep(600)
deep_inside()
"""


def test_it_sees_a_program_that_knows_nothing_of_it() -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEPING], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert "deep_inside (<string>:5)" in run_py_spy(process.pid)
        finally:
            process.kill()


def test_flags(stand_in: Path) -> None:
    program(stand_in, 'echo "$@"')
    assert run_py_spy(7) == "dump --pid 7\n"
    assert run_py_spy(7, native=True, pausing=False) == "dump --pid 7 --native --nonblocking\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo 'Error: no such thing\n\nStack: 1' >&2; exit 1", "py-spy: no such thing"),
        ("exit 1", "py-spy: it failed without a word"),
        ("echo 'Permission denied (os error 13)' >&2; exit 1", "this user may not look into"),
        ("echo 'Operation not permitted' >&2; exit 1", "this user may not look into"),
    ],
)
def test_each_failure_is_one_line(stand_in: Path, text: str, why: str) -> None:
    program(stand_in, text)
    with pytest.raises(PySpyFailed) as failed:
        run_py_spy(os.getpid())
    assert str(failed.value).startswith(why)
    assert "\n" not in str(failed.value)


def test_the_remedy_names_what_forbids_it(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(stand_in, "echo 'Permission denied' >&2; exit 1")
    monkeypatch.setattr(stacks, "SCOPE", str(tmp_path / "scope"))
    with pytest.raises(PySpyFailed, match="be root, or give the container SYS_PTRACE"):
        run_py_spy(os.getpid())
    (tmp_path / "scope").write_text("1\n")
    with pytest.raises(PySpyFailed, match=f"{tmp_path}/scope limits that"):
        run_py_spy(os.getpid())


def test_an_ended_process_is_said_to_have_ended(stand_in: Path) -> None:
    program(stand_in, "echo 'Permission denied' >&2; exit 1")
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(PySpyFailed, match=f"process {ended.pid} has ended"):
        run_py_spy(ended.pid)


def test_it_has_its_time(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "SPY_S", 0.05)
    program(stand_in, "exec sleep 600")
    with pytest.raises(PySpyFailed, match=r"no stacks of 7 in 0\.05 s"):
        run_py_spy(7)


def test_one_that_cannot_be_started_is_named(stand_in: Path) -> None:
    (stand_in / "py-spy").write_bytes(b"\x7fELF no program")
    (stand_in / "py-spy").chmod(0o755)
    with pytest.raises(PySpyFailed, match=r"py-spy cannot be started: Exec format error"):
        run_py_spy(7)
