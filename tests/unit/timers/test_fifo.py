from __future__ import annotations

import os
import stat
import threading
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import UsageError
from holdfast.timers.server import TAKE_BYTES_MAX, Fifo

if TYPE_CHECKING:
    from pathlib import Path


def test_only_its_owner_can_open_it_and_it_goes_with_its_server(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    fifo = Fifo(str(path))
    found = path.lstat()
    assert stat.S_ISFIFO(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o600
    fifo.close()
    fifo.close()
    assert not path.exists()


def test_it_neither_blocks_nor_ends_however_writers_come_and_go(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    fifo = Fifo(str(path))
    assert [*fifo.chunks()] == []
    for _ in range(3):
        path.write_bytes(b"line\n")
        assert b"".join(fifo.chunks()) == b"line\n"
        assert [*fifo.chunks()] == []
    fifo.close()


def test_one_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    fifo = Fifo(str(path))
    path.write_bytes(b"x")
    assert [*fifo.chunks()] == [b"x"]
    fifo.close()


def test_whatever_else_is_there_is_left_alone_and_named(tmp_path: Path) -> None:
    plain, link, folder = tmp_path / "plain", tmp_path / "link", tmp_path / "folder"
    plain.write_text("precious")
    link.symlink_to(plain)
    folder.mkdir()
    for path in (plain, link, folder):
        with pytest.raises(UsageError, match=r"pipe for timers /.*: something else is there"):
            Fifo(str(path))
    assert plain.read_text() == "precious"
    with pytest.raises(UsageError, match=r"missing/pipe: No such file.*TORCHELASTIC_TIMER_FILE"):
        Fifo(str(tmp_path / "missing" / "pipe"))
    with pytest.raises(UsageError, match="Not a directory"):
        Fifo(str(plain / "pipe"))


def test_the_pipe_of_another_agent_is_left_alone(tmp_path: Path) -> None:
    fifo = Fifo(str(tmp_path / "pipe"))
    with pytest.raises(UsageError, match="another agent reads this pipe"):
        Fifo(str(tmp_path / "pipe"))
    fifo.close()


def test_another_at_its_path_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    fifo = Fifo(str(path))
    path.unlink()
    path.write_text("mine")
    fifo.close()
    assert path.read_text() == "mine"


def test_a_writer_that_never_stops_does_not_keep_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    fifo = Fifo(str(path))
    fd = os.open(path, os.O_WRONLY)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            os.write(fd, b"x" * 4096)

    writer = threading.Thread(target=write)
    writer.start()
    taken = 0
    for chunk in fifo.chunks():
        taken += len(chunk)
    assert taken < TAKE_BYTES_MAX + (1 << 16)
    stop.set()
    while writer.is_alive():
        for _ in fifo.chunks():
            pass
    writer.join()
    os.close(fd)
    fifo.close()


def test_one_that_was_removed_is_reachable_no_more(tmp_path: Path) -> None:
    fifo = Fifo(str(tmp_path / "pipe"))
    assert fifo.is_reachable()
    (tmp_path / "pipe").unlink()
    assert not fifo.is_reachable()
    (tmp_path / "other").touch()  # So that it gets another number.
    (tmp_path / "pipe").touch()
    assert not fifo.is_reachable()
    fifo.close()
    assert (tmp_path / "pipe").exists()
