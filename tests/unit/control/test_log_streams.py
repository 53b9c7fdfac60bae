"""The output of workers as a stream: where it starts and ends, and its flow control."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import tempfile
from typing import TYPE_CHECKING

import pytest

from holdfast.control import discovery, log_streams
from holdfast.control.log_streams import LogStream
from holdfast.defaults import PROTOCOL_VERSION
from holdfast.net.runtime_dir import agent_sockets, socket_of
from holdfast.processes.logs.log_tail import LogTail
from holdfast.wire.messages import LogLines, LogsQuery
from in_loop import in_loop

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 20.0
ROOM = 1_000_000


class Reader:
    """Reads a stream; None is its end."""

    def __init__(self, query: LogsQuery) -> None:
        self.stream = LogStream(query, asyncio.get_running_loop())
        self.came: asyncio.Queue[LogLines | None] = asyncio.Queue()

    def begin(self, *paths: Path, generation: int = 0) -> int:
        files = [(rank, "stdout", str(path)) for rank, path in enumerate(paths)]
        count = self.stream.add(generation, files)
        self.stream.begin(self.came.put_nowait, lambda _why: self.came.put_nowait(None))
        return count

    async def next(self) -> LogLines | None:
        async with asyncio.timeout(LIMIT_S):
            return await self.came.get()

    async def text(self) -> bytes:
        lines = await self.next()
        return b"" if lines is None else lines.text

    async def all(self) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        while (lines := await self.next()) is not None:
            found[lines.rank] = found.get(lines.rank, b"") + lines.text
        return found


@pytest.mark.parametrize(
    ("tail", "found"),
    [(-1, b"1\n2\n3\n"), (2, b"2\n3\n"), (9, b"1\n2\n3\n"), (0, b"")],
)
@in_loop
async def test_a_stream_starts_with_the_tail_of_a_file(
    tmp_path: Path, tail: int, found: bytes
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"1\n2\n3\n")
    reader = Reader(LogsQuery(tail=tail, room=ROOM))
    reader.begin(path)
    assert (await reader.all()).get(0, b"") == found
    reader.stream.close()


@pytest.mark.parametrize("tail", [-1, 0, 1, 3, 4, 9])
@in_loop
async def test_a_stream_reads_both_files_of_a_tail(tmp_path: Path, tail: int) -> None:
    path = tmp_path / "a"
    older, newest = b"1\n2\n3\n", b"4\n5\n6\n"
    path.with_name("a.1").write_bytes(older)
    path.write_bytes(newest)
    reader = Reader(LogsQuery(tail=tail, room=ROOM))
    reader.begin(path)
    lines = (older + newest).splitlines(keepends=True)
    expected = lines if tail < 0 else lines[len(lines) - min(tail, len(lines)) :]
    assert (await reader.all()).get(0, b"") == b"".join(expected)
    reader.stream.close()


@in_loop
async def test_each_state_of_a_progress_bar_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"begin\r\n\r10%\r20%\r30%")
    reader = Reader(LogsQuery(follow=True, tail=3, room=ROOM))
    reader.begin(path)
    assert await reader.text() == b"\n10%\n20%\n"
    with path.open("ab") as bar:
        bar.write(b"\r")
        bar.flush()
        bar.write(b"\n")
    assert await reader.text() == b"30%\r\n"
    reader.stream.close()


@in_loop
async def test_a_following_stream_continues_in_the_next_file_of_a_tail(tmp_path: Path) -> None:
    path = tmp_path / "a"
    tail = LogTail(str(path), 64, pytest.fail)
    reader = Reader(LogsQuery(follow=True, tail=0, room=ROOM))
    reader.begin(path)
    for number in range(30):  # Two lines fill a file.
        tail.write(b"line number %02d\n" % number)
        assert await reader.text() == b"line number %02d\n" % number
    reader.stream.close()
    tail.close()


@in_loop
async def test_a_slow_reader_misses_only_what_a_tail_no_longer_has(tmp_path: Path) -> None:
    path = tmp_path / "a"
    tail = LogTail(str(path), 64, pytest.fail)
    tail.write(b"the first line\n")
    reader = Reader(LogsQuery(follow=True, room=0))
    reader.begin(path)
    lines = [b"line number %02d\n" % number for number in range(30)]
    tail.write(b"".join(lines))
    kept = path.with_name("a.1").read_bytes() + path.read_bytes()
    reader.stream.add_credit(ROOM)
    shown = b""
    while not shown.endswith(lines[-1]):
        shown += await reader.text()
    assert shown == b"the first line\n" + kept  # The reader had the first file open.
    reader.stream.close()
    tail.close()


@in_loop
async def test_a_stream_sends_only_the_chosen_ranks_and_lines(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_bytes(b"good\nbad\nworse, without an end")
    reader = Reader(LogsQuery(ranks=[1], grep="wors", room=ROOM))
    assert reader.begin(*paths) == 1
    assert await reader.all() == {1: b"worse, without an end"}
    reader.stream.close()


@in_loop
async def test_stream_sends_no_more_than_its_reader_can_buffer(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345\n" * 100)
    reader = Reader(LogsQuery(room=60))
    reader.begin(path)
    assert await reader.text() == b"12345\n" * 10
    for _ in range(3):
        await asyncio.sleep(0)
    assert reader.came.empty()
    reader.stream.add_credit(600)
    assert (await reader.all())[0] == b"12345\n" * 90
    reader.stream.close()


@in_loop
async def test_a_following_stream_continues_with_new_lines_and_the_next_generation(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"old\nhalf ")
    reader = Reader(LogsQuery(follow=True, room=ROOM))
    reader.begin(first)
    assert await reader.text() == b"old\n"
    with first.open("ab") as file:
        file.write(b"a line\nlast words")
    assert await reader.text() == b"half a line\n"
    second.write_bytes(b"new\n")
    reader.stream.add(1, [(0, "stdout", str(second))])
    with first.open("ab") as file:
        file.write(b"!")
    rest = [await reader.next(), await reader.next()]
    assert {(one.generation, one.text) for one in rest if one} >= {(1, b"new\n")}
    reader.stream.close()


@in_loop
async def test_next_generation_completes_and_closes_the_files_of_the_last(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"old\nlast words")
    second.write_bytes(b"new\n")
    reader = Reader(LogsQuery(follow=True, room=ROOM))
    reader.begin(first)
    assert await reader.text() == b"old\n"
    await asyncio.sleep(0)
    open_files = len(os.listdir("/proc/self/fd"))
    reader.stream.add(1, [(0, "stdout", str(second))])
    rest = [await reader.next(), await reader.next()]
    assert [(one.generation, one.text) for one in rest if one] == [
        (0, b"last words"),
        (1, b"new\n"),
    ]
    assert len(os.listdir("/proc/self/fd")) == open_files
    reader.stream.close()


@in_loop
async def test_a_closed_stream_opens_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1\n")
    reader = Reader(LogsQuery(follow=True, room=ROOM))
    reader.stream.close()
    before = os.listdir("/proc/self/fd")
    assert reader.begin(tmp_path / "a") == 0
    assert os.listdir("/proc/self/fd") == before


@in_loop
async def test_a_stream_reads_only_regular_files(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/etc/passwd")
    reader = Reader(LogsQuery(room=ROOM))
    assert reader.begin(link, tmp_path) == 0
    reader.stream.close()


def test_only_its_user_can_access_the_runtime_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path))
    assert agent_sockets() == []
    folder = tmp_path / f"holdfast-{os.geteuid()}"
    monkeypatch.setattr("holdfast.net.runtime_dir.PATH_BYTES_MAX", 4_096)
    assert socket_of(1).startswith(str(folder))
    assert folder.stat().st_mode & 0o777 == 0o700
    length = len(os.fsencode(socket_of(1)))
    monkeypatch.setattr("holdfast.net.runtime_dir.PATH_BYTES_MAX", length)
    socket_of(1)
    monkeypatch.setattr("holdfast.net.runtime_dir.PATH_BYTES_MAX", length - 1)
    with pytest.raises(OSError, match="too long"):
        socket_of(1)


def test_another_users_folder_of_this_name_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("holdfast.net.runtime_dir.PATH_BYTES_MAX", 4_096)
    name = f"holdfast-{os.geteuid()}"
    (tmp_path / name).mkdir(mode=0o770)
    (tmp_path / name).chmod(0o770)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"{name}-link").symlink_to(tmp_path / "elsewhere")
    path = socket_of(1)
    folder = os.path.dirname(path)
    assert os.path.basename(folder) not in (name, f"{name}-link")
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert os.path.dirname(socket_of(2)) == folder
    with open(path, "x"):
        pass
    (tmp_path / name / os.path.basename(path)).touch()
    assert agent_sockets() == [path]


@in_loop
async def test_an_agent_that_does_not_respond_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "LATE_S", 0.0)
    monkeypatch.setattr(discovery, "CONNECT_S", 0.1)
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as frozen:
        monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", folder)  # A socket's path must be short.
        frozen.bind(socket_of(4711))
        frozen.listen()
        late: list[str] = []
        assert await discovery.local_jobs(late.append) == []
        assert late == ["waiting for the agent with pid 4711 to respond"]


@in_loop
async def test_an_agent_of_another_version_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as other:
        monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", folder)
        with monkeypatch.context() as patch:
            patch.setattr("holdfast.net.runtime_dir.PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
            other.bind(socket_of(4711))
        other.listen()
        problems: list[str] = []
        assert await discovery.local_jobs(problems.append) == []
        (problem,) = problems
        assert problem == (
            f"the agent with pid 4711 speaks protocol version {PROTOCOL_VERSION + 1}, this command "
            f"{PROTOCOL_VERSION}: use the version of Holdfast that started the job"
        )


@pytest.mark.parametrize("shortage", ["instances", "watches"])
@in_loop
async def test_following_continues_without_inotify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shortage: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "no inotify left")

    if shortage == "instances":
        monkeypatch.setattr(log_streams, "Inotify", refuse)
    else:
        monkeypatch.setattr("holdfast.processes.logs.follower.Inotify.watch", refuse)
    monkeypatch.setattr(log_streams, "POLL_S", 0.01)
    path = tmp_path / "a"
    path.write_bytes(b"1\n")
    reader = Reader(LogsQuery(follow=True, room=ROOM))
    reader.begin(path)
    assert await reader.text() == b"1\n"
    for line in (b"2\n", b"3\n"):
        with path.open("ab") as file:
            file.write(line)
        assert await reader.text() == line
    reader.stream.close()
