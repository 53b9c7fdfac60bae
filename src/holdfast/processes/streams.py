"""The sources that are followed: a growing file, and the read end of a pipe or terminal.

The one thing to know: a stream reads in turns of bounded size (`take_turn`), always on the
follower's thread, and frees its descriptor as soon as it has ended.
It does not wait for anything; `holdfast.processes.following` knows when to take a turn.
"""

from __future__ import annotations

import errno
import os
import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.processes.lines import PrefixedLines, RawBytes
    from holdfast.processes.sinks import Sink

# How much is read at once. Larger is no faster (the copies leave the cache) and holds the
# interpreter's lock for longer, which delays the notice of a worker's exit.
CHUNK_BYTES = 1 << 18

# How much one stream may read before it is another's turn.
TURN_BYTES_MAX = 1 << 21

# How much of a stream's end `tail()` gives unless told otherwise.
TAIL_BYTES_MAX = 1 << 14

# The room asked for in a pipe, so that a noisy worker waits less often for its reader.
PIPE_ROOM_BYTES = 1 << 18
_F_SETPIPE_SZ = 1031

# No pipe holds more than this (fs.pipe-max-size), so once this much was read after the wish to
# finish, all that was written before it has come. What a survivor writes later is not waited for.
HELD_BYTES_MAX = 1 << 20

# A turn that read no more than this found a worker writing in small pieces, and the next turn may
# wait a little for more of them. It must be well below what the kernel holds back for us (64 KiB
# in a pipe, 4 KiB in a terminal), since a worker whose pipe is full stands still.
BURST_BYTES = 1 << 15
TERMINAL_BURST_BYTES = 1 << 10


class Stream:
    """One followed stream. Made by `LogFollower`; callers use `tail()` and `finished`."""

    __slots__ = (
        "_done", "_fd", "_lines", "_sinks", "burst_bytes", "bytes_read", "finishing", "name",
    )  # fmt: skip

    def __init__(
        self, name: str, fd: int, lines: PrefixedLines | RawBytes, sinks: tuple[Sink, ...]
    ) -> None:
        self.name = name
        self._fd = fd
        self._lines = lines
        self._sinks = sinks
        self._done = threading.Event()
        self.bytes_read = 0
        self.burst_bytes = BURST_BYTES
        # Set on the follower's thread once the stream was asked to finish.
        self.finishing = False

    @property
    def fd(self) -> int:
        """The descriptor that is read, or -1 once the stream has ended."""
        return self._fd

    @property
    def finished(self) -> bool:
        """Whether everything was read and handed on, and the descriptor closed."""
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the stream has finished; return whether it has."""
        return self._done.wait(timeout_s)

    def progress(self) -> int:
        """Return a number that grows for as long as bytes still move."""
        return self.bytes_read + sum(sink.bytes_written for sink in self._sinks)

    def tail(self, bytes_max: int = TAIL_BYTES_MAX) -> bytes:
        """Return the last bytes of the stream; the first line may be cut. Any thread."""
        raise NotImplementedError

    def catch_up(self, limit_s: float) -> bool:
        """Wait until `tail()` has all that was written so far; return whether. Any thread."""
        del limit_s
        return True

    def begin_finish(self) -> None:
        """Read on only to the end of what is there now; others may go on writing."""
        self.finishing = True

    def take_turn(self) -> bool:
        """Read and hand on up to `TURN_BYTES_MAX`; return whether more is surely there.

        Raises `EOFError` once the stream has ended.
        """
        raise NotImplementedError

    def end(self) -> None:
        """Hand on the last line and free the descriptor. Harmless when repeated."""
        if self._fd >= 0:
            self._lines.flush()
            os.close(self._fd)
            self._fd = -1
        self._done.set()


class FileStream(Stream):
    """A file that a worker writes, from its first byte on.

    A file that became shorter than what was read of it is read again from the start.
    """

    __slots__ = ("_stop_at",)

    def __init__(
        self, name: str, fd: int, lines: PrefixedLines | RawBytes, sinks: tuple[Sink, ...]
    ) -> None:
        super().__init__(name, fd, lines, sinks)
        self._stop_at = 0

    def begin_finish(self) -> None:
        """Read on only to the present end of the file, which others may still write."""
        super().begin_finish()
        self._stop_at = os.fstat(self._fd).st_size

    def take_turn(self) -> bool:
        """See `Stream.take_turn`. A file ends only after it was asked to finish."""
        for _ in range(TURN_BYTES_MAX // CHUNK_BYTES):
            data = os.read(self._fd, CHUNK_BYTES)
            if data:
                self.bytes_read += len(data)
                self._lines.feed(data)
            elif self._was_truncated():
                continue
            if self.finishing:
                if not data or os.lseek(self._fd, 0, os.SEEK_CUR) >= self._stop_at:
                    raise EOFError
            elif len(data) < CHUNK_BYTES:
                return False  # The end, for now: a later write is a later notice.
        return True

    def tail(self, bytes_max: int = TAIL_BYTES_MAX) -> bytes:
        """Read the last bytes of the file itself; empty if it is gone."""
        try:
            fd = os.open(self.name, os.O_RDONLY)
        except OSError:
            return b""
        try:
            return os.pread(fd, bytes_max, max(0, os.fstat(fd).st_size - bytes_max))
        except OSError:
            return b""
        finally:
            os.close(fd)

    def _was_truncated(self) -> bool:
        """Go back to the start if the file is now shorter than what was read of it."""
        if os.fstat(self._fd).st_size >= os.lseek(self._fd, 0, os.SEEK_CUR):
            return False
        self._lines.flush()
        os.lseek(self._fd, 0, os.SEEK_SET)
        return True


class PipeStream(Stream):
    """The read end of a pipe, or the master of a pseudo-terminal, with its last bytes kept."""

    __slots__ = ("_has_read", "_left", "_ring", "_ring_lock", "_tail_bytes_max")

    def __init__(
        self,
        name: str,
        fd: int,
        lines: PrefixedLines | RawBytes,
        sinks: tuple[Sink, ...],
        *,
        tail_bytes_max: int,
    ) -> None:
        super().__init__(name, fd, lines, sinks)
        self._ring = bytearray()
        self._ring_lock = threading.Lock()
        self._has_read = threading.Condition(self._ring_lock)
        self._tail_bytes_max = tail_bytes_max
        self._left = HELD_BYTES_MAX
        os.set_blocking(fd, False)
        if os.isatty(fd):
            self.burst_bytes = TERMINAL_BURST_BYTES
        else:
            _ask_for_room(fd)

    def take_turn(self) -> bool:
        """See `Stream.take_turn`. When asked to finish, an empty pipe is an ended one."""
        left = TURN_BYTES_MAX
        while left > 0:
            try:
                data = self._read()
            except BlockingIOError:
                if self.finishing:
                    raise EOFError from None
                return False
            except OSError as problem:
                # The last process that had the terminal open is gone: its way to say the end.
                if problem.errno == errno.EIO:
                    raise EOFError from None
                raise
            if not data:
                raise EOFError
            left -= len(data)
            self._lines.feed(data)
            if self.finishing:
                self._left -= len(data)
                if self._left <= 0:
                    raise EOFError
            elif len(data) <= TERMINAL_BURST_BYTES:
                return False  # Reading on would catch the worker's writes one by one.
        return True

    def catch_up(self, limit_s: float) -> bool:
        """Wait until the follower's thread has read all that was written so far."""
        import fcntl
        import termios

        with self._ring_lock:
            if self._fd < 0:
                return True
            unread = fcntl.ioctl(self._fd, termios.FIONREAD, bytes(4))
            wanted = self.bytes_read + int.from_bytes(unread, sys.byteorder)
            return self._has_read.wait_for(
                lambda: self.bytes_read >= wanted or self._fd < 0, limit_s
            )

    def end(self) -> None:
        """Hand on the last line and free the descriptor. Harmless when repeated."""
        with self._ring_lock:
            super().end()
            self._has_read.notify_all()

    def tail(self, bytes_max: int = TAIL_BYTES_MAX) -> bytes:
        """Return the last bytes that were read, at most `tail_bytes_max` of them."""
        kept = min(bytes_max, self._tail_bytes_max)
        with self._ring_lock:
            return bytes(self._ring[-kept:]) if kept > 0 else b""

    def _read(self) -> bytes:
        with self._ring_lock:  # Whatever is no longer in the pipe is in the ring.
            data = os.read(self._fd, CHUNK_BYTES)
            self._keep(data)
            self.bytes_read += len(data)
            self._has_read.notify_all()
            return data

    def _keep(self, data: bytes) -> None:
        limit = self._tail_bytes_max
        if limit <= 0:
            return
        self._ring += data[-limit:]
        # Cut only now and then: cutting at each read would copy the whole ring each time.
        if len(self._ring) > 2 * limit:
            del self._ring[:-limit]


def _ask_for_room(fd: int) -> None:
    import fcntl

    try:
        fcntl.fcntl(fd, _F_SETPIPE_SZ, PIPE_ROOM_BYTES)
    except OSError:
        pass  # Not a pipe, or the person's share of pipe memory is used up: it works as it is.
