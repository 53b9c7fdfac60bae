"""One thread that follows all output streams of a job, woken only when something was written.

It watches files by inotify and pipes by epoll, so a silent job costs nothing. `finish` reads each
stream to its end, so that no line is lost. A stream reads in turns of bounded size
(`take_turn`), always on the follower's thread, and frees its descriptor as soon as it has ended. If
another file replaces a followed one, the follower does not follow the new file. It does not notice
writes from another machine.

The calling order: `follow_file` or `follow_fd`, `start`, and later `finish` and `close`. Any thread may
call them, repeatedly and in any order, except that nothing can be followed after `close`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import sys
import termios
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.errors import EnvironmentProblem, InternalError, shortage_hint
from holdfast.processes.logs.lines import LINE_BYTES_MAX, PrefixedLines, RawBytes, Sink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["FollowedStream", "LogFollower", "Sink"]


IN_MODIFY = 0x0002
IN_CLOSE_WRITE = 0x0008
IN_NONBLOCK = os.O_NONBLOCK
IN_CLOEXEC = os.O_CLOEXEC

# The watch in the record of a queue overflow.
OVERFLOW = -1

# One record of a watched file: watch, mask, cookie, length of a name (none), 4 bytes each.
_RECORD_WORDS = 4

# How many bytes of the queue to read at once.
READ_BYTES_MAX = 1 << 16


class Inotify:
    """An inotify instance. Raises `OSError` if the kernel has none left."""

    __slots__ = ("_add_watch", "_rm_watch", "fd")

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
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
        self._rm_watch(self.fd, watch)

    def changed(self) -> set[int]:
        """Read the queue; return the watches whose files were written, or `OVERFLOW`."""
        try:
            records = os.read(self.fd, READ_BYTES_MAX)
        except BlockingIOError:
            return set()
        return set(memoryview(records).cast("i")[::_RECORD_WORDS])

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _problem(self, about: str) -> OSError:
        code = ctypes.get_errno()
        return OSError(code, os.strerror(code), about)


# How much to read at once. A larger value is not faster (the copies leave the cache), but holds the
# interpreter's lock for longer, which delays the notice of a worker's exit.
CHUNK_BYTES = 1 << 18

# How much one stream may read in a turn.
TURN_BYTES_MAX = 1 << 21

# How much of a stream's end `tail()` returns by default.
TAIL_BYTES_MAX = 1 << 14

# The capacity that a pipe gets, so that a noisy worker waits less often for its reader.
PIPE_ROOM_BYTES = 1 << 18
# Its capacity without that. Above the user's limit of pipe memory it is even less.
PIPE_DEFAULT_BYTES = 1 << 16
_F_SETPIPE_SZ = 1031

# The number of reads of a pipe whose times are kept. A traceback arrives in about a dozen reads.
MARKS_MAX = 256

# The capacity of any pipe (fs.pipe-max-size). Once `finish` has read this much, it has everything that
# was written before; it does not wait for what a surviving process writes later.
HELD_BYTES_MAX = 1 << 20

# If a turn reads no more of a file than this, the worker writes in small pieces, and the next turn may
# wait a little for more of them.
BURST_BYTES = 1 << 15

# The next turn of a pipe or terminal waits until this part of its buffer is probably full: reading each
# of the worker's writes by itself would slow both down, and a worker whose buffer is full blocks.
FILL = 0.25
# What the kernel buffers of a terminal.
TERMINAL_ROOM_BYTES = 1 << 12


class FollowedStream:
    """One followed stream. `LogFollower` creates it; callers use `tail()` and `finished`."""

    __slots__ = (
        "_done", "_fd", "_lines", "_sinks", "bytes_read", "finishing", "name",
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
        # The follower's thread sets this when a caller wants the stream to finish.
        self.finishing = False

    @property
    def fd(self) -> int:
        return self._fd

    @property
    def finished(self) -> bool:
        """Whether everything was read and passed on, and the descriptor is closed."""
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._done.wait(timeout_s)

    def progress(self) -> int:
        """Return a number that grows as long as bytes are passed on."""
        return self.bytes_read + sum(sink.bytes_written for sink in self._sinks)

    def tail(self, bytes_max: int = TAIL_BYTES_MAX) -> bytes:
        """Return the last bytes of the stream; the first line may be cut. Any thread."""
        raise NotImplementedError

    def catch_up(self, limit_s: float) -> bool:
        """Wait until `tail()` has everything written so far; return whether it has. Any thread."""
        del limit_s
        return True

    def begin_finish(self) -> None:
        """Read only to the present end of the stream; other processes may continue to write."""
        self.finishing = True

    def take_turn(self) -> bool:
        """Read and pass on up to `TURN_BYTES_MAX`; return whether there is certainly more.

        Raises `EOFError` once the stream has ended.
        """
        raise NotImplementedError

    def pause_s(self, size: int, now: float) -> float:
        """Return how long the next turn may wait for more, after a turn that read `size` bytes."""
        del now
        return BURST_PAUSE_S if size <= BURST_BYTES else 0.0

    def end(self) -> None:
        """Pass on the last line and free the descriptor. May be called again."""
        if self._fd >= 0:
            self._lines.flush()
            os.close(self._fd)
            self._fd = -1
        self._done.set()


class FileStream(FollowedStream):
    """A file that a worker writes, from its first byte on.

    If the file becomes shorter than the part that was read, it is read again from the start.
    """

    __slots__ = ("_stop_at",)

    def __init__(
        self, name: str, fd: int, lines: PrefixedLines | RawBytes, sinks: tuple[Sink, ...]
    ) -> None:
        super().__init__(name, fd, lines, sinks)
        self._stop_at = 0

    def begin_finish(self) -> None:
        super().begin_finish()
        self._stop_at = os.fstat(self._fd).st_size

    def take_turn(self) -> bool:
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
                return False  # The end for now; inotify reports a later write.
        return True

    def tail(self, bytes_max: int = TAIL_BYTES_MAX) -> bytes:
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
        """Return to the start if the file is now shorter than the part that was read."""
        if os.fstat(self._fd).st_size >= os.lseek(self._fd, 0, os.SEEK_CUR):
            return False
        self._lines.flush()
        os.lseek(self._fd, 0, os.SEEK_SET)
        return True


class PipeStream(FollowedStream):
    """The read end of a pipe, or the master of a pseudo-terminal, with its last bytes kept."""

    __slots__ = (
        "_breaks_with", "_has_read", "_keep", "_left", "_marks", "_ring", "_ring_lock",
        "_room_bytes", "_tail_bytes_max", "_terminal_fd", "_turned_at",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        fd: int,
        lines: PrefixedLines | RawBytes,
        sinks: tuple[Sink, ...],
        *,
        tail_bytes_max: int,
        keep: Callable[[bytes], None] | None = None,
        terminal_fd: int = -1,
        breaks_with: Sink | None = None,
    ) -> None:
        super().__init__(name, fd, lines, sinks)
        self._keep = keep
        self._terminal_fd = terminal_fd
        self._breaks_with = breaks_with
        self._ring = bytearray()
        self._ring_lock = threading.Lock()
        self._has_read = threading.Condition(self._ring_lock)
        self._tail_bytes_max = tail_bytes_max
        self._marks: deque[tuple[int, int]] = deque(maxlen=MARKS_MAX)
        self._left = HELD_BYTES_MAX
        os.set_blocking(fd, False)
        self._room_bytes = TERMINAL_ROOM_BYTES if os.isatty(fd) else _enlarge_pipe(fd)
        self._turned_at = 0.0

    def take_turn(self) -> bool:
        if self._terminal_fd >= 0:
            copy_terminal_size(self._terminal_fd, self._fd)
        left = TURN_BYTES_MAX
        while left > 0:
            try:
                data = self._read()
            except BlockingIOError:
                if self.finishing:
                    raise EOFError from None
                return False
            except OSError as problem:
                # The last process has closed the terminal: this is the end of the stream.
                if problem.errno == errno.EIO:
                    raise EOFError from None
                raise
            if not data:
                raise EOFError
            left -= len(data)
            if self._keep is not None:
                self._keep(data)
            self._lines.feed(data)
            if self._breaks_with is not None and self._breaks_with.is_broken:
                raise EOFError  # Closing the pipe lets the next write of the worker fail, too.
            if self.finishing:
                self._left -= len(data)
                if self._left <= 0:
                    raise EOFError
            elif len(data) < self._room_bytes // 2:
                return False  # To continue now would read the worker's writes one by one.
        return True

    def pause_s(self, size: int, now: float) -> float:
        since, self._turned_at = now - self._turned_at, now
        return min(BURST_PAUSE_S, since * FILL * self._room_bytes / max(size, 1))

    def catch_up(self, limit_s: float) -> bool:
        with self._ring_lock:
            if self._fd < 0:
                return True
            wanted = self.bytes_read + _unread(self._fd)
            return self._has_read.wait_for(
                lambda: self.bytes_read >= wanted or self._fd < 0, limit_s
            )

    def written(self) -> int:
        """Return how many bytes were written so far, read or not. Any thread."""
        with self._ring_lock:
            return self.bytes_read + (_unread(self._fd) if self._fd >= 0 else 0)

    def arrival_ns(self, position: int) -> int:
        """Return when a byte was read, on the monotonic clock; 0 if it was long ago. Any thread."""
        with self._ring_lock:
            return next((at for first, at in reversed(self._marks) if first <= position), 0)

    def end(self) -> None:
        keep, self._keep = self._keep, None
        if keep is not None:
            keep(b"")
        with self._ring_lock:
            super().end()
            self._has_read.notify_all()

    def tail(self, bytes_max: int = TAIL_BYTES_MAX) -> bytes:
        kept = min(bytes_max, self._tail_bytes_max)
        with self._ring_lock:
            return bytes(self._ring[-kept:]) if kept > 0 else b""

    def _read(self) -> bytes:
        with self._ring_lock:  # Every byte that is no longer in the pipe is in the ring.
            data = os.read(self._fd, CHUNK_BYTES)
            self._marks.append((self.bytes_read, time.monotonic_ns()))
            self._add_to_ring(data)
            self.bytes_read += len(data)
            self._has_read.notify_all()
            return data

    def _add_to_ring(self, data: bytes) -> None:
        limit = self._tail_bytes_max
        if limit <= 0:
            return
        self._ring += data[-limit:]
        # Cut rarely, because each cut copies the whole ring.
        if len(self._ring) > 2 * limit:
            del self._ring[:-limit]


def copy_terminal_size(terminal_fd: int, fd: int) -> None:
    """Give a pseudo-terminal the size of a real one, which may have changed."""
    try:
        size = fcntl.ioctl(terminal_fd, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(fd, termios.TIOCSWINSZ, size)
    except OSError:
        pass  # The terminal was closed.


def _unread(fd: int) -> int:
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


def _enlarge_pipe(fd: int) -> int:
    """Return the capacity of a pipe, after an attempt to enlarge it."""
    try:
        return fcntl.fcntl(fd, _F_SETPIPE_SZ, PIPE_ROOM_BYTES)
    except OSError:
        return PIPE_DEFAULT_BYTES  # The user's limit of pipe memory is reached.


# How long `finish` waits without progress. A stopped console must not block the end of the job, and a
# slow one must not lose lines.
DRAIN_S_MAX = 10.0

# How often files are read if the kernel does not report writes.
UNWATCHED_INTERVAL_S = 0.1

# A worker that writes many short lines would wake this thread for each line and so slow down the
# training. So after a round in which each stream had only a few bytes, the next
# round begins at least this much later. The first line after silence is not delayed. A longer pause
# costs less, but shows lines later.
BURST_PAUSE_S = 0.002
# `poll` cannot wait for less.
POLL_S_MIN = 0.001


class LogFollower:
    """Follows any number of streams on one thread, `holdfast-logs`."""

    def __init__(
        self, *, line_bytes_max: int = LINE_BYTES_MAX, drain_s_max: float = DRAIN_S_MAX
    ) -> None:
        self._line_bytes_max = line_bytes_max
        self._drain_s_max = drain_s_max
        # Guards everything that both callers and the thread change, and the lifetime of the fds.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._released = False
        self._streams: set[FollowedStream] = set()
        self._by_fd: dict[int, FollowedStream] = {}
        self._by_watch: dict[int, set[FollowedStream]] = {}
        self._unwatched: set[FollowedStream] = set()
        self._to_visit: deque[FollowedStream] = deque()
        self._to_finish: deque[FollowedStream] = deque()
        self._inotify: Inotify | None = None
        self._warned = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._wake_poll = select.poll()
        self._wake_poll.register(self._wake_fd, select.POLLIN)
        self._not_before = 0.0

    # Following, from any thread.

    def follow_file(
        self,
        path: str,
        *,
        prefix: bytes = b"",
        to: Sink | None,
        filters: Sequence[bytes] = (),
        filtered_to: Sink | None = None,
        accept: Callable[[bytes], bool] | None = None,
    ) -> FollowedStream:
        """Follow the file `path` from its first byte; create it if it does not exist yet.

        `to` gets each line with `prefix` before it, or only the lines that `accept` accepts.
        `filtered_to` gets each line that contains one of `filters`.
        """
        lines = self._lines(prefix, to, filters, filtered_to, accept)
        try:
            # Non-blocking has no effect on a file, and keeps a named pipe from blocking this thread.
            fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NONBLOCK, 0o666)
        except OSError as problem:
            raise EnvironmentProblem(
                f"cannot follow {path}: {problem.strerror}", hint=shortage_hint(problem.errno)
            ) from problem
        stream = FileStream(path, fd, lines, _sinks(to, filtered_to))
        with self._lock:
            self._admit(stream)
            self._watch(stream)
            self._to_visit.append(stream)
            self._wake()
        return stream

    def follow_fd(
        self,
        fd: int,
        *,
        prefix: bytes = b"",
        to: Sink | None,
        tail_bytes_max: int = TAIL_BYTES_MAX,
        raw: bool = False,
        keep: Callable[[bytes], None] | None = None,
        terminal_fd: int = -1,
        breaks: bool = False,
    ) -> PipeStream:
        """Follow the read end of a pipe, or a terminal's master. The follower owns it from now on.

        It becomes non-blocking, and is closed when it ends or is finished. The other parameters are
        those of `follow_file`. The last `tail_bytes_max` bytes are kept for `tail()`. With `raw`, `to`
        gets the bytes at once and unchanged, even if they are not whole lines. `keep` gets all bytes, and
        no bytes at the end. A terminal gets the size of the terminal `terminal_fd`. With
        `breaks`, the stream ends as soon as nobody reads what `to` writes.
        """
        lines = RawBytes(to) if raw else self._lines(prefix, to, (), None, None)
        stream = PipeStream(
            f"fd {fd}",
            fd,
            lines,
            _sinks(to, None),
            tail_bytes_max=tail_bytes_max,
            keep=keep,
            terminal_fd=terminal_fd,
            breaks_with=to if breaks else None,
        )
        with self._lock:
            self._admit(stream)
            try:
                self._epoll.register(fd, select.EPOLLIN)
            except OSError as problem:
                self._streams.discard(stream)
                stream.end()
                raise EnvironmentProblem(
                    f"cannot follow fd {fd}: {problem.strerror}", hint=shortage_hint(problem.errno)
                ) from problem
            self._by_fd[fd] = stream
        return stream

    def start(self) -> None:
        with self._lock:
            if self._thread is None and not self._released:
                thread = threading.Thread(target=self._run, name="holdfast-logs", daemon=True)
                thread.start()
                self._thread = thread

    # Finishing, from any thread but the follower's.

    def finish(self, stream: FollowedStream) -> bool:
        """Pass on everything written to `stream` so far, then stop following it.

        Returns whether that was done. If no byte moves for the follower's `drain_s_max`, this stops
        waiting, but the thread continues.
        """
        return self._finish([stream])

    def finish_all(self) -> bool:
        """Finish every stream that is followed now."""
        with self._lock:
            streams = list(self._streams)
        return self._finish(streams)

    def close(self, *, drain_s_max: float | None = None) -> None:
        """Finish all streams and end the thread. Sinks stay open: they are the caller's."""
        with self._lock:
            self._closing = True
            streams = list(self._streams)
            if self._thread is None and not streams:
                self._release()
        done = self._finish(streams, drain_s_max)
        with self._lock:
            self._wake()
            thread = self._thread
        # If the thread is blocked in a write, it ends when the console accepts bytes again.
        if thread is not None and done:
            thread.join()

    def _finish(self, streams: list[FollowedStream], drain_s_max: float | None = None) -> bool:
        pending = [stream for stream in streams if not stream.finished]
        if not pending:
            return True
        self.start()
        with self._lock:
            self._to_finish.extend(pending)
            self._wake()
        stall_s = self._drain_s_max if drain_s_max is None else drain_s_max
        moved = sum(stream.progress() for stream in pending)
        for stream in pending:
            while not stream.wait(stall_s):
                before, moved = moved, sum(each.progress() for each in pending)
                if moved == before or stall_s == 0:
                    return False
        return True

    # Shared by callers and the thread; the caller holds the lock.

    def _lines(
        self,
        prefix: bytes,
        to: Sink | None,
        filters: Sequence[bytes],
        filtered_to: Sink | None,
        accept: Callable[[bytes], bool] | None,
    ) -> PrefixedLines:
        return PrefixedLines(
            prefix,
            to,
            filters=filters,
            filtered_to=filtered_to,
            accept=accept,
            line_bytes_max=self._line_bytes_max,
        )

    def _admit(self, stream: FollowedStream) -> None:
        if self._closing:
            stream.end()
            raise InternalError("a closed log follower cannot follow a stream")
        self._streams.add(stream)

    def _watch(self, stream: FollowedStream) -> None:
        try:
            if self._inotify is None:
                self._inotify = Inotify()
                self._epoll.register(self._inotify.fd, select.EPOLLIN)
            self._by_watch.setdefault(self._inotify.watch(stream.name), set()).add(stream)
        except OSError as problem:
            self._unwatched.add(stream)
            if not self._warned:
                self._warned = True
                console.warning(
                    f"the kernel cannot watch {stream.name} ({problem.strerror}), so log files "
                    f"are read every {UNWATCHED_INTERVAL_S} s; fs.inotify.max_user_instances and "
                    f"fs.inotify.max_user_watches set the limits"
                )

    def _unwatch(self, stream: FollowedStream) -> None:
        self._unwatched.discard(stream)
        for watch, streams in self._by_watch.items():
            if stream in streams:
                streams.discard(stream)
                if not streams:
                    del self._by_watch[watch]
                    assert self._inotify is not None
                    self._inotify.unwatch(watch)
                return

    def _wake(self) -> None:
        if not self._released:
            os.eventfd_write(self._wake_fd, 1)

    # The thread.

    def _run(self) -> None:
        # In order of arrival: the streams that have bytes waiting.
        ready: dict[FollowedStream, None] = {}
        try:
            while not (self._closing and not self._streams):
                self._wait(ready)
                self._pause()
                self._take_turns(ready)
        finally:
            for stream in list(self._streams):
                stream.end()
            with self._lock:
                self._release()

    def _wait(self, ready: dict[FollowedStream, None]) -> None:
        """Find the streams that have something to read; sleep only if none is known."""
        timeout_s = 0 if ready else UNWATCHED_INTERVAL_S if self._unwatched else None
        events = self._epoll.poll(timeout_s)
        with self._lock:
            ready.update(dict.fromkeys(self._unwatched))
            for fd, _ in events:
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                    self._not_before = 0.0
                elif self._inotify is not None and fd == self._inotify.fd:
                    for watch in self._inotify.changed():
                        ready.update(dict.fromkeys(self._changed(watch)))
                elif fd in self._by_fd:
                    ready[self._by_fd[fd]] = None
            while self._to_visit:
                ready[self._to_visit.popleft()] = None
            finishing = [*self._to_finish]
            self._to_finish.clear()
        for stream in finishing:
            if not stream.finished and not stream.finishing:
                stream.begin_finish()
                ready[stream] = None

    def _pause(self) -> None:
        """Let a burst of short lines accumulate, unless a caller needs something."""
        pause_s = self._not_before - time.monotonic()
        if pause_s >= POLL_S_MIN:
            self._wake_poll.poll(pause_s * 1000)
        elif pause_s > 0:
            time.sleep(pause_s)

    def _changed(self, watch: int) -> Iterable[FollowedStream]:
        if watch == OVERFLOW:
            return [stream for streams in self._by_watch.values() for stream in streams]
        return self._by_watch.get(watch, ())

    def _take_turns(self, ready: dict[FollowedStream, None]) -> None:
        """Give each ready stream one turn, and keep those that have more."""
        pause_s = BURST_PAUSE_S
        for stream in list(ready):
            before = stream.bytes_read
            try:
                more = not stream.finished and stream.take_turn()
            except EOFError:
                more = False
                self._retire(stream)
            except OSError as problem:
                more = False
                console.warning(f"stopped following {stream.name}: {problem.strerror}")
                self._retire(stream)
            pause_s = min(pause_s, stream.pause_s(stream.bytes_read - before, time.monotonic()))
            if more:
                pause_s = 0.0
            else:
                del ready[stream]
        self._not_before = time.monotonic() + pause_s if pause_s else 0.0

    def _retire(self, stream: FollowedStream) -> None:
        with self._lock:
            if stream.fd in self._by_fd:
                self._epoll.unregister(stream.fd)
                del self._by_fd[stream.fd]
            self._unwatch(stream)
        stream.end()
        # Last, so that a wait for all streams includes the last line.
        with self._lock:
            self._streams.discard(stream)

    def _release(self) -> None:
        """Free the follower's own descriptors, once; the caller holds the lock."""
        if not self._released:
            self._released = True
            self._streams.clear()
            if self._inotify is not None:
                self._inotify.close()
            self._epoll.close()
            os.close(self._wake_fd)


def _sinks(*sinks: Sink | None) -> tuple[Sink, ...]:
    return tuple({id(sink): sink for sink in sinks if sink is not None}.values())
