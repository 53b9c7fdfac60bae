"""Properties of this backend only; tests/contract has those of all backends."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.rendezvous.file_backend import (
    HEADER_BYTES,
    MAGIC,
    STATES_KEPT,
    FileRendezvousBackend,
    job_folder,
    job_store,
)
from holdfast.rendezvous.rdzv_conf import RendezvousParameters
from holdfast.rendezvous.rendezvous_errors import RendezvousConnectionError, RendezvousStateError
from holdfast.store.file_store import UNFINISHED_S

if TYPE_CHECKING:
    from pathlib import Path


def test_old_token_does_not_restore_a_removed_file(tmp_path: Path) -> None:
    backend = FileRendezvousBackend(tmp_path / "state")
    first = backend.set_state(b"one")
    assert first is not None
    (tmp_path / "state.1").unlink()
    assert backend.get_state() is None
    assert backend.set_state(b"two", first[1]) is None
    assert os.listdir(tmp_path) == []


def test_interrupted_write_is_ignored_and_removed_after_a_while(tmp_path: Path) -> None:
    old, new = (tmp_path / f".new.{number}" for number in range(2))
    for file in (old, new):
        file.write_bytes(b"half of it")
    earlier = new.stat().st_mtime - UNFINISHED_S - 1.0
    os.utime(old, (earlier, earlier))
    backend = FileRendezvousBackend(tmp_path / "state")
    assert backend.get_state() is None
    backend.set_state(b"whole")
    assert (backend.get_state() or (None,))[0] == b"whole"
    assert (old.exists(), new.exists()) == (False, True)


def test_old_states_are_removed(tmp_path: Path) -> None:
    backend = FileRendezvousBackend(tmp_path / "state")
    write(backend, 2 * STATES_KEPT)
    assert len(os.listdir(tmp_path)) == STATES_KEPT


def write(backend: FileRendezvousBackend, times: int) -> None:
    for number in range(times):
        found = backend.get_state()
        answer = backend.set_state(b"%d" % number, found[1] if found else None)
        assert answer is not None
        assert answer[2]


STORED, CONFLICT, UNKNOWN = range(3)


@pytest.mark.parametrize("is_linked", [False, True])
@pytest.mark.parametrize("writes", [0, 1, STATES_KEPT - 1, STATES_KEPT, 3 * STATES_KEPT])
def test_writer_that_is_stopped_blocks_no_other_and_undoes_nothing(
    tmp_path: Path, *, is_linked: bool, writes: int
) -> None:
    backend = FileRendezvousBackend(tmp_path / "state")
    write(backend, 1)

    def link(*args: Any, **more: Any) -> None:
        if not is_linked:
            os.kill(os.getpid(), signal.SIGSTOP)
        real_link(*args, **more)
        if is_linked:
            os.kill(os.getpid(), signal.SIGSTOP)

    def write_once() -> None:
        os.link = link
        _state, token = backend.get_state() or (b"", b"")
        answer = backend.set_state(b"of the stopped writer", token)
        os._exit(UNKNOWN if answer is None else STORED if answer[2] else CONFLICT)

    real_link = os.link
    stopped = multiprocessing.get_context("fork").Process(target=write_once)
    stopped.start()
    assert stopped.pid is not None
    assert os.WIFSTOPPED(os.waitpid(stopped.pid, os.WUNTRACED)[1])
    write(backend, writes)
    before = backend.get_state()
    os.kill(stopped.pid, signal.SIGCONT)
    stopped.join(60)
    if is_linked:
        assert stopped.exitcode == (STORED if writes < STATES_KEPT else UNKNOWN)
    elif writes:
        assert stopped.exitcode == (CONFLICT if writes <= STATES_KEPT else UNKNOWN)
    else:
        assert stopped.exitcode == STORED
        return
    assert backend.get_state() == before
    write(backend, 1)
    assert len(os.listdir(tmp_path)) <= STATES_KEPT


def test_file_system_without_hard_links_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_args: object, **_more: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(RendezvousStateError, match="has no hard links"):
        FileRendezvousBackend(tmp_path / "state").set_state(b"x")
    assert os.listdir(tmp_path) == []


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
    backend = FileRendezvousBackend(tmp_path / "state")
    backend.set_state(b"the state")
    path = tmp_path / "state.1"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    for call in (backend.get_state, lambda: backend.set_state(b"new")):
        with pytest.raises(RendezvousStateError, match=str(path)):
            call()


def test_removed_folder_is_an_error(tmp_path: Path) -> None:
    backend = FileRendezvousBackend(tmp_path / "gone" / "state")
    assert backend.get_state() is None
    with pytest.raises(RendezvousConnectionError, match="gone/state"):
        backend.set_state(b"x")


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
