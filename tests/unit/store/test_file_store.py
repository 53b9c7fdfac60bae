"""What only the store of files does; what all stores do is in tests/contract."""

from __future__ import annotations

import multiprocessing
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from holdfast.store import file_store
from holdfast.store.file_store import FileStore

if TYPE_CHECKING:
    from pathlib import Path


def test_stores_of_one_folder_are_one_store(tmp_path: Path) -> None:
    FileStore(tmp_path / "store").set("key", "value")
    assert FileStore(str(tmp_path / "store")).get("key") == b"value"


def test_the_time_is_over_for_the_keys_without_a_value(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.set("b", "")
    with pytest.raises(
        TimeoutError, match=rf"^no value came within 0\.001 s in {tmp_path} for: a$"
    ):
        store.wait(["a", "b"], timedelta(milliseconds=1))


def test_a_wait_looks_a_bounded_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that only sleeping moves: no loop runs hot, whatever the machine does."""
    clock = [0.0]

    def sleep(seconds: float) -> None:
        assert seconds > 0
        clock[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", sleep)
    looks = []
    store = FileStore(tmp_path)
    monkeypatch.setattr(store._files, "look_afresh", lambda: looks.append(clock[0]))
    with pytest.raises(TimeoutError):
        store.wait(["a"], timedelta(seconds=10))
    assert 100 <= len(looks) <= 125
    assert clock[0] == pytest.approx(10)


def add_often(folder: str) -> None:
    store = FileStore(folder)
    for _ in range(25):
        store.add("count", 1)
    store.set(f"done {os.getpid()}", "")


def test_no_addition_of_several_processes_is_lost(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=add_often, args=(str(tmp_path),)) for _ in range(3)]
    for worker in workers:
        worker.start()
    store = FileStore(tmp_path)
    store.wait([f"done {worker.pid}" for worker in workers], timedelta(minutes=1))
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert store.get("count") == b"75"


def test_values_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "VALUE_BYTES_MAX", 10)
    store = FileStore(tmp_path)
    store.set("key", "x" * 10)
    with pytest.raises(ValueError, match=r"^key: a value of 11 bytes is too large$"):
        store.append("key", "x")
    assert store.get("key") == b"x" * 10


def test_many_sizes_are_checked_before_anything_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "VALUE_BYTES_MAX", 10)
    store = FileStore(tmp_path)
    with pytest.raises(ValueError, match=r"^b: a value of 11 bytes is too large$"):
        store.multi_set(["a", "b"], ["x" * 10, "x" * 11])
    with pytest.raises(ValueError, match=r"^a: a value of 11 bytes is too large$"):
        store.queue_push("a", "x" * 11)
    assert not store.check(["a"])


def test_a_queue_leaves_no_files_behind(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    for value in "abc":
        store.queue_push("queue", value)
    for _ in "abc":
        store.queue_pop("queue")
    assert os.listdir(tmp_path) == [".lock"]
    store.queue_push("queue", "d")
    assert store.queue_pop("queue") == b"d"


def test_what_a_killed_process_left_of_a_push_is_overwritten(tmp_path: Path) -> None:
    """It is killed between writing the value and counting it."""
    store = FileStore(tmp_path)
    store.queue_push("queue", "a")
    (tmp_path / ".queue.kqueue.1").write_text("never counted")
    store.queue_push("queue", "b")
    assert [store.queue_pop("queue"), store.queue_pop("queue")] == [b"a", b"b"]


def test_a_long_key_leaves_no_files_behind(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.set("x" * 500, "1")
    assert store.list_keys() == ["x" * 500]
    assert store.num_keys() == 1
    assert store.delete_key("x" * 500)
    assert os.listdir(tmp_path) == [".lock"]


def take_all(folder: str, turns: int) -> None:
    store = FileStore(folder)
    store.barrier("start", 3)
    for _ in range(turns):
        store.queue_push("taken", store.queue_pop("given"))
    store.barrier("start", 3)


def test_processes_share_queues_and_barriers(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=take_all, args=(str(tmp_path), 8)) for _ in range(3)]
    for worker in workers:
        worker.start()
    store = FileStore(tmp_path)
    for number in range(24):
        store.queue_push("given", str(number))
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    taken = [int(store.queue_pop("taken", block=False)) for _ in range(24)]
    assert sorted(taken) == list(range(24))
    assert (store.queue_len("given"), store.queue_len("taken")) == (0, 0)


def test_a_barrier_that_all_came_to_in_the_last_moment_is_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one comes after the last look, and before this one has given up."""
    store = FileStore(tmp_path)

    def looks(timeout_s: float) -> list[bool]:
        FileStore(tmp_path).barrier("here", 2)
        return []

    monkeypatch.setattr(store._files, "looks", looks)
    store.barrier("here", 2, 0.001)
    assert FileStore(tmp_path).get("here") == b"2"


def test_keys_must_be_there_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is deleted after it was looked at, and before the other is."""
    store = FileStore(tmp_path)
    store.multi_set(["a", "b"], ["", ""])
    exists = store._files.exists

    def deleting(name: str) -> bool:
        if name == "kb":
            FileStore(tmp_path).delete_key("a")
        return exists(name)

    monkeypatch.setattr(store._files, "exists", deleting)
    with pytest.raises(TimeoutError, match=r"for: a$"):
        store.wait(["a", "b"], timedelta(milliseconds=1))
