"""Turns chunks of a stream into whole, prefixed lines for a file descriptor or a text stream.

A chunk of plain lines gets its prefixes by a single `bytes.replace`, and is written by a single
call. Lines are handled one by one only if a filter needs it. A lone carriage return also ends a line,
so that progress bars are visible. A sink whose destination is lost (closed pipe, lost terminal)
discards further bytes, so that following the files continues.
"""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import threading
import weakref
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.errors import EnvironmentProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Protocol

    class TextStream(Protocol):
        """The methods that a sink needs of a stream without a descriptor, such as a notebook's."""

        def write(self, text: str, /) -> object:
            """Write `text`."""

        def flush(self) -> object:
            """Show what was written."""


# The kernel keeps a write to a pipe of up to this many bytes in one piece (PIPE_BUF of Linux), even if
# other processes write to it.
PIPE_PIECE_BYTES_MAX = 4096
# A sink that favours speed writes this much and more at once. Another process that writes to the same pipe
# could then interrupt a line, if the pipe is full.
MUCH_BYTES = 1 << 16

_GONE = (errno.EPIPE, errno.EBADF, errno.EIO, errno.ENXIO, errno.ECONNRESET)

_locks: weakref.WeakValueDictionary[tuple[int, int], threading.Lock] = weakref.WeakValueDictionary()
_locks_guard = threading.Lock()


class Sink:
    """One destination for whole lines, shared by any number of streams and threads.

    Sinks of the same terminal, pipe or file share one lock, so that a line sent to standard
    output and a line sent to standard error never mix when both are the same terminal. A caller
    that passes a descriptor must keep it open as long as the sink is used.
    """

    __slots__ = (
        "_favors_speed", "_fd", "_lock", "_owned", "_put", "_stream", "_warned", "bytes_written",
        "is_broken", "quiet",
    )  # fmt: skip

    def __init__(self, destination: int | TextStream | None, *, favors_speed: bool = False) -> None:
        self._favors_speed = favors_speed
        self._fd = -1
        self._stream: TextStream | None = None
        self._owned = False
        self._warned = False
        self._put: Callable[[bytes | bytearray, bytes, int], None]
        self.quiet = False
        # Whether the destination is a pipe whose reader has closed it.
        self.is_broken = False
        self.bytes_written = 0
        if isinstance(destination, int):
            self._fd = destination
            self._put = self._put_fd
            try:
                about = os.fstat(destination)
            except OSError:
                # This process was started with the stream closed: there is no reader.
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
    def of_stream(cls, stream: TextStream | None, *, favors_speed: bool = False) -> Sink:
        """Return a sink for a Python text stream; it writes to the stream's descriptor if it can rely on that.

        `fileno()` of a notebook's stream may return a descriptor whose output is not visible. So the
        sink uses the descriptor only if the stream is a `TextIOWrapper`. Without a console the stream is
        None, and the sink writes nothing.
        """
        if isinstance(stream, io.TextIOWrapper):
            try:
                stream.flush()
                return cls(stream.fileno(), favors_speed=favors_speed)
            except (OSError, ValueError):
                pass  # In-memory or closed: write text, which works for both.
        return cls(stream)

    @classmethod
    def to_file(cls, path: str) -> Sink:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as problem:
            raise EnvironmentProblem(f"cannot write {path}: {problem.strerror}") from problem
        sink = cls(fd)
        sink._owned = True
        return sink

    def write(self, head: bytes | bytearray, body: bytes = b"", end: int | None = None) -> None:
        """Write `head` and then `body[:end]` completely, with no other sink's bytes between.

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
        if self._favors_speed and end >= MUCH_BYTES:
            self._put_fd(head, body, end)
            return
        view = memoryview(body)
        start = 0
        if head:
            # Write the held part of a line together with the rest of that line.
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
                # Another process made the console non-blocking; wait for room.
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
            console.warning(f"log lines are no longer shown: {type(problem).__name__}: {problem}")
        self.bytes_written += len(head) + end

    def _failed(self, problem: OSError) -> None:
        if problem.errno in _GONE:
            self.quiet = True
            self.is_broken = problem.errno == errno.EPIPE
        elif not self._warned:
            # A full disk may have room again later: these lines are lost, but the sink continues.
            self._warned = True
            console.warning(f"log lines are being lost: {problem.strerror}")


def _lock_of(identity: tuple[int, int]) -> threading.Lock:
    """Return the lock of a destination, which all its sinks share."""
    with _locks_guard:
        lock = _locks.get(identity)
        if lock is None:
            lock = _locks[identity] = threading.Lock()
        return lock


# A longer line is shown in pieces, each on its own line. This bounds the memory if a worker never ends
# its line.
LINE_BYTES_MAX = 1 << 20


class PrefixedLines:
    r"""Passes the lines of one stream to its sinks.

    `to` gets every line, or only the lines that `accept` accepts. `filtered_to` gets each line that
    contains at least one of `filters`. Both get lines in order, whole, and with `prefix`. A filter
    and `accept` see the line without its prefix; `accept` sees it with its line end.
    """

    __slots__ = (
        "_accept", "_accept_failed", "_cr_held", "_filtered_to", "_filters", "_held",
        "_line_bytes_max", "_next_line", "_plain", "_prefix", "_to",
    )  # fmt: skip

    def __init__(
        self,
        prefix: bytes,
        to: Sink | None,
        *,
        filters: Sequence[bytes] = (),
        filtered_to: Sink | None = None,
        accept: Callable[[bytes], bool] | None = None,
        line_bytes_max: int = LINE_BYTES_MAX,
    ) -> None:
        # A line end within the prefix would split the lines.
        self._prefix = prefix.replace(b"\r", b" ").replace(b"\n", b" ")
        self._next_line = b"\n" + self._prefix
        self._to = to
        self._filters = tuple(filters) if filtered_to is not None else ()
        self._filtered_to = filtered_to
        self._accept = accept
        self._accept_failed = False
        self._plain = to is not None and accept is None and not self._filters
        self._line_bytes_max = line_bytes_max
        # The start of a line whose end has not arrived yet; it includes the prefix.
        self._held = bytearray(self._prefix)
        # A `\r` at the end of a chunk waits for its successor: it may be half of a `\r\n`.
        self._cr_held = False

    def feed(self, data: bytes) -> None:
        """Process the next bytes of the stream; write the lines that they complete."""
        if self._to is None and not self._filters:
            return
        if self._cr_held:
            data = b"\r" + data
            self._cr_held = False
        if not self._plain or b"\r" in data:
            self._feed_slowly(data)
        else:
            assert self._to is not None
            marked = data.replace(b"\n", self._next_line) if self._prefix else data
            cut = marked.rfind(b"\n") + 1
            if cut:
                self._to.write(self._held, marked, cut)
                self._held[:] = marked[cut:]
            else:
                self._held += data
        if len(self._held) - len(self._prefix) > self._line_bytes_max:
            self._emit_overlong()

    def flush(self) -> None:
        r"""End the stream: write the held bytes as the last line, and add the missing `\n`."""
        if self._cr_held:
            self._cr_held = False
            self._emit(b"\r\n")
        elif len(self._held) > len(self._prefix):
            self._emit(b"\n")

    def _feed_slowly(self, data: bytes) -> None:
        if data.endswith(b"\r"):
            self._cr_held = True
            data = data[:-1]
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if cut:
            self._emit(data[:cut])
        self._held += data[cut:]

    def _emit_overlong(self) -> None:
        """Write the held bytes in pieces of the allowed length; keep at least one byte."""
        held = bytes(self._held[len(self._prefix) :])
        start = 0
        while len(held) - start > self._line_bytes_max:
            self._held[len(self._prefix) :] = held[start : start + self._line_bytes_max]
            self._emit(b"\n")
            start += self._line_bytes_max
        self._held += held[start:]

    def _emit(self, ended: bytes) -> None:
        """Write the held bytes and `ended`, which ends with a line end; then hold nothing."""
        if self._filters or self._accept is not None:
            raw = bytes(self._held[len(self._prefix) :]) + ended
            self._emit_filtered(raw)
        if self._to is not None and self._accept is None:
            marked = self._mark(ended)
            self._to.write(self._held, marked, len(marked) - len(self._prefix))
        self._held[:] = self._prefix

    def _mark(self, ended: bytes) -> bytes:
        r"""Insert the prefix after each line end, at the speed of `bytes.replace`.

        Insert it after every `\r` first. If a `\n` follows, the two are one line end, so remove the
        prefix between them again. This is exact, because each `\r` is followed by one of our prefixes.
        """
        if b"\r" in ended:
            ended = ended.replace(b"\r", b"\r" + self._prefix)
            ended = ended.replace(b"\r" + self._prefix + b"\n", b"\r\n")
        return ended.replace(b"\n", self._next_line)

    def _emit_filtered(self, raw: bytes) -> None:
        matching = any(text in raw for text in self._filters)
        if not matching and (self._accept is None or self._to is None):
            return
        lines = raw.splitlines(keepends=True)
        if matching and self._filtered_to is not None:
            found = [line for line in lines if any(text in line for text in self._filters)]
            self._write_lines(self._filtered_to, found)
        if self._accept is not None and self._to is not None:
            self._write_lines(self._to, [line for line in lines if self._accepted(line)])

    def _write_lines(self, sink: Sink, lines: list[bytes]) -> None:
        if lines:
            sink.write(b"", b"".join([part for line in lines for part in (self._prefix, line)]))

    def _accepted(self, line: bytes) -> bool:
        assert self._accept is not None
        try:
            return self._accept(line)
        except Exception as problem:  # noqa: BLE001 - the caller's own code may raise anything
            if not self._accept_failed:
                self._accept_failed = True
                console.warning(
                    f"a filter of log lines failed, so its lines are shown: "
                    f"{type(problem).__name__}: {problem}"
                )
            return True


class RawBytes:
    """Passes the bytes of one stream to its sink immediately and unchanged.

    For a person who watches one terminal: a prompt has no line end, and a progress bar shows each
    state only until the next.
    """

    __slots__ = ("_to",)

    def __init__(self, to: Sink | None) -> None:
        self._to = to

    def feed(self, data: bytes) -> None:
        if self._to is not None:
            self._to.write(data)

    def flush(self) -> None:
        """End the stream; there are no held bytes."""
