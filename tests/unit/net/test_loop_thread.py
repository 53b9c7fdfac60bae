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


async def nothing() -> None:
    pass


def test_work_is_done_in_the_thread(thread: LoopThread) -> None:
    assert thread.ask(where(), 20) == "holdfast-test"
    done = threading.Event()
    assert thread.post(done.set)
    assert done.wait(20)


def test_work_that_takes_too_long_is_cancelled(thread: LoopThread) -> None:
    cancelled = threading.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError):
        thread.ask(endless(), 0.01)
    assert cancelled.wait(20)


def test_an_exception_in_a_callback_is_told_and_the_loop_goes_on(
    thread: LoopThread, faults: list[str]
) -> None:
    thread.post(lambda: 1 / 0)
    assert thread.ask(where(), 20) == "holdfast-test"
    (fault,) = faults
    assert "ZeroDivisionError: division by zero" in fault


def test_an_end_that_nobody_asked_for_is_told(thread: LoopThread, faults: list[str]) -> None:
    def end() -> None:
        raise SystemExit("out of place")

    thread.post(end)
    thread.stop()
    assert faults == ["SystemExit: out of place"]
    assert not thread.runs


def test_stopping_cancels_what_runs(thread: LoopThread) -> None:
    cancelled = threading.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    keep: list[asyncio.Task[None]] = []
    thread.ask(nothing(), 20)
    thread.post(lambda: keep.append(thread.loop.create_task(endless())))
    thread.ask(nothing(), 20)
    thread.stop()
    assert cancelled.is_set()
    assert not thread.post(print)
    with pytest.raises(RuntimeError):
        thread.ask(nothing(), 1)
    thread.stop()


def test_one_that_never_started_can_be_stopped() -> None:
    LoopThread("holdfast-test", print).stop()
