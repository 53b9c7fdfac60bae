"""The memory of a coordinator in a file: it is written atomically, private, and used by one process at a time."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from fake_node import a_job_of, a_node
from holdfast.coordinator import state_file
from holdfast.coordinator.state_file import StateFile, WriteAhead
from holdfast.core.coordinator_machine import CoordinatorMachine, StatusReceived
from holdfast.core.phases import JobOutcome
from holdfast.core.protocol import Ack, NodeInfo, View
from holdfast.core.saved_jobs import SavedJob
from holdfast.errors import UsageError
from in_loop import in_loop
from other_users import STRANGER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from holdfast.core.protocol import Status

RUNNING = SavedJob(
    run_id="job",
    term=3,
    round=2,
    generation=5,
    restarts=1,
    fence=77,
    members=(NodeInfo(node="a", incarnation=2**63 - 1),),
    awaited=1,
)
OVER = SavedJob(
    run_id="done", term=1, round=0, generation=0, restarts=0, fence=7, outcome=JobOutcome.FAILED
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.json"


@pytest.fixture
def file(path: Path) -> Iterator[StateFile]:
    file = StateFile(str(path))
    yield file
    file.close(10.0)


def save(file: StateFile, *saved_jobs: SavedJob) -> str:
    """Store these memories; return the problem, if any."""
    done, output = threading.Event(), list[str]()

    def stored(problem: str) -> None:
        output.append(problem)
        done.set()

    file.save(list(saved_jobs), stored)
    assert done.wait(10.0)
    return output[0]


def read_again(path: Path) -> list[SavedJob] | None:
    file = StateFile(str(path))
    file.close(10.0)
    return file.saved_jobs


def aged(path: Path, age_s: float) -> None:
    contents = json.loads(path.read_text())
    path.write_text(json.dumps({**contents, "saved_at": time.time() - age_s}))


def test_state_is_readable_for_the_next_coordinator_and_no_other_user(
    file: StateFile, path: Path
) -> None:
    assert file.saved_jobs is None, "no coordinator has stored jobs before"
    assert save(file, RUNNING, OVER) == ""
    file.close(10.0)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_again(path) == [RUNNING, OVER]


def test_old_jobs_are_dropped_and_finished_ones_sooner(file: StateFile, path: Path) -> None:
    save(file, RUNNING, OVER)
    file.close(10.0)
    aged(path, 3600.0)
    assert read_again(path) == [RUNNING]
    aged(path, state_file.UNFINISHED_KEEP_S)
    assert read_again(path) == []


def test_two_coordinators_cannot_share_a_state_file(file: StateFile, path: Path) -> None:
    with pytest.raises(UsageError):
        StateFile(str(path))
    file.close(10.0)
    StateFile(str(path)).close(10.0)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": 1}', '{"format": 2, "saved_at": 0, "jobs": []}', "\xff\xfe"]
)
def test_invalid_file_is_refused_and_kept(path: Path, text: str) -> None:
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UsageError):
        StateFile(str(path))
    assert path.read_text(encoding="latin-1") == text


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        StateFile(str(tmp_path / "none" / "state.json"))


def test_failed_write_is_reported_and_keeps_the_last_state(file: StateFile, path: Path) -> None:
    save(file, RUNNING)
    os.mkdir(f"{path}.new")
    assert save(file, OVER) != ""
    file.close(10.0)
    os.rmdir(f"{path}.new")
    assert read_again(path) == [RUNNING]


class Disk:
    """Stands in for the state file; a write takes as long as the test wants."""

    path = "state.json"

    def __init__(self) -> None:
        self.stored: list[list[SavedJob]] = []
        self.done: Callable[[str], None] = lambda _problem: None

    def save(self, saved_jobs: list[SavedJob], done: Callable[[str], None]) -> None:
        self.stored.append(saved_jobs)
        self.done = done

    def close(self, limit_s: float) -> None:
        pass


class Desk:
    """A coordinator whose answers wait until the disk has stored the state."""

    def __init__(self) -> None:
        self.disk: Any = Disk()
        self.machine = CoordinatorMachine(0.0, silence_s=5.0, grace_s=0.2)
        self.sent: list[View | Ack] = []
        self.warned: list[str] = []
        self.something = asyncio.Event()
        self.ahead = WriteAhead(self.disk, self.machine, self._send, self.warned.append)  # type: ignore[arg-type]

    def _send(self, answers: Sequence[View | Ack]) -> None:
        self.sent += answers
        self.something.set()

    def take(self, status: Status) -> None:
        self.ahead.send(self.machine.handle(0.0, StatusReceived(status, "here")))


@in_loop
async def test_answers_are_sent_in_order_after_the_write() -> None:
    desk, node = Desk(), a_node("a", a_job_of(1, 1), 1)
    desk.take(node.status())
    desk.take(node.status())
    assert desk.sent == []
    assert [one.generation for one in desk.disk.stored[-1]] == [0]
    desk.disk.done("")
    await desk.something.wait()
    assert [type(one) for one in desk.sent] == [View, Ack]
    desk.take(node.status())
    assert len(desk.sent) == 3, "there is nothing new to be stored"
    assert not desk.warned
    desk.ahead.close()


@pytest.mark.parametrize("hangs", [False, True])
@in_loop
async def test_job_continues_if_writes_fail(
    monkeypatch: pytest.MonkeyPatch,
    hangs: bool,
) -> None:
    monkeypatch.setattr(state_file, "STORE_S", 0.01)
    desk, node = Desk(), a_node("a", a_job_of(1, 1, max_restarts=1), 1)
    desk.take(node.status())
    if not hangs:
        desk.disk.done("state file state.json: no space")
    await desk.something.wait()
    assert len(desk.warned) == 1
    for view in desk.sent:
        assert isinstance(view, View)
        assert node.receive(view)
    desk.sent.clear()
    node.apply()
    desk.take(node.fail())
    if hangs:
        assert desk.sent, "after one timeout, later answers do not wait"
    desk.ahead.close()


def test_files_of_other_users_are_neither_read_nor_written(path: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "state.json.new").symlink_to(tmp_path / "mine")
    file = StateFile(str(path))
    assert save(file, RUNNING) == ""
    file.close(10.0)
    assert (tmp_path / "mine").read_text() == "mine"
    for name in (".new", ".lock"):
        (tmp_path / f"state.json{name}").unlink(missing_ok=True)
    planted = tmp_path / "state.json.new"
    planted.touch()
    planted.chmod(0o666)
    file = StateFile(str(path))
    file.close(10.0)
    assert path.stat().st_mode & 0o777 == 0o600
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(UsageError, match=f"{path}.*{STRANGER}"):
        StateFile(str(path))
