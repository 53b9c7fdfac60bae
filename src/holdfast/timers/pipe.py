"""The named pipe over which workers send timer requests.

The agent opens it for reading and writing, so that opening does not block and the pipe does not end
when a writer closes it. Only its owner can open it. An existing file at its path is replaced only if
it is a pipe without a reader, left by an agent that was killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from typing import TYPE_CHECKING

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

PIPE_BYTES = 1 << 20
"""The capacity of the pipe if the kernel permits it: about 8,000 requests."""

TAKE_BYTES_MAX = 2 * PIPE_BYTES
"""The limit for reading the whole pipe once, in case writers keep filling it."""

READ_BYTES = 1 << 16


class RequestPipe:
    """The reading end of a named pipe, which it creates and removes."""

    def __init__(self, path: str) -> None:
        self.path = path
        clear_path(path)
        try:
            os.mkfifo(path, 0o600)
        except OSError as problem:
            raise _unusable(path, problem.strerror or str(problem)) from problem
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._inode = os.fstat(self._fd).st_ino
        self._enlarge()

    def fileno(self) -> int:
        """Return the descriptor that is readable when there are requests."""
        return self._fd

    def is_reachable(self) -> bool:
        """Whether the pipe is still at its path."""
        try:
            return os.lstat(self.path).st_ino == self._inode
        except OSError:
            return False

    def chunks(self) -> Iterator[bytes]:
        """Read everything in the pipe, but no more than `TAKE_BYTES_MAX`."""
        taken = 0
        while taken < TAKE_BYTES_MAX:
            try:
                chunk = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                return
            taken += len(chunk)
            yield chunk

    def close(self) -> None:
        """Close the pipe, and remove it unless another file is at its path now."""
        if self._fd < 0:
            return
        if self.is_reachable():
            try:
                os.unlink(self.path)
            except OSError:
                pass  # Another process has removed it, or its folder.
        os.close(self._fd)
        self._fd = -1

    def _enlarge(self) -> None:
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            pass  # The user's limit for pipes is reached. Clients then wait more often.


def clear_path(path: str) -> None:
    """Remove a stale pipe at a path; raise `UsageError` for anything else."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as problem:
        raise _unusable(path, problem.strerror or str(problem)) from problem
    if not stat.S_ISFIFO(found.st_mode):
        raise _unusable(path, "the path exists and is not a pipe")
    if found.st_uid != os.geteuid():
        raise _unusable(path, "the pipe belongs to another user")
    if _is_read(path):
        raise _unusable(path, "another agent is reading the pipe")
    os.unlink(path)


def _is_read(path: str) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as problem:
        return problem.errno != errno.ENXIO
    os.close(fd)
    return True


def _unusable(path: str, why: str) -> UsageError:
    return UsageError(
        f"cannot create the timer pipe {path}: {why}",
        hint="set TORCHELASTIC_TIMER_FILE to a path that does not exist yet, or unset it",
    )
