from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast import worker
from holdfast.processes.workers.pages import Progress, Section, WorkerPage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KILLS = 20
NOW = 1_000.0
SECOND = 1_000_000_000


@pytest.fixture
def page(tmp_path: Path) -> Iterator[WorkerPage]:
    made = WorkerPage.create(str(tmp_path), 3)
    yield made
    made.close()


class Hand:
    """Writes words into a page as a worker would, and holds its lock."""

    def __init__(self, page: WorkerPage) -> None:
        self.fd = os.open(page.path, os.O_RDWR)
        fcntl.flock(self.fd, fcntl.LOCK_EX)

    def word(self, number: int, value: int) -> None:
        os.pwrite(self.fd, value.to_bytes(8, sys.byteorder, signed=True), number * 8)

    def section(self, slot: int, name: bytes, deadline: int, entered: int = 1) -> None:
        os.pwrite(self.fd, name, worker.NAMES_AT + slot * worker.NAME_BYTES)
        self.word(worker.ENTERED + slot, entered)
        self.word(worker.DEADLINES + slot, deadline)

    def close(self) -> None:
        os.close(self.fd)


@pytest.fixture
def hand(page: WorkerPage) -> Iterator[Hand]:
    made = Hand(page)
    yield made
    made.close()


def test_the_next_deadline_is_the_earliest(page: WorkerPage, hand: Hand) -> None:
    hand.section(0, b"epoch", worker.NEVER)
    hand.section(1, b"step", 70 * SECOND)
    hand.section(31, b"forward", 50 * SECOND)
    assert page.next_deadline() == 50.0
    hand.word(worker.DEADLINES + 31, 0)
    assert page.next_deadline() == 70.0


def test_an_expired_section_is_told_once_and_again_when_it_is_entered_again(
    page: WorkerPage, hand: Hand
) -> None:
    hand.section(4, b"step", 70 * SECOND, 10 * SECOND)
    hand.section(5, b"later", 700 * SECOND)
    assert page.expired(69.9) == []
    assert page.expired(70.0) == [Section("step", 10 * SECOND, 70 * SECOND)]
    assert page.expired(71.0) == []
    assert page.next_deadline() == 700.0
    hand.section(4, b"again", 90 * SECOND)
    assert [one.name for one in page.expired(100.0)] == ["again"]
    hand.word(worker.DEADLINES + 4, 0)
    assert page.expired(100.0) == []
    hand.section(4, b"again", 90 * SECOND)
    assert [one.name for one in page.expired(100.0)] == ["again"]


def test_a_section_that_was_left_meanwhile_has_not_expired(
    page: WorkerPage, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand.section(4, b"step", 70 * SECOND)
    whole = page._is_in_use

    def leave() -> bool:  # Between the two looks.
        hand.word(worker.DEADLINES + 4, 0)
        return whole()

    monkeypatch.setattr(page, "_is_in_use", leave)
    assert page.expired(100.0) == []


def test_a_section_of_a_process_that_is_dead_has_not_expired(page: WorkerPage) -> None:
    hand = Hand(page)
    hand.section(4, b"step", 70 * SECOND)
    hand.close()
    assert page.expired(100.0) == []
    again = Hand(page)
    assert [one.name for one in page.expired(100.0)] == ["step"]
    again.close()


def test_the_worker_is_told_when_it_is_looked_at(page: WorkerPage) -> None:
    words = memoryview(bytearray(worker.PAGE_BYTES)).cast("q")

    def look_at() -> int:
        with open(page.path, "rb") as file:
            file.readinto(words)
        return words[worker.LOOK_AT]

    assert look_at() == worker.NEVER
    page.plan_look(12.5)
    assert look_at() == 12_500_000_000
    page.plan_look(None)
    assert look_at() == worker.NEVER


# A page that is not as it should be.


def test_a_page_that_was_given_back_says_nothing(tmp_path: Path) -> None:
    """Another thread may ask for it at that moment."""
    page = WorkerPage.create(str(tmp_path), 3)
    page.close()
    assert page.read() == Progress()
    assert (page.next_deadline(), page.asked_look(), page.expired(100.0)) == (None, None, [])
    page.plan_look(5.0)


@pytest.mark.parametrize("size", [0, 1, 8, 4095])
def test_a_page_that_was_cut_says_nothing(page: WorkerPage, hand: Hand, size: int) -> None:
    hand.section(4, b"step", 70 * SECOND)
    os.truncate(page.path, size)
    assert page.read() == Progress()
    assert (page.next_deadline(), page.expired(100.0)) == (None, [])
    page.plan_look(5.0)


def test_a_page_of_another_layout_says_nothing(page: WorkerPage, hand: Hand) -> None:
    hand.section(4, b"step", 70 * SECOND)
    hand.word(0, worker.MAGIC + 1)
    assert page.read() == Progress()
    assert (page.next_deadline(), page.expired(100.0)) == (None, [])


def test_a_section_that_is_half_written_is_not_there_yet(page: WorkerPage, hand: Hand) -> None:
    os.pwrite(hand.fd, b"che", worker.NAMES_AT)
    hand.word(worker.ENTERED, 5)
    assert page.read().sections == ()
    hand.word(worker.DEADLINES, 70 * SECOND)
    assert page.read().sections == (Section("che", 5, 70 * SECOND),)


def test_a_step_without_its_time_is_not_there_yet(page: WorkerPage, hand: Hand) -> None:
    hand.word(worker.STEP, 5)
    assert page.read().step is None
    hand.word(worker.STEP_AT, 9)
    assert (page.read().step, page.read().heartbeat_ns) == (5, 9)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=50,
)
@given(st.binary(min_size=1, max_size=4088), st.integers(8, 4088))
def test_whatever_stands_in_it_it_can_be_read(page: WorkerPage, noise: bytes, at: int) -> None:
    with open(page.path, "r+b") as file:
        file.seek(at)
        file.write(noise[: worker.PAGE_BYTES - at])
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        found = page.read()
        assert len(found.sections) <= worker.SLOTS
        assert all(len(one.name) <= worker.NAME_BYTES for one in found.sections)
        deadline = page.next_deadline()
        assert deadline is None or deadline > 0
        page.expired(NOW)


BUSY = """
import itertools
from holdfast import worker
print(flush=True)
for step in itertools.count(1):
    with worker.section("outer " + "x" * (step % 50), timeout=3600):
        with worker.section("inner"):
            worker.progress(step)
    worker.heartbeat()
"""


def test_a_worker_that_is_killed_anywhere_leaves_a_page_that_makes_sense(
    tmp_path: Path,
) -> None:
    chance = random.Random(6)
    for number in range(KILLS):
        page = WorkerPage.create(str(tmp_path), number)
        start = time.monotonic_ns()
        with subprocess.Popen(
            [sys.executable, "-c", BUSY],
            env={**os.environ, worker.PAGE_ENV: page.path},
            stdout=subprocess.PIPE,
        ) as busy:
            assert busy.stdout is not None
            busy.stdout.readline()
            last = 0
            for _ in range(chance.randrange(1, 400)):
                last = check(page.read(), busy.pid, start, last)
            busy.send_signal(signal.SIGKILL)
            busy.wait()
        last = check(page.read(), busy.pid, start, last)
        # Whatever it was in, nobody is in it any more.
        assert page.expired(time.monotonic() + 7200) == []
        page.close()


def check(found: Progress, pid: int, start: int, last: int) -> int:
    """Check that a page makes sense; return the step it shows."""
    now = time.monotonic_ns()
    assert found.pid in (0, pid)
    assert found.heartbeat_ns == 0 or start <= found.heartbeat_ns <= now
    assert len(found.sections) <= 2
    for section in found.sections:
        assert start <= section.entered_ns <= now
        if section.deadline_ns is not None:
            assert start < section.deadline_ns <= now + 3600 * SECOND
    assert (found.step or 0) >= last
    return found.step or 0
