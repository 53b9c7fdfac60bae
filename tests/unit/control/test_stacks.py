"""The stacks of a process by each of the means, and into its log."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Self

import pytest

from holdfast.control.stacks import dump_into_log, dump_stacks, is_python

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Nothing of ours is imported.
PLAIN = """
def where_it_is():
    print(flush=True)
    input()
where_it_is()
"""
WITH_SERVER = """
from holdfast.control import worker_main
@worker_main()
def main():
    where_it_is()
def where_it_is():
    print(flush=True)
    input()
main()
"""


class Process:
    """A program that waits at a line."""

    def __init__(self, program: str, folder: str = ".", /, **variables: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **variables},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.popen.stdout is not None
        self.popen.stdout.readline()
        self.pid = self.popen.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.communicate(b"\n")


@pytest.fixture
def without_py_spy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.control.stacks.find_py_spy", lambda: None)
        yield


def test_a_script_that_imports_nothing_of_ours() -> None:
    with Process(PLAIN) as process:
        text = dump_stacks(process.pid)
    assert "where_it_is (<string>:" in text
    assert text.endswith("\n")


def test_a_process_that_is_stopped_is_seen_too() -> None:
    with Process(PLAIN) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        text = dump_stacks(process.pid)
        os.kill(process.pid, signal.SIGCONT)
    assert "where_it_is (<string>:" in text


@pytest.mark.usefixtures("without_py_spy")
def test_a_worker_is_asked_at_its_socket(tmp_path: Path) -> None:
    place = {"TORCH_WORKER_SERVER_SOCKET": str(tmp_path / "${rank}.sock"), "RANK": "4"}
    with Process(WITH_SERVER, **place) as process:
        text = dump_stacks(process.pid)
        assert "in where_it_is\n" in text
        assert '"MainThread" (most recent call last)' in text


@pytest.mark.usefixtures("without_py_spy")
def test_a_relative_path_is_the_workers(tmp_path: Path) -> None:
    with Process(WITH_SERVER, str(tmp_path), TORCH_WORKER_SERVER_SOCKET="a.sock") as process:
        assert "in where_it_is\n" in dump_stacks(process.pid)


@pytest.mark.usefixtures("without_py_spy")
def test_a_worker_that_got_its_variables_later_is_asked_too(tmp_path: Path) -> None:
    place = str(tmp_path / "a.sock")
    late = f"import os; os.environ['TORCH_WORKER_SERVER_SOCKET'] = {place!r}"
    with Process(f"{late}\n{WITH_SERVER}") as process:
        assert "in where_it_is\n" in dump_stacks(process.pid)
        variables = {"TORCH_WORKER_SERVER_SOCKET": place}
        assert "in where_it_is\n" in dump_stacks(process.pid, variables)
        assert dump_stacks(process.pid, {}).startswith("command: ")


@pytest.mark.usefixtures("without_py_spy")
def test_what_another_worker_says_at_the_same_path_is_not_taken(tmp_path: Path) -> None:
    place = {"TORCH_WORKER_SERVER_SOCKET": str(tmp_path / "a.sock")}
    with Process(WITH_SERVER, **place), Process(PLAIN, **place) as other:
        assert dump_stacks(other.pid).startswith("command: ")


@pytest.mark.usefixtures("without_py_spy")
def test_a_worker_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    path = str(tmp_path / "a.sock")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()
        variables = {"TORCH_WORKER_SERVER_SOCKET": path}
        text = dump_stacks(os.getpid(), variables, limit_s=0.05)
    assert text.startswith("command: ")


@pytest.mark.usefixtures("without_py_spy")
def test_a_broken_answer_is_none(tmp_path: Path) -> None:
    path = str(tmp_path / "a.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 500 Bad\r\n\r\nnonsense")

        thread = threading.Thread(target=answer)
        thread.start()
        text = dump_stacks(os.getpid(), {"TORCH_WORKER_SERVER_SOCKET": path})
        thread.join()
    assert "nonsense" not in text


@pytest.mark.usefixtures("without_py_spy")
def test_else_what_the_kernel_tells_and_what_to_install() -> None:
    with Process(PLAIN) as process:
        text = dump_stacks(process.pid)
    first, *_, last = text.splitlines()
    assert first.startswith(f"command: {sys.executable} -c")
    assert f'thread {process.pid} "python' in text
    assert last.startswith("no Python stacks: py-spy is not there; install it")


def test_a_program_that_is_no_python() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            assert not is_python(process.pid)
            text = dump_stacks(process.pid)
        finally:
            process.kill()
    assert text.startswith("command: sleep 600\n")
    assert text.endswith("no Python stacks: this is no Python program\n")
    assert is_python(os.getpid())


def test_what_may_not_be_looked_at_may_be_a_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    assert is_python(1)


def test_one_that_is_gone() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert dump_stacks(ended.pid) == f"process {ended.pid} has ended\n"
    unreaped = subprocess.Popen(["true"])
    os.waitid(os.P_PID, unreaped.pid, os.WEXITED | os.WNOWAIT)
    assert dump_stacks(unreaped.pid) == f"process {unreaped.pid} has ended\n"
    unreaped.wait()


def test_into_its_log(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    log.write_text("what it said\n")
    with Process(PLAIN) as process:
        dump_into_log(process.pid, str(log), "timer 'step' has expired")
        dump_into_log(process.pid, str(log))
    text = log.read_text()
    assert text.startswith(
        f"what it said\n\n[holdfast] timer 'step' has expired (pid {process.pid}"
    )
    assert text.count("where_it_is (<string>:") == 2
    assert f"\n[holdfast] stacks (pid {process.pid}, " in text
    with pytest.raises(OSError, match="No such file"):
        dump_into_log(process.pid, str(tmp_path / "no" / "stderr.log"))


def test_a_log_that_nobody_reads_keeps_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with Process(PLAIN) as process, pytest.raises(OSError, match="No such device"):
        dump_into_log(process.pid, str(tmp_path / "pipe"))
