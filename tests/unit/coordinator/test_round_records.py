"""The records of running jobs that a coordinator keeps for its successor on the same host."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

import pytest

from fake_node import RUN, a_job_of, a_node
from holdfast.coordinator import round_records
from holdfast.coordinator.round_records import RoundRecords
from holdfast.core.coordinator_machine import CoordinatorMachine, StatusReceived
from holdfast.core.phases import NodePhase
from holdfast.core.protocol import View

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fake_node import FakeNode
    from holdfast.core.protocol import Status
    from holdfast.core.saved_jobs import SavedJob

TWO = a_job_of(2, 2, max_restarts=1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path))
    return tmp_path / f"holdfast-{os.geteuid()}"


@pytest.fixture
def listener(folder: Path) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


class Endpoint:
    """A coordinator in the agent of node `a`, with its records; messages are passed by hand."""

    def __init__(self, listener: socket.socket) -> None:
        self.warnings: list[str] = []
        self.records = RoundRecords(listener, self.warnings.append)
        self.machine = CoordinatorMachine(0.0, silence_s=5.0, grace_s=0.2, host="a")
        self.nodes: dict[str, FakeNode] = {}

    def join(self, name: str) -> None:
        self.nodes[name] = a_node(name, TWO, len(self.nodes) + 1)
        self.send(self.nodes[name].status())

    def send(self, status: Status) -> None:
        """Handle a status; nodes obey the answers immediately."""
        answers = self.machine.handle(0.0, StatusReceived(status, "10.0.0.1"))
        self.records.update(self.machine, answers)
        for one in answers:
            node = self.nodes[one.node]
            if isinstance(one, View) and node.receive(one) and node.apply():
                self.send(node.status())


@pytest.fixture
def running(listener: socket.socket) -> Endpoint:
    endpoint = Endpoint(listener)
    endpoint.join("a")
    endpoint.join("b")
    return endpoint


def found_by_successor(listener: socket.socket) -> SavedJob | None:
    return RoundRecords(listener, print).read(RUN)


def record_of(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_successor_knows_the_numbers_and_whom_to_wait_for(
    running: Endpoint, listener: socket.socket, folder: Path
) -> None:
    job = running.machine.jobs[RUN].job
    saved = found_by_successor(listener)
    assert saved is not None
    assert (saved.generation, saved.fence, saved.term) == (job.generation, job.fence, job.term)
    assert [info.node for info in saved.members] == ["a", "b"]
    assert saved.awaited == 1, "the node of the coordinator's own agent is lost with it"
    assert record_of(folder).stat().st_mode & 0o777 == 0o600
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        assert found_by_successor(elsewhere) is None, "another endpoint has other jobs"


def test_record_is_written_before_the_decision_is_sent(
    running: Endpoint, listener: socket.socket
) -> None:
    running.nodes["b"].phase = NodePhase.READY  # It requests a restart.
    running.send(running.nodes["b"].status())
    saved = found_by_successor(listener)
    assert saved is not None
    assert saved.generation == running.machine.jobs[RUN].job.generation == 1


def test_record_of_a_finished_job_is_removed(running: Endpoint, folder: Path) -> None:
    for node in running.nodes.values():
        running.send(node.succeed())
    assert running.machine.jobs[RUN].job.outcome is not None
    assert [*folder.iterdir()] == []


def test_only_jobs_that_continue_keep_their_record_when_the_coordinator_exits(
    running: Endpoint, listener: socket.socket
) -> None:
    running.records.close(running.machine)
    assert found_by_successor(listener) is not None
    for node in running.nodes.values():
        running.send(node.leave())
    running.records.close(running.machine)
    assert found_by_successor(listener) is None


def test_record_of_an_earlier_coordinator_is_removed_with_its_job(
    running: Endpoint, listener: socket.socket, folder: Path
) -> None:
    successor = Endpoint(listener)
    assert successor.records.read(RUN) is not None
    successor.records.close(successor.machine)
    assert [*folder.iterdir()] == []


def test_record_expires_some_time_after_its_coordinator(
    running: Endpoint, listener: socket.socket, folder: Path
) -> None:
    path = record_of(folder)
    left_s = path.stat().st_mtime - time.time()
    assert round_records.KEEP_S < left_s <= round_records.KEEP_S + round_records.REFRESH_S
    os.utime(path, (0, 0))
    assert found_by_successor(listener) is None
    running.records.refresh()
    assert found_by_successor(listener) is not None, "its coordinator still runs"
    os.utime(path, (0, 0))
    RoundRecords(listener, print).refresh()
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run_id": "run"}', "\xff"])
def test_damaged_record_counts_as_none(
    running: Endpoint, listener: socket.socket, folder: Path, text: str
) -> None:
    record_of(folder).write_text(text)
    expire_later(record_of(folder))
    assert found_by_successor(listener) is None


def test_record_of_another_user_and_links_are_ignored(
    running: Endpoint,
    listener: socket.socket,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = record_of(folder)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert found_by_successor(listener) is None
    elsewhere.rename(path)
    assert found_by_successor(listener) is not None
    records = RoundRecords(listener, print)
    of_this_user = records._path(RUN)
    monkeypatch.setattr(records, "_path", lambda _: of_this_user)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert records.read(RUN) is None


def test_unusable_folder_is_a_warning(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = Endpoint(listener)
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "missing"))
    endpoint.join("a")
    endpoint.join("b")
    assert len(endpoint.warnings) == 1
    assert "record" in endpoint.warnings[0]


def expire_later(path: Path) -> None:
    later = time.time() + round_records.KEEP_S
    os.utime(path, (later, later))
