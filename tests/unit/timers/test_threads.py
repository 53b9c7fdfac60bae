from __future__ import annotations

import os
import queue
from typing import TYPE_CHECKING

from holdfast.timers.server import ServerThread

if TYPE_CHECKING:
    import pytest


class Driven:
    """Counts how often it is asked, and fails the first time."""

    def __init__(self) -> None:
        self.end, self.start = os.pipe()
        self.taken: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.fails = True

    def fileno(self) -> int:
        return self.end

    def next_deadline(self) -> float | None:
        return None

    def take(self, now: float) -> None:
        assert now > 0
        if self.fails:
            self.fails = False
            raise ZeroDivisionError("only once")
        os.set_blocking(self.end, False)
        try:
            self.taken.put(os.read(self.end, 100))
        except BlockingIOError:
            self.taken.put(b"")


def test_it_sleeps_until_there_is_something_and_survives_a_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driven = Driven()
    thread = ServerThread(driven, daemon=True)
    os.write(driven.start, b"a")
    assert driven.taken.get(timeout=20) == b"a"
    os.write(driven.start, b"b")
    assert driven.taken.get(timeout=20) == b"b"
    assert driven.taken.empty()
    os.write(driven.start, b"c")
    thread.stop()
    left = [driven.taken.get() for _ in range(driven.taken.qsize())]
    assert b"".join(left) == b"c"
    assert len(left) <= 2
    assert caplog.text.count("ZeroDivisionError: only once") == 1
    os.close(driven.start)
    os.close(driven.end)
