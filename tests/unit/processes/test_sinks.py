from __future__ import annotations

import fcntl
import io
import os
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import EnvironmentProblem
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


def test_a_stream_that_fails_goes_quiet_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    sink = Sink(stream)
    stream.close()
    sink.write(b"", b"lost\n")
    sink.write(b"", b"lost\n")
    assert sink.quiet
    (warning,) = caplog.messages
    assert "no longer shown" in warning


def test_a_real_stream_is_written_through_its_descriptor(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file:
        file.write("buffered\n")
        Sink.of_stream(file).write(b"", b"\xffraw\n")
    assert (tmp_path / "file").read_bytes() == b"buffered\n\xffraw\n"


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


def test_threads_never_mix_their_lines(pipe: tuple[int, int]) -> None:
    """Each line is larger than the pipe, so its writer has to stop in the middle of it."""
    read, write = pipe
    fcntl.fcntl(write, 1031, 4096)
    lines = [letter * 20_000 + b"\n" for letter in (b"a", b"b", b"c")]

    def write_many(line: bytes) -> None:
        sink = Sink(write)
        for _ in range(20):
            sink.write(bytearray(line[:5000]), line[5000:])

    threads = [threading.Thread(target=write_many, args=(line,)) for line in lines]
    for thread in threads:
        thread.start()
    shown = bytearray()
    while len(shown) < 60 * len(lines[0]):
        shown += os.read(read, 1 << 16)
    for thread in threads:
        thread.join()
    assert sorted(shown.splitlines(keepends=True)) == sorted(lines * 20)


def test_a_file_sink_appends_and_closes_what_it_opened(tmp_path: Path) -> None:
    path = tmp_path / "filtered.log"
    path.write_bytes(b"old\n")
    sink = Sink.to_file(str(path))
    fd = sink._fd
    assert not os.get_inheritable(fd)
    sink.write(b"", b"new\n")
    sink.close()
    sink.close()
    sink.write(b"", b"after\n")
    assert path.read_bytes() == b"old\nnew\n"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_closing_leaves_a_descriptor_that_was_passed_in(pipe: tuple[int, int]) -> None:
    sink = Sink(pipe[1])
    sink.close()
    os.write(pipe[1], b"still open")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "missing" / "file")
    with pytest.raises(EnvironmentProblem, match=path):
        Sink.to_file(path)
