from __future__ import annotations

import errno
import os
import select
import shutil
import stat
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from holdfast import worker
from holdfast.processes.workers.pages import (
    SETTLE_S,
    SWEPT_AGE_S,
    Progress,
    Section,
    WorkerPage,
    WorkerPages,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAIT_S = 20.0

WORKER = """
import sys, time
from holdfast import worker

for words in sys.stdin:
    what, *how = words.split()
    if what == "progress":
        worker.progress(int(how[0]))
    elif what == "enter":
        section = worker.section(how[0], timeout=float(how[1]))
        section.__enter__()
    elif what == "loop":
        section = worker.section("step", timeout=float(how[1]))
        for _ in range(int(how[0])):
            with section:
                time.sleep(float(how[2]))
            time.sleep(float(how[3]))
    elif what == "leave":
        section.__exit__(None, None, None)
    print("done", flush=True)
"""


class Worker:
    """A real worker that does what it is told to."""

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


def looks_for(pages: WorkerPages, now: float) -> bool:
    """Whether a loop that waits for the descriptor and the deadline would come by now."""
    poll = select.poll()
    poll.register(pages.fileno(), select.POLLIN)
    deadline = pages.next_deadline()
    return bool(poll.poll(0)) or (deadline is not None and deadline <= now)


def test_a_section_that_is_not_left_is_found_at_its_time(
    pages: WorkerPages, workers: list[Worker]
) -> None:
    workers[1].do("enter checkpoint 0.05")
    give_up = time.monotonic() + WAIT_S
    found: list[tuple[int, Section]] = []
    while not found:
        assert time.monotonic() < give_up
        poll = select.poll()
        poll.register(pages.fileno(), select.POLLIN)
        deadline = min(pages.next_deadline() or give_up, give_up)
        poll.poll(max(0.0, deadline - time.monotonic()) * 1000 + 1)
        found = pages.take(time.monotonic())
    ((rank, section),) = found
    assert (rank, section.name) == (1, "checkpoint")
    assert section.deadline_ns == section.entered_ns + 50_000_000
    # It is told once, and does not wake the agent again.
    settled = time.monotonic() + 2 * SETTLE_S
    assert pages.take(settled) == []
    assert pages.next_deadline() is None


def test_sections_entered_and_left_wake_the_agent_once(
    pages: WorkerPages, workers: list[Worker]
) -> None:
    now = time.monotonic()
    workers[0].do("enter step 60")
    assert looks_for(pages, now)
    assert pages.take(now) == []
    # Once more, in case that not all was seen.
    assert pages.next_deadline() == now + SETTLE_S
    assert pages.take(now + SETTLE_S) == []
    first = pages.next_deadline()
    assert first is not None
    assert first > now + 50
    workers[0].do("leave")
    for _ in range(20):
        workers[0].do("enter step 60")
        workers[0].do("leave")
    assert not looks_for(pages, now + 50)
    workers[0].do("enter quick 1")
    assert looks_for(pages, now)
    workers[0].do("leave")
    assert pages.take(now + 30) == []
    # The look that was planned stays, though there is no section: others need not ask for it.
    assert pages.take(now + 40) == []
    assert pages.next_deadline() == first
    workers[0].do("enter step 60")
    workers[0].do("leave")
    assert not looks_for(pages, now)
    # There is nothing to wait for: the next section asks for a look.
    assert pages.take(first + 1) == []
    assert pages.take(first + 2) == []
    assert pages.next_deadline() is None
    workers[0].do("enter step 60")
    assert looks_for(pages, now)


def test_a_section_that_was_left_before_the_look_need_not_be_asked_for_again(
    pages: WorkerPages, workers: list[Worker]
) -> None:
    workers[0].do("enter step 60")
    workers[0].do("leave")
    now = time.monotonic()
    assert pages.take(now) == []
    assert pages.take(now + SETTLE_S) == []
    workers[0].do("enter step 60")
    assert not looks_for(pages, now + 50)
    # It is found at its time all the same.
    late = now + 100
    assert [section.name for _, section in pages.take(late)] == ["step"]


def test_a_section_of_a_dead_worker_does_not_keep_the_agent_awake(
    pages: WorkerPages, workers: list[Worker]
) -> None:
    workers[0].do("enter step 60")
    workers[0].process.kill()
    workers[0].process.wait()
    late = time.monotonic() + 100
    assert pages.take(late) == []
    assert pages.take(late + SETTLE_S) == []
    assert pages.next_deadline() is None


def test_nothing_is_left_where_there_can_be_no_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: str, _mode: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "mkfifo", refuse)
    open_before = os.listdir("/proc/self/fd")
    with pytest.raises(PermissionError):
        WorkerPages(str(tmp_path))
    assert [*tmp_path.iterdir()] == []
    assert os.listdir("/proc/self/fd") == open_before


def test_a_new_generation_has_new_pages(pages: WorkerPages, workers: list[Worker]) -> None:
    workers[0].do("progress 7")
    pages.begin([0, 1])
    assert (pages.progress(0), pages.environment(2)) == (Progress(), {})
    # Some of the last generation that have not ended yet.
    workers[0].do("progress 8")
    workers[1].do("progress 8")
    assert pages.progress(1) == Progress()
    assert pages.progress(0) == Progress()


def test_a_folder_that_was_removed_is_made_anew_for_the_next_generation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = WorkerPages(str(tmp_path))
    first = made.folder
    made.begin([0])
    shutil.rmtree(first)
    open_before = len(os.listdir("/proc/self/fd"))
    made.begin([0])
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert first in caplog.text
    assert os.path.dirname(made.environment(0)[worker.PAGE_ENV]) == made.folder != first
    with open(os.path.join(made.folder, worker.NOTICE_NAME), "wb") as notice:
        notice.write(b"x")
    made.take(time.monotonic())
    assert made.was_asked
    shutil.rmtree(tmp_path)
    with pytest.raises(FileNotFoundError):
        made.begin([0])
    made.close()


def test_without_room_workers_go_without_a_page(
    pages: WorkerPages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: WorkerPage) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(WorkerPage, "_write_all", full)
    pages.begin([0])
    assert (pages.environment(0), pages.progress(0)) == ({}, Progress())
    assert "No space left on device" in caplog.text
    assert sorted(os.listdir(pages.folder)) == [worker.NOTICE_NAME]


def test_only_its_owner_can_look_into_the_folder(pages: WorkerPages) -> None:
    assert stat.S_IMODE(os.stat(pages.folder).st_mode) == 0o700


def test_what_a_killed_agent_left_is_removed_by_the_next(tmp_path: Path) -> None:
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
    assert os.path.exists(left)  # It is too young to be sure.
    for folder in (left, living.folder):
        os.utime(folder, (0, time.time() - SWEPT_AGE_S - 1))
    (tmp_path / "holdfast-other").mkdir()
    next_one = WorkerPages(str(tmp_path))
    assert not os.path.exists(left)
    assert os.path.exists(living.folder)
    assert (tmp_path / "holdfast-other").exists()
    next_one.close()
    living.close()
