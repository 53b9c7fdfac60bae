from __future__ import annotations

import io
import os
import threading
from typing import TYPE_CHECKING

import pytest

from holdfast.processes.logs.follower import (
    CHUNK_BYTES,
    HELD_BYTES_MAX,
    TURN_BYTES_MAX,
    FileStream,
    PipeStream,
    Stream,
)
from holdfast.processes.logs.lines import PrefixedLines, Sink

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Followed:
    """Streams whose lines end up in one text, all ended and closed after the test."""

    def __init__(self) -> None:
        self.out = io.StringIO(newline="")
        self.sink = Sink(self.out)
        self.streams: list[Stream] = []

    def file(self, path: Path) -> FileStream:
        fd = os.open(path, os.O_RDONLY)
        stream = FileStream(str(path), fd, PrefixedLines(b"p:", self.sink), (self.sink,))
        self.streams.append(stream)
        return stream

    def pipe(self, fd: int, tail_bytes_max: int = 100) -> PipeStream:
        lines = PrefixedLines(b"p:", self.sink)
        stream = PipeStream("pipe", fd, lines, (self.sink,), tail_bytes_max=tail_bytes_max)
        self.streams.append(stream)
        return stream


@pytest.fixture
def followed() -> Iterator[Followed]:
    streams = Followed()
    yield streams
    for stream in streams.streams:
        fd = stream.fd
        stream.end()
        stream.end()
        assert (stream.fd, stream.finished) == (-1, True)
        if fd >= 0:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)


def test_a_turn_is_bounded_and_says_that_more_is_there(followed: Followed, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 99 + b"\n")
    os.truncate(tmp_path / "file", TURN_BYTES_MAX + CHUNK_BYTES + 10)
    stream = followed.file(tmp_path / "file")
    assert stream.take_turn()
    assert stream.bytes_read == TURN_BYTES_MAX
    assert not stream.take_turn()
    assert stream.bytes_read == TURN_BYTES_MAX + CHUNK_BYTES + 10


def test_a_truncated_file_is_read_from_its_start(followed: Followed, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo")
    stream = followed.file(path)
    assert not stream.take_turn()
    path.write_bytes(b"new\n")
    assert not stream.take_turn()
    assert followed.out.getvalue() == "p:one\np:two\np:new\n"


def test_finishing_a_file_stops_where_it_ended_at_that_time(
    followed: Followed, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    line = b"x" * 99 + b"\n"
    path.write_bytes(line * (CHUNK_BYTES // 100 + 1))
    stream = followed.file(path)
    stream.begin_finish()
    with open(path, "ab") as file:
        file.write(line * (5 * CHUNK_BYTES // 100))
    with pytest.raises(EOFError):
        stream.take_turn()
    assert CHUNK_BYTES < stream.bytes_read <= 2 * CHUNK_BYTES


def test_a_pipe_gives_what_is_there_and_ends_with_its_writers(followed: Followed) -> None:
    read, write = os.pipe()
    stream = followed.pipe(read)
    assert not stream.take_turn()
    os.write(write, b"one\ntwo")
    assert not stream.take_turn()
    os.close(write)
    with pytest.raises(EOFError):
        stream.take_turn()
    stream.end()
    assert followed.out.getvalue() == "p:one\np:two\n"


def test_finishing_a_pipe_that_is_still_open_takes_what_is_in_it(followed: Followed) -> None:
    read, write = os.pipe()
    try:
        stream = followed.pipe(read)
        os.write(write, b"one\n")
        stream.begin_finish()
        with pytest.raises(EOFError):
            stream.take_turn()
        assert followed.out.getvalue() == "p:one\n"
    finally:
        os.close(write)


def test_finishing_a_pipe_that_never_runs_empty_comes_to_an_end(followed: Followed) -> None:
    stream = followed.pipe(os.open("/dev/zero", os.O_RDONLY))
    stream.begin_finish()
    with pytest.raises(EOFError):
        stream.take_turn()
    assert stream.bytes_read == HELD_BYTES_MAX


def test_tail_of_a_pipe_is_its_last_bytes(followed: Followed) -> None:
    read, write = os.pipe()
    try:
        stream = followed.pipe(read, tail_bytes_max=100)
        assert stream.tail() == b""
        written = b""
        for number in range(60):
            data = b"%d" % number * (number + 1)
            written += data
            os.write(write, data)
            stream.take_turn()
            assert stream.tail() == written[-100:]
            assert len(stream._ring) <= 300
        assert stream.tail(7) == written[-7:]
        assert stream.tail(0) == b""
    finally:
        os.close(write)


def test_a_terminal_ends_when_its_last_user_is_gone(followed: Followed) -> None:
    master, terminal = os.openpty()
    stream = followed.pipe(master)
    os.write(terminal, b"hello\n")
    os.close(terminal)
    assert not stream.take_turn()
    with pytest.raises(EOFError):
        stream.take_turn()
    assert followed.out.getvalue() == "p:hello\r\n"
    assert stream.tail() == b"hello\r\n"


def test_what_is_still_in_a_pipe_can_be_waited_for(followed: Followed) -> None:
    read, write = os.pipe()
    stream = followed.pipe(read)
    assert stream.catch_up(0)
    os.write(write, b"last words\n")
    assert not stream.catch_up(0)
    reading = threading.Timer(0.05, stream.take_turn)
    reading.start()
    assert stream.catch_up(60)
    assert stream.tail() == b"last words\n"
    reading.join()
    os.write(write, b"never read\n")
    os.close(write)
    stream.end()
    assert stream.catch_up(0)
