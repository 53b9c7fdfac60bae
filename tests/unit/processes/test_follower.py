from __future__ import annotations

import errno
import fcntl
import os
import re
import select
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import EnvironmentProblem
from holdfast.processes.logs import follower as following
from holdfast.processes.logs.follower import OVERFLOW, Inotify, LogFollower, Sink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LINES = 20_000

# Writes numbered lines of many lengths in pieces that end anywhere, and flushes each piece.
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


def open_fds() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # The descriptor of the listing itself.
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    fds, threads = open_fds(), set(threading.enumerate())
    yield
    assert open_fds() == fds
    assert set(threading.enumerate()) == threads


@pytest.fixture
def follower() -> Iterator[LogFollower]:
    made = LogFollower()
    yield made
    made.close()


class Console:
    """A pipe to show lines on, and what was read from it so far."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self.sink = Sink(self.write_fd)

    def next_line(self) -> bytes:
        """Wait for a line: the barrier that tells that the follower has come this far."""
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(self.read_fd, 1)
        return line

    def rest(self) -> bytes:
        """Read to the end, after the follower is done with the sink."""
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
    """Wait for as long as it takes; the test's own time limit is the only one."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.001)


def noisy(name: str, fd: int, count: int = LINES) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-S", "-c", NOISY, name, str(count), str(fd)]
    return subprocess.Popen(command, pass_fds=[fd])


def assert_complete(shown: bytes, names: list[str], count: int = LINES) -> None:
    """Every line whole, with the prefix of its own stream, and in order."""
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


def test_a_reader_slower_than_the_writers_gets_every_line(
    follower: LogFollower, console: Console, tmp_path: Path
) -> None:
    """The console holds one page and is non-blocking, as some terminals are left by others."""
    fcntl.fcntl(console.write_fd, 1031, 4096)
    os.set_blocking(console.write_fd, False)
    writers = []
    for name in ("a", "b"):
        path = str(tmp_path / name)
        follower.follow_file(path, prefix=b"[%s]:" % name.encode(), to=console.sink)
        fd = os.open(path, os.O_WRONLY)
        writers.append(noisy(name, fd))
        os.close(fd)
    follower.start()
    for writer in writers:
        assert writer.wait() == 0

    def close_when_drained() -> None:
        follower.close(drain_s_max=60)
        os.close(console.write_fd)
        console.write_fd = -1

    closer = threading.Thread(target=close_when_drained)
    closer.start()
    shown = bytearray()
    while piece := os.read(console.read_fd, 700):
        shown += piece
    closer.join()
    assert_complete(bytes(shown), ["a", "b"])


def test_a_pipe_is_closed_as_soon_as_its_last_writer_is_gone(
    follower: LogFollower, console: Console
) -> None:
    read, write = os.pipe()
    stream = follower.follow_fd(read, prefix=b"p:", to=console.sink)
    follower.start()
    os.write(write, b"last words")
    os.close(write)
    assert stream.wait(60)
    assert stream.fd == -1
    assert read not in open_fds()
    assert console.next_line() == b"p:last words\n"
    assert follower.finish(stream)


def test_a_closed_console_does_not_stop_the_following(
    follower: LogFollower, console: Console, tmp_path: Path
) -> None:
    kept = Sink.to_file(str(tmp_path / "kept"))
    os.close(console.read_fd)
    console.read_fd = -1
    append(tmp_path / "log", b"one\n")
    stream = follower.follow_file(
        str(tmp_path / "log"), to=console.sink, filters=[b""], filtered_to=kept
    )
    follower.start()
    wait_until(lambda: console.sink.quiet)
    append(tmp_path / "log", b"two\n")
    assert follower.finish(stream)
    kept.close()
    assert (tmp_path / "kept").read_bytes() == b"one\ntwo\n"


class WatchedEpoll:
    """The real epoll, which tells when the follower is about to sleep with nothing to do."""

    sleeps: threading.Semaphore
    timeouts: list[float | None]

    def __init__(self) -> None:
        self._real = RealEpoll()

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        if events := self._real.poll(0):
            return events
        self.timeouts.append(timeout)
        self.sleeps.release()
        return self._real.poll(timeout)

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


RealEpoll = select.epoll


def test_an_idle_follower_sleeps_until_something_is_written(
    console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WatchedEpoll, "sleeps", threading.Semaphore(0), raising=False)
    monkeypatch.setattr(WatchedEpoll, "timeouts", [], raising=False)
    monkeypatch.setattr(select, "epoll", WatchedEpoll)
    follower = LogFollower()
    append(tmp_path / "log", b"")
    follower.follow_file(str(tmp_path / "log"), to=console.sink)
    read, write = os.pipe()
    follower.follow_fd(read, to=console.sink)
    follower.start()
    with open(tmp_path / "log", "ab", buffering=0) as file:
        WatchedEpoll.sleeps.acquire()
        for number in range(5):
            before = follower.wakeups
            if number % 2:
                os.write(write, b"line\n")
            else:
                file.write(b"line\n")
            assert console.next_line() == b"line\n"
            WatchedEpoll.sleeps.acquire()
            assert follower.wakeups == before + 1
    assert WatchedEpoll.timeouts == [None] * 6
    os.close(write)
    follower.close()


def test_all_streams_share_one_thread(follower: LogFollower, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    for number in range(20):
        follower.follow_file(str(tmp_path / str(number)), to=None)
    follower.start()
    follower.start()
    (thread,) = set(threading.enumerate()) - before
    assert (thread.name, thread.daemon) == ("holdfast-logs", True)


def test_finishing_works_in_any_order_and_any_number_of_times(
    console: Console, tmp_path: Path
) -> None:
    follower = LogFollower()
    streams = []
    for name in ("a", "b", "c"):
        append(tmp_path / name, name.encode())
        streams.append(follower.follow_file(str(tmp_path / name), to=console.sink))
    assert follower.finish(streams[1])
    assert [stream.finished for stream in streams] == [False, True, False]
    assert follower.finish(streams[1])
    follower.start()
    assert follower.finish_all()
    assert follower.finish_all()
    assert all(stream.finished for stream in streams)
    append(tmp_path / "d", b"d")
    last = follower.follow_file(str(tmp_path / "d"), to=console.sink)
    follower.close()
    assert last.finished
    follower.close()
    assert follower.finish(last)
    assert follower.finish_all()
    follower.start()
    shown = console.rest()
    assert shown.startswith(b"b\n")
    assert sorted(shown.splitlines()) == [b"a", b"b", b"c", b"d"]


def test_a_follower_may_be_closed_without_ever_starting() -> None:
    before = set(threading.enumerate())
    LogFollower().close()
    assert set(threading.enumerate()) == before


def test_a_stuck_console_does_not_hold_up_the_end_and_loses_nothing(
    console: Console, tmp_path: Path
) -> None:
    lines = [b"%06d\n" % number for number in range(50_000)]
    append(tmp_path / "log", b"".join(lines))
    follower = LogFollower(drain_s_max=0.01)
    stream = follower.follow_file(str(tmp_path / "log"), to=console.sink)
    assert not follower.finish(stream, drain_s_max=0)
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
def test_without_inotify_files_are_read_at_an_interval_and_that_is_said_once(
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


def test_a_lost_notice_queue_makes_every_file_be_read(
    console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Inotify.changed
    monkeypatch.setattr(Inotify, "changed", lambda self: {OVERFLOW} if take(self) else set())
    follower = LogFollower()
    for name in ("a", "b"):
        follower.follow_file(str(tmp_path / name), to=console.sink)
    follower.start()
    append(tmp_path / "b", b"found\n")
    assert console.next_line() == b"found\n"
    follower.close()


def test_what_cannot_be_waited_for_is_refused_and_closed(
    follower: LogFollower, tmp_path: Path
) -> None:
    append(tmp_path / "file", b"")
    with pytest.raises(EnvironmentProblem, match="cannot follow fd"):
        follower.follow_fd(os.open(tmp_path / "file", os.O_RDONLY), to=None)


def test_a_stream_that_cannot_be_read_is_told_of_and_ended(
    follower: LogFollower, caplog: pytest.LogCaptureFixture
) -> None:
    """The write end of a pipe can be waited for, but not read."""
    read, write = os.pipe()
    stream = follower.follow_fd(write, to=None)
    follower.start()
    os.close(read)
    assert stream.wait(60)
    (warning,) = caplog.messages
    assert "cannot read fd" in warning


def test_a_noisy_stream_does_not_starve_a_quiet_one(
    follower: LogFollower, console: Console, tmp_path: Path
) -> None:
    """The quiet file comes last, and is shown long before the large one is at its end."""
    (tmp_path / "noisy").write_bytes(b"")
    os.truncate(tmp_path / "noisy", 256 << 20)
    append(tmp_path / "quiet", b"here\n")
    large = follower.follow_file(str(tmp_path / "noisy"), to=Sink(None))
    read_when_seen: list[int] = []

    class Seen:
        def write(self, text: str, /) -> object:
            read_when_seen.append(large.bytes_read)
            return None

        def flush(self) -> object:
            return None

    follower.follow_file(str(tmp_path / "quiet"), to=Sink(Seen()))
    follower.close()
    assert read_when_seen[0] < 16 << 20
    assert large.bytes_read == 256 << 20
