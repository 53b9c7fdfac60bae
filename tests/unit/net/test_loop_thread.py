from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from holdfast.net.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def faults() -> list[str]:
    return []


@pytest.fixture
def thread(faults: list[str]) -> Iterator[LoopThread]:
    thread = LoopThread("holdfast-test", faults.append)
    thread.start()
    yield thread
    thread.stop()


async def where() -> str:
    return threading.current_thread().name


def test_work_runs_in_the_thread_and_a_fault_does_not_end_it(
    thread: LoopThread, faults: list[str]
) -> None:
    done = threading.Event()
    assert thread.post(done.set)
    assert done.wait(20)
    thread.post(lambda: 1 / 0)
    assert thread.run(where(), 20) == "holdfast-test"
    assert "ZeroDivisionError" in faults[0]


def test_slow_or_unfinished_work_is_cancelled(
    thread: LoopThread,
) -> None:
    cancelled = threading.Semaphore(0)

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.release()

    with pytest.raises(TimeoutError):
        thread.run(endless(), 0.01)
    assert cancelled.acquire(timeout=20)
    keep: list[asyncio.Task[None]] = []
    thread.post(lambda: keep.append(thread.loop.create_task(endless())))
    thread.run(where(), 20)
    thread.stop()
    assert cancelled.acquire(timeout=0)
    assert not thread.post(print)
    with pytest.raises(RuntimeError):
        thread.run(where(), 1)
    thread.stop()
    LoopThread("holdfast-test", print).stop()  # A thread that was never started.


def test_unexpected_end_of_the_loop_is_reported(thread: LoopThread, faults: list[str]) -> None:
    def end() -> None:
        raise SystemExit("out of place")

    thread.post(end)
    thread.stop()
    assert faults == ["SystemExit: out of place"]
    assert not thread.runs
