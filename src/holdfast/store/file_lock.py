"""One at a time, over processes and hosts that share a file system.

`fcntl.lockf` works on NFS, and the kernel gives the lock back when its holder dies. Two things to
know about it: it does not keep threads of one process apart, and it is dropped when any descriptor
of the file is closed. So a process opens a lock file once at a time, guarded by a lock of Python's.
Waiting is by trying again: a blocking wait could not be bounded.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from holdfast.store.errors import StoreTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator

TRY_AGAIN_S_MIN = 0.001
TRY_AGAIN_S_MAX = 0.1
LOCK_S_MAX = 30.0
"""How long a lock is waited for. It is held for some file operations only, so somebody hangs."""

_BUSY = (errno.EACCES, errno.EAGAIN)


class _InProcess:
    """The lock among the threads of this process; a class, since a lock has no weak references."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class _Table:
    """The locks among threads that somebody has or waits for, by the file's path."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, as a forked child has to: whoever had one of these is in the parent."""
        self.lock = threading.Lock()
        self.by_path: WeakValueDictionary[str, _InProcess] = WeakValueDictionary()


_table = _Table()
os.register_at_fork(after_in_child=_table.forget)


@contextmanager
def locked(path: str, timeout_s: float = LOCK_S_MAX) -> Iterator[None]:
    """Hold the lock of this file, which is made if need be and never removed.

    Raises `StoreTimeoutError` if another holds it for too long, and `OSError` if it cannot be used.
    """
    deadline = time.monotonic() + timeout_s
    with _table.lock:
        mine = _table.by_path.setdefault(os.path.realpath(path), _InProcess())
    if not mine.lock.acquire(timeout=timeout_s):
        raise StoreTimeoutError(_held(path, timeout_s))
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _acquire(descriptor, path, deadline, timeout_s)
            yield
        finally:
            os.close(descriptor)  # This gives the lock back.
    finally:
        mine.lock.release()


def _acquire(descriptor: int, path: str, deadline: float, timeout_s: float) -> None:
    for pause in pauses():
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno not in _BUSY:
                raise
        else:
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise StoreTimeoutError(_held(path, timeout_s))
        time.sleep(min(pause, left))


def pauses() -> Iterator[float]:
    """Yield growing times to wait between two looks at a file."""
    pause = TRY_AGAIN_S_MIN
    while True:
        yield pause
        pause = min(TRY_AGAIN_S_MAX, pause * 1.5)


def _held(path: str, timeout_s: float) -> str:
    return f"{path} has been locked by another process or host for more than {timeout_s:g} s"
