"""Properties of the file store only; tests/contract has those of all stores."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import EnvironmentProblem
from holdfast.store import file_store
from holdfast.store.file_store import FileStore, SharedFolder, file_name, locked

if TYPE_CHECKING:
    from pathlib import Path


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_wait_for_a_lock_of_another_thread_times_out(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    with locked(path), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: locked(path, 0.01).__enter__())
        with pytest.raises(TimeoutError, match=path):
            waiting.result()


def test_exit_of_a_process_releases_its_lock(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(TimeoutError, match=path), locked(path, 0.01):
            pass
        entered = threading.Event()

        def enter() -> None:
            with locked(path):
                entered.set()

        waiting = threading.Thread(target=enter)
        waiting.start()
        assert not entered.is_set()
        holder.kill()
        waiting.join(30)
        assert entered.is_set()


def test_forked_child_does_not_wait_for_a_thread_of_its_parent(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    with locked(path), ThreadPoolExecutor(1) as pool:
        pid = pool.submit(forked, path).result()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def forked(path: str) -> int:
    """Return the pid of a child that exits with 7 after it has held the lock."""
    pid = os.fork()
    if pid == 0:
        try:
            with locked(path):
                os._exit(7)
        finally:
            os._exit(1)
    return pid


def test_stale_file_is_reread_a_limited_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SharedFolder(str(tmp_path))
    folder.write("key", b"value")
    times = [3]

    content = file_store._content

    def stale_at_first(name: str, descriptor: int) -> bytes:
        times[0] -= 1
        if times[0] >= 0:
            raise OSError(errno.ESTALE, "stale")
        return content(name, descriptor)

    monkeypatch.setattr(file_store, "_content", stale_at_first)
    assert folder.read("key") == b"value"
    times[0] = 10**6
    with pytest.raises(OSError, match="stale"):
        folder.read("key")


@given(st.text(max_size=300), st.text(max_size=300))
def test_every_key_has_its_own_file_name(one: str, other: str) -> None:
    for key in (one, other):
        name = file_name(key)
        assert "/" not in name
        assert not name.startswith(".")
        assert len(name.encode()) <= 255
    assert (file_name(one) == file_name(other)) == (one == other)


def test_wait_polls_a_bounded_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only sleeping moves the clock of this test, so a busy loop would show on any machine."""
    clock = [0.0]

    def sleep(seconds: float) -> None:
        assert seconds > 0
        clock[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", sleep)
    looks = []
    store = FileStore(tmp_path)
    monkeypatch.setattr(store._files, "refresh", lambda: looks.append(clock[0]))
    with pytest.raises(TimeoutError):
        store.wait(["a"], timedelta(seconds=10))
    assert 100 <= len(looks) <= 125
    assert clock[0] == pytest.approx(10)


def test_value_size_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "VALUE_BYTES_MAX", 10)
    store = FileStore(tmp_path)
    store.set("key", "x" * 10)
    with pytest.raises(ValueError, match=r"key: .*11 bytes"):
        store.append("key", "x")
    with pytest.raises(ValueError, match=r"b: .*11 bytes"):
        store.multi_set(["a", "b"], ["x" * 10, "x" * 11])
    assert store.get("key") == b"x" * 10
    assert not store.check(["a"])


def test_incomplete_push_of_a_killed_process_is_overwritten(tmp_path: Path) -> None:
    """The process is killed between writing the value and updating the count."""
    store = FileStore(tmp_path)
    store.queue_push("queue", "a")
    (tmp_path / ".queue.kqueue.1").write_text("never counted")
    store.queue_push("queue", "b")
    assert [store.queue_pop("queue"), store.queue_pop("queue")] == [b"a", b"b"]


def test_deleted_long_key_leaves_no_files(tmp_path: Path) -> None:
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


def test_file_barrier_that_completes_at_the_deadline_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other caller arrives after the last poll, and before this one has unregistered."""
    store = FileStore(tmp_path)

    def poll_times(timeout_s: float) -> list[None]:
        FileStore(tmp_path).barrier("here", 2)
        return []

    monkeypatch.setattr(store._files, "poll_times", poll_times)
    store.barrier("here", 2, 0.001)
    assert FileStore(tmp_path).get("here") == b"2"


def test_file_store_wait_requires_all_keys_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key is deleted after it was checked, and before the other is checked."""
    store = FileStore(tmp_path)
    store.multi_set(["a", "b"], ["", ""])
    exists = store._files.exists

    def deleting(name: str) -> bool:
        if name == "kb":
            FileStore(tmp_path).delete_key("a")
        return exists(name)

    monkeypatch.setattr(store._files, "exists", deleting)
    with pytest.raises(TimeoutError, match=r"\ba\b"):
        store.wait(["a", "b"], timedelta(milliseconds=1))


# Other users.


def test_folder_and_files_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = FileStore(tmp_path / "new")
        store.set("x" * 500, "1")
        store.queue_push("queue", "a")
        store.barrier("here", 1)
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()}
    assert len(modes) >= 6
    assert set(modes.values()) == {0o600}, modes


def test_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    store = FileStore(tmp_path / "folder")
    (tmp_path / "folder" / "kkey").symlink_to(elsewhere)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        store.get("key")
    (tmp_path / "folder" / ".lock").symlink_to(tmp_path / "lock elsewhere")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        store.set("other", "value")
    assert not (tmp_path / "lock elsewhere").exists()
    (tmp_path / "folder" / ".lock").unlink()
    store.multi_set(["key"], ["value"])
    assert (elsewhere.read_text(), store.get("key")) == ("mine", b"value")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with pytest.raises(EnvironmentProblem, match="link"):
        SharedFolder(str(tmp_path / "link"))
    assert FileStore(tmp_path / "link").get("key") == b"value"  # The user chose this link.


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_folder_writable_by_other_users_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(EnvironmentProblem, match=f"open': .*{mode:o}"):
        FileStore(folder)
    assert os.listdir(folder) == []


def test_folder_is_checked_at_every_use(tmp_path: Path) -> None:
    """A user who can write to the parent folder may replace it."""
    folder = SharedFolder(str(tmp_path / "job"))
    store = FileStore(folder.subfolder("store"))
    store.set("key", "value")
    calls = (lambda: store.get("key"), lambda: store.set("key", "new"), store.num_keys)
    (tmp_path / "job" / "store").chmod(0o777)
    for call in calls:
        with pytest.raises(EnvironmentProblem, match=f"{tmp_path}/job/store"):
            call()
    (tmp_path / "job").rename(tmp_path / "old")
    (tmp_path / "old" / "store").chmod(0o700)
    (tmp_path / "job").symlink_to(tmp_path / "old")
    for call in calls:
        with pytest.raises(OSError, match=f"{tmp_path}/job"):
            call()
    assert (tmp_path / "old" / "store" / "kkey").read_bytes() == b"value"
