"""What the kernel tells of a process, and that a process that goes away is no trouble."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from holdfast.control import process_facts
from holdfast.control.process_facts import command_of, facts_of, has_ended, is_stopped, name_of

if TYPE_CHECKING:
    import pytest


def test_a_process_and_its_threads() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            lines = facts_of(process.pid).splitlines()
            assert lines[0] == "command: sleep 600"
            assert lines[1].startswith(f'  thread {process.pid} "sleep": stopped')
            assert name_of(process.pid) == "sleep"
            assert is_stopped(process.pid)
            assert not has_ended(process.pid)
        finally:
            process.kill()


def test_a_command_is_one_line() -> None:
    with subprocess.Popen(["sh", "-c", "echo\nread x\n\n"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert command_of(process.pid) == "sh -c echo read x"


def test_one_that_is_gone() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert facts_of(ended.pid) == f"process {ended.pid} has ended\n"
    assert has_ended(ended.pid)
    assert not is_stopped(ended.pid)
    assert command_of(ended.pid) == "[]"


def test_one_that_nobody_has_reaped() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert "ended, not yet reaped" in facts_of(ended.pid)
    assert has_ended(ended.pid)
    assert command_of(ended.pid).startswith("[python")
    ended.wait()


def test_many_threads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_facts, "THREADS_MAX", 2)
    go_on = threading.Event()
    threads = [threading.Thread(target=go_on.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    text = facts_of(os.getpid())
    go_on.set()
    for thread in threads:
        thread.join()
    assert text.count("  thread ") == 2
    assert " more threads\n" in text
