from __future__ import annotations

import os
import subprocess
import sys

from timer_fakes import run_python, sleeping

from holdfast.timers.reaper import (
    descends_from,
    has_ended,
    is_below_this_process,
    parent_of,
    root_of,
)

GRANDCHILD = """
import subprocess
with subprocess.Popen(["sleep", "600"]) as child:
    print(child.pid, flush=True)
    input()
    child.kill()
"""


def test_children_and_theirs_are_ours() -> None:
    with run_python(GRANDCHILD) as child:
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        assert parent_of(pid) == child.pid
        assert is_below_this_process(pid)
        assert descends_from(pid, {child.pid: "a worker"})
        assert descends_from(child.pid, {child.pid: "a worker"})
        assert not descends_from(child.pid, {pid})
        assert (root_of(pid, {child.pid}), root_of(child.pid, {pid})) == (child.pid, 0)
        child.communicate("\n")


def test_nobody_else_is() -> None:
    for pid in (os.getpid(), os.getppid(), 1, 0, -1):
        assert not is_below_this_process(pid)
    assert not descends_from(os.getpid(), {os.getpid()})


def test_a_process_that_is_gone_is_nobodys() -> None:
    with sleeping() as child:
        pass
    assert parent_of(child.pid) == 0
    assert not is_below_this_process(child.pid)


def test_one_that_nobody_has_reaped_has_ended() -> None:
    with sleeping() as child:
        assert not has_ended(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(child.pid)
    assert has_ended(child.pid)


def test_the_name_of_a_program_may_be_anything() -> None:
    name = "a ) 1 ("
    program = f"open('/proc/self/comm', 'w').write({name!r}); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert parent_of(child.pid) == os.getpid()
        assert not has_ended(child.pid)
        child.communicate("\n")
