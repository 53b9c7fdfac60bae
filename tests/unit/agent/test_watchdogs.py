from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from holdfast import worker
from holdfast.agent.watchdogs import DUMP_EACH_S_MIN, DUMP_S, ENABLE_ENV, FILE_ENV, Watchdogs
from holdfast.core.supervision import ExpiredTimer, TimersExpired
from holdfast.observe.lifecycle import WatchdogEvent
from holdfast.processes import stacks
from holdfast.processes.failures.failure import ProcessFailure
from holdfast.processes.procfs import usage_of
from holdfast.timers import reaper
from holdfast.timers.timer_requests import FileTimerRequest
from holdfast.worker import PAGE_ENV

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.core.machine import Event
    from holdfast.observe.lifecycle import LifecycleEvent

ON = {ENABLE_ENV: "1"}
Dumps = list[tuple[int, float]]


def test_memory_is_that_of_the_running_workers() -> None:
    dogs = Watchdogs("job", lambda _event: None, lambda _rank: None)
    dogs.started(0, {0: os.getpid(), 1: os.getpid() + (1 << 22)}, {})
    assert dogs.memory() == pytest.approx(usage_of(os.getpid())[1], rel=0.1)
    dogs.ended(0)
    assert dogs.memory() == 0


class Watching:
    """Watchdogs, and the events they reported."""

    def __init__(self) -> None:
        self.events: list[LifecycleEvent] = []
        self.dogs = Watchdogs("job", self.events.append, lambda _rank: None)

    def expire(self, pid: int, signum: int = signal.SIGKILL) -> None:
        """Set a timer that has expired."""
        request = FileTimerRequest(pid, "step", time.time() - 1, signum)
        with open(self.dogs.environment(0)[FILE_ENV], "w") as pipe:
            pipe.write(request.to_json() + "\n")

    def detect(self) -> list[ExpiredTimer]:
        """Check the watchdogs; return the timers that they report."""
        return [one for event in self.dogs.poll(time.monotonic()) for one in timers_of(event)]

    def poll(self) -> None:
        """Check the watchdogs, and perform the effects of the supervision."""
        for one in self.dogs.dump(tuple(self.detect())):
            if one.signum > 0:
                self.dogs.signal(one.pid, one.signum)

    def reported(self) -> list[str]:
        events = [one for one in self.events if isinstance(one, WatchdogEvent)]
        return [f"{one.what} {one.pid} {one.scope}" for one in events]


def timers_of(event: Event) -> tuple[ExpiredTimer, ...]:
    assert isinstance(event, TimersExpired)
    return event.timers


@pytest.fixture
def watching() -> Iterator[Watching]:
    made = Watching()
    yield made
    made.dogs.close()


@pytest.fixture
def dumps(monkeypatch: pytest.MonkeyPatch) -> Dumps:
    """Dumps that each take three quarters of the common limit; they record their own limits."""
    made: Dumps = []
    clock = time.monotonic
    spent = 0.0

    def dump(pid: int, *, limit_s: float) -> str:
        nonlocal spent
        made.append((pid, limit_s))
        spent += DUMP_S * 0.75
        return f"stacks of {pid}\n"

    monkeypatch.setattr(stacks, "dump_stacks", dump)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + spent)
    return made


def test_timer_pipe_is_in_the_folder_that_the_keeper_removes(watching: Watching) -> None:
    watching.dogs.begin([0], ON)
    found = watching.dogs.environment(0)
    assert os.path.dirname(found[FILE_ENV]) == os.path.dirname(found[PAGE_ENV])
    watching.dogs.close()
    assert not os.path.exists(os.path.dirname(found[FILE_ENV]))


def test_failing_timer_pipe_is_reported_once_and_dropped(
    watching: Watching, caplog: pytest.LogCaptureFixture
) -> None:
    watching.dogs.begin([0], ON)
    nothing = os.open("/dev", os.O_RDONLY)  # Reading it fails.
    for left, descriptor in enumerate(reversed(watching.dogs.descriptors())):
        os.dup2(nothing, descriptor)
        watching.poll()
        watching.poll()
        assert len(caplog.messages) == left + 1
    os.close(nothing)
    assert (watching.dogs.descriptors(), watching.dogs.next_deadline()) == ([], None)
    watching.dogs.begin([0], ON)  # The next generation has no timers.
    assert watching.dogs.environment(0) == {FILE_ENV: ""}


def test_workers_do_not_inherit_the_agents_own_page(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("holdfast.processes.workers.pages.WorkerPage.create", no_room)
    watching.dogs.begin([0], {})
    assert watching.dogs.environment(0) == {}
    monkeypatch.setenv(PAGE_ENV, "/the/page/of/the/worker/that/started/this/agent")
    assert watching.dogs.environment(0) == {PAGE_ENV: ""}


def test_removed_pipe_and_pages_are_recreated_for_the_next_generation(watching: Watching) -> None:
    watching.dogs.begin([0], ON)
    shutil.rmtree(os.path.dirname(watching.dogs.environment(0)[FILE_ENV]))
    watching.dogs.begin([0], ON)
    with subprocess.Popen(["sleep", "60"]) as child:
        watching.dogs.started(0, {0: child.pid}, {})
        watching.expire(child.pid)
        watching.poll()
    assert child.returncode == -9


class Stuck:
    """A process that is idle in expired sections."""

    def __init__(self, page: str, *names: bytes, pid: int | None = None) -> None:
        self.process = subprocess.Popen(["sleep", "60"])
        self.pid = self.process.pid
        self._page = os.open(page, os.O_RDWR)
        fcntl.flock(self._page, fcntl.LOCK_EX)
        self._write(worker.PID, self.pid if pid is None else pid)
        for slot, name in enumerate(names):
            os.pwrite(self._page, name, worker.NAMES_AT + slot * worker.NAME_BYTES)
            self._write(worker.ENTERED + slot, 1)
            self._write(worker.DEADLINES + slot, 1000 - slot)

    def _write(self, word: int, value: int) -> None:
        os.pwrite(self._page, value.to_bytes(8, sys.byteorder), word * 8)

    def end(self) -> int:
        os.close(self._page)
        return self.process.wait()


def start(watching: Watching, stuck: list[Stuck]) -> None:
    watching.dogs.started(0, {rank: one.pid for rank, one in enumerate(stuck)}, {})
    page = watching.dogs.environment(0)[PAGE_ENV]
    with open(os.path.join(os.path.dirname(page), worker.NOTICE_NAME), "wb") as notice:
        notice.write(b"\0")


def poll_past(watching: Watching, stuck: list[Stuck]) -> None:
    start(watching, stuck)
    watching.poll()


def test_poll_reports_each_late_process_once_and_neither_dumps_nor_signals_it(
    watching: Watching, dumps: Dumps
) -> None:
    watching.dogs.begin([0, 1], ON)
    stuck = [Stuck(watching.dogs.environment(rank)[PAGE_ENV], b"section") for rank in (0, 1)]
    start(watching, stuck)
    late, kept = stuck
    watching.expire(late.pid, signal.SIGTERM)
    found = watching.detect()
    assert sorted((one.pid, one.scope, one.signum) for one in found) == sorted(
        [(late.pid, "step", signal.SIGTERM), (kept.pid, "section section", signal.SIGKILL)]
    )
    assert [one.process.poll() for one in stuck] == [None, None]
    assert (dumps, watching.reported()[1:]) == ([], [])
    # The supervision decides which process is dumped, and which signal it gets.
    [dumped] = watching.dogs.dump(tuple(one for one in found if one.pid == late.pid))
    assert [pid for pid, _ in dumps] == [late.pid]
    watching.dogs.signal(dumped.pid, dumped.signum)
    assert late.end() == -signal.SIGTERM
    assert kept.process.poll() is None
    kept.process.kill()
    kept.end()


def test_all_late_sections_are_reported_before_the_first_kill(
    watching: Watching, dumps: Dumps
) -> None:
    watching.dogs.begin([0, 1], {})
    stuck = [
        Stuck(watching.dogs.environment(rank)[PAGE_ENV], b"outer", b"inner") for rank in (0, 1)
    ]
    poll_past(watching, stuck)
    assert [one.end() for one in stuck] == [-9, -9]
    assert sorted(pid for pid, _ in dumps) == sorted(one.pid for one in stuck)
    # If several sections of a worker have expired, the one with the earliest deadline is to blame.
    assert watching.reported() == [
        f"{what} {one.pid} section inner"
        for what in ("timer expired", "kill worker process")
        for one in stuck
    ]


@pytest.mark.parametrize("calls_itself", [1, 0, (1 << 62)])
def test_late_worker_in_a_pid_namespace_is_killed(
    watching: Watching, dumps: Dumps, calls_itself: int
) -> None:
    watching.dogs.begin([0], {})
    stuck = Stuck(watching.dogs.environment(0)[PAGE_ENV], b"step", pid=calls_itself)
    poll_past(watching, [stuck])
    assert stuck.end() == -9


def explained(watching: Watching, pid: int, code: int, *, stopped: bool = False) -> ProcessFailure:
    failure = ProcessFailure(0, pid, code, "", consequence=stopped, stopped=stopped)
    watching.dogs.explain(failure)
    return failure


def test_worker_that_survives_its_signal_is_not_blamed_on_it(
    watching: Watching, dumps: Dumps
) -> None:
    watching.dogs.begin([0], ON)
    number = int(signal.SIGWINCH)
    with subprocess.Popen(["sleep", "60"]) as process:
        watching.dogs.started(0, {0: process.pid}, {})
        watching.expire(process.pid, number)
        watching.poll()
        assert process.poll() is None
        process.kill()
    assert f"signal {number}" in explained(watching, process.pid, 1).detail
    stopped = explained(watching, process.pid, -15, stopped=True)
    assert (stopped.detail, stopped.consequence, stopped.stopped) == ("", True, True)
    by_it = explained(watching, process.pid, -number, stopped=True)
    assert (by_it.consequence, by_it.stopped) == (False, False)


def test_dumps_of_late_workers_share_one_time_limit(
    watching: Watching, dumps: Dumps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "DUMPS_AT_ONCE", 1)
    watching.dogs.begin([0, 1, 2], ON)
    workers = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    watching.dogs.started(0, {rank: one.pid for rank, one in enumerate(workers)}, {})
    for one in workers:
        watching.expire(one.pid)
    watching.poll()
    assert [one.wait() for one in workers] == [-9, -9, -9]
    limits = [limit_s for _, limit_s in dumps]
    assert DUMP_S / 4 < limits[0] <= DUMP_S
    assert limits[1] <= DUMP_S / 4
    assert limits[2] == DUMP_EACH_S_MIN
    failure = ProcessFailure(0, workers[0].pid, -9, "", stderr_tail="its last words\n")
    for _ in range(2):
        watching.dogs.explain(failure)  # Without a log, the report has the stacks, once.
    assert failure.stderr_tail == f"its last words\nstacks of {workers[0].pid}\n"
