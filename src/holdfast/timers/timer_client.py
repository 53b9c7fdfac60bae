"""A script's side of watchdog timers: `with expires(after=60): ...`, and the client over a named pipe.

Each block has its own timer, even if nested or concurrent blocks have the same name or none. If a name is in use, a
number is added, so that leaving a block releases only its own timer. The default name of a block is its file and
line.

The client opens the pipe for each request. So it works in forked processes and after a restart of
the server.
"""

from __future__ import annotations

import abc
import errno
import os
import select
import signal as signals
import sys
import threading
import time
from functools import wraps
from typing import TYPE_CHECKING

from holdfast.timers.timer_requests import LINE_BYTES_MAX, RELEASED, FileTimerRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    Function = TypeVar("Function", bound=Callable[..., Any])


class TimerClient(abc.ABC):
    """Sets and releases the timers of this process."""

    @abc.abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Set the timer of a scope, or move it, to a time in seconds since 1970."""

    @abc.abstractmethod
    def release(self, scope_id: str) -> None:
        """Release the timer of a scope, if it is set."""


_configured: TimerClient | None = None
_scopes_in_use: dict[tuple[int, str], object] = {}


def configure(timer_client: TimerClient) -> None:
    """Set the client for all `expires` blocks of this process that have no client of their own."""
    global _configured  # noqa: PLW0603 (one for the process, as in TorchElastic)
    _configured = timer_client


def expires(
    after: float, scope: str | None = None, client: TimerClient | None = None
) -> ExpiringBlock:
    """Return a context manager with a timer: if the block takes longer than `after` seconds, this process is killed.

    It is also a decorator: every call of the function then has a timer.
    """
    if scope is None:
        caller = sys._getframe(1)
        scope = f"{caller.f_code.co_filename}#{caller.f_lineno}"
    return ExpiringBlock(after, scope, client)


class ExpiringBlock:
    """One block with a timer. Any thread may enter it again, even before it is left."""

    def __init__(self, after: float, scope: str, client: TimerClient | None) -> None:
        self._after = after
        self._scope = scope
        self._client = client
        self._entered: dict[int, list[tuple[TimerClient, str]]] = {}  # By thread.

    def __enter__(self) -> None:
        client = self._client or _configured
        if client is None:
            raise RuntimeError(
                "expires() has no client: call timer.configure(client), or pass client=..."
            )
        scope = _claim(client, self._scope)
        self._entered.setdefault(threading.get_ident(), []).append((client, scope))
        try:
            client.acquire(scope, time.time() + self._after)
        except BaseException:
            self._leave(release=False)
            raise

    def __exit__(self, *_: object) -> None:
        self._leave(release=True)

    def __call__(self, function: Function) -> Function:
        """Give each call of a function its own timer."""

        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with ExpiringBlock(self._after, self._scope, self._client):
                return function(*args, **kwargs)

        return watched  # type: ignore[return-value]

    def _leave(self, *, release: bool) -> None:
        client, scope = self._pop_entered()
        try:
            if release:
                client.release(scope)
        finally:
            _scopes_in_use.pop((id(client), scope), None)

    def _pop_entered(self) -> tuple[TimerClient, str]:
        """Return the last entry of this thread, or of another thread if this one has none."""
        thread = threading.get_ident()
        if thread not in self._entered:
            thread = next(iter(self._entered))
        found = self._entered[thread].pop()
        if not self._entered[thread]:
            del self._entered[thread]
        return found


def _claim(client: TimerClient, scope: str) -> str:
    """Return a name that no other block of this process uses now: the scope's name, if possible.

    `setdefault` is atomic, so this needs no lock, which a forked child could inherit locked.
    """
    token = object()
    name, number = scope, 1
    while _scopes_in_use.setdefault((id(client), name), token) is not token:
        number += 1
        name = f"{scope} ({number})"
    return name


OPEN_TRIES_MAX = 10
OPEN_AGAIN_S = 0.1

FULL_S_MAX = 10.0
"""How long a request waits for a full pipe whose reader is delayed."""


class FileTimerClient(TimerClient):
    """Sets timers at the server that reads the pipe `file_path`, the value of TORCHELASTIC_TIMER_FILE.

    This process receives `signal` when a timer expires. If `signal` is 0 or less, the expiry is only reported.
    """

    def __init__(self, file_path: str, signal: int = signals.SIGKILL) -> None:
        super().__init__()
        self._file_path = file_path
        self.signal = signal

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Set the timer of a scope, or move it.

        Raises `BrokenPipeError` if no server reads the pipe, `BlockingIOError` if the pipe stays full for
        `FULL_S_MAX`, and `RuntimeError` if the name of the scope is too long.
        """
        self._send(FileTimerRequest(os.getpid(), scope_id, expiration_time, self.signal))

    def release(self, scope_id: str) -> None:
        """Release the timer of a scope."""
        self._send(FileTimerRequest(os.getpid(), scope_id, RELEASED, 0))

    def _send(self, request: FileTimerRequest) -> None:
        line = request.to_json().encode() + b"\n"
        if len(line) > LINE_BYTES_MAX:
            raise RuntimeError(
                f"a timer request of {len(line)} bytes is longer than {LINE_BYTES_MAX}: "
                "give the scope a shorter name"
            )
        fd = self._open()
        try:
            self._write(fd, line)
        finally:
            os.close(fd)

    def _open(self) -> int:
        if not self._file_path:
            raise BrokenPipeError(errno.EPIPE, "the agent has no timer pipe; its log says why")
        for tries in range(OPEN_TRIES_MAX):
            try:
                return os.open(self._file_path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as problem:
                why = problem
                if problem.errno not in (errno.ENXIO, errno.ENOENT):
                    break
            if tries < OPEN_TRIES_MAX - 1:
                time.sleep(OPEN_AGAIN_S)  # The server may just be starting.
        raise BrokenPipeError(
            errno.EPIPE, f"no timer server reads this pipe ({why.strerror})", self._file_path
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
                        errno.EAGAIN, "the timer server is not reading its pipe", self._file_path
                    ) from None
                _wait_writable(fd, left)
            else:
                return


def _wait_writable(fd: int, seconds: float) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll(seconds * 1000 + 1)
