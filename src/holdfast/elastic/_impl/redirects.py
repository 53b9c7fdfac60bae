"""Redirects a process's own standard output or error to a file, including output of C libraries.

It replaces the descriptor itself, so the output of C libraries and child processes also goes to the
file. On exit it restores everything. All threads of a process share its streams.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

_FDS = {"stdout": 1, "stderr": 2}


def get_libc() -> ctypes.CDLL:
    """Return the C library that this process runs on."""
    return ctypes.CDLL(None)


def _flush(std: str) -> None:
    """Flush the buffers of C and of Python, so that bytes reach the right file."""
    get_libc().fflush(None)
    stream = getattr(sys, std)
    if stream is not None:
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # A closed stream has nothing to flush.


def _descriptors(std: str) -> set[int]:
    """Return the descriptors behind a stream: the process's, and Python's if it differs."""
    fds = {_FDS[std]}
    try:
        fds.add(getattr(sys, std).fileno())
    except (AttributeError, OSError, ValueError):
        pass  # The stream has no descriptor, so replace only the process's own.
    return fds


@contextmanager
def redirect(std: str, to_file: str) -> Iterator[None]:
    """Redirect `std` ("stdout" or "stderr") to `to_file`, which is truncated first."""
    if std not in _FDS:
        raise UsageError(f"{std!r} cannot be redirected; accepted: stdout, stderr")
    target = os.open(to_file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    saved: dict[int, tuple[int, bool]] = {}
    try:
        _flush(std)
        for fd in _descriptors(std):
            saved[fd] = (os.dup(fd), os.get_inheritable(fd))
            os.dup2(target, fd, saved[fd][1])
        yield
    finally:
        _flush(std)
        for fd, (copy, inheritable) in saved.items():
            os.dup2(copy, fd, inheritable)
            os.close(copy)
        os.close(target)


redirect_stdout = partial(redirect, "stdout")
redirect_stderr = partial(redirect, "stderr")


def get_std_cm(
    std_rd: str, redirect_fn: Callable[[str], AbstractContextManager[None]]
) -> AbstractContextManager[None]:
    """Return `redirect_fn(std_rd)`, or a context that does nothing if the path is empty."""
    return redirect_fn(std_rd) if std_rd else nullcontext()
