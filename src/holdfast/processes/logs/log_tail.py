"""The end of a worker's output, kept on disk in two files of bounded size.

`LogTail` writes them, `next_file` and `older_file` lead a reader through them. New output goes to the
file `path`. When it is full, it becomes `path.1`, replaces the file of this name, and a new file begins
at `path`. A file ends at the end of a line, unless the line is very long.

`TailWriter` writes the tails of all workers on a thread of its own, so that a disk that does not respond
delays neither the console nor the workers.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

OLDER = ".1"

# The part of a file that is only for the rest of its last line.
SLACK = 1 / 8

_FULL = (errno.ENOSPC, errno.EDQUOT)


def older_file(path: str) -> str:
    """Return the file with the output before that of the file `path`."""
    return path + OLDER


def next_file(path: str, fd: int) -> str:
    """Return the file that continues the open file `fd` of the tail `path`; empty if it is the newest.

    Then the file `fd` is complete. If more than one file has replaced it, the oldest existing one is returned.
    """
    own = _identity(os.fstat(fd))
    try:
        newest = _identity(os.stat(path, follow_symlinks=False))
    except OSError:
        return ""  # It was removed, or will exist in a moment.
    if own == newest:
        return ""
    try:
        older = _identity(os.stat(older_file(path), follow_symlinks=False))
    except OSError:
        return path
    return path if own == older else older_file(path)


def _identity(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino


class LogTail:
    """Writes one tail. A problem never raises after the start: it costs a part of the tail only."""

    __slots__ = ("_complain", "_ends_line", "_fd", "_file_bytes_max", "_path", "_size")

    def __init__(self, path: str, bytes_max: int, complain: Callable[[str], None]) -> None:
        """Create the file `path`, or raise `OSError`. `complain` gets a line about each later problem."""
        self._path = path
        self._file_bytes_max = max(1, bytes_max // 2)
        self._complain = complain
        self._fd = _create(path)
        self._size = 0
        self._ends_line = True

    def complain(self, text: str) -> None:
        """Report that a part of the tail is lost."""
        self._complain(text)

    def write(self, data: bytes) -> None:
        start = 0
        while start < len(data) and self._fd >= 0:
            stop = self._end_of_piece(data, start)
            if stop > start:
                self._put(data, start, stop)
            if stop < len(data):
                self._begin_file()
            start = stop

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _end_of_piece(self, data: bytes, start: int) -> int:
        """Return the end of the bytes from `start` on that the present file still takes."""
        hard_limit = start + self._file_bytes_max - self._size
        limit = max(start, hard_limit - int(self._file_bytes_max * SLACK))
        if limit >= len(data):
            return len(data)
        stop = data.rfind(b"\n", start, limit) + 1
        if stop or (self._ends_line and self._size):
            return stop or start
        return data.find(b"\n", limit, hard_limit) + 1 or min(hard_limit, len(data))

    def _put(self, data: bytes, start: int, stop: int) -> None:
        rest = memoryview(data)[start:stop]
        self._ends_line = data[stop - 1] == ord("\n")
        while rest:
            try:
                written = os.write(self._fd, rest)
            except OSError as problem:
                if problem.errno in _FULL and self._free_older():
                    continue
                self._complain(f"{self._path} is incomplete: {problem.strerror}")
                return  # A full disk may have room again later.
            self._size += written
            rest = rest[written:]

    def _free_older(self) -> bool:
        try:
            os.unlink(older_file(self._path))
        except OSError:
            return False
        return True

    def _begin_file(self) -> None:
        before = self._fd
        try:
            # To rename a file over another makes ext4 write it to the disk at once.
            self._free_older()
            os.rename(self._path, older_file(self._path))
            self._fd = _create(self._path)
        except OSError as problem:
            self._complain(f"{self._path} is no longer written: {problem.strerror}")
            self._fd = -1
        # Last, because this wakes readers, which then look for the new file.
        os.close(before)
        self._size, self._ends_line = 0, True


# What may wait for the disk. If it takes longer than `ROOM_S_MAX` to make room, further output is lost until it
# responds again.
WAITING_BYTES_MAX = 4 << 20
ROOM_S_MAX = 1.0


class TailWriter:
    """Writes any number of tails, in the order of the calls of `write`."""

    def __init__(self) -> None:
        """Start the thread, or raise `RuntimeError` if the system has none left."""
        self._changed = threading.Condition()
        self._waiting: deque[tuple[LogTail, bytes]] = deque()
        self._waiting_bytes = 0
        self._is_busy = False
        self._is_stuck = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="holdfast-tails", daemon=True)
        self._thread.start()

    def write(self, tail: LogTail, data: bytes) -> None:
        """Write `data` soon; empty data closes the tail."""
        with self._changed:
            if data and not self._has_room(0 if self._is_stuck else ROOM_S_MAX):
                if not self._is_stuck:
                    tail.complain("the disk of the log directory does not respond")
                self._is_stuck = True
                return
            self._waiting.append((tail, data))
            self._waiting_bytes += len(data)
            self._changed.notify_all()

    def flush(self, limit_s: float) -> bool:
        """Wait until everything is written; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_busy, limit_s)

    def close(self, limit_s: float) -> None:
        """Write what is waiting, and end the thread. A disk that does not respond keeps the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(limit_s)

    def _has_room(self, limit_s: float) -> bool:
        return self._changed.wait_for(lambda: self._waiting_bytes < WAITING_BYTES_MAX, limit_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    return
                tail, data = self._waiting.popleft()
                self._is_busy = True
            if data:
                tail.write(data)
            else:
                tail.close()
            with self._changed:
                self._waiting_bytes -= len(data)
                self._is_stuck = False


def _create(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o600)


def remove_tail(path: str) -> None:
    """Remove the files of a tail that nobody writes any more."""
    for one in (path, older_file(path)):
        try:
            os.unlink(one)
        except OSError:
            pass  # It was never created, or a cleaner has removed it.
