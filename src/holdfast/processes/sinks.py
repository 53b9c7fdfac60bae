"""Where followed lines end up: a file descriptor, or a Python text stream without one.

The one thing to know: a sink that cannot be written any more (closed pipe, lost terminal)
goes quiet and takes bytes without complaint, so that following the files goes on.
It does not cut or prefix lines, and it never closes a descriptor it did not open.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import threading
import weakref

from holdfast import messages
from holdfast.errors import EnvironmentProblem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    class TextStream(Protocol):
        """What a sink needs of a stream that has no file descriptor, such as a notebook's."""

        def write(self, text: str, /) -> object:
            """Take `text`."""

        def flush(self) -> object:
            """Show what was taken."""


# The kernel keeps a write of up to this many bytes to a pipe in one piece, whoever else writes
# to that pipe at the same time (PIPE_BUF of Linux).
PIPE_PIECE_BYTES_MAX = 4096

_GONE = (errno.EPIPE, errno.EBADF, errno.EIO, errno.ENXIO, errno.ECONNRESET)

_locks: weakref.WeakValueDictionary[tuple[int, int], threading.Lock] = weakref.WeakValueDictionary()
_locks_guard = threading.Lock()


class Sink:
    """One destination for whole lines, shared by any number of streams and threads.

    Sinks of the same terminal, pipe or file share one lock, so that a line sent to standard
    output and a line sent to standard error never mix when both are the same terminal. The
    caller keeps a descriptor that it passes in open for as long as the sink is used.
    """

    __slots__ = ("_fd", "_lock", "_owned", "_put", "_stream", "_warned", "bytes_written", "quiet")

    def __init__(self, destination: int | TextStream | None) -> None:
        self._fd = -1
        self._stream: TextStream | None = None
        self._owned = False
        self._warned = False
        self._put: Callable[[bytes | bytearray, bytes, int], None]
        self.quiet = False
        self.bytes_written = 0
        if isinstance(destination, int):
            self._fd = destination
            self._put = self._put_fd
            try:
                about = os.fstat(destination)
            except OSError:
                # We were started with this stream closed: there is nobody to show lines to.
                self.quiet = True
                self._lock = threading.Lock()
                return
            if stat.S_ISFIFO(about.st_mode):
                self._put = self._put_pipe
            self._lock = _lock_of((about.st_dev, about.st_ino))
        else:
            self._stream = destination
            self._put = self._put_text
            self._lock = _lock_of((-1, id(destination)))
            self.quiet = destination is None

    @classmethod
    def of_stream(cls, stream: TextStream | None) -> Sink:
        """Return a sink for a Python text stream, by its descriptor if it truly has one.

        A notebook's stream may answer `fileno()` with a descriptor that shows nothing there,
        so only the streams that Python itself makes are trusted to mean theirs. Python has None
        for a console that is not there; its sink is quiet.
        """
        import io

        if isinstance(stream, io.TextIOWrapper):
            try:
                stream.flush()
                return cls(stream.fileno())
            except (OSError, ValueError):
                pass  # In-memory or closed: the text way copes with both.
        return cls(stream)

    @classmethod
    def to_file(cls, path: str) -> Sink:
        """Return a sink that appends to the file `path`; `close()` closes the file."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as problem:
            raise EnvironmentProblem(f"cannot write {path}: {problem.strerror}") from problem
        sink = cls(fd)
        sink._owned = True
        return sink

    def write(self, head: bytes | bytearray, body: bytes = b"", end: int | None = None) -> None:
        """Write `head` and then `body[:end]`, all of it, with no other sink's bytes between.

        The bytes should end where a line ends. Blocks while the destination is full.
        """
        end = len(body) if end is None else end
        with self._lock:
            if self.quiet:
                return
            try:
                self._put(head, body, end)
            except OSError as problem:
                self._failed(problem)

    def close(self) -> None:
        """Take no more bytes, and close the file if this sink opened it."""
        with self._lock:
            self.quiet = True
            if self._owned and self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _put_fd(self, head: bytes | bytearray, body: bytes, end: int) -> None:
        parts = [memoryview(head), memoryview(body)[:end]]
        try:
            written = os.writev(self._fd, parts)
        except BlockingIOError:
            written = 0
        self.bytes_written += written
        for part in parts:
            if written < len(part):
                self._put_rest(part[written:])
            written = max(0, written - len(part))

    def _put_pipe(self, head: bytes | bytearray, body: bytes, end: int) -> None:
        """Write in pieces that end at line ends and that the kernel keeps whole."""
        view = memoryview(body)
        start = 0
        if head:
            # The held part of a line goes out together with the rest of that line.
            start = body.find(b"\n", 0, end) + 1 or end
            self._put_rest(memoryview(bytes(head) + body[:start]))
        while start < end:
            stop = start + PIPE_PIECE_BYTES_MAX
            if stop >= end:
                stop = end
            else:
                stop = body.rfind(b"\n", start, stop) + 1 or body.find(b"\n", stop, end) + 1 or end
            self._put_rest(view[start:stop])
            start = stop

    def _put_rest(self, rest: memoryview) -> None:
        while rest:
            try:
                written = os.write(self._fd, rest)
            except BlockingIOError:
                # Somebody made the console non-blocking; wait for room as if it were not.
                room = select.poll()
                room.register(self._fd, select.POLLOUT)
                room.poll()
                continue
            self.bytes_written += written
            rest = rest[written:]

    def _put_text(self, head: bytes | bytearray, body: bytes, end: int) -> None:
        assert self._stream is not None
        text = (bytes(head) + body[:end]).decode("utf-8", "replace")
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError as problem:
                narrow = text.encode(problem.encoding, "replace")
                self._stream.write(narrow.decode(problem.encoding))
            self._stream.flush()
        except Exception as problem:  # noqa: BLE001 - any class of stream may be passed in
            self.quiet = True
            messages.warning(f"log lines are no longer shown: {type(problem).__name__}: {problem}")
        self.bytes_written += len(head) + end

    def _failed(self, problem: OSError) -> None:
        if problem.errno in _GONE:
            self.quiet = True
        elif not self._warned:
            # A full disk may have room again later: the lines are lost, the sink is not.
            self._warned = True
            messages.warning(f"log lines are being lost: {problem.strerror}")


def _lock_of(identity: tuple[int, int]) -> threading.Lock:
    """Return the one lock of a destination; it lives as long as any sink uses it."""
    with _locks_guard:
        lock = _locks.get(identity)
        if lock is None:
            lock = _locks[identity] = threading.Lock()
        return lock
