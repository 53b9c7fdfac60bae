"""The stacks of a process by each of the means, and the workers of this host."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import pytest

from holdfast.processes import stacks
from holdfast.processes.local_workers import LocalWorker, local_workers
from holdfast.processes.stacks import (
    PySpyFailed,
    activity_of,
    dump_into_log,
    dump_stacks,
    find_py_spy,
    is_python,
    run_py_spy,
)

if TYPE_CHECKING:
    from pathlib import Path

# Imports nothing of Holdfast.
PLAIN = """
def where_it_is():
    print(flush=True)
    input()
where_it_is()
"""
WITH_SERVER = """
from holdfast.elastic.control_plane import worker_main
@worker_main()
def main():
    where_it_is()
def where_it_is():
    print(flush=True)
    input()
main()
"""
SOCKET = "TORCH_WORKER_SERVER_SOCKET"


class Process:
    """A program that waits at a line."""

    def __init__(
        self,
        program: str,
        env: dict[str, str] | None = None,
        *words: str,
        folder: str = ".",
        leads: bool = False,
    ) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", program, *words],
            env={**os.environ, **(env or {})},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=leads,
        )
        assert self.popen.stdout is not None
        self.popen.stdout.readline()
        self.pid = self.popen.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.communicate(b"\n")


@pytest.fixture
def without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)


def test_stacks_of_an_unprepared_script_are_shown_running_or_stopped() -> None:
    with Process(PLAIN) as process:
        assert "where_it_is (<string>:" in dump_stacks(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert "where_it_is (<string>:" in dump_stacks(process.pid)
        os.kill(process.pid, signal.SIGCONT)


def test_activity_of_a_process_is_its_innermost_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    with Process(PLAIN) as process:
        pattern = r"(running|sleeping).*, called from where_it_is \(<string>:[34]\)"
        assert re.fullmatch(pattern, activity_of(process.pid, limit_s=20))
        monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
        assert re.fullmatch(r"(running|sleeping)[^,]*", activity_of(process.pid, limit_s=20))


@pytest.mark.usefixtures("without_py_spy")
def test_stacks_come_from_the_workers_socket_if_it_has_one(tmp_path: Path) -> None:
    with Process(WITH_SERVER, {SOCKET: str(tmp_path / "${rank}.sock"), "RANK": "4"}) as process:
        assert "in where_it_is\n" in dump_stacks(process.pid)
    with Process(
        WITH_SERVER, {SOCKET: "a.sock"}, folder=str(tmp_path)
    ) as process:  # The path is relative to the process.
        assert "in where_it_is\n" in dump_stacks(process.pid)
    late = f"import os; os.environ[{SOCKET!r}] = {str(tmp_path / 'late.sock')!r}\n"
    with Process(late + WITH_SERVER) as process:  # Its variables are only in its memory.
        assert "in where_it_is\n" in dump_stacks(process.pid)
        assert dump_stacks(process.pid, {}).startswith("command: ")
        path = str(tmp_path / "late.sock")
        with Process(PLAIN, {SOCKET: path}) as other:  # Another worker's response is not used.
            assert dump_stacks(other.pid).startswith("command: ")


@pytest.mark.usefixtures("without_py_spy")
@pytest.mark.parametrize("answers", [True, False])
def test_misbehaving_worker_socket_falls_back(tmp_path: Path, answers: bool) -> None:
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
        if answers:
            thread.start()
        limit_s = 20.0 if answers else 0.05
        text = dump_stacks(os.getpid(), {SOCKET: path}, limit_s=limit_s)
        if answers:
            thread.join()
    assert text.startswith("command: ")
    assert "nonsense" not in text


def test_half_of_the_time_is_left_for_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def spy(pid: int, *, pausing: bool, limit_s: float) -> str:
        limits.append(limit_s)
        return "here"

    monkeypatch.setattr(stacks, "run_py_spy", spy)
    assert dump_stacks(os.getpid(), limit_s=6.0) == "here\n"
    assert limits == [3.0]


def test_a_process_without_python_or_that_has_exited_is_described(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        assert not is_python(process.pid)
        text = dump_stacks(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert len(dump_stacks(process.pid).splitlines()) == 1  # It is not reaped yet.
    assert text.startswith("command: sleep 600\n")
    assert f'thread {process.pid} "sleep"' in text
    assert len(dump_stacks(process.pid).splitlines()) == 1
    assert is_python(os.getpid())

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    assert is_python(1)


def test_stacks_are_appended_to_a_log(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    log.write_text("what it printed\n")
    os.mkfifo(tmp_path / "pipe")
    with Process(PLAIN) as process:
        dump_into_log(process.pid, str(log), "timer 'step' expired")
        dump_into_log(process.pid, str(log))
        for wrong in (tmp_path / "no" / "stderr.log", tmp_path / "pipe"):  # Nobody reads it.
            with pytest.raises(OSError, match="No such"):
                dump_into_log(process.pid, str(wrong))
    text = log.read_text()
    assert text.startswith(f"what it printed\n\n[holdfast] timer 'step' expired (pid {process.pid}")
    assert text.count("where_it_is (<string>:") == 2


# py-spy.


def program(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    file = folder / "py-spy"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the code look for py-spy in a folder of the test."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/nowhere:/usr/bin:/bin")
    return tmp_path


def test_py_spy_is_found_in_safe_places_only(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_py_spy() is None
    program(stand_in / "on-path", "true")
    monkeypatch.chdir(stand_in / "on-path")
    for relative in (".", "", "../on-path"):
        monkeypatch.setenv("PATH", relative)
        assert find_py_spy() is None
    monkeypatch.setenv("PATH", f"/nowhere:{stand_in}/on-path")
    assert find_py_spy() == f"{stand_in}/on-path/py-spy"
    program(stand_in, 'echo "$@"')
    assert run_py_spy(7, native=True, pausing=False) == "dump --pid 7 --native --nonblocking\n"
    (stand_in / "py-spy").chmod(0o644)
    assert find_py_spy() == f"{stand_in}/on-path/py-spy"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo 'Error: no such thing\n\nStack: 1' >&2; exit 1", "no such thing"),
        ("exit 1", "py-spy"),
        ("echo 'Permission denied (os error 13)' >&2; exit 1", "SYS_PTRACE"),
        ("echo 'Operation not permitted' >&2; exit 1", "SYS_PTRACE"),
        ("exec sleep 600", "0.05 s"),
    ],
)
def test_each_failure_of_py_spy_is_one_line(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    monkeypatch.setattr(stacks, "PY_SPY_S", 0.05 if "sleep" in text else 10.0)
    monkeypatch.setattr(stacks, "SCOPE", str(stand_in / "scope"))
    program(stand_in, text)
    with pytest.raises(PySpyFailed) as failed:
        run_py_spy(os.getpid())
    assert why in str(failed.value)
    assert "\n" not in str(failed.value)
    (stand_in / "scope").write_text("1\n")
    if why == "SYS_PTRACE":
        with pytest.raises(PySpyFailed, match=f"{stand_in}/scope"):
            run_py_spy(os.getpid())


# Has its variables only in its memory, like a worker that a zygote has forked.
LATE = """
import os, sys
os.environ.update(TORCHELASTIC_RUN_ID=sys.argv[1], RANK="7", LOCAL_RANK="3")
print(flush=True); input()
"""
WITH_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"])
child.wait()
"""


def found(run_id: str) -> list[LocalWorker]:
    return [worker for worker in local_workers() if worker.run_id == run_id]


def variables(run_id: str, rank: int) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": run_id, "RANK": str(rank), "LOCAL_RANK": str(rank % 2),
        "HOLDFAST_GENERATION": "5",
    }  # fmt: skip


def test_workers_are_found_by_their_environment_in_the_order_of_their_ranks() -> None:
    run_id = str(uuid.uuid4())
    with ExitStack() as stack:
        late = stack.enter_context(Process(LATE, {}, run_id, leads=True))
        tenth, parent, second = (
            stack.enter_context(Process(text, variables(run_id, rank), leads=rank > 2))
            for text, rank in ((PLAIN, 10), (WITH_CHILD, 9), (PLAIN, 2))
        )
        workers = found(run_id)
        assert [(worker.rank, worker.local_rank, worker.pid) for worker in workers] == [
            (2, 0, second.pid), (7, 3, late.pid), (9, 1, parent.pid), (10, 0, tenth.pid),
        ]  # fmt: skip
        line = workers[0].described()
    for part in ("rank 2 ", "local rank 0", f"pid {second.pid}", run_id, "generation 5"):
        assert part in line
    assert found(run_id) == []
