"""What only the store of files does; what all stores do is in tests/contract."""

from __future__ import annotations

import multiprocessing
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import EnvironmentProblem
from holdfast.store import file_store
from holdfast.store.file_store import FileStore, file_name

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
    monkeypatch.setattr(store, "_look_afresh", lambda: looks.append(clock[0]))
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


def test_a_folder_that_cannot_be_made_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        EnvironmentProblem, match=r"shared folder .* cannot be used: Not a directory"
    ):
        FileStore(tmp_path / "file" / "store")


def test_a_stale_file_is_read_again_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    store = FileStore(tmp_path)
    store.set("key", "value")
    times = [3]

    def stale_at_first(path: str, mode: str) -> object:
        times[0] -= 1
        if times[0] >= 0:
            raise OSError(errno.ESTALE, "stale")
        return open(path, mode)

    monkeypatch.setattr(file_store, "open", stale_at_first, raising=False)
    assert store.get("key") == b"value"
    times[0] = 10**6
    with pytest.raises(OSError, match="stale"):
        store.get("key")


@given(st.text(max_size=300), st.text(max_size=300))
def test_every_key_has_a_file_name_of_its_own(one: str, other: str) -> None:
    for key in (one, other):
        name = file_name(key)
        assert "/" not in name
        assert not name.startswith(".")
        assert len(name.encode()) <= 255
    assert (file_name(one) == file_name(other)) == (one == other)
