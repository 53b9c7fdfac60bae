"""A folder that several hosts see: files that are replaced as a whole, one lock, and looking again.

The one thing to know: a file is replaced by renaming a finished one over it, so reading needs no
lock and never sees half of it. Whatever is written depends on what is there, so writing does.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

from holdfast.errors import EnvironmentProblem
from holdfast.store.file_lock import locked, pauses

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

NAME_CHARS_MAX = 200  # File systems take 255 bytes; the rest is for marks and numbers.
STALE_TRIES_MAX = 5

LOCK_NAME = ".lock"
NEW_NAME = ".new"


class SharedFolder:
    """One folder, which is made if it is not there."""

    def __init__(self, path: str) -> None:
        self.path = path
        make_folder(path)

    def locked(self) -> AbstractContextManager[None]:
        """Hold the lock of this folder, over all processes and hosts."""
        return locked(self._at(LOCK_NAME))

    def exists(self, name: str) -> bool:
        """Return whether there is such a file."""
        return os.path.exists(self._at(name))

    def read(self, name: str) -> bytes | None:
        """Return what is in a file, or None if there is no such file."""
        return read_file(self._at(name))

    def read_pair(self, name: str) -> tuple[int, int]:
        """Return the two numbers in a file, zeros if there is no such file."""
        content = self.read(name)
        if content is None:
            return 0, 0
        first, second = content.split()
        return int(first), int(second)

    def write(self, name: str, content: bytes) -> None:
        """Replace a file; the lock has to be held."""
        new = self._at(NEW_NAME)
        with open(new, "wb") as file:
            file.write(content)
        os.replace(new, self._at(name))

    def write_pair(self, name: str, first: int, second: int) -> None:
        """Replace a file by two numbers; the lock has to be held."""
        self.write(name, b"%d %d" % (first, second))

    def remove(self, name: str) -> bool:
        """Remove a file, and return whether there was one; the lock has to be held."""
        try:
            os.unlink(self._at(name))
        except FileNotFoundError:
            return False
        return True

    def names(self) -> list[str]:
        """Return the names of all files, other than those with a dot first."""
        return [name for name in os.listdir(self.path) if not name.startswith(".")]

    def look_afresh(self) -> None:
        """Have a network file system forget what it believes not to be there.

        NFS asks its server about a folder when that is opened, and else keeps a missing name in
        mind for up to a minute.
        """
        os.close(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def looks(self, timeout_s: float) -> Iterator[bool]:
        """Yield each time that it is time to look, and whether that is the last time."""
        deadline = time.monotonic() + timeout_s
        for pause in pauses():
            self.look_afresh()
            left = deadline - time.monotonic()
            yield left <= 0
            if left <= 0:
                return
            time.sleep(min(pause, left))

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)


def file_name(key: str) -> str:
    """Return a file's name for any text: readable where it can be, never with a dot first."""
    name = "k" + quote(key, safe="._-")
    if len(name) <= NAME_CHARS_MAX:
        return name
    return f"h{name[1:100]}-{hashlib.sha256(key.encode()).hexdigest()}"


def make_folder(folder: str) -> None:
    """Make a folder if it is not there; raise `EnvironmentProblem` if it cannot be."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as problem:
        raise EnvironmentProblem(
            f"the shared folder {folder!r} cannot be used: {problem.strerror}",
            hint="name a folder that all nodes can write to",
        ) from None


def read_file(path: str) -> bytes | None:
    """Return what is in a file, or None if there is no such file.

    A file that is replaced on another host while it is read here may be stale; the new one is read.
    """
    for attempt in range(1, STALE_TRIES_MAX + 1):
        try:
            with open(path, "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as problem:
            if problem.errno != errno.ESTALE or attempt == STALE_TRIES_MAX:
                raise
    raise AssertionError("unreachable")
