"""One thread that follows all output streams of a job, woken only when something was written.

The one thing to know: files are watched by inotify and pipes by epoll, so an idle job costs
nothing; `finish` then reads each stream to its end, so that no line is lost.
It does not start workers or choose where lines go: callers pass a `Sink` for each stream. A
file that is replaced by another of the same name is not followed over.

The calling order: `follow_file` or `follow_fd`, `start`, and later `finish` and `close`. All
may be called from any thread, repeatedly, and in any order, except that nothing can be
followed after `close`.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque

from holdfast import messages
from holdfast.errors import EnvironmentProblem, InternalError
from holdfast.processes.inotify import OVERFLOW, Inotify
from holdfast.processes.lines import LINE_BYTES_MAX, PrefixedLines, RawBytes
from holdfast.processes.sinks import Sink
from holdfast.processes.streams import TAIL_BYTES_MAX, FileStream, PipeStream, Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["LogFollower", "Sink", "Stream"]

# For how long `finish` waits while not one byte moves: a console that is stopped must not hold
# up the end of the job for ever, and one that is slow must not lose lines.
DRAIN_S_MAX = 10.0

# How often files are read where the kernel cannot tell us that they were written.
UNWATCHED_INTERVAL_S = 0.1

# A worker that writes many short lines would wake us for each, and take the processor away from
# the training. So after a round of turns in which each stream had only a few bytes (its
# `burst_bytes`), the next begins this much later at the earliest. The first line after silence
# is never delayed. A longer pause costs less and shows lines later.
BURST_PAUSE_S = 0.002


class LogFollower:
    """Follows any number of streams on one thread, `holdfast-logs`."""

    def __init__(
        self, *, line_bytes_max: int = LINE_BYTES_MAX, drain_s_max: float = DRAIN_S_MAX
    ) -> None:
        self._line_bytes_max = line_bytes_max
        self._drain_s_max = drain_s_max
        # Guards everything that callers and the thread both change, and the life of the fds.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._released = False
        self._streams: set[Stream] = set()
        self._by_fd: dict[int, Stream] = {}
        self._by_watch: dict[int, set[Stream]] = {}
        self._unwatched: set[Stream] = set()
        self._to_visit: deque[Stream] = deque()
        self._to_finish: deque[Stream] = deque()
        self._inotify: Inotify | None = None
        self._warned = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._wake_poll = select.poll()
        self._wake_poll.register(self._wake_fd, select.POLLIN)
        self._not_before = 0.0
        # How often the thread woke up. An idle follower does not.
        self.wakeups = 0

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
    ) -> Stream:
        """Follow the file `path` from its first byte; it is created if it is not there yet.

        Each line goes to `to` with `prefix` before it, or only those that `accept` takes; each
        line that holds one of `filters` goes to `filtered_to` as well.
        """
        lines = self._lines(prefix, to, filters, filtered_to, accept)
        try:
            # Non-blocking has no effect on a file, and keeps a named pipe from holding us up.
            fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NONBLOCK, 0o666)
        except OSError as problem:
            raise EnvironmentProblem(f"cannot follow {path}: {problem.strerror}") from problem
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
        filters: Sequence[bytes] = (),
        filtered_to: Sink | None = None,
        accept: Callable[[bytes], bool] | None = None,
        tail_bytes_max: int = TAIL_BYTES_MAX,
        raw: bool = False,
    ) -> Stream:
        """Follow the read end of a pipe, or a terminal's master, which is ours from now on.

        It is made non-blocking, and closed when it ends or is finished. The rest is as with
        `follow_file`; the last `tail_bytes_max` bytes are kept for `tail()`. With `raw` its bytes
        go to `to` at once and as they are, whether they are whole lines or not.
        """
        lines = RawBytes(to) if raw else self._lines(prefix, to, filters, filtered_to, accept)
        sinks = _sinks(to, filtered_to)
        stream = PipeStream(f"fd {fd}", fd, lines, sinks, tail_bytes_max=tail_bytes_max)
        with self._lock:
            self._admit(stream)
            try:
                self._epoll.register(fd, select.EPOLLIN)
            except OSError as problem:
                self._streams.discard(stream)
                stream.end()
                raise EnvironmentProblem(f"cannot follow fd {fd}: {problem.strerror}") from problem
            self._by_fd[fd] = stream
        return stream

    def start(self) -> None:
        """Start the thread, if it does not run yet."""
        with self._lock:
            if self._thread is None and not self._released:
                self._thread = threading.Thread(target=self._run, name="holdfast-logs", daemon=True)
                self._thread.start()

    # Finishing, from any thread but our own.

    def finish(self, stream: Stream, *, drain_s_max: float | None = None) -> bool:
        """Hand on all that was written to `stream` so far, then stop following it.

        Returns whether that was done. It gives up waiting, while the thread goes on, once no
        byte moved for `drain_s_max`; 0 asks for the finish and does not wait.
        """
        return self._finish([stream], drain_s_max)

    def finish_all(self, *, drain_s_max: float | None = None) -> bool:
        """Do the same for every stream that is followed now."""
        with self._lock:
            streams = list(self._streams)
        return self._finish(streams, drain_s_max)

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
        # A thread that is stuck in a write ends by itself when the console takes bytes again.
        if thread is not None and done:
            thread.join()

    def _finish(self, streams: list[Stream], drain_s_max: float | None) -> bool:
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

    # Shared by callers and the thread; the lock is held.

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

    def _admit(self, stream: Stream) -> None:
        if self._closing:
            stream.end()
            raise InternalError("a closed log follower was asked to follow a stream")
        self._streams.add(stream)

    def _watch(self, stream: Stream) -> None:
        try:
            if self._inotify is None:
                self._inotify = Inotify()
                self._epoll.register(self._inotify.fd, select.EPOLLIN)
            self._by_watch.setdefault(self._inotify.watch(stream.name), set()).add(stream)
        except OSError as problem:
            self._unwatched.add(stream)
            if not self._warned:
                self._warned = True
                messages.warning(
                    f"the kernel cannot watch {stream.name} ({problem.strerror}), so log files "
                    f"are read every {UNWATCHED_INTERVAL_S} s; fs.inotify.max_user_instances and "
                    f"fs.inotify.max_user_watches set the limits"
                )

    def _unwatch(self, stream: Stream) -> None:
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
        ready: dict[Stream, None] = {}
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

    def _wait(self, ready: dict[Stream, None]) -> None:
        """Learn which streams have something to read; sleep only if none is known to."""
        timeout_s = 0 if ready else UNWATCHED_INTERVAL_S if self._unwatched else None
        events = self._epoll.poll(timeout_s)
        self.wakeups += 1
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
        """Let a burst of short lines gather, unless a caller asks for something."""
        pause_s = self._not_before - time.monotonic()
        if pause_s > 0:
            self._wake_poll.poll(pause_s * 1000)

    def _changed(self, watch: int) -> Iterable[Stream]:
        if watch == OVERFLOW:
            return [stream for streams in self._by_watch.values() for stream in streams]
        return self._by_watch.get(watch, ())

    def _take_turns(self, ready: dict[Stream, None]) -> None:
        """Give each ready stream one turn, and keep those that have more."""
        few = True
        for stream in list(ready):
            before = stream.bytes_read
            try:
                more = not stream.finished and stream.take_turn()
            except EOFError:
                more = False
                self._retire(stream)
            except OSError as problem:
                more = False
                messages.warning(f"cannot read {stream.name} any more: {problem.strerror}")
                self._retire(stream)
            few = few and stream.bytes_read - before <= stream.burst_bytes
            if not more:
                del ready[stream]
        self._not_before = time.monotonic() + BURST_PAUSE_S if few else 0.0

    def _retire(self, stream: Stream) -> None:
        with self._lock:
            if stream.fd in self._by_fd:
                self._epoll.unregister(stream.fd)
                del self._by_fd[stream.fd]
            self._unwatch(stream)
        stream.end()
        # Only now, so that whoever waits for all streams waits for the last line too.
        with self._lock:
            self._streams.discard(stream)

    def _release(self) -> None:
        """Free what the follower itself holds, once; the lock is held."""
        if not self._released:
            self._released = True
            self._streams.clear()
            if self._inotify is not None:
                self._inotify.close()
            self._epoll.close()
            os.close(self._wake_fd)


def _sinks(*sinks: Sink | None) -> tuple[Sink, ...]:
    return tuple({id(sink): sink for sink in sinks if sink is not None}.values())
