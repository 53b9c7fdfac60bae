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
from holdfast.control import stacks
from holdfast.observe.lifecycle import WatchdogEvent
from holdfast.processes.failures.failure import ProcessFailure
from holdfast.timers import reaper
from holdfast.timers.protocol import FileTimerRequest
from holdfast.worker import PAGE_ENV

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.observe.lifecycle import LifecycleEvent

ON = {ENABLE_ENV: "1"}


class Watching:
    """Watchdogs, and what they told."""

    def __init__(self) -> None:
        self.told: list[LifecycleEvent] = []
        self.dogs = Watchdogs("job", self.told.append, lambda _rank: None)

    def ask(self, pid: int, scope: str, signum: int = signal.SIGKILL) -> None:
        """Set a timer that is over."""
        request = FileTimerRequest(pid, scope, time.time() - 1, signum)
        with open(self.dogs.environment(0)[FILE_ENV], "w") as pipe:
            pipe.write(request.to_json() + "\n")


def refuse_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.fixture
def watching() -> Iterator[Watching]:
    made = Watching()
    yield made
    made.dogs.close()


@pytest.fixture
def dumps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """Dumps of which each takes a quarter more than all of them may, and what limits they had."""
    made: list[tuple[int, float]] = []
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


# Whether there are timers.


@pytest.mark.parametrize("word", ["1", "true", "YES", "on"])
def test_timers_may_be_asked_for_in_several_words(watching: Watching, word: str) -> None:
    watching.dogs.begin([0], {ENABLE_ENV: word})
    assert FILE_ENV in watching.dogs.environment(0)


@pytest.mark.parametrize("word", ["", "0", "false", "no", "off"])
def test_other_words_ask_for_none(watching: Watching, word: str) -> None:
    watching.dogs.begin([0], {ENABLE_ENV: word, FILE_ENV: "/somebody/elses"})
    assert FILE_ENV not in watching.dogs.environment(0)


def test_their_pipe_is_where_it_is_swept_if_the_agent_is_killed(watching: Watching) -> None:
    watching.dogs.begin([0], ON)
    found = watching.dogs.environment(0)
    assert os.path.dirname(found[FILE_ENV]) == os.path.dirname(found[PAGE_ENV])
    watching.dogs.close()
    assert not os.path.exists(os.path.dirname(found[FILE_ENV]))


def test_a_bad_path_for_the_pipe_is_told_once_and_means_no_timers(
    watching: Watching, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pipe"
    path.write_text("mine")
    for _ in range(2):
        watching.dogs.begin([0], {**ON, FILE_ENV: str(path)})
        assert watching.dogs.environment(0)[FILE_ENV] == ""
    [line] = caplog.messages
    assert str(path) in line
    assert "TORCHELASTIC_TIMER_FILE" in line
    assert path.read_text() == "mine"
    assert watching.told == []


# What goes wrong while it looks.


def test_a_pipe_that_fails_is_named_once_and_dropped(
    watching: Watching, caplog: pytest.LogCaptureFixture
) -> None:
    watching.dogs.begin([0], ON)
    timers, pages = watching.dogs.descriptors()
    nothing = os.open("/dev", os.O_RDONLY)  # To read it is an error.
    os.dup2(nothing, timers)
    for _ in range(2):
        watching.dogs.look(time.monotonic())
    assert caplog.messages == ["timers are not watched any more: [Errno 21] Is a directory"]
    assert watching.dogs.descriptors() == [pages]
    caplog.clear()
    os.dup2(nothing, pages)
    os.close(nothing)
    for _ in range(2):
        watching.dogs.look(time.monotonic())
    [line] = caplog.messages
    assert line.startswith("sections and progress are not watched any more: [Errno 21]")
    assert (watching.dogs.descriptors(), watching.dogs.next_deadline()) == ([], None)
    watching.dogs.begin([0], ON)  # The next generation goes without them.
    assert watching.dogs.environment(0) == {FILE_ENV: ""}
    assert len(caplog.messages) == 1


def test_the_page_of_another_agents_worker_is_not_passed_on(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.processes.workers.pages.WorkerPage.create", refuse_room)
    watching.dogs.begin([0], {})
    assert watching.dogs.environment(0) == {}
    monkeypatch.setenv(PAGE_ENV, "/the/page/of/the/worker/that/started/this/agent")
    assert watching.dogs.environment(0) == {PAGE_ENV: ""}


def test_what_was_removed_is_made_anew_for_the_next_generation(
    watching: Watching, caplog: pytest.LogCaptureFixture
) -> None:
    watching.dogs.begin([0], ON)
    pipe = watching.dogs.environment(0)[FILE_ENV]
    shutil.rmtree(os.path.dirname(pipe))
    watching.dogs.begin([0], ON)
    assert f"{pipe} has been removed: another pipe is made" in caplog.messages
    with subprocess.Popen(["sleep", "60"]) as child:
        watching.dogs.started({0: child.pid}, {})
        watching.ask(child.pid, "step")
        watching.dogs.look(time.monotonic())
    assert child.returncode == -9
    whats = [one.what for one in watching.told if isinstance(one, WatchdogEvent)]
    assert whats[:3] == ["watchdog started", "watchdog stopped", "watchdog started"]


def test_without_a_folder_for_pages_the_next_generation_goes_without(
    watching: Watching, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watching.dogs.begin([0], {})
    shutil.rmtree(os.path.dirname(watching.dogs.environment(0)[PAGE_ENV]))
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.processes.workers.pages.WorkerPages._make", refuse_room)
        watching.dogs.begin([0], {})
    assert "sections and progress are not watched any more: " in caplog.text
    assert (watching.dogs.environment(0), watching.dogs.descriptors()) == ({}, [])


# Sections that are not left.


class Stuck:
    """A process that does nothing, in a section whose time is up: one late for each name."""

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
        """Return how it ended."""
        os.close(self._page)
        return self.process.wait()


def look_at(watching: Watching, stuck: list[Stuck]) -> list[str]:
    """Have a generation of these looked at; return what was told."""
    watching.dogs.started({rank: one.pid for rank, one in enumerate(stuck)}, {})
    page = watching.dogs.environment(0)[PAGE_ENV]
    with open(os.path.join(os.path.dirname(page), worker.NOTICE_NAME), "wb") as notice:
        notice.write(b"\0")
    watching.dogs.look(time.monotonic())
    moments = [one for one in watching.told if isinstance(one, WatchdogEvent)]
    return [f"{one.what} {one.pid} {one.scope}" for one in moments]


def test_sections_that_are_late_together_are_all_told_before_the_first_is_killed(
    watching: Watching, dumps: list[tuple[int, float]]
) -> None:
    watching.dogs.begin([0, 1], {})
    stuck = [
        Stuck(watching.dogs.environment(rank)[PAGE_ENV], b"outer", b"inner") for rank in (0, 1)
    ]
    told = look_at(watching, stuck)
    assert [one.end() for one in stuck] == [-9, -9]
    assert sorted(pid for pid, _ in dumps) == sorted(one.pid for one in stuck)
    # Of several sections of one worker, the one that was to be left first is to blame.
    assert told == [
        f"{what} {one.pid} section inner"
        for what in ("timer expired", "kill worker process")
        for one in stuck
    ]


@pytest.mark.parametrize("calls_itself", [1, 0, (1 << 62)])
def test_a_worker_that_knows_itself_by_another_number_is_ended_all_the_same(
    watching: Watching, dumps: list[tuple[int, float]], calls_itself: int
) -> None:
    watching.dogs.begin([0], {})
    stuck = Stuck(watching.dogs.environment(0)[PAGE_ENV], b"step", pid=calls_itself)
    told = look_at(watching, [stuck])
    assert stuck.end() == -9
    assert told[-1] == f"kill worker process {stuck.pid} section step"


# Whose a process is, and what becomes of its stacks.

BELOW = "import subprocess as s; p = s.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"


def test_the_end_of_a_process_below_a_worker_is_its_end(
    watching: Watching, dumps: list[tuple[int, float]], tmp_path: Path
) -> None:
    log = tmp_path / "stderr.log"
    watching.dogs.begin([0], ON)
    with subprocess.Popen([sys.executable, "-c", BELOW], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        below = int(worker.stdout.readline())
        watching.dogs.started({0: worker.pid}, {0: str(log)})
        watching.ask(below, "step")
        watching.dogs.look(time.monotonic())
    assert f"stacks of {below}" in log.read_text()
    why = f"its process {below} was killed because timer 'step' expired"
    as_shells_do = ProcessFailure(0, worker.pid, 128 + 9, "", consequence=True)
    assert watching.dogs.explain(as_shells_do).detail == why
    assert not as_shells_do.consequence
    otherwise = watching.dogs.explain(ProcessFailure(0, worker.pid, 1, ""))
    assert otherwise.detail == why
    stopped_later = ProcessFailure(0, worker.pid, -15, "", consequence=True, stopped=True)
    assert watching.dogs.explain(stopped_later).detail == ""
    assert stopped_later.stopped
    assert watching.dogs.explain(ProcessFailure(0, below, -9, "")).detail == ""


def test_a_worker_that_outlived_its_signal_did_not_fail_by_it(
    watching: Watching, dumps: list[tuple[int, float]]
) -> None:
    watching.dogs.begin([0], ON)
    with subprocess.Popen(["sleep", "60"]) as worker:
        watching.dogs.started({0: worker.pid}, {})
        watching.ask(worker.pid, "step", signal.SIGWINCH)
        watching.dogs.look(time.monotonic())
        assert worker.poll() is None
        worker.kill()
    later = watching.dogs.explain(ProcessFailure(0, worker.pid, 1, ""))
    number = int(signal.SIGWINCH)
    assert later.detail == f"got signal {number} because timer 'step' expired"
    stopped = ProcessFailure(0, worker.pid, -15, "", consequence=True, stopped=True)
    assert watching.dogs.explain(stopped).detail == ""
    assert (stopped.consequence, stopped.stopped) == (True, True)
    by_it = ProcessFailure(0, worker.pid, -number, "", consequence=True, stopped=True)
    assert watching.dogs.explain(by_it).detail == "was killed because timer 'step' expired"
    assert (by_it.consequence, by_it.stopped) == (False, False)


def test_workers_that_are_late_together_share_the_time_for_dumps(
    watching: Watching, dumps: list[tuple[int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "DUMPS_AT_ONCE", 1)
    watching.dogs.begin([0, 1, 2], ON)
    workers = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    watching.dogs.started({rank: one.pid for rank, one in enumerate(workers)}, {})
    for one in workers:
        watching.ask(one.pid, "step")
    watching.dogs.look(time.monotonic())
    assert [one.wait() for one in workers] == [-9, -9, -9]
    assert sorted(pid for pid, _ in dumps) == sorted(one.pid for one in workers)
    limits = [limit_s for _, limit_s in dumps]
    assert DUMP_S / 4 < limits[0] <= DUMP_S
    assert limits[1] <= DUMP_S / 4
    assert limits[2] == DUMP_EACH_S_MIN
    # Without a log, they are in the report.
    failure = ProcessFailure(0, workers[0].pid, -9, "", stderr_tail="its last words\n")
    for _ in range(2):
        watching.dogs.explain(failure)
    assert failure.stderr_tail == f"its last words\nstacks of {workers[0].pid}\n"
    assert failure.detail == "was killed because timer 'step' expired"


def test_the_next_look_has_its_own_time_for_dumps(
    watching: Watching, dumps: list[tuple[int, float]]
) -> None:
    for _ in range(2):
        watching.dogs.begin([0], ON)
        worker = subprocess.Popen(["sleep", "60"])
        watching.dogs.started({0: worker.pid}, {})
        watching.ask(worker.pid, "step")
        watching.dogs.look(time.monotonic())
        worker.wait()
    assert [limit_s > DUMP_S / 4 for _, limit_s in dumps] == [True, True]
