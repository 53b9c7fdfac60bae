"""The bounded tail of a worker's output."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

import pytest

from holdfast.processes.logs import log_tail
from holdfast.processes.logs.log_tail import LogTail, TailWriter, next_file, older_file

if TYPE_CHECKING:
    from pathlib import Path


PATIENCE_S = 60


def contents(path: Path) -> tuple[bytes, bytes]:
    older = path.with_name(path.name + ".1")
    return older.read_bytes() if older.exists() else b"", path.read_bytes()


def no_complaint(text: str) -> None:
    raise AssertionError(text)


@pytest.mark.parametrize("piece", [1, 7, 64, 10_000])
def test_a_tail_is_bounded_and_ends_with_the_last_lines(tmp_path: Path, piece: int) -> None:
    path, bytes_max = tmp_path / "tail", 200
    tail = LogTail(str(path), bytes_max, no_complaint)
    written = b"".join(b"line %d\n" % number for number in range(1000))
    for start in range(0, len(written), piece):
        tail.write(written[start : start + piece])
    tail.close()
    older, newest = contents(path)
    assert written.endswith(older + newest)
    assert bytes_max / 3 <= len(older + newest) <= bytes_max
    assert all(part.startswith(b"line ") and part.endswith(b"\n") for part in (older, newest))
    assert [one.stat().st_mode & 0o777 for one in tmp_path.iterdir()] == [0o600, 0o600]


def test_a_line_without_an_end_is_bounded_too(tmp_path: Path) -> None:
    path, bytes_max = tmp_path / "tail", 200
    tail = LogTail(str(path), bytes_max, no_complaint)
    tail.write(b"x" * 10_000)
    tail.close()
    assert bytes_max / 2 <= len(b"".join(contents(path))) <= bytes_max


def test_a_reader_continues_in_the_next_file(tmp_path: Path) -> None:
    path = str(tmp_path / "tail")
    tail = LogTail(path, 24, no_complaint)
    fds = []
    for number in range(4):
        tail.write(b"line %04d\n" % number)  # Each fills a file.
        fds.append(os.open(path, os.O_RDONLY))
    found = [next_file(path, fd) for fd in fds]
    # The second file after the first was replaced too, so the first continues with the oldest one.
    assert found == [older_file(path), older_file(path), path, ""]
    for fd in fds:
        os.close(fd)
    tail.close()


def test_a_full_disk_costs_the_older_file_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tail"
    complaints: list[str] = []
    tail = LogTail(str(path), 24, complaints.append)
    tail.write(b"line 0000\n")
    tail.write(b"line 0001\n")
    write = os.write

    def full_disk(fd: int, data: bytes) -> int:
        if os.path.exists(older_file(str(path))) or bytes(data) == b"lost\n":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", full_disk)
    tail.write(b"line 0002\n")
    assert contents(path) == (b"", b"line 0002\n")
    assert complaints == []
    tail.write(b"lost\n")
    assert complaints == [f"{path} is incomplete: No space left on device"]
    monkeypatch.undo()
    tail.write(b"later\n")
    tail.close()
    assert contents(path)[1].endswith(b"later\n")


def test_a_disk_that_does_not_respond_delays_nobody_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tail, "WAITING_BYTES_MAX", 10)
    monkeypatch.setattr(log_tail, "ROOM_S_MAX", 0.01)
    responds = threading.Event()
    write = os.write

    def slow_disk(fd: int, data: bytes) -> int:
        responds.wait()
        return write(fd, data)

    monkeypatch.setattr(os, "write", slow_disk)
    complaints: list[str] = []
    tail = LogTail(str(tmp_path / "tail"), 1 << 20, complaints.append)
    writer = TailWriter()
    for number in range(5):
        writer.write(tail, b"line %04d\n" % number)
    assert complaints == ["the disk of the log directory does not respond"]
    assert not writer.flush(0)
    responds.set()
    assert writer.flush(PATIENCE_S)
    writer.write(tail, b"later\n")
    writer.write(tail, b"")
    writer.close(PATIENCE_S)
    # The disk had only begun to write the first line.
    assert (tmp_path / "tail").read_bytes() == b"line 0000\nlater\n"


def test_a_removed_folder_ends_the_tail_only(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    complaints: list[str] = []
    tail = LogTail(str(folder / "tail"), 24, complaints.append)
    (folder / "tail").unlink()
    folder.rmdir()
    for _ in range(3):
        tail.write(b"line 0000\n")
    tail.close()
    assert complaints == [f"{folder}/tail is no longer written: No such file or directory"]
