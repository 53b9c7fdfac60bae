"""A store in a folder that all nodes see: one file per key.

A value is replaced by renaming a finished file over the old one, so reading needs no lock and never
sees half a value; changes that depend on the present value hold the folder's lock. The one thing to
know: waiting is by looking again, with growing pauses up to a tenth of a second. A shared file
system tells nobody of a change made on another host (inotify does not see it), so this is the one
store that has to. Values do not survive a loss of power, and need not: a job does not either.
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
from holdfast.store.memory import DEFAULT_TIMEOUT_S, as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

VALUE_BYTES_MAX = 8 * 1024 * 1024  # As much as a TCPStore takes.
NAME_CHARS_MAX = 200  # File systems take 255 bytes; the rest is for suffixes.
STALE_TRIES_MAX = 5

LOCK_NAME = ".lock"
NEW_NAME = ".new"


class FileStore:
    """Keys and values as files of one folder, which is made if it is not there."""

    def __init__(
        self, folder: str | os.PathLike[str], timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self.folder = os.fspath(folder)
        self._timeout_s = timeout_s
        make_folder(self.folder)

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value."""
        self._change(key, lambda _: as_bytes(value))

    def get(self, key: str) -> bytes:
        """Return a key's value, waiting for it to have one."""
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, 0 at first, and return what it is now."""
        return int(self._change(key, lambda now: str(int(now or b"0") + amount).encode()))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values; raise `TimeoutError` naming those that have none."""
        self._await(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        self._look_afresh()
        return all(os.path.exists(self._path(key)) for key in keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value; return the value that it has afterwards.

        A missing key is set if nothing is expected; if something is, that is returned.
        """
        wanted = as_bytes(expected)

        def compare(now: bytes | None) -> bytes | None:
            if now is None and wanted:
                return None
            return as_bytes(desired) if now is None or now == wanted else now

        return self._change(key, compare, otherwise=wanted)

    def append(self, key: str, value: str | bytes) -> None:
        """Put a value after the one that a key has."""
        self._change(key, lambda now: (now or b"") + as_bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of all keys, waiting for each to have one."""
        return self._await(keys, self._timeout_s)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Give each key its value, one after the other."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        """Take a key's value away; return whether it had one."""
        with locked(self._lock):
            try:
                os.unlink(self._path(key))
            except FileNotFoundError:
                return False
            return True

    def num_keys(self) -> int:
        """Return how many keys have values."""
        return sum(not name.startswith(".") for name in os.listdir(self.folder))

    @property
    def _lock(self) -> str:
        return os.path.join(self.folder, LOCK_NAME)

    def _change(
        self, key: str, change: Callable[[bytes | None], bytes | None], otherwise: bytes = b""
    ) -> bytes:
        """Replace a value by what `change` makes of it; return it, or `otherwise` for None."""
        path = self._path(key)
        with locked(self._lock):
            now = read_file(path)
            value = change(now)
            if value is None:
                return otherwise
            if value != now:
                if len(value) > VALUE_BYTES_MAX:
                    raise ValueError(f"{key}: a value of {len(value)} bytes is too large")
                new = os.path.join(self.folder, NEW_NAME)
                with open(new, "wb") as file:
                    file.write(value)
                os.replace(new, path)
            return value

    def _await(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        deadline = time.monotonic() + timeout_s
        found: dict[str, bytes] = {}
        for pause in pauses():
            self._look_afresh()
            for key in keys:
                value = None if key in found else read_file(self._path(key))
                if value is not None:
                    found[key] = value
            if len(found) == len(set(keys)):
                break
            left = deadline - time.monotonic()
            if left <= 0:
                missing = ", ".join(key for key in keys if key not in found)
                raise TimeoutError(
                    f"no value came within {timeout_s:g} s in {self.folder} for: {missing}"
                )
            time.sleep(min(pause, left))
        return [found[key] for key in keys]

    def _look_afresh(self) -> None:
        """Have a network file system forget what it believes not to be there.

        NFS asks its server about a folder when that is opened, and else keeps a missing name in
        mind for up to a minute.
        """
        os.close(os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def _path(self, key: str) -> str:
        return os.path.join(self.folder, file_name(key))


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
