from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import threading
import time
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import worker
from holdfast.processes.workers.pages import (
    CURVE_RANKS_MAX,
    CURVES_MAX,
    Progress,
    WorkerPage,
    WorkerPages,
    points_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def first_call(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every test make the first call of a process."""
    monkeypatch.delenv(worker.PAGE_ENV, raising=False)
    worker._reset_after_fork()
    yield
    worker._reset_after_fork()


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPage]:
    made = WorkerPage.create(str(tmp_path), 0)
    monkeypatch.setenv(worker.PAGE_ENV, made.path)
    yield made
    worker._reset_after_fork()
    made.close()


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# Reports.


def test_heartbeat_reaches_the_agent(page: WorkerPage) -> None:
    assert page.read() == Progress()
    before = time.monotonic_ns()
    worker.heartbeat()
    found = page.read()
    assert before <= found.heartbeat_ns <= time.monotonic_ns()
    assert (found.pid, found.step, found.step_ns) == (os.getpid(), None, 0)


@pytest.mark.parametrize("bad", ["7", 1.5, None])
def test_step_that_is_not_a_number_is_rejected(page: WorkerPage, bad: object) -> None:
    with pytest.raises(TypeError):
        worker.progress(bad)  # type: ignore[arg-type]
    assert page.read().step is None


def test_agent_reads_open_sections_outermost_first(page: WorkerPage) -> None:
    before = time.monotonic_ns()
    with worker.section("epoch"), worker.section("step ä", timeout=60):
        outer, inner = page.read().sections
        assert (outer.name, outer.deadline_ns) == ("epoch", None)
        assert inner.name == "step ä"
        assert before <= outer.entered_ns <= inner.entered_ns <= time.monotonic_ns()
        assert inner.deadline_ns == inner.entered_ns + 60_000_000_000
    assert page.read().sections == ()


def test_threads_may_leave_one_section_in_any_order(page: WorkerPage) -> None:
    section = worker.section("io", timeout=60)
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with section:
            entered.set()
            leave.wait(20)

    thread = threading.Thread(target=stay)
    with section:
        [ours] = page.read().sections
        thread.start()
        assert entered.wait(20)
        theirs = page.read().sections[1]
    assert page.read().sections == (theirs,)
    with section:
        again = page.read().sections[1]
        leave.set()
        thread.join()
        assert page.read().sections == (again,)
    assert page.read().sections == ()
    assert ours.entered_ns <= theirs.entered_ns <= again.entered_ns
    assert sorted(worker._attach().free) == [*range(worker.SLOTS)]


def test_section_without_a_slot_does_not_affect_others(page: WorkerPage) -> None:
    section = worker.section("step", timeout=60)
    for _ in range(worker.SLOTS):
        section.__enter__()
    with section:
        assert (len(page.read().sections), page.read().unwatched) == (worker.SLOTS, 1)
    assert len(page.read().sections) == worker.SLOTS
    for _ in range(worker.SLOTS):
        section.__exit__(None, None, None)
    assert page.read().sections == ()


def test_total_and_loss_stay_until_another_call_changes_them(page: WorkerPage) -> None:
    worker.progress(1, total=500, loss=2.5)
    assert (page.read().total, page.read().loss) == (500, 2.5)
    worker.progress(2)
    found = page.read()
    assert (found.step, found.total, found.loss) == (2, 500, 2.5)
    worker.progress(2, loss=Fraction(3, 4))  # As a tensor, it converts to a float.
    assert page.read().loss == 0.75
    worker.progress(3, loss=-math.inf)
    assert page.read().loss == -math.inf
    worker.progress(4, loss=math.nan)
    loss = page.read().loss
    assert loss is not None
    assert math.isnan(loss)
    worker._reset_after_fork()
    worker.progress(0)  # Another process has the page now.
    assert (page.read().total, page.read().loss) == (None, None)


@pytest.mark.parametrize("bad", [{"loss": "7"}, {"total": 1.5}])
def test_total_or_loss_that_is_not_a_number_is_rejected(
    page: WorkerPage, bad: dict[str, Any]
) -> None:
    with pytest.raises(TypeError):
        worker.progress(1, **bad)
    assert page.read() == Progress(pid=os.getpid())


class FakeClock:
    """The clock of a worker, which a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.s = 1000.0
        monkeypatch.setattr(worker, "monotonic_ns", lambda: int(self.s * 1e9))

    def run(self, seconds: float, step_s: float, first: int = 0) -> int:
        """Make steps of this length; return the number of the next one."""
        step = first
        for step in range(first, first + int(seconds / step_s)):
            self.s += step_s
            worker.progress(step, total=1_000_000, loss=1 / (step + 1))
        return step + 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return FakeClock(monkeypatch)


def test_curve_covers_days_and_shows_the_last_minutes_in_detail(
    page: WorkerPage, clock: FakeClock
) -> None:
    days_s = 3 * 86_400
    clock.run(2 * 3600, 1.0, first=clock.run(days_s - 2 * 3600, 60.0))
    points = points_of(page.curve())
    assert len(points) <= len(worker.LEVELS_S) * worker.LEVEL_POINTS + 1
    ages = [clock.s - point.at_ns / 1e9 for point in points]
    assert (ages[-1], ages[0]) == (0.0, days_s - 60)
    assert sum(age < 60 for age in ages) >= 30
    assert sum(age < 600 for age in ages) >= 60
    assert all(earlier - later <= 1 + later / 2 + 2 for earlier, later in pairwise(ages))
    assert all(point.loss == 1 / (point.step + 1) for point in points)


def test_point_that_the_worker_is_writing_is_left_out(page: WorkerPage, clock: FakeClock) -> None:
    clock.run(20, 2.0)
    assert len(points_of(page.curve())) == 10
    memory = worker._attach().words
    memory[worker.CURVE_AT + 5 * worker.POINT_WORDS] = 0
    assert [point.step for point in points_of(page.curve())] == [0, 1, 2, 3, 4, 6, 7, 8, 9]


def test_curves_of_earlier_generations_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = WorkerPages(str(tmp_path))
    for generation in range(CURVES_MAX + 3):
        pages.begin(range(CURVE_RANKS_MAX + 1))
        for rank in range(0 if generation == 2 else CURVE_RANKS_MAX + 1):
            monkeypatch.setenv(worker.PAGE_ENV, pages.environment(rank)[worker.PAGE_ENV])
            worker.progress(generation)
            worker._reset_after_fork()
    found = pages.curves()
    assert len(found) == CURVES_MAX + 1
    assert {len(curves) for curves in found} == {CURVE_RANKS_MAX}
    assert [points_of(curves[0])[0].step for curves in found] == [1, *range(3, CURVES_MAX + 3)]
    pages.close()


def test_pace_waits_for_enough_steps_after_each_start(page: WorkerPage, clock: FakeClock) -> None:
    clock.run(9, 0.5)
    assert page.read().pace is None
    step = clock.run(3, 0.5, first=18)
    assert page.read().pace == 2.0
    clock.s += 1000
    worker.progress(0, total=1_000_000)  # From the start again.
    assert page.read().pace is None
    clock.run(2 * 4 * step, 4.0, first=1)
    assert page.read().pace == 0.25


def test_pace_follows_a_change_within_minutes_and_without_a_jump(
    page: WorkerPage, clock: FakeClock
) -> None:
    step = clock.run(3600, 1.0)
    assert page.read().pace == pytest.approx(1.0)
    paces = []
    for _ in range(400):
        step = clock.run(1, 0.5, first=step)
        paces.append(page.read().pace or 0.0)
    assert all(0 <= later - earlier < 0.06 for earlier, later in pairwise(paces))
    assert paces[-1] == 2.0


def test_pace_of_slow_steps_covers_several(page: WorkerPage, clock: FakeClock) -> None:
    clock.run(600, 600.0)
    clock.s += 300
    clock.run(6000, 600.0, first=1)
    pace = page.read().pace
    assert pace is not None
    assert 1 / pace == pytest.approx(600)


# Processes and threads.


def test_calls_of_a_forked_child_have_no_effect(page: WorkerPage) -> None:
    with worker.section("of the parent", timeout=60):
        worker.progress(1)
        before = page.read()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                worker.progress(99)
                worker.heartbeat()
                with worker.section("of the child", timeout=0):
                    code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert page.read() == before


def test_page_belongs_to_one_process_at_a_time(page: WorkerPage) -> None:
    script = "import os; from holdfast import worker; worker.progress({}); print(os.getpid())"
    first = int(run(script.format(1)))
    assert (page.read().pid, page.read().step) == (first, 1)
    second = int(run(script.format(2)))  # The first process has exited.
    assert (page.read().pid, page.read().step) == (second, 2)
    worker.progress(3)
    run(script.format(4))
    assert (page.read().pid, page.read().step) == (os.getpid(), 3)


class CountedLock:
    """A lock that counts the threads that try to acquire it."""

    def __init__(self) -> None:
        self.came = threading.Semaphore(0)
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self.came.release()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_threads_that_call_first_at_the_same_time_get_one_page(
    page: WorkerPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, claim, claims = CountedLock(), worker._claim, []

    def claim_slowly() -> worker._Page | None:
        for _ in range(2):  # Both threads have tried to acquire the lock.
            assert lock.came.acquire(timeout=20)
        claims.append(claim())
        return claims[-1]

    monkeypatch.setattr(worker, "_lock", lock)
    monkeypatch.setattr(worker, "_claim", claim_slowly)
    threads = [threading.Thread(target=worker.progress, args=(5,)) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(claims) == 1
    assert page.read().step == 5


# Without an agent.


def test_outside_holdfast_every_call_does_nothing() -> None:
    worker.heartbeat()
    worker.progress(5)
    with worker.section("a", timeout=0), worker.section("b"):
        pass


@pytest.mark.parametrize("content", [None, b"", b"short", b"x" * 4096, b"x" * 9000])
def test_invalid_page_is_not_used(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv(worker.PAGE_ENV, str(path))
    with worker.section("a", timeout=0):
        worker.progress(5)
        worker.heartbeat()
    assert (path.read_bytes() if content is not None else None) == content


def test_worker_module_imports_no_heavy_module() -> None:
    program = "import sys; before = set(sys.modules); from holdfast import worker; {}; "
    program += "print(*sorted(set(sys.modules) - before))"
    assert set(run(program.format("pass")).split()) <= {
        "__future__", "holdfast", "holdfast.worker", "time"
    }  # fmt: skip
    assert set(run(program.format("worker.heartbeat(); worker.info()")).split()) <= {
        "__future__", "holdfast", "holdfast.worker", "time"
    }  # fmt: skip


# Requests for a check.


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPages]:
    made = WorkerPages(str(tmp_path))
    made.begin([0])
    monkeypatch.setenv(worker.PAGE_ENV, made.environment(0)[worker.PAGE_ENV])
    yield made
    worker._reset_after_fork()
    made.close()


def test_worker_wakes_the_agent_only_if_its_next_check_is_too_late(pages: WorkerPages) -> None:
    worker.heartbeat()
    assert pages._take_notice()  # The first call of a process always wakes the agent.
    worker.progress(1)
    with worker.section("without a timeout"):
        assert not pages._take_notice()
    with worker.section("short", timeout=60):
        assert pages._take_notice()
    page = pages._pages[0]
    page.plan_scan(time.monotonic() + 30)
    with worker.section("longer than that", timeout=60):
        assert not pages._take_notice()
    with worker.section("shorter than that", timeout=1):
        assert pages._take_notice()


def test_dead_or_slow_agent_does_not_block_the_worker(pages: WorkerPages) -> None:
    for _ in range(3):
        with worker.section("a", timeout=1):
            pass

    def fill() -> None:
        while True:
            os.write(pages.fileno(), b"x" * 4096)

    with pytest.raises(BlockingIOError):
        fill()
    with worker.section("full", timeout=1):
        pass
    pages.close()
    with worker.section("gone", timeout=1):
        worker.progress(7)


def test_worker_can_wake_the_agent_after_the_folder_was_removed(pages: WorkerPages) -> None:
    worker.heartbeat()
    assert pages._take_notice()
    shutil.rmtree(pages.folder)
    with worker.section("short", timeout=60):
        assert pages._take_notice()
        assert [one.name for one in pages.progress(0).sections] == ["short"]
    # A program may close the descriptor, and reuse its number for another file.
    assert worker._page is not None
    assert worker._page.notice is not None
    kept = worker._page.notice[0]
    with open(os.devnull, "wb") as other:
        os.dup2(other.fileno(), kept)
        assert worker._page._kept() == -1
        os.close(kept)
        assert worker._page._kept() == -1
    with worker.section("without a descriptor", timeout=1):
        assert not pages._take_notice()


def test_forked_child_closes_the_page(pages: WorkerPages) -> None:
    before = len(os.listdir("/proc/self/fd"))
    worker.heartbeat()
    assert len(os.listdir("/proc/self/fd")) == before + 2
    child = os.fork()
    if child == 0:
        os._exit(len(os.listdir("/proc/self/fd")) != before)
    assert os.waitpid(child, 0)[1] == 0


# Information about the job.


def test_worker_info_has_ranks_and_the_previous_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1", "HOLDFAST_GENERATION": "3", "HOLDFAST_FENCE": "77",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_RUN_ID": "bert", worker.PREVIOUS_WORLD_SIZE_ENV: "12",
        worker.LAST_END_ENV: "worker 9 failed: exit code 1",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = worker.info()
    assert repr(found) == (
        "Info(fence=77, generation=3, group_rank=1, last_end='worker 9 failed: exit code 1', local_rank=1, "
        "local_world_size=4, previous_world_size=12, rank=5, restart_count=2, run_id='bert', "
        "supervised=True, world_size=8)"
    )
