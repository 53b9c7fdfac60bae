"""What `/proc` shows of a process. A process that exits meanwhile is not an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.processes import procfs

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

GRANDCHILD = """
import subprocess
with subprocess.Popen(["sleep", "600"]) as child:
    print(child.pid, flush=True)
    input()
    child.kill()
"""
CHANGES_ENVIRONMENT = """
import os
os.environ["LATER"] = "\\u00e9 = 1"
os.environ["LONG"] = "x" * 100_000
del os.environ["FIRST"]
for number in range(300):
    os.environ[f"MORE_{number}"] = str(number)
print(flush=True)
input()
"""


@contextmanager
def python(program: str) -> Iterator[tuple[int, str]]:
    """A child that runs a program; its process id, and the first line that it writes."""
    env = {**os.environ, "FIRST": "1", "STAYS": "2"}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=env, stdin=-1, stdout=-1, text=True
    ) as child:
        assert child.stdout is not None
        yield child.pid, child.stdout.readline()
        child.communicate("\n")


def gone() -> int:
    with subprocess.Popen(["true"]) as child:
        return child.pid


def test_description_names_the_command_and_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        lines = procfs.describe(process.pid).splitlines()
        assert lines[0] == "command: sleep 600"
        assert lines[1].startswith(f'  thread {process.pid} "sleep": stopped')
        assert procfs.name_of(process.pid) == "sleep"
        assert procfs.is_stopped(process.pid)
        assert not procfs.has_ended(process.pid)
        assert procfs.exists(process.pid)
        assert process.pid in procfs.all_pids()
        assert procfs.user_of(process.pid) == os.geteuid()
        process.kill()
    monkeypatch.setattr(procfs, "THREADS_MAX", 2)
    go_on = threading.Event()
    threads = [threading.Thread(target=go_on.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    text = procfs.describe(os.getpid())
    go_on.set()
    for thread in threads:
        thread.join()
    assert text.count("  thread ") == 2


def test_exited_process_has_empty_values() -> None:
    pid = gone()
    assert str(pid) in procfs.describe(pid)
    assert procfs.stat_of(pid) == procfs.Stat()
    assert procfs.has_ended(pid)
    assert not procfs.is_stopped(pid)
    assert not procfs.exists(pid)
    assert not procfs.exists(-1)
    assert procfs.command_of(pid) == "[]"
    assert procfs.user_of(pid) == -1
    assert not procfs.is_descendant(pid)
    assert procfs.initial_environment(pid) == procfs.current_environment(pid) == {}


def test_unreaped_process_counts_as_exited() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert procfs.state_of(ended.pid) == "Z"
    assert procfs.has_ended(ended.pid)
    assert procfs.exists(ended.pid)
    assert procfs.command_of(ended.pid).startswith("[python")
    ended.wait()


def test_descendants_are_below_this_process() -> None:
    with python(GRANDCHILD) as (child, line):
        pid = int(line)
        assert procfs.parent_of(pid) == child
        assert procfs.is_descendant(pid)
        assert procfs.root_of(pid, {child: "a worker"}) == procfs.root_of(child, {child}) == child
        assert procfs.root_of(child, {pid}) == 0
    for pid in (os.getpid(), os.getppid(), 1, 0, -1):
        assert not procfs.is_descendant(pid)
    assert procfs.root_of(os.getpid(), {os.getpid()}) == 0


def test_program_name_can_contain_any_characters() -> None:
    rename = "open('/proc/self/comm', 'w').write('a ) 1 (')"
    with python(f"{rename}; print(flush=True); input()") as (pid, _):
        assert procfs.parent_of(pid) == os.getpid()
        assert not procfs.has_ended(pid)


def test_initial_and_current_environment_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with python(CHANGES_ENVIRONMENT) as (pid, _):
        env = procfs.initial_environment(pid)
        assert (env["FIRST"], env["STAYS"], env.get("LATER")) == ("1", "2", None)
        env = procfs.current_environment(pid)
        assert (env["STAYS"], env["LATER"], env["MORE_299"]) == ("2", "é = 1", "299")
        assert "FIRST" not in env
        assert len(env["LONG"]) == procfs.VALUE_BYTES_MAX - len("LONG=")
        here = procfs._place_of_environ()
        assert here is not None
        wrong = [(here[0], at) for at in (0, 8, 1 << 46, -(1 << 62))]
        for place in [*wrong, (("00:00", "12345"), 0), None]:
            monkeypatch.setattr(procfs, "_place_of_environ", lambda at=place: at)
            assert "STAYS" not in procfs.current_environment(pid)
