from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from holdfast.agent.watchdogs import DUMP_LEAST_S, DUMP_S, ENABLE_ENV, FILE_ENV, Watchdogs
from holdfast.control import stacks
from holdfast.processes.failures import ProcessFailure
from holdfast.timers.requests import FileTimerRequest
from holdfast.worker import PAGE_ENV

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.agent.moments import Moment

ON = {ENABLE_ENV: "1"}


class Watching:
    """Watchdogs, and what they told."""

    def __init__(self) -> None:
        self.told: list[Moment] = []
        self.dogs = Watchdogs("job", self.told.append, lambda _rank: None)

    def ask(self, pid: int, scope: str) -> None:
        """Set a timer that is over."""
        request = FileTimerRequest(pid, scope, time.time() - 1, 9)
        with open(self.dogs.environment(0)[FILE_ENV], "w") as pipe:
            pipe.write(request.to_json() + "\n")


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
    assert line.startswith(f"cannot make the pipe for timers {path}: something else is there")
    assert "timers are not watched (TORCHELASTIC_TIMER_FILE names a path" in line
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
    why = f"its process {below} was killed because the time was up for 'step'"
    as_shells_do = ProcessFailure(0, worker.pid, 128 + 9, "", consequence=True)
    assert watching.dogs.explain(as_shells_do).detail == why
    assert not as_shells_do.consequence
    otherwise = watching.dogs.explain(ProcessFailure(0, worker.pid, 1, ""))
    assert otherwise.detail == why
    stopped_later = ProcessFailure(0, worker.pid, -15, "", consequence=True, stopped=True)
    assert watching.dogs.explain(stopped_later).detail == ""
    assert stopped_later.stopped
    assert watching.dogs.explain(ProcessFailure(0, below, -9, "")).detail == ""


def test_workers_that_are_late_together_share_the_time_for_dumps(
    watching: Watching, dumps: list[tuple[int, float]], caplog: pytest.LogCaptureFixture
) -> None:
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
    assert limits[2] == DUMP_LEAST_S
    # Without a log, they are in the report.
    failure = ProcessFailure(0, workers[0].pid, -9, "", stderr_tail="its last words\n")
    for _ in range(2):
        watching.dogs.explain(failure)
    assert failure.stderr_tail == f"its last words\nstacks of {workers[0].pid}\n"
    assert failure.detail == "was killed because the time was up for 'step'"


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
