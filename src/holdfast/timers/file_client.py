"""A worker's way to the server over a named pipe: one line for each request, in one piece.

The pipe is opened anew for each, so that forked processes and servers that come and go need no
thought. Nothing is kept.
"""

from __future__ import annotations

import errno
import os
import signal as signals
import time

from holdfast.timers.clients import TimerClient
from holdfast.timers.request_lines import LINE_BYTES_MAX
from holdfast.timers.requests import RELEASED, FileTimerRequest

OPEN_TRIES_MAX = 10
OPEN_AGAIN_S = 0.1

FULL_S_MAX = 10.0
"""How long a request waits for a pipe that is full, since its reader is held up."""


class FileTimerClient(TimerClient):
    """Sets timers with the server at `file_path`, as TORCHELASTIC_TIMER_FILE names it.

    `signal` is what this process gets when a timer expires; 0 or less has it told, and no more.
    """

    def __init__(self, file_path: str, signal: int = signals.SIGKILL) -> None:
        super().__init__()
        self._file_path = file_path
        self.signal = signal

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Set the timer of a scope, or move it.

        Raises `BrokenPipeError` where no server reads, `BlockingIOError` where it does not for
        `FULL_S_MAX`, and `RuntimeError` if the name of the scope is too long for one line.
        """
        self._send(FileTimerRequest(os.getpid(), scope_id, expiration_time, self.signal))

    def release(self, scope_id: str) -> None:
        """Release the timer of a scope."""
        self._send(FileTimerRequest(os.getpid(), scope_id, RELEASED, 0))

    def _send(self, request: FileTimerRequest) -> None:
        line = request.to_json().encode() + b"\n"
        if len(line) > LINE_BYTES_MAX:
            raise RuntimeError(
                f"a timer request of {len(line)} bytes is too long, {LINE_BYTES_MAX} are the most: "
                "give the scope a shorter name"
            )
        fd = self._open()
        try:
            self._write(fd, line)
        finally:
            os.close(fd)

    def _open(self) -> int:
        if not self._file_path:
            raise BrokenPipeError(
                errno.EPIPE, "there is no pipe for timers here, and the agent has said why"
            )
        for tries in range(OPEN_TRIES_MAX):
            try:
                return os.open(self._file_path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as problem:
                why = problem
                if problem.errno not in (errno.ENXIO, errno.ENOENT):
                    break
            if tries < OPEN_TRIES_MAX - 1:
                time.sleep(OPEN_AGAIN_S)  # The server may just be on its way.
        raise BrokenPipeError(
            errno.EPIPE, f"no timer server reads the pipe ({why.strerror})", self._file_path
        ) from why

    def _write(self, fd: int, line: bytes) -> None:
        deadline = time.monotonic() + FULL_S_MAX
        while True:
            try:
                os.write(fd, line)
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise BlockingIOError(
                        errno.EAGAIN, "the timer server does not read its pipe", self._file_path
                    ) from None
                _await_room(fd, left)
            else:
                return


def _await_room(fd: int, seconds: float) -> None:
    import select

    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll(seconds * 1000 + 1)
