from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from holdfast.store.file_lock import TRY_AGAIN_S_MAX, TRY_AGAIN_S_MIN, locked, pauses

if TYPE_CHECKING:
    from pathlib import Path

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_threads_take_turns(tmp_path: Path) -> None:
    inside = []
    most = []

    def enter(number: int) -> None:
        with locked(str(tmp_path / "lock")):
            inside.append(number)
            most.append(len(inside))
            inside.remove(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(enter, range(40)))
    assert most == [1] * 40


def test_another_thread_that_holds_it_is_waited_for_no_longer_than_said(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    with locked(path), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: locked(path, 0.01).__enter__())
        with pytest.raises(TimeoutError, match=f"^{path} has been locked .* more than 0.01 s$"):
            waiting.result()


def test_another_process_that_holds_it_is_waited_for_until_it_ends(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(TimeoutError, match="has been locked"), locked(path, 0.01):
            pass
        entered = threading.Event()

        def enter() -> None:
            with locked(path):
                entered.set()

        waiting = threading.Thread(target=enter)
        waiting.start()
        assert not entered.is_set()
        holder.kill()
        waiting.join(30)
        assert entered.is_set()


def test_a_fork_does_not_wait_for_a_thread_of_its_parent(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    with locked(path), ThreadPoolExecutor(1) as pool:
        pid = pool.submit(forked, path).result()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def forked(path: str) -> int:
    """Return the number of a child that ends with 7 when it has had the lock."""
    pid = os.fork()
    if pid == 0:
        try:
            with locked(path):
                os._exit(7)
        finally:
            os._exit(1)
    return pid


def test_what_goes_wrong_inside_gives_it_back(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    with pytest.raises(ZeroDivisionError), locked(path):
        raise ZeroDivisionError
    with locked(path, 0.01):
        pass


def test_a_place_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), locked(str(tmp_path / "no" / "lock")):
        pass


def test_pauses_grow_up_to_a_limit() -> None:
    first = list(itertools.islice(pauses(), 40))
    assert first[0] == TRY_AGAIN_S_MIN
    assert first == sorted(first)
    assert first[-1] == TRY_AGAIN_S_MAX
