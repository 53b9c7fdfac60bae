"""The parts of the keeper's program that can be called; `test_keeping` has it run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from holdfast.processes.keeper import main
from real_jobs import News

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# A child with two children, one of them of a thread that is not the first.
FAMILY = """
import os, subprocess, threading
first = subprocess.Popen(["sleep", "1000"])
second = []
def start():
    second.append(subprocess.Popen(["sleep", "1000"]))
    with open(os.environ["NEWS"], "w") as news:
        news.write(f"{first.pid} {second[0].pid}\\n")
    threading.Event().wait()
threading.Thread(target=start).start()
"""


@pytest.fixture
def family(tmp_path: Path) -> Iterator[tuple[int, set[int]]]:
    news = News(tmp_path)
    parent = subprocess.Popen(
        [sys.executable, "-c", FAMILY], env={**os.environ, "NEWS": str(news.path)}
    )
    pids = {int(word) for word in news.next()}
    yield parent.pid, pids
    for pid in (*pids, parent.pid):
        os.kill(pid, signal.SIGKILL)
    parent.wait()
    news.close()


def test_children_of_every_thread_are_found(family: tuple[int, set[int]]) -> None:
    parent, children = family
    assert set(main.children_of(parent)) == children
    assert set(main.children_by_scan(parent)) == children
    assert parent in main.children_of(os.getpid())


def test_a_kernel_that_does_not_list_children(
    family: tuple[int, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, children = family
    real = os.path.exists
    monkeypatch.setattr(
        os.path, "exists", lambda path: real(path) and not str(path).endswith("/children")
    )
    monkeypatch.setattr(main, "open", missing_listing, raising=False)
    assert set(main.children_of(parent)) == children
    assert main.children_of(1 << 30) == []


def missing_listing(path: str, mode: str) -> object:
    if path.endswith("/children"):
        raise FileNotFoundError(path)
    return open(path, mode)


def test_a_thread_that_ends_meanwhile_hides_no_children(
    family: tuple[int, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, children = family
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: [str(1 << 30), *real(path)])
    assert set(main.children_of(parent)) == children


def test_it_imports_nothing_but_small_parts_of_the_standard_library() -> None:
    """It must start fast and stay small; `ctypes` is the one exception, for prctl."""
    code = (
        f"import os, sys; sys.path.insert(0, {os.path.dirname(main.__file__)!r})\n"
        "before = set(sys.modules); import main; print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    small = {"__future__", "_signal", "_socket", "errno", "fcntl", "gc", "select"}
    assert set(done.stdout.split()) <= {"main", *small}
