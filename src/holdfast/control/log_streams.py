"""The log files of one node's workers as a stream: the tail of each, then what workers append.

A file is one that a worker writes itself, or a tail (`processes.logs.log_tail`), which continues in another
file when it is full. A reader that is much slower than the worker misses the part of a tail that was
replaced meanwhile.

One stream serves one query. It sends no more than its reader has room for and continues when the
reader grants more. Inotify wakes it; if the kernel has no inotify instance or watch left, the stream
checks its files every `POLL_S` instead. The agent provides the paths: a client cannot name one.
"""

from __future__ import annotations

import os
import re
import stat
import time
from typing import TYPE_CHECKING

from holdfast.processes.logs import log_tail
from holdfast.processes.logs.follower import Inotify
from holdfast.wire.messages import CHUNK_BYTES, LogLines

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from holdfast.wire.messages import LogsQuery

TURN_BYTES = 1024 * 1024
"""The bytes that a stream reads in one turn, before other streams get theirs."""
FILES_MAX = 1_024
TAIL_BLOCK_BYTES = 64 * 1024
POLL_S = 1.0  # If inotify is not available.
BREAK = re.compile(rb"\r\n|\r|\n")
RETURN = re.compile(rb"\r(?!\n)")
"""A carriage return that is not part of a line break. It also ends a line, so that progress bars are visible."""


class LogFile:
    """One stream of a worker on disk, and how far it was read."""

    __slots__ = (
        "at",
        "fd",
        "generation",
        "has_moved",
        "is_ready",
        "path",
        "rank",
        "stream",
        "watch",
    )

    def __init__(self, path: str, rank: int, stream: str, generation: int) -> None:
        self.fd = open_file(path)
        self.path, self.rank, self.stream, self.generation = path, rank, stream, generation
        self.at = 0
        self.watch = -1
        self.is_ready = True
        self.has_moved = False
        """Whether `fd` is another file now, which is not watched yet."""

    def skip_to_start(self) -> None:
        """Start at the older file of a tail, if there is one."""
        self._use(log_tail.older_file(self.path))

    def skip_to_tail(self, lines: int) -> None:
        """Start this many lines before the end."""
        end = os.fstat(self.fd).st_size
        # One more, because the last line ends with a line break too.
        missing, self.at = lines_back(self.fd, lines + 1)
        if not lines:
            self.at = end
        elif missing:
            self.skip_to_start()
            if self.has_moved:
                self.at = lines_back(self.fd, missing)[1]

    def read(self, room: int, *, is_over: bool) -> bytes:
        """Return whole lines, with line breaks for carriage returns, and the unfinished last line of a complete file."""
        if os.fstat(self.fd).st_size < self.at:
            self.at = 0  # The file was truncated.
        data = os.pread(self.fd, room, self.at)
        end = end_of_lines(data)
        if not end and len(data) < room:
            following = log_tail.next_file(self.path, self.fd)
            if following:  # This file is complete, perhaps only since it was read.
                data = os.pread(self.fd, room, self.at)
                end = end_of_lines(data)
                if not data:
                    return self.read(room, is_over=is_over) if self._use(following) else b""
            is_over = is_over or bool(following)
        if not end and (len(data) == room or is_over):
            end = len(data)  # A line longer than the room, or without an end.
        self.at += end
        return RETURN.sub(b"\n", data[:end])

    def _use(self, path: str) -> bool:
        """Continue at the start of this file, if it exists."""
        try:
            fd = open_file(path)
        except OSError:
            return False
        os.close(self.fd)
        self.fd, self.at, self.has_moved = fd, 0, True
        return True


def open_file(path: str) -> int:
    """Open a regular file to read it, or raise `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a file")
    return fd


def end_of_lines(data: bytes) -> int:
    """Return the end of the last whole line; 0 if there is none.

    A carriage return at the end does not count yet, because it may be half of a line break.
    """
    return max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1


def lines_back(fd: int, breaks: int) -> tuple[int, int]:
    """Return the position after the line break that is the given number of them from the end of a file.

    If the file has fewer, the position is 0. First in the result is the number of missing ones.
    """
    at = os.fstat(fd).st_size
    while at > 0:
        size = min(TAIL_BLOCK_BYTES, at)
        ends = [found.end() for found in BREAK.finditer(os.pread(fd, size, at - size))]
        if len(ends) >= breaks:
            return 0, at - size + ends[-breaks]
        breaks -= len(ends)
        at -= size
    return breaks, 0


class LogStream:
    """The log stream of one query; belongs to a loop."""

    def __init__(self, wanted: LogsQuery, loop: asyncio.AbstractEventLoop) -> None:
        self.follows = wanted.follow
        self._wanted = wanted
        self._loop = loop
        self._credit = wanted.room
        self._grep = wanted.grep.encode(errors="surrogateescape")
        self._files: list[LogFile] = []
        self._inotify: Inotify | None = None
        self._turn: asyncio.Handle | None = None
        self._polling: asyncio.TimerHandle | None = None
        self._send: Callable[[LogLines], None] | None = None
        self._end: Callable[[str], None] | None = None
        self._generation = -1
        self._is_closed = False

    def add(self, generation: int, files: list[tuple[int, str, str]]) -> int:
        """Add these files; return how many files the wanted ranks have now."""
        if self._is_closed:
            return 0  # The client disconnected meanwhile.
        if generation != self._generation:
            is_first = self._generation < 0
            self._generation = generation
            for one in self._files:
                one.is_ready = True  # Its unfinished last line is complete now.
            for rank, stream, path in files:
                if self._wanted.ranks and rank not in self._wanted.ranks:
                    continue
                if len(self._files) >= FILES_MAX:
                    break
                try:
                    one = LogFile(path, rank, stream, generation)
                except OSError:
                    continue  # It was removed.
                self._files.append(one)
                try:
                    if is_first and self._wanted.tail >= 0:
                        one.skip_to_tail(self._wanted.tail)
                    else:
                        one.skip_to_start()
                except OSError:
                    continue  # Reading it reports the error.
                if self.follows:
                    self._observe(one)
            self._schedule_turn()
        return len(self._files)

    def begin(self, send: Callable[[LogLines], None], end: Callable[[str], None]) -> None:
        if not self._is_closed:
            self._send, self._end = send, end
            self._schedule_turn()

    def add_credit(self, size: int) -> None:
        """Send up to `size` more bytes."""
        self._credit += size
        self._schedule_turn()

    def close(self) -> None:
        self._is_closed = True
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        if self._polling is not None:
            self._polling.cancel()
            self._polling = None
        if self._inotify is not None:
            self._loop.remove_reader(self._inotify.fd)
            self._inotify.close()
            self._inotify = None
        for one in self._files:
            os.close(one.fd)
        self._files = []
        self._send = self._end = None

    def _observe(self, one: LogFile) -> None:
        one.has_moved = False
        try:
            if self._inotify is None:
                self._inotify = Inotify()
                self._loop.add_reader(self._inotify.fd, self._changed)
            one.watch = self._inotify.watch(f"/proc/self/fd/{one.fd}")
        except OSError:  # The kernel has no instance or no watch left.
            one.watch = -1
            if self._polling is None:
                self._polling = self._loop.call_later(POLL_S, self._poll)

    def _poll(self) -> None:
        """Check the files that inotify does not watch."""
        unwatched = [one for one in self._files if one.watch < 0]
        for one in unwatched:
            one.is_ready = True
        self._polling = self._loop.call_later(POLL_S, self._poll) if unwatched else None
        self._schedule_turn()

    def _changed(self) -> None:
        if self._inotify is None:
            return
        changed = self._inotify.changed()
        for one in self._files:
            one.is_ready = one.is_ready or one.watch in changed or -1 in changed
        self._schedule_turn()

    def _schedule_turn(self) -> None:
        if self._turn is None and self._send is not None:
            self._turn = self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._turn = None
        budget = TURN_BYTES
        for one in [*self._files]:
            while one.is_ready and self._credit > 0 and budget > 0 and self._send is not None:
                is_over = one.generation != self._generation or not self.follows
                room = min(CHUNK_BYTES, self._credit, budget)
                try:
                    data = one.read(room, is_over=is_over)
                except OSError as problem:
                    self._forget(one)
                    if self._end is not None and not self._files:
                        self._end(f"cannot read: {problem.strerror}")
                    break
                if one.has_moved and self.follows:
                    self._unobserve(one)
                    self._observe(one)
                    if not data:
                        continue  # The worker may have written before the file was watched.
                if not data:
                    one.is_ready = False
                    if is_over and (self.follows or len(self._files) > 1):
                        self._forget(one)
                    break
                budget -= len(data)
                self._send_lines(one, data)
        if self._send is None:
            return
        if any(one.is_ready for one in self._files):
            if self._credit > 0:
                self._schedule_turn()
        elif not self.follows and self._end is not None:
            self._end("")

    def _send_lines(self, one: LogFile, data: bytes) -> None:
        if self._grep:
            lines = data.splitlines(keepends=True)
            data = b"".join(line for line in lines if self._grep in line)
            if not data:
                return
        self._credit -= len(data)
        assert self._send is not None
        self._send(
            LogLines(
                rank=one.rank,
                stream=one.stream,
                generation=one.generation,
                at=time.time(),
                text=data,
            )
        )

    def _unobserve(self, one: LogFile) -> None:
        if one.watch >= 0 and self._inotify is not None:
            self._inotify.unwatch(one.watch)

    def _forget(self, one: LogFile) -> None:
        self._unobserve(one)
        os.close(one.fd)
        self._files.remove(one)
