"""The socket's file: only its owner's, never another's taken, never a dead one's in the way."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.control import socket_file
from holdfast.control.socket_file import identity, listen_privately, peer_of, remove, socket_path
from holdfast.errors import EnvironmentProblem


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "control.sock")


def mode(path: str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_only_the_owner_can_open_it(path: str) -> None:
    old = os.umask(0)
    try:
        listener = listen_privately(path)
    finally:
        os.umask(old)
    with listener:
        assert mode(path) == 0o600


def test_it_is_private_from_the_moment_it_is_there(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "chmod", lambda *_: None)
    with listen_privately(path):
        assert mode(path) == 0o600


def test_a_missing_folder_is_made_for_the_owner_alone(tmp_path: Path) -> None:
    with listen_privately(str(tmp_path / "new" / "a.sock")):
        assert mode(str(tmp_path / "new")) == 0o700


@pytest.mark.parametrize("open_to", [0o720, 0o702, 0o777])
def test_a_folder_where_others_can_replace_it_is_refused(tmp_path: Path, open_to: int) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(open_to)
    with pytest.raises(EnvironmentProblem, match=r"others can replace the socket .*chmod 700"):
        listen_privately(str(folder / "a.sock"))
    folder.chmod(open_to | stat.S_ISVTX)  # As in /tmp, each can remove their own alone.
    listen_privately(str(folder / "a.sock")).close()


def test_what_a_dead_server_left_is_replaced(path: str) -> None:
    program = "import socket,sys; s=socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()"
    subprocess.run([sys.executable, "-c", program, path], check=True)
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(path)
    with listen_privately(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


def test_one_that_lives_is_left_alone(path: str) -> None:
    with listen_privately(path):
        before = identity(path)
        with pytest.raises(EnvironmentProblem, match=rf"in use by process {os.getpid()} \(give"):
            listen_privately(path)
        assert identity(path) == before


def test_one_whose_queue_is_full_lives(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_file, "CONNECT_S", 0.05)
    monkeypatch.setattr(socket_file, "BACKLOG", 0)
    with listen_privately(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        with pytest.raises(EnvironmentProblem, match="in use by another process"):
            listen_privately(path)


def test_what_is_no_socket_is_left_alone(path: str) -> None:
    Path(path).write_text("precious")
    with pytest.raises(EnvironmentProblem, match="is there, and is no socket"):
        listen_privately(path)
    assert Path(path).read_text() == "precious"


def test_a_path_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"longer than a socket's path may be, 107"):
        listen_privately(str(tmp_path / ("x" * 108)))
    with pytest.raises(EnvironmentProblem, match=r"cannot listen at .*No such file"):
        listen_privately(str(tmp_path / "a" / "b" / "c.sock"))
    with pytest.raises(EnvironmentProblem, match="longer"):
        listen_privately("")


def test_only_ones_own_file_is_removed(path: str) -> None:
    with listen_privately(path):
        mine = identity(path)
    Path(path).unlink()
    with listen_privately(path):
        remove(path, (mine[0], mine[1] + 10_000_000))
        assert Path(path).exists()
        remove(path, identity(path))
        assert not Path(path).exists()
        remove(path, mine)


def test_a_folder_that_somebody_holds_is_used_all_the_same(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_file, "LOCK_S", 0.05)
    holder = socket_file._lock(os.path.dirname(path))
    try:
        listen_privately(path).close()
    finally:
        os.close(holder)


def test_who_is_at_the_other_end(path: str) -> None:
    with listen_privately(path) as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        connection, _ = listener.accept()
        with connection:
            assert peer_of(connection) == (os.getpid(), os.geteuid())


def test_each_worker_has_a_place_of_its_own() -> None:
    name = "TORCH_WORKER_SERVER_SOCKET"
    ranks = {"RANK": "5", "LOCAL_RANK": "1"}
    assert socket_path({}) == ""
    assert socket_path({name: "/a/b", **ranks}) == "/a/b"
    assert socket_path({name: "/a/${rank}-${local_rank}", **ranks}) == "/a/5-1"
    assert socket_path({name: "/a/${rank}"}) == "/a/${rank}"
