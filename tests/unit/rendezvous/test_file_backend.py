"""Properties of this backend only; tests/contract has those of all backends."""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.rendezvous.file_backend import (
    HEADER_BYTES,
    MAGIC,
    FileRendezvousBackend,
    job_folder,
    job_store,
)
from holdfast.rendezvous.rdzv_conf import RendezvousParameters
from holdfast.rendezvous.rendezvous_errors import RendezvousConnectionError, RendezvousStateError
from holdfast.store.file_store import locked

if TYPE_CHECKING:
    from pathlib import Path


def test_old_token_does_not_restore_a_removed_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    backend = FileRendezvousBackend(path)
    first = backend.set_state(b"one")
    assert first is not None
    path.unlink()
    assert backend.get_state() is None
    assert backend.set_state(b"two", first[1]) is None
    assert not path.exists()


def test_interrupted_write_is_ignored(tmp_path: Path) -> None:
    unfinished = [tmp_path / f"state.new.{number}" for number in range(2)]
    for file in unfinished:
        file.write_bytes(b"half of it")
    backend = FileRendezvousBackend(tmp_path / "state")
    assert backend.get_state() is None
    backend.set_state(b"whole")
    assert (backend.get_state() or (None,))[0] == b"whole"
    assert not any(file.exists() for file in unfinished)


def test_created_folder_causes_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A share that is not mounted looks like this, and then no other node can join."""
    for endpoint in (tmp_path, tmp_path / "share"):
        for _ in range(2):
            job_folder(RendezvousParameters("file", str(endpoint), "job", 1, 1))
    (line,) = caplog.messages
    assert f"{tmp_path}/share" in line


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"anything else",
        lambda content: content[:-1],
        lambda content: content[: HEADER_BYTES - 1],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: MAGIC[:-2] + b"2\n" + content[len(MAGIC) :],
    ],
)
def test_damaged_file_is_an_error(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "state"
    backend = FileRendezvousBackend(path)
    backend.set_state(b"the state")
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    for call in (backend.get_state, lambda: backend.set_state(b"new")):
        with pytest.raises(RendezvousStateError, match=str(path)):
            call()


def test_removed_folder_is_an_error(tmp_path: Path) -> None:
    backend = FileRendezvousBackend(tmp_path / "gone" / "state")
    assert backend.get_state() is None
    with pytest.raises(RendezvousConnectionError, match="gone/state"):
        backend.set_state(b"x")


def test_lock_held_too_long_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "state"
    backend = FileRendezvousBackend(path, lock_timeout_s=0.01)
    with locked(f"{path}.lock"), pytest.raises(RendezvousConnectionError):
        backend.set_state(b"x")
    assert backend.set_state(b"x") is not None


def count_up(path: str, times: int) -> None:
    backend = FileRendezvousBackend(path)
    done = 0
    while done < times:
        found = backend.get_state()
        number, token = (int(found[0]), found[1]) if found else (0, None)
        answer = backend.set_state(str(number + 1).encode(), token)
        done += answer is not None and answer[2]


def test_concurrent_processes_lose_no_write(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=count_up, args=(path, 10)) for _ in range(3)]
    for worker in workers:
        worker.start()
    count_up(path, 10)
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    found = FileRendezvousBackend(path).get_state()
    assert found is not None
    assert found[0] == b"40"


def params(endpoint: object, run_id: str = "job") -> RendezvousParameters:
    return RendezvousParameters("file", str(endpoint), run_id, 1, 2)


def test_each_job_has_its_own_folder(tmp_path: Path) -> None:
    one = job_folder(params(tmp_path / "new" / "place", "a/b"))
    other = job_folder(params(tmp_path / "new" / "place", "../a"))
    assert one.path != other.path
    for folder in (one, other):
        assert os.path.dirname(folder.path) == str(tmp_path / "new" / "place")
        assert os.path.isdir(folder.path)
    assert job_store(params(tmp_path)).folder.startswith(str(tmp_path))


def test_unusable_endpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--rdzv-endpoint: missing"):
        job_folder(params(" "))
    with pytest.raises(UsageError, match=r"^--rdzv-id"):
        job_folder(params(tmp_path, ""))
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem, match=r"(File exists|Not a directory)"):
        job_folder(params(tmp_path / "file" / "below"))


def test_endpoint_may_be_an_existing_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job_store(params(tmp_path / "file")).set("key", "value")
    assert job_store(params(tmp_path / "file")).get("key") == b"value"
    assert (tmp_path / "file").stat().st_size == 0
