from __future__ import annotations

import errno
import io
import os
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from holdfast.processes.logs import follower as following
from holdfast.processes.logs.follower import (
    CHUNK_BYTES,
    OVERFLOW,
    FileStream,
    Inotify,
    LogFollower,
    PipeStream,
    Sink,
)
from holdfast.processes.logs.lines import PrefixedLines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def stream_of(path: Path, sink: Sink) -> FileStream:
    fd = os.open(path, os.O_RDONLY)
    return FileStream(str(path), fd, PrefixedLines(b"p:", sink), (sink,))


def test_a_truncated_file_is_read_from_its_start(tmp_path: Path) -> None:
    path, out = tmp_path / "file", io.StringIO(newline="")
    path.write_bytes(b"one\ntwo")
    stream = stream_of(path, Sink(out))
    assert not stream.take_turn()
    path.write_bytes(b"new\n")
    assert not stream.take_turn()
    assert out.getvalue() == "p:one\np:two\np:new\n"
    stream.end()


def test_finish_stops_at_the_end_of_the_file_at_that_time(tmp_path: Path) -> None:
    path, line = tmp_path / "file", b"x" * 99 + b"\n"
    path.write_bytes(line * (CHUNK_BYTES // 100 + 1))
    stream = stream_of(path, Sink(io.StringIO(newline="")))
    stream.begin_finish()
    append(path, line * (5 * CHUNK_BYTES // 100))
    with pytest.raises(EOFError):
        stream.take_turn()
    assert CHUNK_BYTES < stream.bytes_read <= 2 * CHUNK_BYTES
    stream.end()


def test_finish_reads_a_limited_part_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that never stops writing must not delay the end of the job."""
    monkeypatch.setattr(following, "CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr(following, "HELD_BYTES_MAX", 1 << 12)
    source, out = os.pipe()
    sink = Sink(io.StringIO(newline=""))
    stream = PipeStream("pipe", source, PrefixedLines(b"", sink), (sink,), tail_bytes_max=0)
    os.write(out, b"x" * (1 << 14))
    stream.begin_finish()
    with pytest.raises(EOFError):
        stream.take_turn()
    assert stream.bytes_read == 1 << 12
    stream.end()
    os.close(out)


LINES = 20_000

# Writes numbered lines of many lengths, in pieces that need not end at a line end; flushes each piece.
NOISY = """
import os, random, sys
name, count, fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
choose = random.Random(name)
lines = [f"{name} {number} {'.' * choose.randrange(120)}\\n" for number in range(count)]
data = "".join(lines).encode()
at = 0
while at < len(data):
    at += os.write(fd, data[at : at + choose.choice([1, 7, 50, 4096, 9000])])
"""


@pytest.fixture
def follower() -> Iterator[LogFollower]:
    made = LogFollower()
    yield made
    made.close()


class Console:
    """A pipe that shows lines, and the text that was read from it so far."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self.sink = Sink(self.write_fd)

    def next_line(self) -> bytes:
        """Wait for a line, which shows that the follower has reached it."""
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(self.read_fd, 1)
        return line

    def rest(self) -> bytes:
        """Read to the end, after the follower has finished with the sink."""
        os.close(self.write_fd)
        self.write_fd = -1
        data = b""
        while piece := os.read(self.read_fd, 1 << 16):
            data += piece
        return data

    def close(self) -> None:
        for fd in (self.read_fd, self.write_fd):
            if fd >= 0:
                os.close(fd)


@pytest.fixture
def console() -> Iterator[Console]:
    made = Console()
    yield made
    made.close()


def append(path: Path, data: bytes) -> None:
    with open(path, "ab", buffering=0) as file:
        file.write(data)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, limited only by the test's own timeout."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.001)


def noisy(name: str, fd: int, count: int = LINES) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-S", "-c", NOISY, name, str(count), str(fd)]
    return subprocess.Popen(command, pass_fds=[fd])


def assert_complete(shown: bytes, names: list[str], count: int = LINES) -> None:
    """Check that every line is whole, has the prefix of its stream, and is in order."""
    numbers: dict[bytes, list[int]] = {name.encode(): [] for name in names}
    assert shown.endswith(b"\n")
    for line in shown[:-1].split(b"\n"):
        match = re.fullmatch(rb"\[(\w+)\]:(\w+) (\d+) \.*", line)
        assert match is not None, line
        assert match[1] == match[2]
        numbers[match[1]].append(int(match[3]))
    for name in names:
        assert numbers[name.encode()] == list(range(count))


@pytest.mark.parametrize("source", ["files", "pipes", "terminals"])
def test_two_noisy_writers_lose_no_line_and_never_mix(
    follower: LogFollower, tmp_path: Path, source: str
) -> None:
    shown = tmp_path / "shown"
    sink = Sink.to_file(str(shown))
    follower.start()
    writers = []
    for name in ("a", "b"):
        prefix = b"[%s]:" % name.encode()
        if source == "files":
            path = str(tmp_path / name)
            follower.follow_file(path, prefix=prefix, to=sink)
            write = os.open(path, os.O_WRONLY | os.O_TRUNC)
        else:
            read, write = os.pipe() if source == "pipes" else raw_terminal()
            follower.follow_fd(read, prefix=prefix, to=sink)
        writers.append(noisy(name, write))
        os.close(write)
    for writer in writers:
        assert writer.wait() == 0
    assert follower.finish_all()
    sink.close()
    assert_complete(shown.read_bytes(), ["a", "b"])


def raw_terminal() -> tuple[int, int]:
    import tty

    master, terminal = os.openpty()
    tty.setraw(terminal)
    return master, terminal


def test_stuck_console_does_not_block_the_end(console: Console, tmp_path: Path) -> None:
    lines = [b"%06d\n" % number for number in range(50_000)]
    append(tmp_path / "log", b"".join(lines))
    follower = LogFollower(drain_s_max=0.01)
    stream = follower.follow_file(str(tmp_path / "log"), to=console.sink)
    assert not follower.finish(stream)
    wait_until(lambda: not follower.finish(stream))
    follower.close()
    assert not stream.finished
    shown = b""
    while len(shown) < len(b"".join(lines)):
        shown += os.read(console.read_fd, 1 << 16)
    assert shown == b"".join(lines)
    follower.close(drain_s_max=60)
    assert stream.finished


@pytest.mark.parametrize("refused", ["instance", "watch"])
def test_without_inotify_files_are_polled_with_one_warning(
    console: Console,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refused: str,
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    if refused == "instance":
        monkeypatch.setattr(following, "Inotify", refuse)
    else:
        monkeypatch.setattr(Inotify, "watch", refuse)
    follower = LogFollower()
    for name in ("a", "b"):
        follower.follow_file(str(tmp_path / name), prefix=b"p:", to=console.sink)
    follower.start()
    append(tmp_path / "a", b"one\n")
    assert console.next_line() == b"p:one\n"
    append(tmp_path / "b", b"two\n")
    assert console.next_line() == b"p:two\n"
    follower.close()
    (warning,) = caplog.messages
    assert "are read every 0.1 s" in warning


def test_inotify_overflow_reads_every_file(
    console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Inotify.changed
    monkeypatch.setattr(Inotify, "changed", lambda self: {OVERFLOW} if take(self) else set())
    follower = LogFollower()
    for name in ("a", "b"):
        append(tmp_path / name, b"visited\n")
        follower.follow_file(str(tmp_path / name), to=console.sink)
    follower.start()
    assert [console.next_line(), console.next_line()] == [b"visited\n"] * 2
    append(tmp_path / "b", b"found\n")
    assert console.next_line() == b"found\n"
    follower.close()
