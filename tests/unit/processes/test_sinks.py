from __future__ import annotations

import fcntl
import io
import os
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from holdfast.processes.logs.lines import PIPE_PIECE_BYTES_MAX, Sink

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    for fd in (read, write):
        try:
            os.close(fd)
        except OSError:
            continue  # The test closed it.


def read_all(fd: int, into: list[bytes]) -> None:
    while data := os.read(fd, 1000):
        into.append(data)


def test_head_and_part_of_the_body_are_written(pipe: tuple[int, int], tmp_path: Path) -> None:
    read, write = pipe
    with open(tmp_path / "file", "wb") as file:
        for sink in (Sink(write), Sink(file.fileno())):
            sink.write(bytearray(b"head "), b"body\nmore\nnot this", 10)
            sink.write(b"", b"whole\n")
            sink.write(b"only head\n")
            assert sink.bytes_written == 31
    expected = b"head body\nmore\nwhole\nonly head\n"
    assert os.read(read, 100) == expected
    assert (tmp_path / "file").read_bytes() == expected


def test_a_non_blocking_destination_that_is_full_is_waited_for() -> None:
    body = b"".join(b"%06d\n" % number for number in range(100_000))
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    fcntl.fcntl(write, 1031, 4096)
    try:
        for reading, writing in ((theirs.fileno(), ours.fileno()), (read, write)):
            os.set_blocking(writing, False)
            got: list[bytes] = []
            reader = threading.Thread(target=read_all, args=(reading, got))
            reader.start()
            Sink(writing).write(bytearray(b"head\n"), body)
            if writing == write:
                os.close(write)
            else:
                ours.shutdown(socket.SHUT_WR)
            reader.join()
            assert b"".join(got) == b"head\n" + body
    finally:
        ours.close()
        theirs.close()
        os.close(read)


def test_a_pipe_gets_whole_lines_in_pieces_the_kernel_keeps_together() -> None:
    """A pipe in packet mode shows where one write ended and the next began."""
    read, write = os.pipe2(os.O_DIRECT)
    try:
        sink = Sink(write)
        lines = [b"%04d " % number + b"x" * (number % 300) + b"\n" for number in range(200)]
        sink.write(bytearray(b"0000 "), b"".join(lines)[5:])
        lengths = []
        rest = b"".join(lines)
        while rest:
            piece = os.read(read, 1 << 16)
            assert rest.startswith(piece)
            assert piece.endswith(b"\n")
            rest = rest[len(piece) :]
            lengths.append(len(piece))
        assert max(lengths) <= PIPE_PIECE_BYTES_MAX
        assert len(lengths) < len(lines) / 5
    finally:
        os.close(read)
        os.close(write)


def test_a_line_longer_than_a_piece_is_written_too(pipe: tuple[int, int]) -> None:
    read, write = pipe
    data = b"short\n" + b"y" * 3 * PIPE_PIECE_BYTES_MAX + b"\nshort\n" + b"z" * 5000 + b"\n"
    Sink(write).write(b"", data)
    assert os.read(read, 1 << 16) == data


def test_a_sink_nobody_reads_goes_quiet(pipe: tuple[int, int]) -> None:
    read, write = pipe
    os.close(read)
    sink = Sink(write)
    sink.write(b"", b"lost\n")
    assert sink.quiet
    sink.write(b"", b"lost\n")
    assert sink.bytes_written == 0


def test_a_closed_or_missing_console_is_quiet_from_the_start(pipe: tuple[int, int]) -> None:
    os.close(pipe[1])
    for sink in (Sink(pipe[1]), Sink(None), Sink.of_stream(None)):
        assert sink.quiet
        sink.write(b"", b"lost\n")


def test_a_full_disk_is_told_of_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        sink = Sink(full.fileno())
        sink.write(b"", b"lost\n")
        sink.write(b"", b"lost\n")
        assert not sink.quiet
    (warning,) = caplog.messages
    assert "log lines are being lost" in warning


def test_a_stream_without_descriptor_gets_text_and_is_flushed() -> None:
    class Notebook(io.StringIO):
        flushes = 0

        def fileno(self) -> int:
            return 1

        def flush(self) -> None:
            self.flushes += 1

    stream = Notebook()
    sink = Sink.of_stream(stream)
    sink.write(bytearray(b"caf\xc3"), b"\xa9\n\xff\nnot this", 4)
    assert stream.getvalue() == "caf\u00e9\n\ufffd\n"
    assert stream.flushes == 1


def test_a_stream_of_a_narrow_encoding_gets_question_marks() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Sink.of_stream(stream).write(b"", "caf\u00e9\n".encode())
    assert raw.getvalue() == b"caf?\n"


def test_sinks_of_one_terminal_share_a_lock_and_others_do_not(pipe: tuple[int, int]) -> None:
    master, terminal = os.openpty()
    again = os.open(os.ttyname(terminal), os.O_WRONLY | os.O_NOCTTY)
    try:
        out, err, other = Sink(terminal), Sink(again), Sink(pipe[1])
        assert out._lock is err._lock
        assert other._lock is not out._lock
    finally:
        for fd in (master, terminal, again):
            os.close(fd)
