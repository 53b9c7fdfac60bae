"""The stacks of this process's threads, in words."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

from holdfast.control import handlers
from holdfast.control.handlers import stacks_of_this_process

if TYPE_CHECKING:
    import pytest


class Waiting:
    """Some threads that wait, each so many calls deep."""

    def __init__(self, depth: int, count: int = 1) -> None:
        self.go_on = threading.Event()
        self.barrier = threading.Barrier(count + 1)
        self.threads = [
            threading.Thread(target=self.deep, args=(depth,), name=f"deep {number}")
            for number in range(count)
        ]

    def deep(self, left: int) -> None:
        if left:
            self.deep(left - 1)
        else:
            self.barrier.wait()
            self.go_on.wait()

    def __enter__(self) -> None:
        for thread in self.threads:
            thread.start()
        self.barrier.wait()

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        for thread in self.threads:
            thread.join()


def test_the_main_thread_comes_first_and_who_asks_is_left_out() -> None:
    said: list[str] = []
    with Waiting(2):
        asker = threading.Thread(target=lambda: said.append(stacks_of_this_process()), name="asker")
        asker.start()
        asker.join()
    names = re.findall(
        r'^Thread 0x[0-9a-f]+ "(.*)" \(most recent call last\):$', said[0], re.MULTILINE
    )
    assert names[0] == "MainThread"
    assert "deep 0" in names
    assert "asker" not in names
    assert said[0].count("self.deep(left - 1)") == 2


def test_a_deep_stack_is_shown_from_its_inner_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "FRAMES_MAX", 5)
    with Waiting(20):
        text = stacks_of_this_process()
    assert "in wait" in text
    assert text.count("self.deep(left - 1)") <= 4


def test_many_threads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "THREADS_MAX", 2)
    with Waiting(0, count=6):
        text = stacks_of_this_process()
    assert text.count("Thread 0x") == 2
    assert re.search(r"\.\.\. and \d+ more threads\n$", text)
