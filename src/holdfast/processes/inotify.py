"""The kernel's notice that a file was written: inotify, through ctypes.

The one thing to know: only files are watched, never folders, so every record has the same
size and a full queue is read without looking at records one by one.
It does not tell what was written, and it sees only writes made on this machine.
"""

from __future__ import annotations

import os

IN_MODIFY = 0x0002
IN_CLOSE_WRITE = 0x0008
IN_NONBLOCK = os.O_NONBLOCK
IN_CLOEXEC = os.O_CLOEXEC

# The descriptor that the record of a queue overflow carries instead of a watch.
OVERFLOW = -1

# One record of a watched file: watch, mask, cookie, length of a name (none), 4 bytes each.
_RECORD_WORDS = 4

# How much of the queue is taken at once.
READ_BYTES_MAX = 1 << 16


class Inotify:
    """An inotify instance. Raises `OSError` where the kernel has none left to give."""

    __slots__ = ("_add_watch", "_ctypes", "_rm_watch", "fd")

    def __init__(self) -> None:
        # Imported here, since most jobs follow no file and ctypes costs some milliseconds.
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        self._ctypes = ctypes
        self._add_watch = libc.inotify_add_watch
        self._add_watch.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
        self._rm_watch = libc.inotify_rm_watch
        self._rm_watch.argtypes = (ctypes.c_int, ctypes.c_int)
        self.fd: int = libc.inotify_init1(IN_NONBLOCK | IN_CLOEXEC)
        if self.fd < 0:
            raise self._problem("inotify")

    def watch(self, path: str) -> int:
        """Watch the file `path` for writes; the same file gives the same number again."""
        watch: int = self._add_watch(self.fd, os.fsencode(path), IN_MODIFY | IN_CLOSE_WRITE)
        if watch < 0:
            raise self._problem(path)
        return watch

    def unwatch(self, watch: int) -> None:
        """Stop watching. A watch that the kernel dropped already is no fault."""
        self._rm_watch(self.fd, watch)

    def changed(self) -> set[int]:
        """Take notices off the queue: the watches whose files were written, or `OVERFLOW`."""
        try:
            records = os.read(self.fd, READ_BYTES_MAX)
        except BlockingIOError:
            return set()
        return set(memoryview(records).cast("i")[::_RECORD_WORDS])

    def close(self) -> None:
        """Give the instance back to the kernel."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _problem(self, about: str) -> OSError:
        code = self._ctypes.get_errno()
        return OSError(code, os.strerror(code), about)
