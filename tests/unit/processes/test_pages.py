from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast import worker
from holdfast.processes.workers.pages import (
    SETTLE_S,
    SWEPT_AGE_S,
    OpenSection,
    WorkerPage,
    WorkerPages,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


NOW = 1_000.0
SECOND = 1_000_000_000


@pytest.fixture
def page(tmp_path: Path) -> Iterator[WorkerPage]:
    made = WorkerPage.create(str(tmp_path), 3)
    yield made
    made.close()


class PageWriter:
    """Writes numbers into a page as a worker does, and holds its lock."""

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
def page_writer(page: WorkerPage) -> Iterator[PageWriter]:
    made = PageWriter(page)
    yield made
    made.close()


def test_expired_section_is_reported_once_per_entry(
    page: WorkerPage, page_writer: PageWriter
) -> None:
    page_writer.section(4, b"step", 70 * SECOND, 10 * SECOND)
    page_writer.section(5, b"later", 700 * SECOND)
    assert page.expired(69.9) == []
    assert page.expired(70.0) == [OpenSection("step", 10 * SECOND, 70 * SECOND)]
    assert page.expired(71.0) == []
    assert page.next_deadline() == 700.0
    page_writer.section(4, b"again", 90 * SECOND)
    assert [one.name for one in page.expired(100.0)] == ["again"]
    page_writer.word(worker.DEADLINES + 4, 0)
    assert page.expired(100.0) == []
    page_writer.section(4, b"again", 90 * SECOND)
    assert [one.name for one in page.expired(100.0)] == ["again"]


def test_left_section_does_not_expire(
    page: WorkerPage, page_writer: PageWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_writer.section(4, b"step", 70 * SECOND)
    is_in_use = page._is_in_use

    def leave() -> bool:  # Between the two checks.
        page_writer.word(worker.DEADLINES + 4, 0)
        return is_in_use()

    monkeypatch.setattr(page, "_is_in_use", leave)
    assert page.expired(100.0) == []


def test_section_of_a_dead_process_does_not_expire(page: WorkerPage) -> None:
    page_writer = PageWriter(page)
    page_writer.section(4, b"step", 70 * SECOND)
    page_writer.close()
    assert page.expired(100.0) == []
    again = PageWriter(page)
    assert [one.name for one in page.expired(100.0)] == ["step"]
    again.close()


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=50,
)
@given(st.binary(min_size=1, max_size=4088), st.integers(8, 4088))
def test_page_with_any_content_can_be_read(page: WorkerPage, noise: bytes, at: int) -> None:
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


WORKER = """
import sys
from holdfast import worker

for words in sys.stdin:
    what, *how = words.split()
    if what == "progress":
        worker.progress(int(how[0]))
    elif what == "enter":
        section = worker.section(how[0], timeout=float(how[1]))
        section.__enter__()
    elif what == "leave":
        section.__exit__(None, None, None)
    print("done", flush=True)
"""


class Worker:
    """A real worker that follows commands."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER], env={**os.environ, **environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def do(self, words: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{words}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def end(self) -> None:
        with self.process:
            self.process.communicate("")


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[WorkerPages]:
    made = WorkerPages(str(tmp_path))
    yield made
    made.close()
    made.close()
    assert [*tmp_path.iterdir()] == []


@pytest.fixture
def workers(pages: WorkerPages) -> Iterator[list[Worker]]:
    pages.begin([0, 1])
    made = [Worker(pages.environment(rank)) for rank in (0, 1)]
    yield made
    for one in made:
        one.end()


def is_woken(pages: WorkerPages, now: float) -> bool:
    """Whether a loop that waits for the descriptor and the deadline would be woken by now."""
    poll = select.poll()
    poll.register(pages.fileno(), select.POLLIN)
    deadline = pages.next_deadline()
    return bool(poll.poll(0)) or (deadline is not None and deadline <= now)


def test_sections_entered_and_left_wake_the_agent_once(
    pages: WorkerPages, workers: list[Worker]
) -> None:
    now = time.monotonic()
    workers[0].do("enter step 60")
    assert is_woken(pages, now)
    assert pages.take(now) == []
    # Check once more, in case the first check missed a store.
    assert pages.next_deadline() == now + SETTLE_S
    assert pages.take(now + SETTLE_S) == []
    first = pages.next_deadline()
    assert first is not None
    assert first > now + 50
    workers[0].do("leave")
    for _ in range(20):
        workers[0].do("enter step 60")
        workers[0].do("leave")
    assert not is_woken(pages, now + 50)
    workers[0].do("enter quick 1")
    assert is_woken(pages, now)
    workers[0].do("leave")
    assert pages.take(now + 30) == []
    # The planned check remains without a section, so that later sections need not request one.
    assert pages.take(now + 40) == []
    assert pages.next_deadline() == first
    workers[0].do("enter step 60")
    workers[0].do("leave")
    assert not is_woken(pages, now)
    # No check is planned, so the next section requests one.
    assert pages.take(first + 1) == []
    assert pages.take(first + 2) == []
    assert pages.next_deadline() is None
    workers[0].do("enter step 60")
    assert is_woken(pages, now)


def test_next_agent_removes_the_pages_of_a_killed_one(tmp_path: Path) -> None:
    program = (
        "import os, sys; from holdfast.processes.workers.pages import WorkerPages; "
        "pages = WorkerPages(sys.argv[1]); pages.begin([0]); print(pages.folder, flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    left = done.stdout.strip()
    assert done.returncode == -9
    assert sorted(os.listdir(left)) == ["0.1", worker.NOTICE_NAME]

    living = WorkerPages(str(tmp_path))
    assert os.path.exists(left)  # It is too young: its agent may not have locked it yet.
    for folder in (left, living.folder):
        os.utime(folder, (0, time.time() - SWEPT_AGE_S - 1))
    (tmp_path / "holdfast-other").mkdir()
    next_one = WorkerPages(str(tmp_path))
    assert not os.path.exists(left)
    assert os.path.exists(living.folder)
    assert (tmp_path / "holdfast-other").exists()
    next_one.close()
    living.close()
